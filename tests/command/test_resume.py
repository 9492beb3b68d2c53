"""The command on a cache that is there: what is kept, written again, or refused."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from observed import SHARDS, error_lines, snapshot

from dspark.cache import (
    read_manifest,
    shard_path,
    write_manifest,
)
from dspark.errors import CacheError
from dspark.model.capture import Target
from dspark.precompute import (
    _ensure_resume_compatible,
    main,
)
from dspark_caches import a_manifest
from tiny_target import (
    cache_files,
    command_line,
)

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
