"""Tokenizers of every kind, loading them and their templates, the clock, worker processes."""

import json
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from chat_fixtures import (
    SPECIAL,
    TEMPLATES,
    backend_json,
    chat,
    decode,
    encode,
    encoder,
    supervised,
    text,
    tiny_decoder,
    tiny_tokenizer,
)
from dspark.chat import ChatEncoder, load_tokenizer, read_chat_template
from dspark.errors import DataError, RowError

ROW = chat("What is the capital of France?", " Paris 🙂.\n", "And 日本?", "Tokyo")


class SlowTokenizer(PreTrainedTokenizer):
    """The tiny tokenizer in Python: no offsets. `lossy` loses white space in decoding."""

    def __init__(self, lossy: bool = False, **kwargs: Any) -> None:
        self.bpe = Tokenizer.from_str(backend_json())
        self.lossy = lossy
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return int(self.bpe.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return dict(self.bpe.get_vocab())

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(self.bpe.encode(text, add_special_tokens=False).tokens)

    def _convert_token_to_id(self, token: str) -> int:
        found = self.bpe.token_to_id(token)
        return 0 if found is None else int(found)

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.bpe.id_to_token(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        ids = [self.bpe.token_to_id(token) for token in tokens]
        decoded = str(self.bpe.decode(ids, skip_special_tokens=False))
        return decoded.replace(" ", "") if self.lossy else decoded


def slow_tokenizer(template: str, *, lossy: bool = False) -> SlowTokenizer:
    tokenizer = SlowTokenizer(
        lossy=lossy,
        bos_token="<bos>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<eos>", "<|eot|>"],
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


class TestTokenizers:
    @pytest.mark.parametrize(
        ("template", "lossy"),
        [
            *((name, False) for name in ("chatml", "mistral", "headerless", "qwen3", "tag")),
            *((name, True) for name in ("chatml", "mistral", "qwen3", "tag")),
        ],
    )
    def test_a_tokenizer_without_offsets_gives_the_same(self, template: str, lossy: bool) -> None:
        slow = ChatEncoder(slow_tokenizer(template, lossy=lossy), seq_length=512).encode(ROW)
        fast = encode(template, ROW)
        assert slow.input_ids.tolist() == fast.input_ids.tolist()
        assert slow.loss_mask.tolist() == fast.loss_mask.tolist()

    def test_a_token_across_two_messages_is_found_without_offsets_too(self) -> None:
        row = chat("wor", "ld real", " q", roles="uau")
        slow = ChatEncoder(slow_tokenizer("headerless"), seq_length=512).encode(row)
        assert slow.loss_mask.tolist() == encode("headerless", row).loss_mask.tolist()

    @pytest.mark.parametrize(
        "settings",
        [
            {"padding_side": "left"},
            {"truncation_side": "left"},
            {"model_max_length": 4},
            {"pad_token": "<|im_end|>"},
            {"pad_token": None},
            {"add_bos_token": True},
        ],
        ids=str,
    )
    def test_the_tokenizers_own_settings_do_not_matter(self, settings: dict[str, Any]) -> None:
        made = ChatEncoder(tiny_tokenizer(TEMPLATES["chatml"], **settings), seq_length=512)
        expected = encode("chatml", ROW, seq_length=512)
        assert made.encode(ROW).input_ids.tolist() == expected.input_ids.tolist()
        assert made.encode(ROW).loss_mask.tolist() == expected.loss_mask.tolist()

    def test_a_tokenizer_set_to_cut_and_pad_is_left_as_it_was_and_not_obeyed(self) -> None:
        tokenizer = tiny_tokenizer(TEMPLATES["chatml"])
        tokenizer.backend_tokenizer.enable_truncation(5)
        tokenizer.backend_tokenizer.enable_padding(length=64)
        before = tokenizer.backend_tokenizer.to_str()
        result = ChatEncoder(tokenizer, seq_length=512).encode(ROW)
        assert result.input_ids.tolist() == encode("chatml", ROW).input_ids.tolist()
        assert tokenizer.backend_tokenizer.to_str() == before
        assert tokenizer.chat_template == TEMPLATES["chatml"]

    def test_a_template_that_prints_bos_gives_exactly_one(self) -> None:
        tokenizer = with_auto_bos(TEMPLATES["llama3"])
        ids = ChatEncoder(tokenizer, seq_length=512).encode(ROW).input_ids.tolist()
        assert tokenizer("x")["input_ids"][0] == SPECIAL.index("<bos>")  # it does add one by itself
        assert ids.count(SPECIAL.index("<bos>")) == 1
        assert ids[0] == SPECIAL.index("<bos>")

    def test_a_template_that_prints_no_bos_gives_what_apply_chat_template_gives(self) -> None:
        tokenizer = with_auto_bos(TEMPLATES["chatml"])
        ids = ChatEncoder(tokenizer, seq_length=512).encode(ROW).input_ids.tolist()
        theirs = tokenizer.apply_chat_template(ROW["messages"], tokenize=True, return_dict=True)
        assert ids == theirs["input_ids"]
        assert SPECIAL.index("<bos>") not in ids

    def test_a_normalizer_that_shortens_the_text_moves_no_turn(self) -> None:
        backend = Tokenizer.from_str(backend_json())
        backend.normalizer = normalizers.NFC()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        tokenizer.chat_template = TEMPLATES["mistral"]
        result = ChatEncoder(tokenizer, seq_length=512).encode(chat("e\u0301" * 9, "a", "q"))
        # The text has 9 characters fewer than the template printed.
        assert supervised(result) == [" a<eos>"]

    def test_ids_are_integers_whatever_apply_chat_template_returns(self) -> None:
        result = encode("chatml", ROW)
        assert result.input_ids.ndim == 1
        assert len(result.input_ids) > 20

    def test_a_lone_surrogate_is_a_bad_row(self) -> None:
        with pytest.raises(RowError, match="not valid Unicode"):
            encode("chatml", chat("\ud83d", "a"))

    def test_a_sequence_length_below_one_is_refused(self) -> None:
        with pytest.raises(DataError, match="seq_length must be at least 1, got 0"):
            encoder("chatml", seq_length=0)


def with_auto_bos(template: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(backend_json())
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


class TestTemplates:
    def test_named_templates_follow_the_tools(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["tojson"]}
        made = ChatEncoder(tokenizer, seq_length=512)
        assert "<tools>" not in text(made.encode(ROW))
        assert "<tools>" in text(made.encode({**ROW, "tools": [{"name": "t"}]}))

    def test_a_template_error_is_a_bad_row_with_the_templates_own_words(self) -> None:
        with pytest.raises(RowError, match="System role not supported") as caught:
            encode("strict", chat("s", "q", "a", roles="sua"))
        assert caught.value.reason == "template error"

    def test_a_python_error_inside_a_template_is_a_bad_row(self) -> None:
        with pytest.raises(RowError, match="template error"):
            encode("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", ROW)

    def test_a_template_that_prints_nothing_is_a_bad_row(self) -> None:
        with pytest.raises(RowError, match="nothing rendered"):
            encode("{% if false %}x{% endif %}", ROW)

    def test_a_template_that_is_not_jinja_is_refused_at_once(self) -> None:
        with pytest.raises(DataError, match="not valid Jinja: line 2"):
            encoder("{% for m in messages %}\n{% endif %}")

    def test_a_missing_template_is_refused_with_the_way_out(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(DataError, match="--chat-template"):
            ChatEncoder(tokenizer, seq_length=8)

    def test_templates_that_want_content_parts_get_them(self) -> None:
        assert supervised(encode("parts", chat("q", "a"))) == [
            "<|im_start|>assistant\na<|im_end|>\n"
        ]

    @pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"untraceable"}))
    def test_the_text_is_the_one_transformers_renders(self, name: str) -> None:
        row = chat("q1", " a1 ", "q2\n", "a2")
        tokenizer = tiny_tokenizer(TEMPLATES[name])
        messages = row["messages"]
        if name == "parts":
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
            ]
        theirs = tokenizer.apply_chat_template(messages, tokenize=False)
        assert text(encode(name, row)) == theirs

    def test_loop_controls_and_escapes_work_as_in_transformers(self) -> None:
        template = (
            "{% for m in messages %}{% if m.content == 'skip' %}{% continue %}{% endif %}"
            "<|im_start|>{{ m.role }}\n{{ m | tojson(indent=2) }} <&> '{{ m.content }}'<|im_end|>\n"
            "{% if loop.index == 4 %}{% break %}{% endif %}{% endfor %}"
        )
        row = chat("q<é>&'", "a", "skip", "b", "q", "never")
        tokenizer = tiny_tokenizer(template)
        result = encode(template, row)
        assert text(result) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert [run.count("<|im_start|>assistant") for run in supervised(result)] == [2]


