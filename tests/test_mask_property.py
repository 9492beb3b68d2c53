"""What holds for every conversation and every template, drawn by hypothesis."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chat_fixtures import TEMPLATES, encoder, tiny_tokenizer
from dspark.chat import ChatEncoder
from dspark.errors import RowError

PLAIN = [
    "chatml", "default-system", "qwen3", "think", "llama3", "gemma", "mistral", "headerless",
    "joined", "indexed", "items", "tojson", "nextrole", "parts", "macro", "end-at-last",
    "macro-rewriting", "captured-rewriting", "gathered-rewriting", "trimmed",
]  # fmt: skip
TAGGED = ["tag", "tag-noend", "macro-tag"]
WITH_TOOLS = {"qwen3", "items", "tojson"}
ENCODERS = {name: encoder(name) for name in [*PLAIN, *TAGGED]}

PIECES = [
    "a", "yes", "Hello world", "<|im_end|>", "<|im_start|>assistant\n", "[/INST]", "<think>",
    "</think>", "\n", "\n\n", " ", "  ", "é", "日本語", "🙂", "👩‍👩‍👧",
    "{% generation %}", "{{ x }}", "user", "assistant", "<bos>", "None", "\u2028", "\t", "\\",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


@st.composite
def conversations(draw: st.DrawFn, tools: bool) -> list[dict[str, Any]]:
    """Draw messages: any start, any end, at least one answer, tool calls where they are printed."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    role = draw(st.sampled_from(["user", "assistant"]))
    for _ in range(draw(st.integers(1, 5))):
        message = {"role": role, "content": draw(TEXT)}
        if role == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = draw(TEXT)
        messages.append(message)
        if tools and role == "assistant" and draw(st.booleans()):
            arguments = {"city": draw(TEXT)}
            function = {"name": "weather", "arguments": arguments}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
            messages.append({"role": "tool", "content": draw(TEXT)})
        else:
            role = "user" if role == "assistant" else "assistant"
    if not any(message["role"] == "assistant" for message in messages):
        messages.append({"role": "assistant", "content": draw(TEXT)})
    return messages


@st.composite
def cases(draw: st.DrawFn, names: list[str]) -> tuple[str, list[dict[str, Any]]]:
    name = draw(st.sampled_from(names))
    return name, draw(conversations(tools=name in WITH_TOOLS))


def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a word of its own into every message, so that its tokens can be told from others'."""
    return [
        {
            **message,
            "content": f"{message['content']} w{i}w{message['role'][0]} {message['content']}",
        }
        for i, message in enumerate(messages)
    ]


def offsets_of(name: str, ids: list[int], text: str) -> list[tuple[int, int]]:
    """Return where each token lies in `text`, by decoding: [start, stop) in bytes."""
    backend = tiny_tokenizer(TEMPLATES[name]).backend_tokenizer
    places, at = [], 0
    alphabet = byte_of_letter()
    for token in ids:
        piece = backend.id_to_token(token)
        added = piece.startswith("<") and piece.endswith(">") and len(piece) > 2
        data = piece.encode() if added else bytes(alphabet[letter] for letter in piece)
        assert text.encode()[at : at + len(data)] == data
        places.append((at, at + len(data)))
        at += len(data)
    assert at == len(text.encode())
    return places


def byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,  # the same examples for everyone; raise the number to search further
    suppress_health_check=[HealthCheck.too_slow],
)


