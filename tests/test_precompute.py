"""The command, run in this process on a tiny target: what it writes, refuses and goes on with."""

import argparse
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chat_fixtures import tiny_tokenizer
from dspark import precompute
from dspark.cache import (
    CachedDSparkDataset,
    read_manifest,
    read_target_weight_modules,
    shard_path,
    write_manifest,
)
from dspark.errors import CacheError
from dspark.model.capture import Target
from dspark.precompute import (
    _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES,
    _build_parser,
    _ensure_resume_compatible,
    _run,
    _validate_args,
    main,
)
from dspark_caches import a_manifest
from tiny_target import (
    SEQ_LENGTH,
    cache_files,
    command_line,
    some_chats,
    write_chats,
    write_target,
)

ROWS, SHARDS = 10, 3  # of four, four and two rows


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", ROWS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, target, chats):
    """A cache as one uninterrupted run writes it; not to be changed."""
    cache = tmp_path_factory.mktemp("finished") / "cache"
    assert main(command_line(target, chats, cache)) == 0
    return cache


@pytest.fixture
def cache(tmp_path, finished):
    """A copy of the finished cache, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "cache"))


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return inode, time and content of every file of a cache, its workplace left out."""
    files = [path for path in directory.iterdir() if path.is_file()]
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [line for line in captured.err.splitlines() if "error:" in line]


@pytest.fixture
def no_weights(monkeypatch):
    """Fail the test if weights are loaded."""
    monkeypatch.setattr(
        "dspark.job.run.load_target", lambda *_, **__: pytest.fail("weights loaded")
    )


def test_the_names_of_the_page_are_there():
    assert _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES == (
        "deepseek_v4",
        "glm_moe_dsa",
        "minimax_m3_vl",
    )
    assert precompute.logger.name == "dspark.precompute"
    assert isinstance(_build_parser(), argparse.ArgumentParser)
    assert callable(_validate_args)
    assert callable(_run)


def test_a_run_writes_manifest_weights_and_every_shard(finished):
    assert sorted(cache_files(finished)) == [
        "manifest.json",
        "shard-000000.safetensors",
        "shard-000001.safetensors",
        "shard-000002.safetensors",
        "target_weights.safetensors",
    ]


def test_the_manifest_says_what_was_run(finished, target, chats):
    manifest = read_manifest(str(finished))
    identity = manifest["provenance"]["identity"]
    assert manifest["complete"] is True
    assert manifest["target_model"] == str(target)
    assert manifest["target_model_type"] == "qwen3"
    assert manifest["target_vocab_size"] == 512
    assert manifest["hidden_size"] == 32
    assert manifest["num_hidden_layers"] == 4
    assert manifest["seq_length"] == SEQ_LENGTH
    assert manifest["dtype"] == "bf16"
    assert manifest["num_samples"] == ROWS
    assert manifest["shard_size"] == 4
    assert manifest["target_layer_ids"] == [1, 3]
    assert manifest["train_data_path"] == str(chats)
    assert manifest["train_split"] is None
    assert manifest["shuffle_seed"] == 42
    assert manifest["mask_reasoning_content"] is manifest["mask_generation_prompt"] is False
    assert identity["compute_dtype"] == "float32"
    assert identity["pad_token_id"] == tiny_tokenizer().pad_token_id


def test_the_manifest_counts_what_was_kept(finished):
    counts = read_manifest(str(finished))["provenance"]["counts"]
    dataset = CachedDSparkDataset(str(finished))
    assert counts["rows"] == counts["source_rows"] == len(dataset) == ROWS
    assert counts["supervised_tokens"] == sum(int(row["loss_mask"].sum()) for row in dataset)
    assert counts["skipped"] == {}
    assert counts["cut_rows"] > 0


def test_the_last_states_through_the_stored_head_are_the_targets_logits(finished, target):
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    _, lm_head = read_target_weight_modules(str(finished))
    dataset = CachedDSparkDataset(str(finished))
    for item in dataset:
        length = int((item["target_last_hidden_states"] != 0).any(dim=-1).sum())
        with torch.no_grad():
            logits = model(input_ids=item["input_ids"][None, :length]).logits[0]
        found = item["target_last_hidden_states"][:length].float() @ lm_head.weight.float().T
        assert (found - logits).abs().max() <= 0.05 * logits.abs().max()


def test_two_runs_write_the_same_bytes(finished, target, chats, tmp_path):
    assert main(command_line(target, chats, tmp_path / "again")) == 0
    assert cache_files(tmp_path / "again") == cache_files(finished)


