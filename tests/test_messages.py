"""Rows of every shape to messages, tools in every form, and what is refused."""

import json
from typing import Any

import pytest

from chat_fixtures import TEMPLATES, chat, encode, supervised, text
from dspark.errors import RowError
from dspark.rendering.messages import read_chat

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def roles_and_contents(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in read_chat(row).messages]


def calling(arguments: Any, content: str | None = "") -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call_1234", "type": "function", "function": function}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1234", "content": "cold"},
            {"role": "assistant", "content": "It is cold."},
        ]
    }


class TestShapes:
    def test_sharegpt_rows_keep_every_turn_and_the_system_field(self) -> None:
        row = {
            "system": "Be kind.",
            "conversations": [
                {"from": "human", "value": "q1"},
                {"from": "gpt", "value": "a1"},
                {"from": "human", "value": "q2"},
                {"from": "gpt", "value": "a2"},
            ],
        }
        assert roles_and_contents(row) == [
            ("system", "Be kind."),
            ("user", "q1"),
            ("assistant", "a1"),
            ("user", "q2"),
            ("assistant", "a2"),
        ]

    def test_roles_come_from_their_names_and_never_from_their_place(self) -> None:
        row = {
            "conversations": [
                {"from": "gpt", "value": "a0"},
                {"from": "gpt", "value": "a1"},
                {"from": "human", "value": "q"},
            ]
        }
        assert [role for role, _ in roles_and_contents(row)] == ["assistant", "assistant", "user"]

    @pytest.mark.parametrize(
        ("name", "role"),
        [
            ("human", "user"),
            ("User", "user"),
            ("gpt", "assistant"),
            ("chatgpt", "assistant"),
            ("model", "assistant"),
            ("bot", "assistant"),
            ("function_response", "tool"),
        ],
    )
    def test_other_names_of_roles(self, name: str, role: str) -> None:
        row = {"messages": [{"role": name, "content": "x"}, {"role": "assistant", "content": "a"}]}
        assert roles_and_contents(row)[0] == (role, "x")

    def test_keys_may_be_mixed(self) -> None:
        row = {
            "messages": [
                {"from": "human", "content": "q", "value": None, "role": None},
                {"role": "assistant", "value": "a", "content": None},
            ]
        }
        assert roles_and_contents(row) == [("user", "q"), ("assistant", "a")]

    def test_null_columns_count_as_absent(self) -> None:
        row = {
            "messages": [
                {"role": "user", "content": "q", "tool_calls": None, "name": None},
                {"role": "assistant", "content": "a", "tool_calls": [], "reasoning_content": None},
            ],
            "conversations": None,
            "tools": None,
            "system": None,
        }
        assert read_chat(row).messages == [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
        ]

    def test_messages_may_be_a_json_string(self) -> None:
        row = {"messages": json.dumps(chat("q", "a")["messages"])}
        assert roles_and_contents(row) == [("user", "q"), ("assistant", "a")]

    def test_text_parts_are_joined_by_a_space(self) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "image": None}]
        row = {"messages": [{"role": "user", "content": parts}, {"role": "gpt", "content": "a"}]}
        assert roles_and_contents(row)[0] == ("user", "one two")

    def test_an_empty_answer_of_null_prints_nothing(self) -> None:
        assert supervised(encode("chatml", chat("q", None, "q", "a"))) == [  # type: ignore[arg-type]
            "<|im_start|>assistant\n<|im_end|>\n",
            "<|im_start|>assistant\na<|im_end|>\n",
        ]

    def test_a_system_field_equal_to_the_first_message_is_not_said_twice(self) -> None:
        row = {**chat("be kind", "q", "a", roles="sua"), "system": "be kind"}
        assert len(read_chat(row).messages) == 3

    def test_further_keys_of_a_message_reach_the_template(self) -> None:
        template = TEMPLATES["chatml"].replace("{{ m['role'] }}", "{{ m['role'] }} {{ m.name }}")
        row = {
            "messages": [
                {"role": "user", "name": "Ann", "content": "q"},
                *chat("q", "a")["messages"],
            ]
        }
        assert "<|im_start|>user Ann\nq" in text(encode(template, row))


