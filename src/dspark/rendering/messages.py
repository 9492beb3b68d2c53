"""A dataset row to messages: one shape, whatever the row is written in.

    {"messages": [{"role": ..., "content": ...}], "tools": [...]}         chat-completions rows
    {"conversations": [{"from": ..., "value": ...}], "system": "..."}     ShareGPT rows

Messages keep their order and are never merged, and none is invented. Nothing is dropped in
silence: what cannot be text is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.errors import RowError

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_LISTS = ("messages", "conversations", "conversation")
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of one row and the tools that its template may print.

    Attributes:
        messages: Each has ``role`` (system, user, assistant or tool) and ``content`` (a string, or
            None); reasoning is under ``reasoning_content``; other keys are as the row has them.
        tools: Tool definitions, None where there are none.
    """

    messages: list[Message]
    tools: list[Any] | None


def read_chat(row: Mapping[str, Any]) -> Chat:
    """Read the conversation of one row.

    Raises:
        RowError: If the row holds no conversation that a template could print as it is.
    """
    messages = [_read_message(item, i) for i, item in enumerate(_find_messages(row))]
    system = row.get("system")
    if system:
        messages = _with_system(messages, _read_text(system, "system field"))
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn", f"roles are {[m['role'] for m in messages]}")
    return Chat(messages, _read_tools(row.get("tools")))


def _find_messages(row: Mapping[str, Any]) -> list[Any]:
    found = [name for name in _LISTS if row.get(name) is not None]
    if not found:
        raise RowError("no messages", f"expected one of {list(_LISTS)}, row has {sorted(row)}")
    messages = _parse_if_string(row[found[0]], found[0])
    if not isinstance(messages, list) or not messages:
        raise RowError("no messages", f"{found[0]} is {_shown(messages)}")
    return messages


def _read_message(item: Any, index: int) -> Message:
    if not isinstance(item, Mapping):
        raise RowError("message is not an object", f"message {index} is {_shown(item)}")
    role = _first(item, ("role", "from"))
    known = _ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise RowError(
            "unknown role",
            f"message {index} has role {role!r}; known are {', '.join(sorted(_ROLES))}",
        )
    read = ("role", "from", "content", "value", "tool_calls", *REASONING_NAMES)
    message = {key: value for key, value in item.items() if key not in read and value is not None}
    message["role"] = known
    content = _first(item, ("content", "value"))
    message["content"] = None if content is None else _read_text(content, f"message {index}")
    reasoning = _read_reasoning(item, index)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    calls = _read_tool_calls(item.get("tool_calls"), index)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_text(content: Any, where: str) -> str:
    """Return text as it is and a list of text parts joined by spaces."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("content is not text", f"{where} has {_shown(content)}")
    return " ".join(_read_part(part, where) for part in content)


def _read_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get("type", "text") != "text":
        raise RowError("content is not text", f"{where} has the part {_shown(part)}")
    return text


def _read_reasoning(item: Mapping[str, Any], index: int) -> str | None:
    if not any(name in item for name in REASONING_NAMES):
        return None
    given = {item[name] for name in REASONING_NAMES if isinstance(item.get(name), str)}
    wrong = [name for name in REASONING_NAMES if not isinstance(item.get(name), str | None)]
    if wrong or len(given) > 1:
        names = wrong or [name for name in REASONING_NAMES if item.get(name) is not None]
        raise RowError(
            "reasoning is not one text", f"message {index} has {names}: {_shown(sorted(given))}"
        )
    return given.pop() if given else None


def _read_tool_calls(calls: Any, index: int) -> list[Any] | None:
    calls = _parse_if_string(calls, f"tool_calls of message {index}")
    if not calls:
        return None
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError("tool calls are not a list", f"message {index} has {_shown(calls)}")
    return calls


def _read_tools(tools: Any) -> list[Any] | None:
    tools = _parse_if_string(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError("tools are not a list", f"got {_shown(tools)}")
    parsed = [_parse_if_string(tool, "tools") for tool in tools]
    if not all(isinstance(tool, Mapping) for tool in parsed):
        raise RowError("tools are not a list", f"it holds more than objects: {_shown(parsed)}")
    return parsed


def _with_system(messages: list[Message], system: str) -> list[Message]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if first["content"] != system:
        raise RowError(
            "two system prompts", f"the system field says {_shown(system)}, the first message not"
        )
    return messages


def _parse_if_string(value: Any, where: str) -> Any:
    """Parse what a column stores as a JSON string; an empty string counts as absent."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError("invalid JSON in a column", f"{where}: {error}") from error


def _first(item: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
