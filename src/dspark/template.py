"""A chat template that says where in its text each message went.

Templates put messages into text in ways that cannot be undone by looking at the text: a user may
write markup, two messages may be equal, an earlier turn may be printed differently once a later
one exists. So the template is watched while it runs. Its Jinja syntax tree gets calls that print
nothing at the places where a loop takes up an item and where a loop ends; Jinja hands out its
output piece by piece, so each call knows how much text is out. One render gives the text and the
regions:

    {% for m in messages %} (1) <|im_start|>{{ m.role }} ... {% endfor %} (2)

    text     <|im_start|>user Hi<|im_end|><|im_start|>assistant Hello<|im_end|>
    regions  (1) message 0               (1) message 1                         (2)

``{% generation %}`` blocks are found the same way.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.errors import DataError, RowError
from dspark.messages import Message

# Names no template uses; what they are bound to prints nothing.
_ITEM, _HEADER, _LEAVE = "_dspark_item", "_dspark_header", "_dspark_leave"
_TAG_OPEN, _TAG_CLOSE = "_dspark_tag_open", "_dspark_tag_close"

# Their output is gathered before it is handed out, so positions inside mean nothing.
_GATHERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


@dataclass(frozen=True, slots=True)
class Region:
    """The text [start, stop) that the template printed for one message."""

    start: int
    stop: int
    message: int


@dataclass(frozen=True, slots=True)
class Render:
    """One rendered conversation.

    Attributes:
        text: What ``apply_chat_template(..., tokenize=False)`` gives.
        regions: In text order, without gaps after the first.
        tagged: The [start, stop) of each generation block, in text order.
    """

    text: str
    regions: list[Region]
    tagged: list[tuple[int, int]]


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
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error
        self.source = source
        names = {node.name for node in tree.find_all(nodes.Name)}
        self.is_tagged = _TAG_OPEN in names
        self.reads_clock = "strftime_now" in names
        self.keys = names | {node.attr for node in tree.find_all(nodes.Getattr)}
        self.keys |= {node.value for node in tree.find_all(nodes.Const)}
        tree.body = _watched(tree.body, iter(range(1 << 30)))
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(
            environment, code, environment.make_globals(None)
        )
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
        watcher = _Watcher(messages)
        values = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": False,
            **self._variables,
            **variables,
            **watcher.calls,
        }
        try:
            for piece in self._template.generate(messages=list(messages), **values):
                watcher.pieces.append(piece)
                watcher.length += len(piece)
        except Exception as error:  # a template can fail in any way that Python can
            raise RowError("template error", f"{type(error).__name__}: {error}") from error
        return watcher.finish(self._bos)


class _Watcher:
    """Notes how much text was out when the template reached each message."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.pieces: list[str] = []
        self.length = 0
        self._number = {id(message): i for i, message in enumerate(messages)}
        self._stack: list[tuple[int, int]] = []  # (loop, message) of the loops now on a message
        self._events: list[tuple[int, int | None]] = []  # from this length on, this message
        self._headers: dict[int, int] = {}
        self._open: list[int] = []
        self._tagged: list[tuple[int, int]] = []
        self.calls: dict[str, Callable[..., None]] = {
            _ITEM: self._item,
            _HEADER: self._header,
            _LEAVE: self._leave,
            _TAG_OPEN: lambda: self._open.append(self.length),
            _TAG_CLOSE: lambda: self._tagged.append((self._open.pop(), self.length)),
        }

    def _item(self, loop: int, item: Any, *containers: Any) -> None:
        number = self._number.get(id(item))
        if number is None and isinstance(item, int):
            number = self._indexed(item, containers)
        if number is not None:
            self._unwind(loop)
            self._stack.append((loop, number))
            self._note()

    def _indexed(self, item: int, containers: tuple[Any, ...]) -> int | None:
        """Return the message that a loop over numbers means by ``messages[item]``."""
        lists = [c for c in containers if isinstance(c, list) and -len(c) <= item < len(c)]
        found = (self._number.get(id(container[item])) for container in lists)
        return next((number for number in found if number is not None), None)

    def _header(self, loop: int) -> None:
        if self._stack and self._stack[-1][0] == loop:
            self._headers[self._stack[-1][1]] = self.length

    def _leave(self, loop: int) -> None:
        if self._unwind(loop):
            self._note()

    def _unwind(self, loop: int) -> bool:
        """Forget `loop` and the loops inside it; say whether there was one."""
        depth = next((i for i, (entry, _) in enumerate(self._stack) if entry == loop), None)
        if depth is not None:
            del self._stack[depth:]
        return depth is not None

    def _note(self) -> None:
        self._events.append((self.length, self._stack[-1][1] if self._stack else None))

    def finish(self, bos: str) -> Render:
        text = "".join(self.pieces)
        return Render(text, self._regions(text, bos), sorted(self._tagged))

    def _regions(self, text: str, bos: str) -> list[Region]:
        """Turn the events into regions; text outside every loop falls to the message before it."""
        begun: list[tuple[int, int]] = []  # (start, message) where a message printed something
        stops = [start for start, _ in self._events[1:]] + [len(text)]
        for (start, message), stop in zip(self._events, stops, strict=True):
            if message is not None and stop > start and (not begun or begun[-1][1] != message):
                begun.append((start, message))
        if begun:
            begun[0] = (self._first_header(*begun[0], text, bos), begun[0][1])
        ends = [start for start, _ in begun[1:]] + [len(text)]
        return [Region(start, stop, m) for (start, m), stop in zip(begun, ends, strict=True)]

    def _first_header(self, start: int, message: int, text: str, bos: str) -> int:
        """Skip what a template prints once, before the header of whichever message is first."""
        start = max(start, self._headers.get(message, start))
        return start + len(bos) if start == 0 and bos and text.startswith(bos) else start


