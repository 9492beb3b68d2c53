"""What a template expects of messages, found out by showing it a small conversation.

Templates differ in ways that no field declares: some iterate over tool-call arguments and some
paste them as a string, some know a tool call by its missing content, some want content as a list
of parts. Given the wrong one they fail, print it quoted twice, or print nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dspark.errors import RowError
from dspark.rendering.messages import REASONING_NAMES, Message
from dspark.rendering.template import ChatTemplate

_WORDS = ("probe_key", "probe value")
_ARGUMENTS = dict([_WORDS])
_DUMPED = json.dumps(_ARGUMENTS)
_TEXT = "probe text"
_CHAT: list[Message] = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "probe answer"},
]
_FUNCTION = {"name": "probe_name", "arguments": _ARGUMENTS}
_CALL: Message = {
    "role": "assistant",
    "tool_calls": [{"id": "probe1234", "type": "function", "function": _FUNCTION}],
}
_REST: tuple[Message, ...] = (
    {"role": "tool", "name": "probe_name", "tool_call_id": "probe1234", "content": "probe result"},
    _CHAT[1],
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_name",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


@dataclass(frozen=True, slots=True)
class Habits:
    """How to hand messages to one template.

    Attributes:
        content_parts: Content as ``[{"type": "text", "text": ...}]`` instead of a string.
        object_arguments: Tool-call arguments as objects instead of JSON strings.
        null_content: Null content beside tool calls stays None instead of an empty string.
        no_empty_content: Beside tool calls an empty string is None too.
        reasoning_names: The keys under which the template reads reasoning.
    """

    content_parts: bool = False
    object_arguments: bool = False
    null_content: bool = False
    no_empty_content: bool = False
    reasoning_names: tuple[str, ...] = ()

    def adapt(self, message: Message) -> Message:
        """Return a new message as the template expects it.

        Raises:
            RowError: If tool-call arguments must be an object and are not JSON.
        """
        adapted = dict(message)
        calls = message.get("tool_calls")
        content = message["content"]
        if not content:
            is_null = self.no_empty_content or (self.null_content and content is None)
            content = None if calls and is_null else ""
        if self.content_parts and content is not None:
            content = [{"type": "text", "text": content}]
        adapted["content"] = content
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
        if holder.get("arguments") is None:
            return dict(holder)
        arguments = holder["arguments"]
        if isinstance(arguments, str) and self.object_arguments:
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise RowError(
                    "tool-call arguments are not JSON", f"{arguments[:80]!r}: {error}"
                ) from error
        elif not isinstance(arguments, str) and not self.object_arguments:
            arguments = json.dumps(arguments)
        return {**holder, "arguments": arguments}


def find_habits(template: ChatTemplate) -> Habits:
    """Find out what `template` expects."""
    names = tuple(name for name in REASONING_NAMES if name in template.keys)
    found = Habits(reasoning_names=names)
    if _TEXT not in _print(template, found, _CHAT):
        parts = replace(found, content_parts=True)
        found = parts if _TEXT in _print(template, parts, _CHAT) else found
    for object_arguments in (False, True):
        habits = replace(found, object_arguments=object_arguments, null_content=True)
        with_null, with_empty = (_prints_call(template, habits, text) for text in (None, ""))
        if with_null or with_empty:
            return replace(
                habits, null_content=with_null, no_empty_content=with_null and not with_empty
            )
    return found  # it prints no tool calls, or refuses them


def _print(template: ChatTemplate, habits: Habits, messages: Sequence[Message]) -> str:
    """Render a probe, with the tools or the rest of the conversation that some templates need."""
    for rest, tools in product(((), _REST), (None, [_TOOL])):
        try:
            adapted = [habits.adapt(message) for message in (*messages, *rest)]
            return template.render(adapted, tools).text
        except RowError:
            continue
    return ""


def _prints_call(template: ChatTemplate, habits: Habits, content: str | None) -> bool:
    """Whether a tool call's arguments come out, as an object or its pasted JSON, and only once."""
    text = _print(template, habits, [_CHAT[0], {**_CALL, "content": content}])
    if text.count("None") > _print(template, habits, _CHAT).count("None"):
        return False
    if not habits.object_arguments:
        return _DUMPED in text
    return all(word in text for word in _WORDS) and repr(_ARGUMENTS) not in text
