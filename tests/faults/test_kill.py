"""Killed at any point and resumed, a cache has the bytes of an undisturbed run."""

import json
from pathlib import Path

import pytest

from bench import SECONDS, everything, stamps
from injection import Fault

START = [
    Fault("os.mkdir", "kill", path=".dspark"),
    Fault("os.open", "kill", path="writer.lock"),
    Fault("os.pwrite", "kill", path="writer.lock", moment="halfway"),
    Fault("os.link", "kill", path="writer.lock"),
    Fault("os.link", "kill", path="writer.lock", moment="after"),
]
TOKENS = [
    Fault("os.open", "kill", path="lengths.bin"),
    Fault("os.pwrite", "kill", 10, path="input_ids.bin", moment="halfway"),
    Fault("os.fsync", "kill", path="source_rows.bin", moment="after"),
    Fault("os.replace", "kill", path="loss_mask.bin", moment="after"),
    Fault("os.pwrite", "kill", path="tokens.json", moment="halfway"),
    Fault("os.replace", "kill", path="tokens.json"),
    Fault("os.replace", "kill", path="weights.json"),
]
BEGIN = [
    Fault("os.unlink", "kill", path=".holes"),
    Fault("os.replace", "kill", path="manifest.json"),
    Fault("os.replace", "kill", path="manifest.json", moment="after"),
    Fault("dspark.model.capture.Target.capture", "kill"),  # the check of the target
    Fault("os.pwrite", "kill", path="target_weights", moment="halfway"),
    Fault("os.fsync", "kill", path="target_weights"),
    Fault("os.replace", "kill", path="target_weights"),
    Fault("os.replace", "kill", path="target_weights", moment="after"),
]
SHARDS = [
    Fault("os.open", "kill", path="shard-000000", moment="after"),
    Fault("os.ftruncate", "kill", path="shard-000000", moment="after"),
    Fault("dspark.model.capture.Target.capture", "kill", 3),
    Fault("os.pwrite", "kill", path="shard-000000", moment="halfway"),
    Fault("os.pwrite", "kill", 16, path="shard-000001", moment="after"),
    Fault("os.pwrite", "kill", 17, path="shard-000001", moment="halfway"),  # its header
    Fault("os.fsync", "kill", path="shard-000002"),
    Fault("os.fsync", "kill", path="shard-000002", moment="after"),
    Fault("os.replace", "kill", path="shard-000003"),
    Fault("os.replace", "kill", path="shard-000003", moment="after"),
    Fault("os.pwrite", "kill", 5, path="shard-000005"),
    Fault("os.replace", "kill", path="shard-000006"),
]
FINISH = [
    Fault("os.replace", "kill", path="shard-000006", moment="after"),
    Fault("os.open", "kill", 2, path="shard-000006"),  # its header is read for the manifest
    Fault("os.pwrite", "kill", 2, path="manifest.json", moment="halfway"),
    Fault("os.fsync", "kill", 2, path="manifest.json", moment="after"),
    Fault("os.replace", "kill", 2, path="manifest.json"),
    Fault("os.replace", "kill", 2, path="manifest.json", moment="after"),
    Fault("os.unlink", "kill", path="/writer.lock"),
]
POINTS = [*START, *TOKENS, *BEGIN, *SHARDS, *FINISH]


@pytest.mark.faults
@pytest.mark.parametrize("fault", POINTS, ids=str)
def test_a_run_killed_at_any_point_is_finished_by_resume(bench, tmp_path, fault):
    cache = tmp_path / "cache"
    assert bench.run(cache, faults=[fault]).code == -9
    bench.check_published(cache)
    before = stamps(cache)
    ended = bench.run(cache, "--resume")
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)
    after = stamps(cache)
    assert {name: after[name] for name in before} == before, "a finished file was written again"


def test_a_run_killed_again_and_again_gets_there(bench, tmp_path):
    cache = tmp_path / "cache"
    kept: dict[str, tuple[int, int]] = {}
    for fault in (*START[2:4], *TOKENS[1::2], *BEGIN[1::3], *SHARDS[1::3], *FINISH[::2]):
        ended = bench.run(cache, "--resume", faults=[fault])
        assert ended.code == -9, f"{fault} was not reached: {ended.stderr}"
        bench.check_published(cache)
        found = stamps(cache)
        assert found.items() >= kept.items(), f"{fault}: a finished file was written again"
        kept = found
    ended = bench.run(cache, "--resume")
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)
    assert stamps(cache) == kept


@pytest.mark.faults
@pytest.mark.parametrize("fault", [BEGIN[1], SHARDS[8], FINISH[4]], ids=str)
def test_a_process_of_its_own_that_is_killed_is_finished_by_resume(bench, tmp_path, fault):
    cache = tmp_path / "cache"
    killed = bench.process(cache, faults=[fault])
    _, stderr = killed.communicate(timeout=SECONDS)
    assert killed.returncode == -9, stderr
    bench.check_published(cache)
    before = stamps(cache)
    ended = bench.run(cache, "--resume")
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)
    assert stamps(cache).items() >= before.items()


def test_resume_computes_what_is_missing_or_damaged_and_nothing_else(bench, tmp_path):
    cache = tmp_path / "cache"
    assert bench.run(cache).code == 0
    before = stamps(cache)
    shards = sorted(cache.glob("shard-*"))
    shards[1].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-10])
    shards[3].write_bytes(bytes(shards[3].stat().st_size))
    _flip_bit(shards[4], -100)
    shards[6].write_bytes(shards[6].read_bytes().replace(b'"loss_mask"', b'"mask_loss"', 1))
    (cache / "target_weights.safetensors").write_bytes(b"")
    ended = bench.run(cache, "--resume")
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)
    after = stamps(cache)
    assert [name for name in before if before[name] == after[name]] == [
        f"shard-00000{index}.safetensors" for index in (0, 5)
    ]
    for index in (2, 3, 4, 6):
        assert f"shard {index} is written again" in ended.stderr


def _flip_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_resume_of_a_finished_cache_says_so_and_changes_nothing(bench, tmp_path):
    cache = tmp_path / "cache"
    assert bench.run(cache).code == 0
    before = everything(cache)
    ended = bench.run(cache, "--resume")
    assert ended.code == 0
    assert "is finished: all 7 shards pass" in ended.last_line
    assert everything(cache) == before


def test_shards_without_a_manifest_are_refused_and_kept(bench, tmp_path):
    cache = tmp_path / "cache"
    assert bench.run(cache, faults=[SHARDS[8]]).code == -9
    (cache / "manifest.json").unlink()
    before = stamps(cache)
    ended = bench.run(cache, "--resume")
    assert ended.code == 1
    assert "holds 3 shards but no manifest" in ended.last_line
    assert stamps(cache) == before


def test_the_manifest_says_incomplete_until_everything_is_there(bench, tmp_path):
    cache = tmp_path / "cache"
    for fault in (BEGIN[2], SHARDS[9], FINISH[4]):
        assert bench.run(cache, "--resume", faults=[fault]).code == -9
        assert json.loads((cache / "manifest.json").read_bytes())["complete"] is False
