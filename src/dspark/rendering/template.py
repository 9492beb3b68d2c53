"""Chat templates, compiled as transformers compiles them and watched while they run."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.errors import DataError, RowError
from dspark.rendering.instrument import TAG_CLOSE, TAG_OPEN, instrument, looks_ahead, silent_call
from dspark.rendering.messages import Message
from dspark.rendering.watch import Render, Watcher

_SILENT = dict.fromkeys((TAG_OPEN, TAG_CLOSE), lambda: None)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja text.
        variables: What the tokenizer passes to every render: its special tokens.

    Raises:
        DataError: If `source` is not a Jinja template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            environment.compile(source)  # an unknown filter or test is found here
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error
        self.source = source
        names = {node.name for node in tree.find_all(nodes.Name)}
        self.is_tagged = TAG_OPEN in names
        self.reads_clock = "strftime_now" in names
        self.keys = names | {node.attr for node in tree.find_all(nodes.Getattr)}
        self.keys |= {node.value for node in tree.find_all(nodes.Const)}
        self.looks_ahead = looks_ahead(tree)
        instrument(tree)
        self._template = _template_of(environment, tree)
        self._environment = environment
        self._variables = dict(variables)
        bos = variables.get("bos_token")
        self._bos = bos if isinstance(bos, str) and "bos_token" in names else ""

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, **variables: Any
    ) -> Render:
        """Render a conversation.

        Args:
            messages: Distinct dict objects.
            tools: Tool definitions or None.
            variables: Further variables of the template, such as ``add_generation_prompt``.

        Raises:
            RowError: If the template refuses the conversation or fails on it.
        """
        return self._run(self._template, messages, {"tools": tools, **variables})

    def render_with_marks(self, messages: Sequence[Message], tools: list[Any] | None) -> Render:
        """Render a conversation with marks in the variables in which the text is gathered.

        A template may act upon such a variable, so this is for what `render` finds no regions in.

        Raises:
            RowError: If the template refuses the conversation or fails on it.
        """
        return self._run(self._marking, messages, {"tools": tools})

    def _run(
        self, template: jinja2.Template, messages: Sequence[Message], given: dict[str, Any]
    ) -> Render:
        values = {
            "messages": list(messages),
            "documents": None,
            "add_generation_prompt": False,
            **self._variables,
            **given,
        }
        watcher = Watcher(messages)
        try:
            render = self._watched(template, values, watcher)
        except Exception as error:  # a template can fail in any way that Python can
            if not watcher.has_printed:
                raise _template_error(error) from error
            render = None
        if not watcher.has_printed:
            assert render is not None
            return render
        try:
            plain = self._unwatched.render(**values, **_SILENT)
        except Exception as error:
            raise _template_error(error) from error
        # What met a mark, a filter or a comparison, may have done something else.
        return render if render and render.text == plain else Render(plain, [], [])

    def _watched(
        self, template: jinja2.Template, values: dict[str, Any], watcher: Watcher
    ) -> Render:
        pieces = []
        for piece in template.generate(**values, **watcher.calls):
            pieces.append(piece)
            watcher.length += len(piece)
        return watcher.finish("".join(pieces), self._bos)

    @cached_property
    def _marking(self) -> jinja2.Template:
        tree = self._environment.parse(self.source)
        instrument(tree, in_variables=True)
        return _template_of(self._environment, tree)

    @cached_property
    def _unwatched(self) -> jinja2.Template:
        return _template_of(self._environment, self._environment.parse(self.source))


def _template_error(error: Exception) -> RowError:
    return RowError("template error", f"{type(error).__name__}: {error}")


def _template_of(environment: jinja2.Environment, tree: nodes.Template) -> jinja2.Template:
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _GenerationTag(Extension):
    """``{% generation %}``: prints its body, and notes where it begins and ends."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [silent_call(TAG_OPEN, line), nodes.Scope(body), silent_call(TAG_CLOSE, line)]


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja set up as transformers sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