class TestRefused:
    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({}, "no messages"),
            ({"messages": []}, "no messages"),
            ({"messages": None, "text": "x"}, "no messages"),
            ({"messages": {"role": "user"}}, "no messages"),
            ({"messages": "not json"}, "invalid JSON in a column"),
            ({"messages": ["hello"]}, "message is not an object"),
            (chat("q"), "no assistant turn"),
            ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role"),
            ({"messages": [{"content": "x"}]}, "unknown role"),
            ({"messages": [{"role": "assistant", "content": 3}]}, "content is not text"),
            (
                {"messages": [{"role": "assistant", "content": {"text": "x"}}]},
                "content is not text",
            ),
            (
                {"messages": [{"role": "assistant", "content": "a", "tool_calls": "[3]"}]},
                "tool calls are not a list",
            ),
            ({**chat("q", "a"), "tools": {"name": "x"}}, "tools are not a list"),
            ({**chat("q", "a"), "tools": [3]}, "tools are not a list"),
            ({**chat("q", "a"), "tools": "{"}, "invalid JSON in a column"),
            ({**chat("s", "q", "a", roles="sua"), "system": "other"}, "two system prompts"),
            (
                {
                    "messages": [
                        {"role": "assistant", "content": "a", "thinking": "x", "reasoning": "y"}
                    ]
                },
                "reasoning is not one text",
            ),
            (
                {"messages": [{"role": "assistant", "content": "a", "reasoning": ["x"]}]},
                "reasoning is not one text",
            ),
        ],
    )
    def test_what_is_no_conversation_is_named(self, row: dict[str, Any], reason: str) -> None:
        with pytest.raises(RowError) as caught:
            read_chat(row)
        assert caught.value.reason == reason

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "image", "text": "caption"},
            {"type": "text", "text": None},
            "text",
            None,
        ],
    )
    def test_parts_that_are_no_text_are_refused_and_not_dropped(self, part: Any) -> None:
        content = [{"type": "text", "text": "look"}, part]
        row = {"messages": [{"role": "user", "content": content}, {"role": "gpt", "content": "a"}]}
        with pytest.raises(RowError, match="content is not text: message 0"):
            read_chat(row)


class TestTools:
    @pytest.mark.parametrize("tools", [None, [], "", "null", "[]"], ids=repr)
    def test_no_tools_in_any_form_print_nothing(self, tools: Any) -> None:
        expected = encode("tojson", chat("q", "a"))
        result = encode("tojson", {**chat("q", "a"), "tools": tools})
        assert result.input_ids.tolist() == expected.input_ids.tolist()
        assert "<tools>" not in text(result)

    @pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
    def test_tools_as_list_or_as_json_string_are_the_same(self, tools: Any) -> None:
        result = encode("tojson", {**chat("q", "a"), "tools": tools})
        assert f"<tools>{json.dumps(TOOL)}</tools>" in text(result)
        assert "tools" not in "".join(supervised(result))

    def test_tools_that_the_template_does_not_print_are_warned_of(self) -> None:
        assert "tools" in encode("chatml", {**chat("q", "a"), "tools": [TOOL]}).warnings[0]


class TestToolCalls:
    ARGUMENTS: dict[str, Any] = {"city": "Köln", "days": [1, 2], "deep": {"a": None}}  # noqa: RUF012

    @pytest.mark.parametrize("template", ["items", "tojson", "pasted", "qwen3"])
    def test_an_object_and_its_json_string_give_the_same_ids(self, template: str) -> None:
        as_object = encode(template, calling(self.ARGUMENTS))
        as_string = encode(template, calling(json.dumps(self.ARGUMENTS)))
        assert as_object.input_ids.tolist() == as_string.input_ids.tolist()
        assert as_object.loss_mask.tolist() == as_string.loss_mask.tolist()
        assert '\\"' not in text(as_object)
        assert "city" in "".join(supervised(as_object))

    @pytest.mark.parametrize("template", ["pasted", "qwen3"])
    def test_a_string_is_pasted_as_it_is(self, template: str) -> None:
        written = '{"city":"Oslo",   "x": 1}'
        assert written in text(encode(template, calling(written)))

    def test_a_template_that_serialises_does_not_quote_a_string_again(self) -> None:
        result = encode("tojson", calling('{"city": "Oslo"}'))
        assert 'weather({"city": "Oslo"})' in text(result)

    def test_arguments_that_must_be_parsed_and_cannot_be_are_refused(self) -> None:
        with pytest.raises(RowError) as caught:
            encode("items", calling("{broken"))
        assert caught.value.reason == "tool-call arguments are not JSON"

    @pytest.mark.parametrize("content", [None, ""])
    @pytest.mark.parametrize("template", ["items", "tojson", "pasted", "qwen3"])
    def test_a_call_is_printed_whether_its_content_is_null_or_empty(
        self, template: str, content: str | None
    ) -> None:
        result = encode(template, calling({"city": "Oslo"}, content))
        call = supervised(result)[0]
        assert "Oslo" in call
        assert "None" not in call

    @pytest.mark.parametrize("template", ["items", "tojson", "qwen3"])
    def test_results_are_not_supervised(self, template: str) -> None:
        result = encode(template, calling({"city": "Oslo"}))
        assert "cold" in text(result)
        assert "".join(supervised(result)).count("cold") == 1  # the answer's own

    @pytest.mark.parametrize("template", ["items", "tojson", "macro-lookup"])
    def test_a_template_that_insists_on_tools_is_understood_too(self, template: str) -> None:
        insisting = "{% for t in tools %}{{ t.name }}{% endfor %}" + TEMPLATES[template]
        row = {**calling(json.dumps({"city": "Oslo"})), "tools": [TOOL]}
        result = encode(insisting, row)
        assert "Oslo" in supervised(result)[0]
        assert '\\"' not in text(result)

    def test_calls_that_the_template_does_not_print_are_warned_of(self) -> None:
        assert "tool calls" in encode("chatml", calling({"city": "Oslo"})).warnings[0]