def _watched(statements: list[nodes.Node], numbers: Iterable[int]) -> list[nodes.Node]:
    """Return the statements with calls added to every loop whose output is handed out at once."""
    watched: list[nodes.Node] = []
    for statement in statements:
        watched.append(statement)
        if isinstance(statement, _GATHERED):
            continue
        if isinstance(statement, nodes.For) and statement.recursive:
            continue  # compiled into a function whose output is gathered
        for field in ("body", "elif_", "else_"):
            if hasattr(statement, field):
                setattr(statement, field, _watched(getattr(statement, field), numbers))
        if isinstance(statement, nodes.For) and isinstance(statement.target, nodes.Name):
            watched.append(_watch_loop(statement, next(iter(numbers))))
    return watched


def _watch_loop(loop: nodes.For, number: int) -> nodes.Node:
    """Add the calls inside `loop` and return the one to put behind it."""
    assert isinstance(loop.target, nodes.Name)
    name = loop.target.name
    containers = {
        node.node.name
        for node in loop.find_all(nodes.Getitem)  # a loop over range() that takes messages[i]
        if isinstance(node.arg, nodes.Name) and node.arg.name == name
        if isinstance(node.node, nodes.Name)
    }
    arguments = [nodes.Name(each, "load") for each in (name, *sorted(containers))]
    preamble = 0
    while preamble < len(loop.body) and _is_preamble(loop.body[preamble], name):
        preamble += 1
    header = [_call(_HEADER, loop.lineno, nodes.Const(number))] if preamble else []
    loop.body = [
        _call(_ITEM, loop.lineno, nodes.Const(number), *arguments),
        *loop.body[:preamble],
        *header,
        *loop.body[preamble:],
    ]
    return _call(_LEAVE, loop.lineno, nodes.Const(number))


def _is_preamble(statement: nodes.Node, item: str) -> bool:
    """Whether a statement of a loop's body prints by position alone, whatever the item is."""
    if not isinstance(statement, nodes.If):
        return False
    tested = {node.name for node in statement.test.find_all(nodes.Name)}
    named = {node.name for node in statement.find_all(nodes.Name)}
    return "loop" in tested and item not in named


def _call(name: str, line: int, *arguments: nodes.Expr) -> nodes.Node:
    call = nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
    return nodes.ExprStmt(call).set_lineno(line)


class _GenerationTag(Extension):
    """``{% generation %}``: prints its body, and notes where it begins and ends."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_call(_TAG_OPEN, line), nodes.Scope(body), _call(_TAG_CLOSE, line)]


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
