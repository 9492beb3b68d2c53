"""The run log says when, where and how each run went, and nothing in the cache depends on it."""

import json
import logging
import os
import socket
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from dspark.job.run_log import describe_run, noted_run


def a_run(**changes: object) -> dict:
    run = describe_run(
        command="python -m dspark.precompute --resume",
        batch_size=4,
        device=torch.device("cpu"),
        ranks=1,
        tensor_parallel=1,
    )
    return run | changes


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_one_line_from_its_beginning_to_its_end(tmp_path):
    path = tmp_path / "runs.jsonl"
    with noted_run(path, a_run()):
        (line,) = lines(path)
        assert (line["ended"], line["outcome"]) == (None, None)
    (line,) = lines(path)
    assert line["begun"] <= line["ended"]
    assert line["outcome"] == "finished"
    assert (line["host"], line["pid"]) == (socket.gethostname(), os.getpid())
    assert line["command"] == "python -m dspark.precompute --resume"
    assert (line["batch_size"], line["device"], line["ranks"]) == (4, "cpu", 1)
    assert line["threads"] == torch.get_num_threads()
    assert line["versions"]["torch"] == version("torch")


def test_a_failed_run_is_noted_with_its_error(tmp_path):
    path = tmp_path / "runs.jsonl"
    with pytest.raises(OSError, match="No space left"), noted_run(path, a_run()):
        raise OSError(28, "No space left on device", "shard-000001.safetensors")
    (line,) = lines(path)
    assert line["outcome"].startswith("OSError: [Errno 28] No space left on device")


def test_a_run_that_was_killed_is_noted_by_the_next(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(a_run(begun="2025-01-31", ended=None, outcome=None)) + "\n")
    with noted_run(path, a_run()):
        pass
    assert [line["outcome"] for line in lines(path)] == ["killed", "finished"]


def test_lines_that_cannot_be_read_are_dropped(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"begun": \n[]\n\xff\n')
    with noted_run(path, a_run()):
        pass
    assert len(lines(path)) == 1


def test_an_end_that_cannot_be_noted_hides_no_error(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="the cause"), noted_run(tmp_path / "runs.jsonl", a_run()):
        monkeypatch.setattr(os, "pwrite", refuse)
        raise ValueError("the cause")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 8}, "batch_size is 8, not 4"),
        ({"threads": 64}, "threads is 64, not "),
        ({"device": "NVIDIA H200"}, "device is NVIDIA H200, not cpu"),
        ({"versions": {"torch": "3.0"}}, "versions is {'torch': '3.0'}, not "),
    ],
)
def test_what_may_change_last_bits_is_said(tmp_path, caplog, changes, said):
    path = tmp_path / "runs.jsonl"
    with noted_run(path, a_run()):
        pass
    with caplog.at_level(logging.WARNING), noted_run(path, a_run(**changes)):
        pass
    (message,) = caplog.messages
    assert said in message
    assert "the last bits of states may differ" in message


def test_what_does_not_change_them_is_not(tmp_path, caplog):
    path = tmp_path / "runs.jsonl"
    for changes in ({}, {"host": "elsewhere", "pid": 1, "ranks": 8, "command": "another"}):
        with caplog.at_level(logging.WARNING), noted_run(path, a_run(**changes)):
            pass
    assert not caplog.messages