class TestClock:
    def test_a_pinned_day_is_what_the_template_sees(self) -> None:
        result = encode("date", chat("q", "a"), template_date="2024-02-29")
        assert "Today is 29 February 2024." in text(result)

    def test_only_templates_that_read_the_clock_say_so(self) -> None:
        assert encoder("date").template_reads_clock
        assert not encoder("chatml").template_reads_clock
        assert not encoder("{# strftime_now #}" + TEMPLATES["chatml"]).template_reads_clock

    @pytest.mark.parametrize("day", ["2024-02-30", "today", ""])
    def test_what_is_no_day_is_refused(self, day: str) -> None:
        with pytest.raises(DataError, match="must be a day like 2025-01-31"):
            encoder("date", template_date=day)


class TestWorkers:
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_an_encoder_works_in_another_process(self, method: str) -> None:
        made = encoder("date", template_date="2024-02-29", mask_generation_prompt=True)
        expected = made.encode(ROW)
        with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
            result = pool.submit(made.encode, ROW).result()
            error = pool.submit(made.encode, {"messages": []}).exception()
        assert np.array_equal(result.input_ids, expected.input_ids)
        assert np.array_equal(result.loss_mask, expected.loss_mask)
        assert isinstance(error, RowError)
        assert error.reason == "no messages"

    def test_a_pickled_encoder_keeps_its_options(self) -> None:
        made = pickle.loads(pickle.dumps(encoder("chatml", mask_generation_prompt=True)))
        assert supervised(made.encode(chat("q", "a"))) == ["a<|im_end|>\n"]


