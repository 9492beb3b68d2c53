"""What the command refuses, when, and in how many words."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from observed import error_lines

from dspark.precompute import (
    _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES,
    main,
)
from tiny_target import (
    cache_files,
    command_line,
    some_chats,
    write_chats,
    write_target,
)


@pytest.mark.parametrize("model_type", _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES)
def test_three_kinds_of_target_are_refused_before_their_configuration_is_built(
    model_type, chats, tmp_path, monkeypatch, capsys
):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        loader = getattr(transformers, name)
        monkeypatch.setattr(loader, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert main(command_line(target, chats, tmp_path / "cache")) == 1
    (line,) = error_lines(capsys)
    assert f"model_type='{model_type}'" in line
    assert "online" in line
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["--batch-size", "0"], "--batch-size"),
        (["--shard-size", "6", "--batch-size", "4"], "--shard-size"),
        (["--draft-num-hidden-layers", "0"], "--draft-num-hidden-layers"),
    ],
)
def test_bad_values_end_with_1_before_anything_is_looked_at(tmp_path, capsys, flags, flag):
    nowhere = tmp_path / "nowhere"
    assert main([*command_line(nowhere, nowhere, tmp_path / "cache"), *flags]) == 1
    (line,) = error_lines(capsys)
    assert line.startswith("dspark.precompute: error: ")
    assert flag in line
    assert not (tmp_path / "cache").exists()


def test_bad_usage_ends_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--no-such-flag"])
    assert caught.value.code == 2
    assert "--target-model" in capsys.readouterr().err


def test_help_ends_with_0(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "--output-dir" in capsys.readouterr().out


def bad_row(directory: Path) -> list[str]:
    rows = [*some_chats(2), {"messages": [{"role": "user", "content": "no answer"}]}]
    return ["--input-data", str(write_chats(directory / "bad.jsonl", rows))]


def null_template(directory: Path) -> list[str]:
    (directory / "null.json").write_text('{"chat_template": null}')
    return ["--chat-template", str(directory / "null.json")]


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a target that is not there": (lambda d: ["--target-model", str(d / "none")], "none"),
    "an input that is not there": (lambda d: ["--input-data", str(d / "none.jsonl")], "none.jsonl"),
    "a row without an answer": (bad_row, "bad.jsonl line 3"),
    "a split that does not exist": (lambda d: ["--split", "test"], "train"),
    "an input without a name": (lambda d: ["--input-data", ""], "has no name"),
    "an output without a name": (lambda d: ["--output-dir", ""], "--output-dir is empty"),
    "a template that is null": (null_template, "must be Jinja text"),
    "a filter that does not exist": (lambda d: ["--chat-template", "{{ 1|nosuch }}"], "nosuch"),
    "a day that is none": (lambda d: ["--template-date", ""], "template date"),
    "a device that is not here": (lambda d: ["--device", "xpu"], "--device xpu cannot be used"),
    "a template that is not there": (lambda d: ["--chat-template", "none.jinja"], "none.jinja"),
    "a layer beyond the target": (lambda d: ["--target-layer-ids", "1", "4"], "4"),
    "layers that do not increase": (lambda d: ["--target-layer-ids", "2", "2"], "2"),
    "a layer before the first": (lambda d: ["--target-layer-ids", "-2"], "-2"),
    "rows longer than the positions": (lambda d: ["--seq-length", "257"], "257"),
    "a device that does not exist": (lambda d: ["--device", "abacus"], "--device abacus"),
    "an output that is a file": (lambda d: ["--output-dir", str(touch(d / "file"))], "file"),
}


def touch(path: Path) -> Path:
    path.write_bytes(b"mine")
    return path


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("flags", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_with_1_and_one_line_before_weights_are_loaded(
    target, chats, tmp_path, capsys, flags, says
):
    command = [*command_line(target, chats, tmp_path / "cache"), *flags(tmp_path)]
    if "--input-data" in command[12:]:  # inputs add up: take the first one away
        command = [*command[:2], *command[4:]]
    assert main([*command, "--log-level", "error"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("dspark.precompute: error: ")
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert cache_files(tmp_path / "cache") == {}


@pytest.mark.usefixtures("no_weights")
def test_token_ids_beyond_the_embedding_are_refused(chats, tmp_path, capsys):
    small = write_target(tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    assert main(command_line(small, chats, tmp_path / "cache")) == 1
    (line,) = error_lines(capsys)
    assert "embeds only 100" in line


def test_a_traceback_is_shown_only_on_request(target, tmp_path, capsys):
    command = command_line(target, tmp_path / "none.jsonl", tmp_path / "cache")
    assert main(command) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert main([*command, "--log-level", "debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("dspark.precompute: error: ")


def test_code_that_comes_with_a_model_does_not_run_unless_asked_for(chats, tmp_path, capsys):
    directory = write_target(tmp_path / "target")
    config = json.loads((directory / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    config |= {"model_type": "evil", "auto_map": auto_map}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert main(command_line(directory, chats, tmp_path / "cache")) == 1
    assert "--trust-remote-code" in " ".join(error_lines(capsys))
    assert not (tmp_path / "ran").exists()


def test_weights_that_cannot_be_read_end_the_run_in_one_line(chats, tmp_path, capsys):
    broken = write_target(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"garbage" * 99)
    assert main([*command_line(broken, chats, tmp_path / "cache"), "--log-level", "error"]) == 1
    (line,) = error_lines(capsys)
    assert f"cannot load {broken}: SafetensorError" in line
    assert line.endswith("No row was computed.")


def test_a_text_of_endless_brackets_is_a_bad_row(target, tmp_path, capsys):
    chats = write_chats(tmp_path / "deep.jsonl", [{"messages": "[" * 100_000}])
    assert main(command_line(target, chats, tmp_path / "cache")) == 1
    (line,) = error_lines(capsys)
    assert "deep.jsonl line 1: invalid JSON in a column" in line


def test_an_input_without_a_supervised_token_is_warned_of(target, chats, tmp_path, caplog):
    command = [*command_line(target, chats, tmp_path / "cache"), "--seq-length", "1", "--dry-run"]
    assert main(command) == 0
    assert "no token is supervised" in caplog.text


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("content", [None, "{broken"])
def test_a_target_without_a_tokenizer_is_refused(chats, tmp_path, capsys, content):
    bare = write_target(tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    if content is not None:
        (bare / "tokenizer.json").write_text(content)
    command = [*command_line(bare, chats, tmp_path / "cache"), "--chat-template", "{{ messages }}"]
    assert main(command) == 1
    (line,) = error_lines(capsys)
    assert f"the tokenizer of {bare}" in line
