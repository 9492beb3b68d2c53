"""`python -m dspark.inspect` on chat files: a conversation with its mask, and totals."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_fixtures import TEMPLATES, chat, tiny_tokenizer
from dspark.inspect import main
from dspark.reports.marked_text import Segment, mark, split_by_mask


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer(TEMPLATES["chatml"]).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows: list[dict[str, Any]] = [
        chat("q1", "a1"),
        chat("q2", "a longer answer of some more words", "q3", "a3"),
        chat("nobody answers"),
        {"messages": [{"role": "narrator", "content": "x"}]},
        chat("nobody answers either"),
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return str(path)


def test_supervised_text_stands_in_double_brackets(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target-model", model, "--input-data", data]) == 0
    out = capsys.readouterr().out
    assert "chats.jsonl line 1: " in out
    assert "<|im_start|>user\nq1<|im_end|>\n[[<|im_start|>assistant\na1<|im_end|>\n]]" in out


def test_another_row_can_be_asked_for(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target-model", model, "--input-data", data, "--row", "1"]) == 0
    assert "a longer answer of some more words<|im_end|>\n]]" in capsys.readouterr().out


def test_totals_count_rows_tokens_and_what_is_left_out(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target-model", model, "--input-data", data, "--seq-length", "20"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"^rows cut at 20 +1$", out, re.MULTILINE)
    assert re.search(r"^rows left out +4$", out, re.MULTILINE)
    assert out.index("no assistant turn") < out.index("unknown role")  # the most frequent first
    assert main([*arguments, "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)["totals"]
    assert totals["rows"] == 2
    assert totals["cut_rows"] == 1
    assert totals["tokens"] == totals["length_percentiles"]["p10"] + 20
    assert totals["skipped_by_reason"] == {
        "no assistant turn": 2,
        "unknown role": 1,
        "invalid JSON": 1,
    }
    assert totals["supervised_share"] == pytest.approx(
        totals["supervised_tokens"] / totals["tokens"], abs=1e-4
    )


def test_json_has_the_row_for_machines(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target-model", model, "--input-data", data, "--row", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["row"]
    assert row["row"] == 1
    assert row["where"] == f"{data} line 2"
    assert len(row["input_ids"]) == len(row["loss_mask"]) == row["tokens"]
    assert sum(row["loss_mask"]) == row["supervised_tokens"]
    assert sum(s["tokens"] for s in row["segments"]) == row["tokens"]
    assert [s["supervised"] for s in row["segments"]] == [False, True, False, True]


def test_the_options_of_the_mask_are_those_of_precompute(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target-model", model, "--input-data", data, "--mask-generation-prompt"]
    assert main(arguments) == 0
    assert "<|im_start|>assistant\n[[a1<|im_end|>\n]]" in capsys.readouterr().out


def test_a_row_that_cannot_be_labelled_says_why_and_the_totals_follow(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target-model", model, "--input-data", data, "--row", "3"]) == 0
    out = capsys.readouterr().out
    assert "chats.jsonl line 4: left out: unknown role: message 0 has role" in out
    assert "supervised" in out


def test_a_row_behind_the_end_is_a_mistake_on_one_line(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target-model", model, "--input-data", data, "--row", "99"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "dspark.inspect: error: there is no row 99: the input has rows 0 to 5\n"
    )


def test_a_missing_file_is_a_mistake_on_one_line(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target-model", model, "--input-data", "missing.jsonl"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_warnings_about_the_template_are_told(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target-model", model, "--input-data", data]
    assert main([*arguments, "--chat-template", TEMPLATES["nextrole"]]) == 0
    assert "warning: the chat template puts no end token" in capsys.readouterr().out


def test_colour_marks_line_by_line_and_control_characters_are_shown_as_escapes() -> None:
    segments = [Segment("q\x1b[2J", 1, False), Segment("a\n\nb", 2, True)]
    assert mark(segments, colour=False) == "q\\x1b[2J[[a\n\nb]]"
    shown = mark(segments, colour=True)
    assert shown == "q\\x1b[2J\x1b[30;42ma\x1b[0m\n\n\x1b[30;42mb\x1b[0m"


def test_segments_are_runs_of_equal_mask() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("one two three", add_special_tokens=False)["input_ids"])
    mask = np.zeros(len(ids), dtype=np.uint8)
    mask[1:] = 1
    first, second = split_by_mask(tokenizer, ids, mask)
    assert first.text + second.text == "one two three"
    assert (first.tokens, second.tokens) == (1, len(ids) - 1)
    assert (first.supervised, second.supervised) == (False, True)


def test_a_reader_that_goes_away_ends_the_command_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = """if True:
        import sys
        from dspark.reports.terminal import run_printing
        sys.exit(run_printing(lambda: print("x" * 100_000) or 0))
    """
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