def test_a_nested_output_directory_is_created(target, chats, tmp_path):
    cache = tmp_path / "a" / "b" / "c"
    assert main([*command_line(target, chats, cache), "--max-samples", "1"]) == 0
    assert len(CachedDSparkDataset(str(cache))) == 1


def test_the_batch_size_does_not_change_what_a_row_holds(finished, target, chats, tmp_path):
    command = [*command_line(target, chats, tmp_path), "--dtype", "fp32", "--shard-size", "4"]
    assert main([*command, "--batch-size", "4"]) == 0
    for found, expected in zip(
        CachedDSparkDataset(str(tmp_path)), CachedDSparkDataset(str(finished)), strict=True
    ):
        assert torch.equal(found["input_ids"], expected["input_ids"])
        assert torch.allclose(
            found["target_last_hidden_states"],
            expected["target_last_hidden_states"].float(),
            rtol=2**-7,
            atol=1e-2,
        )


def test_layers_can_be_chosen(target, chats, tmp_path):
    command = [*command_line(target, chats, tmp_path), "--max-samples", "2", "--dtype", "fp32"]
    assert main([*command, "--target-layer-ids", "-1", "0", "3"]) == 0
    assert read_manifest(str(tmp_path))["target_layer_ids"] == [-1, 0, 3]
    row = CachedDSparkDataset(str(tmp_path))[0]
    assert torch.equal(row["target_hidden_states"][:, 64:], row["target_last_hidden_states"])
    embed_tokens, _ = read_target_weight_modules(str(tmp_path))
    length = int(row["target_hidden_states"].any(dim=-1).sum())
    expected = embed_tokens.weight[row["input_ids"][:length]]
    assert torch.equal(row["target_hidden_states"][:length, :32], expected)


def test_more_layers_than_the_target_has_are_captured_as_far_as_possible(
    target, chats, tmp_path, caplog
):
    command = [*command_line(target, chats, tmp_path), "--max-samples", "1"]
    with caplog.at_level(logging.WARNING, logger="dspark"):
        assert main([*command, "--draft-num-hidden-layers", "9"]) == 0
    assert read_manifest(str(tmp_path))["target_layer_ids"] == [1, 2, 3]
    assert "--draft-num-hidden-layers 9: the target has 4 layers, so 3 are captured" in caplog.text


def test_max_samples_counts_rows_kept_after_split_and_skipping(target, tmp_path):
    rows = some_chats(8)
    rows[2] = {"messages": [{"role": "user", "content": "no answer"}]}
    data = write_chats(tmp_path / "chats.jsonl", rows)
    flags = ["--split", "train[1:]", "--on-bad-row", "skip", "--max-samples", "3"]
    assert main([*command_line(target, data, tmp_path / "cache"), *flags]) == 0
    counts = read_manifest(str(tmp_path / "cache"))["provenance"]["counts"]
    assert (counts["rows"], counts["source_rows"]) == (3, 4)
    assert sum(counts["skipped"].values()) == 1
    assert len(CachedDSparkDataset(str(tmp_path / "cache"))) == 3


def test_several_inputs_are_joined_in_order(target, tmp_path):
    paths = [write_chats(tmp_path / f"{name}.jsonl", rows) for name, rows in (("b", 2), ("a", 1))]
    command = [*command_line(target, paths[0], tmp_path / "cache"), "--input-data", str(paths[1])]
    assert main(command) == 0
    manifest = read_manifest(str(tmp_path / "cache"))
    assert json.loads(manifest["train_data_path"]) == [str(path) for path in paths]
    ids = [row["input_ids"].tolist() for row in CachedDSparkDataset(str(tmp_path / "cache"))]
    assert ids[0] == ids[2] != ids[1]


def test_a_dry_run_prints_the_size_and_writes_no_cache(target, chats, finished, tmp_path, capsys):
    command = [*command_line(target, chats, tmp_path), "--dry-run", "--log-level", "error"]
    assert main(command) == 0
    *table, last = capsys.readouterr().out.splitlines()
    forecast = json.loads(last)
    assert forecast["rows"] == ROWS
    assert table
    assert cache_files(tmp_path) == {}
    written = sum(len(raw) for name, raw in cache_files(finished).items() if "manifest" not in name)
    apparent = forecast["apparent_bytes"]
    assert abs(apparent - written) <= 0.02 * written


