"""Which tokens are supervised: turns, tags, look-alikes, rewritten history, cuts and options."""

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from chat_fixtures import TEMPLATES, chat, decode, encode, encoder, supervised, text, tiny_tokenizer
from dspark.chat import ChatEncoder
from dspark.errors import RowError

TWO_TURNS = chat("q1", "a1", "q2", "a2")


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def weather(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1234", "type": "function", "function": function}


class TestTurns:
    def test_a_turn_is_supervised_from_its_header_to_the_next_message(self) -> None:
        result = encode("chatml", TWO_TURNS)
        assert supervised(result) == [
            "<|im_start|>assistant\na1<|im_end|>\n",
            "<|im_start|>assistant\na2<|im_end|>\n",
        ]
        assert result.input_ids.dtype == np.int32
        assert result.loss_mask.dtype == np.uint8

    def test_every_finished_turn_has_its_end_token_in_the_mask(self) -> None:
        result = encode("chatml", chat("q1", "a1", "q2", "a2", "q3"))
        ends = [decode(result.input_ids[[i]]) for i in np.flatnonzero(result.loss_mask)]
        assert ends.count("<|im_end|>") == 2

    @pytest.mark.parametrize("roles", ["au", "aua", "sau", "uau", "suaua"])
    def test_any_first_and_last_role_will_do(self, roles: str) -> None:
        contents = [f"m{i}" for i in range(len(roles))]
        result = encode("chatml", chat(*contents, roles=roles))
        assert supervised(result) == [
            f"<|im_start|>assistant\nm{i}<|im_end|>\n"
            for i, role in enumerate(roles)
            if role == "a"
        ]

    def test_neighbouring_answers_are_both_supervised(self) -> None:
        result = encode("chatml", chat("q", "a", "b", roles="uaa"))
        assert supervised(result) == [
            "<|im_start|>assistant\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        ]

    def test_a_system_prompt_that_the_template_adds_is_not_part_of_a_first_answer(self) -> None:
        result = encode("default-system", chat("a0", "q1", "a1", roles="aua"))
        assert text(result).startswith("<|im_start|>system\nBe helpful.<|im_end|>\n")
        assert supervised(result)[0] == "<|im_start|>assistant\na0<|im_end|>\n"

    def test_a_system_prompt_merged_into_a_first_answer_is_not_supervised(self) -> None:
        result = encode("gemma", chat("be brief", "a0", roles="sa"))
        assert text(result) == "<bos><|im_start|>model\nbe brief\n\na0<|im_end|>\n"
        assert "brief" not in "".join(supervised(result))

    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            ("llama3", ["<|im_start|>assistant<|im_end|>\n\na1<|eot|>"]),
            ("gemma", ["<|im_start|>model\na1<|im_end|>\n"]),
            ("mistral", [" a1<eos>"]),
            ("headerless", ["a1"]),
            ("macro", ["<|im_start|>assistant\na1<|im_end|>\n"]),
        ],
    )
    def test_headers_of_every_kind(self, template: str, expected: list[str]) -> None:
        assert supervised(encode(template, chat("q1", "a1", "q2"))) == expected

    def test_a_token_that_overlaps_an_answer_is_supervised(self) -> None:
        result = encode("headerless", chat("wor", "ld real", " q", roles="uau"))
        pieces = [decode(result.input_ids[[i]]) for i in range(len(result.input_ids))]
        assert text(result) == "world real q"
        first = next(i for i, _ in enumerate(pieces) if len("".join(pieces[: i + 1])) > 3)
        assert result.loss_mask[first] == 1
        assert pieces[first] not in ("l", "d")  # it begins inside the question

    @pytest.mark.parametrize("content", ["", " ", "  a  ", "\n\na\n", "\t", "a \n"])
    def test_white_space_around_an_answer_and_empty_answers_stay(self, content: str) -> None:
        result = encode("chatml", chat(" q ", content, "q", "a"))
        assert supervised(result)[0] == f"<|im_start|>assistant\n{content}<|im_end|>\n"

    def test_an_answer_of_white_space_alone_is_supervised_without_a_header(self) -> None:
        result = encode("headerless", chat("x", "  ", "y", roles="uau"))
        assert "".join(supervised(result)).count(" ") == 2

    def test_trimming_templates_are_followed(self) -> None:
        result = encode("llama3", chat("  q  ", "  a  ", "  r "))
        assert supervised(result) == ["<|im_start|>assistant<|im_end|>\n\na<|eot|>"]


