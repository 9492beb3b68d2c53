"""Parts without a launcher: they share a directory, and the last of them finishes the cache."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from ranks import Fault, Launch, Rank, errors, only, stamps

CAPTURE = "dspark.model.capture.Target.capture"
RENAME = "os.replace"


def part(bench, cache: Path, number: int, of: int = 3, faults=(), *options: str) -> Rank:
    """Start one part of a run."""
    parts = ("--num-parts", str(of), "--part", str(number))
    return Rank(bench, bench.argv(cache, *parts, *options), faults)


def paused_part(bench, cache: Path, number: int, gate: Path, of: int = 3) -> Rank:
    """Start a part, and return once it waits in the middle of its shards, until `gate` is there."""
    started = part(bench, cache, number, of, [Fault(CAPTURE, "pause", 3, gate=str(gate))])
    reached = Path(f"{gate}.reached")
    while not reached.exists():
        assert started.poll(), started.wait()
        time.sleep(0.02)
    return started


def test_parts_that_run_at_the_same_time_write_the_cache_of_one_process(bench, tmp_path):
    cache = tmp_path / "cache"
    parts = [part(bench, cache, number) for number in range(3)]
    ended = [one.wait() for one in parts]
    assert [one.code for one in ended] == [0, 0, 0], ended
    bench.check_finished(cache)
    lines = [one.last_line for one in ended]
    assert sum("cache is finished: 7 shards" in line for line in lines) == 1
    assert sum("is done; other parts are not yet" in line for line in lines) == 2


@pytest.mark.parallel
def test_parts_that_run_one_after_the_other_compute_each_shard_once(bench, tmp_path):
    cache = tmp_path / "cache"
    before = {}
    for number in (2, 0, 1):
        assert not (cache / "manifest.json").exists() or not manifest(cache)["complete"]
        ended = part(bench, cache, number).wait()
        assert ended.code == 0, ended
        after = stamps(cache)
        assert after.items() > before.items()
        before = after
    bench.check_finished(cache)


def manifest(cache: Path) -> dict:
    return json.loads((cache / "manifest.json").read_bytes())


def test_a_part_of_a_finished_cache_says_so_and_changes_nothing(bench, tmp_path):
    cache = tmp_path / "cache"
    assert part(bench, cache, 0, 1).wait().code == 0
    before = stamps(cache), manifest(cache)
    ended = part(bench, cache, 1).wait()
    assert ended.code == 0
    assert "is finished" in ended.last_line
    assert (stamps(cache), manifest(cache)) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--num-parts", "3", "--part", "0"), "is being written by another run: process"),
        (("--num-parts", "2", "--part", "1"), "is being written by part-0-of-3: process"),
        (("--resume",), "is being written by part-0-of-3: process"),
        (("--finish",), "is being written by part-0-of-3: process"),
        (("--num-parts", "3", "--part", "1", "--seq-length", "32"), "does not match this run"),
    ],
)
def test_what_does_not_fit_a_living_part_is_refused(bench, tmp_path, options, reason):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    living = paused_part(bench, cache, 0, gate)
    before = sorted(path for path in cache.rglob("*") if "lock" not in path.name)
    refused = Rank(bench, bench.argv(cache, *options), []).wait()
    assert refused.code == 1
    assert reason in only(errors([refused]))
    assert sorted(path for path in cache.rglob("*") if "lock" not in path.name) == before
    gate.touch()
    assert living.wait().code == 0


@pytest.mark.parallel
def test_a_whole_run_that_lives_refuses_parts(bench, tmp_path):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    living = Rank(bench, bench.argv(cache), [Fault(CAPTURE, "pause", 3, gate=str(gate))])
    while not Path(f"{gate}.reached").exists():
        time.sleep(0.02)
    refused = part(bench, cache, 1).wait()
    assert "is being written by writer: process" in only(errors([refused]))
    gate.touch()
    assert living.wait().code == 0
    bench.check_finished(cache)


def test_a_part_that_was_killed_goes_on_and_removes_only_what_is_its_own(bench, tmp_path):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    living = paused_part(bench, cache, 1, gate)
    killed = part(bench, cache, 0, 3, [Fault("os.fsync", "kill", 2, path="shard-")]).wait()
    assert killed.code == -signal.SIGKILL
    before = stamps(cache)
    unfinished = {path.name.split(".")[3]: path for path in cache.glob(".shard-*.tmp")}
    assert set(unfinished) == {"part-0", "part-1"}
    again = part(bench, cache, 0).wait()
    assert again.code == 0, again
    assert not unfinished["part-0"].exists()
    assert unfinished["part-1"].exists()
    assert stamps(cache).items() > before.items()
    gate.touch()
    assert living.wait().code == 0
    assert part(bench, cache, 2).wait().code == 0
    bench.check_finished(cache)


@pytest.mark.parallel
def test_the_number_of_parts_may_change_once_none_lives(bench, tmp_path):
    cache = tmp_path / "cache"
    assert part(bench, cache, 0, 3, [Fault(CAPTURE, "kill", 5)]).wait().code == -signal.SIGKILL
    before = stamps(cache)
    for number in range(2):
        assert part(bench, cache, number, 2).wait().code == 0
    bench.check_finished(cache)
    assert stamps(cache).items() >= before.items()


def test_the_last_part_does_not_finish_a_cache_with_a_damaged_shard_of_another(bench, tmp_path):
    cache = tmp_path / "cache"
    for number in (0, 1):
        assert part(bench, cache, number).wait().code == 0
    victim = sorted(cache.glob("shard-*"))[0]
    flip_last_bit(victim)
    ended = part(bench, cache, 2).wait()
    assert ended.code == 1
    message = only(errors([ended]))
    assert f"shards [{int(victim.stem.split('-')[1])}] are damaged. Run part" in message
    assert not manifest(cache)["complete"]
    for number in (0, 1):  # the part that it belongs to is one of them
        assert part(bench, cache, number).wait().code == 0
    bench.check_finished(cache)


def flip_last_bit(path: Path) -> None:
    """Change the last real byte of a shard: its last row is full, or padding is looked at."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        value = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([value ^ 1]))


def test_finish_names_what_is_missing_and_finishes_what_is_not(bench, tmp_path):
    cache = tmp_path / "cache"
    assert part(bench, cache, 0).wait().code == 0
    early = Rank(bench, bench.argv(cache, "--finish"), []).wait()
    assert early.code == 1
    assert "is not done: 5 of 7 shards are missing or damaged" in only(errors([early]))
    assert not manifest(cache)["complete"]
    killed = [Fault(RENAME, "kill", path="manifest.json")]
    assert part(bench, cache, 1).wait().code == 0
    assert part(bench, cache, 2, 3, killed).wait().code == -signal.SIGKILL
    assert not manifest(cache)["complete"]
    before = stamps(cache)
    ended = Rank(bench, bench.argv(cache, "--finish"), []).wait()
    assert ended.code == 0, ended
    assert "cache is finished: 7 shards" in ended.last_line
    assert stamps(cache) == before
    bench.check_finished(cache)


@pytest.mark.parallel
def test_a_part_may_itself_be_a_group_of_ranks(bench, tmp_path):
    cache = tmp_path / "cache"
    for number in range(2):
        options = ("--num-parts", "2", "--part", str(number))
        ended = Launch(bench, cache, *options, world_size=2).wait()
        assert [one.code for one in ended] == [0, 0], ended
    bench.check_finished(cache)