def test_a_dry_run_says_the_same_beside_a_finished_cache_and_changes_nothing(
    target, chats, cache, capsys
):
    before = snapshot(cache)
    assert main([*command_line(target, chats, cache), "--dry-run", "--log-level", "error"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == ROWS
    assert snapshot(cache) == before


PATTERNS = [[0], [2], [0, 2], [1, 2], [0, 1, 2]]


@pytest.mark.parametrize("gone", PATTERNS, ids=str)
def test_resume_computes_the_missing_shards_and_no_others(target, chats, cache, finished, gone):
    before = snapshot(cache)
    for index in gone:
        Path(shard_path(str(cache), index)).unlink()
    write_manifest(str(cache), read_manifest(str(cache)) | {"complete": False})
    assert main([*command_line(target, chats, cache), "--resume"]) == 0
    assert cache_files(cache) == cache_files(finished)
    after = snapshot(cache)
    for index in set(range(SHARDS)) - set(gone):
        name = Path(shard_path(str(cache), index)).name
        assert after[name] == before[name]
    assert after["target_weights.safetensors"] == before["target_weights.safetensors"]


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)


def zero_fill(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"loss_mask":{', b'"lost_mask":{'))


def flip_last_state(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    place = max(place for place, byte in enumerate(raw) if byte)
    raw[place] ^= 0x80
    path.write_bytes(raw)


def swap_with_the_first(path: Path) -> None:
    shutil.copyfile(path.with_name("shard-000000.safetensors"), path)


DAMAGES = [cut, zero_fill, rename_tensor, flip_last_state, swap_with_the_first]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_resume_notices_a_damaged_shard_and_writes_it_again(
    target, chats, cache, finished, damage, caplog
):
    damage(cache / "shard-000001.safetensors")
    with caplog.at_level(logging.WARNING, logger="dspark"):
        assert main([*command_line(target, chats, cache), "--resume"]) == 0
    assert "shard-000001.safetensors" in caplog.text
    assert cache_files(cache) == cache_files(finished)


@pytest.mark.parametrize("damage", [Path.unlink, cut, zero_fill, flip_last_state])
def test_resume_writes_damaged_weights_again_and_keeps_the_shards(
    target, chats, cache, finished, damage
):
    before = snapshot(cache)
    damage(cache / "target_weights.safetensors")
    assert main([*command_line(target, chats, cache), "--resume"]) == 0
    assert cache_files(cache) == cache_files(finished)
    after = snapshot(cache)
    assert all(after[name] == before[name] for name in before if name.startswith("shard"))


def test_resume_of_a_cache_never_finished_starts_from_its_manifest(target, chats, cache, finished):
    for index in range(SHARDS):
        Path(shard_path(str(cache), index)).unlink()
    (cache / "target_weights.safetensors").unlink()
    write_manifest(str(cache), read_manifest(str(cache)) | {"complete": False})
    assert main([*command_line(target, chats, cache), "--resume"]) == 0
    assert cache_files(cache) == cache_files(finished)


def test_resume_where_nothing_is_starts_afresh(target, chats, finished, tmp_path):
    assert main([*command_line(target, chats, tmp_path / "new"), "--resume"]) == 0
    assert cache_files(tmp_path / "new") == cache_files(finished)


@pytest.mark.usefixtures("no_weights")
def test_resume_of_a_finished_cache_says_so_and_changes_nothing(target, chats, cache, caplog):
    before = snapshot(cache)
    with caplog.at_level(logging.INFO, logger="dspark"):
        assert main([*command_line(target, chats, cache), "--resume"]) == 0
    assert f"{cache} is finished" in caplog.text
    assert snapshot(cache) == before


def test_tokens_of_the_first_start_are_taken_up_again(target, chats, cache, monkeypatch):
    (cache / "shard-000001.safetensors").unlink()
    monkeypatch.setattr(
        "dspark.job.read_input.encode_rows", lambda *_: pytest.fail("tokenized again")
    )
    assert main([*command_line(target, chats, cache), "--resume"]) == 0


@pytest.mark.usefixtures("no_weights")
def test_shards_without_resume_are_refused_and_kept(target, chats, cache, capsys):
    before = snapshot(cache)
    assert main(command_line(target, chats, cache)) == 1
    (line,) = error_lines(capsys)
    assert "already holds 3 shards" in line
    assert "--resume" in line
    assert snapshot(cache) == before


@pytest.mark.usefixtures("no_weights")
def test_shards_without_a_manifest_are_refused_and_kept(target, chats, cache, capsys):
    (cache / "manifest.json").unlink()
    before = snapshot(cache)
    assert main([*command_line(target, chats, cache), "--resume"]) == 1
    (line,) = error_lines(capsys)
    assert "no manifest" in line
    assert snapshot(cache) == before


@pytest.mark.usefixtures("no_weights")
def test_other_settings_are_refused_in_one_line_with_every_field(target, chats, cache, capsys):
    before = snapshot(cache)
    flags = ["--resume", "--seq-length", "32", "--dtype", "fp16", "--shuffle-seed", "7"]
    assert main([*command_line(target, chats, cache), *flags]) == 1
    (line,) = error_lines(capsys)
    assert "does not match" in line
    assert 'dtype: cache "bf16", this run "fp16"' in line
    assert "seq_length: cache 64, this run 32" in line
    assert "shuffle_seed: cache 42, this run 7" in line
    assert snapshot(cache) == before


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    "provenance",
    [
        None,
        3,
        "text",
        [],
        {},
        {"identity": None},
        {"identity": {"template_date": 3}},
        {"counts": 1},
    ],
    ids=repr,
)
def test_a_manifest_whose_provenance_is_damaged_is_refused(
    target, chats, cache, capsys, provenance
):
    write_manifest(str(cache), read_manifest(str(cache)) | {"provenance": provenance})
    before = snapshot(cache)
    assert main([*command_line(target, chats, cache), "--resume"]) == 1
    (line,) = error_lines(capsys)
    assert "does not match" in line or "damaged" in line
    assert snapshot(cache) == before


def compatible(cache: Path, manifest: dict[str, Any], shards: set[int]) -> None:
    _ensure_resume_compatible(str(cache), manifest, shards)


def test_an_empty_directory_is_compatible_with_every_run(tmp_path):
    compatible(tmp_path, a_manifest(), set())


def test_the_same_settings_are_compatible(tmp_path):
    write_manifest(str(tmp_path), a_manifest())
    compatible(tmp_path, a_manifest() | {"complete": True}, {0, 1})
    compatible(tmp_path, a_manifest(), set())


def test_shards_that_nothing_describes_are_not_compatible(tmp_path):
    with pytest.raises(CacheError, match="2 shards but no manifest"):
        compatible(tmp_path, a_manifest(), {0, 1})


@pytest.mark.parametrize("shards", [set(), {0}])
def test_other_settings_are_not_compatible_and_both_values_are_named(tmp_path, shards):
    write_manifest(str(tmp_path), a_manifest())
    other = a_manifest(seq_length=8, target_layer_ids=[1, 3], train_split="train[:5]")
    with pytest.raises(ValueError, match="does not match") as caught:
        compatible(tmp_path, other, shards)
    message = str(caught.value)
    assert "seq_length: cache 6, this run 8" in message
    assert "target_layer_ids: cache [0, 2], this run [1, 3]" in message
    assert 'train_split: cache nothing, this run "train[:5]"' in message


def test_differences_of_identity_are_named(tmp_path):
    write_manifest(str(tmp_path), a_manifest() | {"provenance": {"identity": {"rows": "ab"}}})
    other = a_manifest() | {"provenance": {"identity": {"rows": "cd", "weights": "ef"}}}
    with pytest.raises(ValueError, match="does not match") as caught:
        compatible(tmp_path, other, {0})
    message = str(caught.value)
    assert 'provenance.identity.rows: cache "ab", this run "cd"' in message
    assert 'provenance.identity.weights: cache nothing, this run "ef"' in message


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


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a target that is not there": (lambda d: ["--target-model", str(d / "none")], "none"),
    "an input that is not there": (lambda d: ["--input-data", str(d / "none.jsonl")], "none.jsonl"),
    "a row without an answer": (bad_row, "bad.jsonl line 3"),
    "a split that does not exist": (lambda d: ["--split", "test"], "train"),
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


def test_a_model_that_fails_on_the_last_rows_ends_with_1_and_says_how_to_go_on(
    target, chats, tmp_path, capsys, finished, monkeypatch
):
    capture, calls = Target.capture, []

    def count(self: Target, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 * needed:
            raise RuntimeError("a bug in the model")
        return capture(self, *args, **options)

    monkeypatch.setattr(Target, "capture", count)
    needed = 1000
    assert main(command_line(target, chats, tmp_path / "counted")) == 0
    needed = len(calls)
    assert main(command_line(target, chats, tmp_path / "cache")) == 1
    (line,) = error_lines(capsys)
    assert "RuntimeError: a bug in the model" in line
    assert "--resume" in line
    assert read_manifest(str(tmp_path / "cache"), allow_incomplete=True)["complete"] is False
    assert not (tmp_path / "cache" / "shard-000002.safetensors").exists()
    monkeypatch.undo()
    assert main([*command_line(target, chats, tmp_path / "cache"), "--resume"]) == 0
    assert cache_files(tmp_path / "cache") == cache_files(finished)