class TestLookAlikes:
    def test_markup_in_a_message_changes_nothing(self) -> None:
        fake = "<|im_end|>\n<|im_start|>assistant\nfake"
        result = encode("chatml", chat(fake, "real", fake, roles="uau"))
        assert supervised(result) == ["<|im_start|>assistant\nreal<|im_end|>\n"]

    def test_equal_texts_in_all_turns_change_nothing(self) -> None:
        result = encode("chatml", chat("same", "same", "same", "same"))
        assert supervised(result) == ["<|im_start|>assistant\nsame<|im_end|>\n"] * 2

    def test_markup_in_an_answer_stays_supervised(self) -> None:
        fake = "a<|im_end|>\n<|im_start|>user\nb"
        result = encode("chatml", chat("q", fake, "r", "b"))
        assert supervised(result)[0] == f"<|im_start|>assistant\n{fake}<|im_end|>\n"

    def test_jinja_in_a_message_is_text(self) -> None:
        result = encode("chatml", chat("{% generation %}{{ 1 + 1 }}", "{{ messages }}"))
        assert supervised(result) == ["<|im_start|>assistant\n{{ messages }}<|im_end|>\n"]


class TestTags:
    def test_a_tag_in_a_comment_is_no_tag(self) -> None:
        commented = "{# use {% generation %} here #}" + TEMPLATES["chatml"]
        assert np.array_equal(
            encode(commented, TWO_TURNS).loss_mask, encode("chatml", TWO_TURNS).loss_mask
        )

    def test_a_tag_in_a_printed_string_is_no_tag(self) -> None:
        quoted = TEMPLATES["chatml"] + "{{ '{% generation %}' if false else '' }}"
        assert supervised(encode(quoted, TWO_TURNS)) == supervised(encode("chatml", TWO_TURNS))

    def test_tags_decide_whatever_their_spacing(self) -> None:
        assert "{%- generation -%}" in TEMPLATES["tag"]
        assert supervised(encode("tag", TWO_TURNS)) == ["a1<|im_end|>", "a2<|im_end|>"]
        spaced = TEMPLATES["tag"].replace("{%- generation -%}", "{%   generation   %}")
        assert supervised(encode(spaced, TWO_TURNS)) == ["a1<|im_end|>", "a2<|im_end|>"]

    def test_the_mask_is_the_one_transformers_makes(self) -> None:
        template = TEMPLATES["tag"].replace("{%- generation -%}", "{% generation %}")
        tokenizer = tiny_tokenizer(template)
        row = chat("q1", "a1 one two", "q2", "a2")
        theirs = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ours = ChatEncoder(tokenizer, seq_length=512).encode(row)
        assert ours.input_ids.tolist() == theirs["input_ids"]
        assert ours.loss_mask.tolist() == theirs["assistant_masks"]

    def test_tags_inside_a_macro_are_where_they_print(self) -> None:
        row = chat("q", "a b", "q", "a b")
        assert supervised(encode("macro-tag", row)) == ["a b<|im_end|>", "a b<|im_end|>"]

    def test_a_cut_inside_an_answer_keeps_what_the_tags_say(self) -> None:
        whole = encode("tag", chat("q", "one two three four five six seven"))
        start = int(np.flatnonzero(whole.loss_mask)[0])
        cut = encode("tag", chat("q", "one two three four five six seven"), seq_length=start + 2)
        assert cut.loss_mask.tolist() == [0] * start + [1, 1]

    def test_an_answer_without_a_tag_is_an_error(self) -> None:
        half = TEMPLATES["tag"].replace("== 'assistant' %}", "== 'assistant' and loop.last %}", 1)
        with pytest.raises(RowError, match="generation tags miss an answer") as caught:
            encode(half, TWO_TURNS)
        assert caught.value.reason == "generation tags miss an answer"

    def test_a_tag_around_a_question_is_an_error(self) -> None:
        wide = (
            "{% for m in messages %}{% generation %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "<|im_end|>\n{% endgeneration %}{% endfor %}"
        )
        with pytest.raises(RowError, match="generation tags cover a prompt"):
            encode(wide, TWO_TURNS)

    def test_tags_are_checked_before_the_cut(self) -> None:
        half = TEMPLATES["tag"].replace("== 'assistant' %}", "== 'assistant' and loop.first %}", 1)
        with pytest.raises(RowError, match="miss an answer"):
            encode(half, TWO_TURNS, seq_length=2)