class TestLoading:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        tiny_tokenizer(TEMPLATES["chatml"]).save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
        return tmp_path / "model"

    def test_the_models_own_template_is_the_default(self, model: Path) -> None:
        assert load_tokenizer(str(model)).chat_template == TEMPLATES["chatml"]

    def test_an_inline_template_replaces_it(self, model: Path) -> None:
        given = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert load_tokenizer(str(model), chat_template=given).chat_template == given

    def test_a_model_without_a_template_needs_one(self, tmp_path: Path) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(DataError, match="has no chat template; give one with --chat-template"):
            load_tokenizer(str(tmp_path))

    def test_a_file_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "t.jinja").write_text("{{ messages }}é", encoding="utf-8")
        assert read_chat_template(str(tmp_path / "t.jinja")) == "{{ messages }}é"

    def test_a_json_file_is_read_by_its_key(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({"chat_template": "{{ 1 }}", "other": 2}))
        assert read_chat_template(str(path)) == "{{ 1 }}"
        path.write_text(json.dumps({"chat_template": [{"name": "default", "template": "{{ 2 }}"}]}))
        assert read_chat_template(str(path)) == {"default": "{{ 2 }}"}

    @pytest.mark.parametrize("content", ["{}", "[1]", "not json"])
    def test_a_json_file_without_the_key_is_refused(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(DataError, match="'chat_template' key"):
            read_chat_template(str(tmp_path / "t.json"))

    def test_a_path_that_does_not_exist_is_not_taken_for_a_template(self) -> None:
        with pytest.raises(FileNotFoundError, match="neither Jinja nor an existing file"):
            read_chat_template("no/such/file.jinja")

    def test_importing_the_module_loads_no_torch(self) -> None:
        code = "import dspark.chat, dspark.data.rows, sys; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert not {"torch", "transformers", "datasets"} & set(done.stdout.decode().split())


def test_the_tiny_tokenizer_round_trips() -> None:
    ids = tiny_decoder().encode("é <|im_end|> 日本", add_special_tokens=False).ids
    assert decode(np.array(ids)) == "é <|im_end|> 日本"