@SETTINGS
@given(cases(PLAIN + TAGGED))
def test_ids_are_the_render_and_exactly_the_answers_are_supervised(
    case: tuple[str, list[dict[str, Any]]],
) -> None:
    name, drawn = case
    messages = marked(drawn)
    result = ENCODERS[name].encode({"messages": messages})
    tokenizer = tiny_tokenizer(TEMPLATES[name])
    given_to_template = as_given(name, messages)
    text = tokenizer.apply_chat_template(given_to_template, tokenize=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert result.input_ids.tolist() == expected
    assert len(result.loss_mask) == len(result.input_ids)
    assert not result.truncated
    data = text.encode()
    places = offsets_of(name, expected, text)
    for i, message in enumerate(messages):
        word = f"w{i}w{message['role'][0]}".encode()
        assert data.count(word) == 1, (name, text)
        start = data.index(word)
        inside = [
            bool(bit)
            for bit, (first, last) in zip(result.loss_mask, places, strict=True)
            if first >= start and last <= start + len(word)
        ]
        assert inside
        assert set(inside) == {message["role"] == "assistant"}, (name, text)


def as_given(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as a caller of `apply_chat_template` has to write them."""
    if name == "parts":
        return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    if name != "qwen3":
        return messages
    copied: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copied


@SETTINGS
@given(cases(PLAIN + TAGGED), st.integers(1, 60))
def test_a_cut_conversation_is_a_beginning_of_the_whole(
    case: tuple[str, list[dict[str, Any]]], seq_length: int
) -> None:
    name, messages = case
    whole = ENCODERS[name].encode({"messages": marked(messages)})
    cut = encoder(name, seq_length=seq_length).encode({"messages": marked(messages)})
    assert cut.input_ids.tolist() == whole.input_ids[:seq_length].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:seq_length].tolist()
    assert cut.truncated == (len(whole.input_ids) > seq_length)


@settings(SETTINGS, max_examples=60)
@given(cases(PLAIN + TAGGED), cases(PLAIN))
def test_the_result_depends_on_the_row_and_the_template_alone(
    case: tuple[str, list[dict[str, Any]]], other: tuple[str, list[dict[str, Any]]]
) -> None:
    name, messages = case
    row = {"messages": marked(messages)}
    alone = ENCODERS[name].encode(row)
    tokenizer = tiny_tokenizer(
        TEMPLATES[name],
        padding_side="left",
        truncation_side="left",
        model_max_length=7,
        pad_token="<|im_end|>",
    )
    unusual = ChatEncoder(tokenizer, seq_length=4096)
    unusual.encode({"messages": other[1]} if name == other[0] else row)
    again = unusual.encode(row)
    assert np.array_equal(alone.input_ids, again.input_ids)
    assert np.array_equal(alone.loss_mask, again.loss_mask)


@SETTINGS
@given(cases(["chatml", "think", "llama3", "mistral", "headerless", "joined"]))
def test_the_mask_is_that_of_the_prefix_lengths_where_prefixes_hold(
    case: tuple[str, list[dict[str, Any]]],
) -> None:
    """In text: a turn is what a render gains when the message is added."""
    name, messages = case
    tokenizer = tiny_tokenizer(TEMPLATES[name])

    def render(count: int) -> str:
        text = tokenizer.apply_chat_template(messages[:count], tokenize=False) if count else ""
        assert isinstance(text, str)
        return text

    text = render(len(messages))
    assume(text)
    begins = [render(count) for count in range(len(messages) + 1)]
    assume(all(text.startswith(begin) for begin in begins))
    encoding = tokenizer.backend_tokenizer
    encoding.post_processor = None
    offsets = encoding.encode(text, add_special_tokens=False).offsets
    expected = np.zeros(len(offsets), dtype=np.uint8)
    for i, message in enumerate(messages):
        start = len(begins[i])
        if i == 0 and text.startswith("<bos>") and "bos_token" in TEMPLATES[name]:
            start = len("<bos>")  # ahead of the header
        for token, (first, last) in enumerate(offsets):
            if message["role"] == "assistant" and first < len(begins[i + 1]) and last > start:
                expected[token] = 1
    result = ENCODERS[name].encode({"messages": messages})
    assert result.loss_mask.tolist() == expected.tolist()


KEYS = [
    "messages", "conversations", "role", "from", "content", "value", "tools", "tool_calls",
    "function", "arguments", "system", "text", "type", "thinking",
]  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(PIECES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@SETTINGS
@given(
    st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=4),
    st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=4),
    st.sampled_from(["chatml", "qwen3", "items"]),
)
def test_any_row_is_a_conversation_or_a_bad_row(
    row: dict[str, Any], message: dict[str, Any], name: str
) -> None:
    answer = {"role": "assistant", "content": "a", **message}
    for tried in (row, {**row, "messages": [{"role": "user", "content": "q"}, answer]}):
        try:
            result = ENCODERS[name].encode(tried)
        except RowError:
            continue
        assert len(result.input_ids) == len(result.loss_mask) > 0


@pytest.mark.parametrize("name", PLAIN + TAGGED)
def test_every_template_of_the_property_prints_a_word_of_every_message(name: str) -> None:
    messages = marked([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    result = ENCODERS[name].encode({"messages": messages})
    assert 0 < int(result.loss_mask.sum()) < len(result.loss_mask)