class TestRewrittenHistory:
    def test_two_plain_turns(self) -> None:
        result = encode("qwen3", TWO_TURNS)
        assert supervised(result) == [
            "<|im_start|>assistant\na1<|im_end|>\n",
            "<|im_start|>assistant\n<think>\n\n</think>\n\na2<|im_end|>\n",
        ]

    def test_reasoning_is_kept_in_the_last_turn_alone(self) -> None:
        row = {
            "messages": [
                user("q1"),
                assistant("a1", reasoning_content="r1"),
                user("q2"),
                assistant("a2", reasoning_content="r2"),
            ]
        }
        assert supervised(encode("qwen3", row)) == [
            "<|im_start|>assistant\na1<|im_end|>\n",
            "<|im_start|>assistant\n<think>\nr2\n</think>\n\na2<|im_end|>\n",
        ]

    def test_both_turns_around_a_tool_result_keep_their_reasoning(self) -> None:
        row = {
            "messages": [
                user("q1"),
                assistant("", reasoning_content="r1", tool_calls=[weather({"city": "Oslo"})]),
                {"role": "tool", "content": "cold"},
                assistant("a2", reasoning_content="r2"),
            ]
        }
        first, second = supervised(encode("qwen3", row))
        assert first == (
            "<|im_start|>assistant\n<think>\nr1\n</think>\n\n<tool_call>\n"
            '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        )
        assert second == "<|im_start|>assistant\n<think>\nr2\n</think>\n\na2<|im_end|>\n"

    def test_ids_are_those_of_the_one_full_render(self) -> None:
        tokenizer = tiny_tokenizer(TEMPLATES["qwen3"])
        rendered = tokenizer.apply_chat_template(TWO_TURNS["messages"], tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert encode("qwen3", TWO_TURNS).input_ids.tolist() == ids

    def test_a_template_that_wants_a_user_message_gets_the_whole_conversation(self) -> None:
        result = encode("nouser", chat("s", "q", "a", roles="sua"))
        assert supervised(result) == ["<|im_start|>assistant\na<|im_end|>\n"]

    def test_a_loop_over_numbers_is_followed(self) -> None:
        assert supervised(encode("indexed", TWO_TURNS)) == [
            "<|im_start|>assistant\na1<|im_end|>\n",
            "<|im_start|>assistant\n<think></think>a2<|im_end|>\n",
        ]

    @pytest.mark.parametrize(
        ("contents", "roles", "expected"),
        [
            (("q1", "a1", "q2", "a2"), "uaua", ["a1", "a2"]),
            (("q1", "a1", "q2"), "uau", ["a1"]),
        ],
    )
    def test_a_message_printed_outside_the_loop_is_found(
        self, contents: tuple[str, ...], roles: str, expected: list[str]
    ) -> None:
        runs = supervised(encode("last-apart", chat(*contents, roles=roles)))
        assert len(runs) == len(expected)
        for run, answer in zip(runs, expected, strict=True):
            assert run.startswith("<|im_start|>assistant\n")
            assert f"{answer}<|im_end|>" in run
            assert "q2" not in run

    def test_what_cannot_be_followed_is_an_error_and_not_a_guess(self) -> None:
        with pytest.raises(RowError, match="turns not found"):
            encode("untraceable", TWO_TURNS)

    @pytest.mark.parametrize(
        "template", ["macro-rewriting", "captured-rewriting", "gathered-rewriting"]
    )
    def test_text_gathered_before_it_is_printed_is_followed(self, template: str) -> None:
        assert supervised(encode(template, TWO_TURNS)) == [
            "<|im_start|>assistant\na1<|im_end|>\n",
            "<|im_start|>assistant\n<think></think>a2<|im_end|>\n",
        ]

    def test_a_filter_over_a_captured_block_changes_nothing(self) -> None:
        result = encode("trimmed", chat("q1", "a1", "q2", "a2"))
        assert text(result).endswith("a2<|im_end|>")
        assert supervised(result) == [
            "\n<|im_start|>assistant\na1<|im_end|>",
            "\n<|im_start|>assistant\na2<|im_end|>",
        ]


class TestEnds:
    def test_an_end_printed_with_the_next_header_stays_where_prefix_lengths_put_it(self) -> None:
        result = encode("joined", TWO_TURNS)
        assert [run.strip() for run in supervised(result)] == [
            "<|im_start|>assistant\na1<|im_end|>",
            "<|im_start|>assistant\na2<|im_end|>",
        ]

    def test_an_end_printed_only_after_the_last_message_moves_no_header(self) -> None:
        result = encode("end-at-last", TWO_TURNS)
        assert supervised(result) == [
            "<|im_start|>assistant\na1\n",
            "<|im_start|>assistant\na2\n<eos>",
        ]

    @pytest.mark.parametrize("template", ["tag-noend", "nextrole", "end-at-last", "headerless"])
    def test_a_turn_without_an_end_token_is_warned_of_once(self, template: str) -> None:
        made = encoder(template)
        first, second = made.encode(TWO_TURNS), made.encode(TWO_TURNS)
        assert len(first.warnings) == 1
        assert "no end token" in first.warnings[0]
        assert second.warnings == ()
        assert made.warnings == list(first.warnings)

    @pytest.mark.parametrize("template", ["chatml", "tag", "llama3", "mistral", "joined", "qwen3"])
    def test_a_turn_with_an_end_token_is_not_warned_of(self, template: str) -> None:
        assert encode(template, chat("q1", "a1", "q2", "")).warnings == ()

    def test_an_end_token_is_known_by_being_marked_as_special(self) -> None:
        tokenizer = tiny_tokenizer(
            TEMPLATES["chatml"].replace("<|im_end|>", "<|stop|>"), eos_token="<|endoftext|>"
        )
        tokenizer.add_tokens([AddedToken("<|stop|>", special=True)])
        assert ChatEncoder(tokenizer, seq_length=64).encode(TWO_TURNS).warnings == ()


class TestCut:
    def test_a_cut_inside_an_answer_keeps_the_first_answer(self) -> None:
        row = chat("q1", "a1", "q2", "one two three four five six seven")
        whole = encode("chatml", row)
        second = [i for i in np.flatnonzero(whole.loss_mask) if not whole.loss_mask[i - 1]][1]
        cut = encode("chatml", row, seq_length=int(second) + 3)
        assert cut.truncated
        assert not whole.truncated
        assert len(cut.input_ids) == len(cut.loss_mask) == second + 3
        assert cut.loss_mask[-3:].tolist() == [1, 1, 1]
        assert supervised(cut)[0] == "<|im_start|>assistant\na1<|im_end|>\n"

    def test_a_prompt_longer_than_the_window_leaves_nothing_supervised(self) -> None:
        result = encode("chatml", chat("word " * 50, "ok"), seq_length=8)
        assert result.loss_mask.tolist() == [0] * 8


class TestReasoning:
    ROW: dict[str, Any] = {  # noqa: RUF012
        "messages": [user("2+2?"), assistant("4", reasoning_content="two and two")]
    }

    def test_reasoning_is_supervised_by_default(self) -> None:
        assert supervised(encode("think", self.ROW)) == [
            "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n\n4<|im_end|>\n"
        ]

    def test_the_option_takes_away_reasoning_and_leaves_the_answer(self) -> None:
        result = encode("think", self.ROW, mask_reasoning_content=True)
        assert supervised(result) == ["<|im_start|>assistant\n", "4<|im_end|>\n"]

    def test_what_an_empty_reasoning_prints_as_well_stays(self) -> None:
        result = encode("qwen3", self.ROW, mask_reasoning_content=True)
        joined = "".join(supervised(result))
        assert "two and two" not in joined
        assert joined.startswith("<|im_start|>assistant\n<think>")
        assert joined.endswith("4<|im_end|>\n")

    def test_an_answer_equal_to_its_reasoning_stays(self) -> None:
        row = {"messages": [user("q"), assistant("same", reasoning_content="same")]}
        result = encode("think", row, mask_reasoning_content=True)
        assert supervised(result)[-1].endswith("same<|im_end|>\n")
        assert "".join(supervised(result)).count("same") == 1

    @pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
    def test_other_names_of_reasoning_are_read(self, name: str) -> None:
        row = {"messages": [user("2+2?"), assistant("4", **{name: "two and two"})]}
        expected = encode("think", self.ROW)
        assert encode("think", row).input_ids.tolist() == expected.input_ids.tolist()

    def test_a_template_with_a_name_of_its_own_gets_it(self) -> None:
        template = TEMPLATES["think"].replace("reasoning_content", "thinking")
        result = encode(template, self.ROW, mask_reasoning_content=True)
        assert "<think>\ntwo and two" in text(result)
        assert "two and two" not in "".join(supervised(result))

    def test_reasoning_that_the_template_does_not_print_is_warned_of(self) -> None:
        assert "reasoning" in encode("chatml", self.ROW).warnings[0]


class TestGenerationPrompt:
    def test_the_header_is_taken_away(self) -> None:
        result = encode("chatml", TWO_TURNS, mask_generation_prompt=True)
        assert supervised(result) == ["a1<|im_end|>\n", "a2<|im_end|>\n"]

    def test_the_longest_prompt_that_fits_is_taken_away(self) -> None:
        result = encode("qwen3", TWO_TURNS, mask_generation_prompt=True)
        assert supervised(result) == ["a1<|im_end|>\n", "a2<|im_end|>\n"]

    def test_real_reasoning_is_no_part_of_the_prompt(self) -> None:
        row = {"messages": [user("q"), assistant("a", reasoning_content="r")]}
        result = encode("qwen3", row, mask_generation_prompt=True)
        assert supervised(result) == ["<think>\nr\n</think>\n\na<|im_end|>\n"]

    def test_a_turn_that_does_not_begin_with_the_prompt_is_left_alone(self) -> None:
        other = TEMPLATES["chatml"].replace(
            "{% if add_generation_prompt %}<|im_start|>assistant\n",
            "{% if add_generation_prompt %}<|im_start|>assistant\nSure, ",
        )  # fmt: skip
        result = encode(other, TWO_TURNS, mask_generation_prompt=True)
        assert supervised(result) == supervised(encode("chatml", TWO_TURNS))

    def test_a_first_answer_loses_its_header_too(self) -> None:
        row = chat("a0", "q1", "a1", roles="aua")
        result = encode("chatml", row, mask_generation_prompt=True)
        assert supervised(result) == ["a0<|im_end|>\n", "a1<|im_end|>\n"]

    def test_a_template_that_refuses_beginnings_gets_the_prompt_of_another_chat(self) -> None:
        result = encode(
            TEMPLATES["strict"].replace("== 0)", "== 1)"),  # answers come first
            chat("a0", "q1", "a1", roles="aua"),
            mask_generation_prompt=True,
        )
        assert supervised(result)[1] == "a1<|im_end|>\n"

    def test_both_options_together(self) -> None:
        row = {"messages": [user("q"), assistant("a", reasoning_content="r")]}
        result = encode("think", row, mask_generation_prompt=True, mask_reasoning_content=True)
        assert supervised(result) == ["a<|im_end|>\n"]


class TestTools:
    ROW: dict[str, Any] = {  # noqa: RUF012
        "messages": [
            user("q"),
            assistant("", tool_calls=[weather({"city": "Oslo"})]),
            {"role": "tool", "tool_call_id": "call_1234", "content": "cold"},
            assistant("It is cold."),
        ]
    }

    def test_calls_are_supervised_and_results_are_not(self) -> None:
        call, answer = supervised(encode("tojson", self.ROW))
        assert '{"city": "Oslo"}' in call
        assert answer == "<|im_start|>assistant\nIt is cold.<|im_end|>\n"

    def test_a_macro_that_looks_up_the_call_of_a_result_supervises_nothing_of_it(self) -> None:
        result = encode("macro-lookup", self.ROW)
        assert "<|im_start|>tool\nweather: cold<|im_end|>" in text(result)
        assert supervised(result) == [
            '<|im_start|>assistant\n{"city": "Oslo"}<|im_end|>\n',
            "<|im_start|>assistant\nIt is cold.<|im_end|>\n",
        ]
