"""What a template expects of messages, found out by showing it a small conversation.

Templates differ in ways that no field declares: some iterate over tool-call arguments and some
paste them as a string, some know a tool call by its missing content, some want content as a list
of parts. Given the wrong one they fail, print it quoted twice, or print nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dspark.errors import RowError
from dspark.messages import REASONING_NAMES, Message
from dspark.template import ChatTemplate

_ARGUMENTS = {"probe_key": "probe value"}
_DUMPED = json.dumps(_ARGUMENTS)
_TEXT = "probe text"


@dataclass(frozen=True, slots=True)
class Habits:
    """How to hand messages to one template.

    Attributes:
        content_parts: Content as ``[{"type": "text", "text": ...}]`` instead of a string.
        object_arguments: Tool-call arguments as objects instead of JSON strings.
        null_content: None instead of an empty string beside tool calls.
        reasoning_names: The keys under which the template reads reasoning.
    """

    content_parts: bool = False
    object_arguments: bool = False
    null_content: bool = False
    reasoning_names: tuple[str, ...] = ()

    def adapt(self, message: Message) -> Message:
        """Return a new message as the template expects it.

        Raises:
            RowError: If tool-call arguments must be an object and are not JSON.
        """
        adapted = dict(message)
        calls = message.get("tool_calls")
        content = message["content"] or ""
        adapted["content"] = None if calls and not content and self.null_content else content
        if self.content_parts and adapted["content"] is not None:
            adapted["content"] = [{"type": "text", "text": content}]
        if calls:
            adapted["tool_calls"] = [self._adapt_call(call) for call in calls]
        reasoning = adapted.pop("reasoning_content", None)
        if reasoning is not None:
            adapted.update(dict.fromkeys(self.reasoning_names, reasoning))
        return adapted

    def _adapt_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if isinstance(function, Mapping):
            return {**call, "function": self._adapt_arguments(function)}
        return self._adapt_arguments(call)

    def _adapt_arguments(self, holder: Mapping[str, Any]) -> dict[str, Any]:
        arguments = holder.get("arguments")
        if isinstance(arguments, str) and self.object_arguments:
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise RowError(
                    "tool-call arguments are not JSON", f"{arguments[:80]!r}: {error}"
                ) from error
        elif not isinstance(arguments, str | None) and not self.object_arguments:
            arguments = json.dumps(arguments)
        return {**holder, "arguments": arguments}


def find_habits(template: ChatTemplate) -> Habits:
    """Find out what `template` expects."""
    reads = tuple(name for name in REASONING_NAMES if name in template.keys)
    content_parts = not _prints_text(template, Habits()) and _prints_text(
        template, Habits(content_parts=True)
    )
    for null_content, object_arguments in product((False, True), repeat=2):
        habits = Habits(content_parts, object_arguments, null_content, reads)
        if _prints_call(template, habits):
            return habits
    # It prints no tool calls, or refuses them.
    return Habits(content_parts, reasoning_names=reads)


def _try(template: ChatTemplate, habits: Habits, messages: list[Message]) -> str:
    try:
        return template.render([habits.adapt(message) for message in messages], None).text
    except RowError:
        return ""


def _prints_text(template: ChatTemplate, habits: Habits) -> bool:
    messages = [{"role": "user", "content": _TEXT}, {"role": "assistant", "content": "ok"}]
    return _TEXT in _try(template, habits, messages)


def _prints_call(template: ChatTemplate, habits: Habits) -> bool:
    """Whether a tool call's arguments come out, as an object or its pasted JSON, and only once."""
    function = {"name": "probe_name", "arguments": _ARGUMENTS}
    call = {"id": "probe12345"[:9], "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": _TEXT},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    text = _try(template, habits, messages)
    if "probe_name" not in text or "None" in text:
        return False
    if not habits.object_arguments:
        return _DUMPED in text
    return "probe_key" in text and "probe value" in text and repr(_ARGUMENTS) not in text
