"""A disk that refuses ends the run with one line, leaves nothing half done, and is gone on with."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import wait_for
from injection import Fault

CAPTURE = "dspark.model.capture.Target.capture"
REFUSALS = [
    Fault("os.pwrite", "ENOSPC", 12, path="input_ids.bin"),
    Fault("os.pwrite", "ENOSPC", path="target_weights"),
    Fault("os.pwrite", "ENOSPC", 7, path="shard-000002"),
    Fault("os.ftruncate", "ENOSPC", path="shard-000003"),
    Fault("os.fsync", "ENOSPC", path="shard-000004"),
    Fault("os.pwrite", "EDQUOT", 7, path="shard-000002"),
    Fault("os.fsync", "EDQUOT", path="shard-000004"),  # network file systems tell when flushing
    Fault("os.open", "EROFS", path="shard-000001"),
    Fault("os.pwrite", "EIO", 17, path="shard-000005"),
    Fault("os.replace", "EACCES", path="shard-000006"),
    Fault("os.pwrite", "ENOSPC", 2, path="manifest.json"),
]
QUICK = (0, 2, 6)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if place in QUICK else [pytest.mark.faults], id=str(fault))
        for place, fault in enumerate(REFUSALS)
    ],
)
def test_a_disk_that_refuses_ends_the_run_with_one_line(bench, tmp_path, fault):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[fault])
    bench.check_stopped(cache, ended, os.strerror(getattr(errno, fault.action)), 1)
    assert fault.path in ended.last_line, "the file is not named"
    bench.check_resumes(cache)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB: the weights and some shards fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or mount("-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)):
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode


def test_a_full_file_system_keeps_what_fits_and_is_gone_on_with(bench, small_disk):
    cache = small_disk / "cache"
    ended = bench.run(cache, "--ignore-free-space")
    assert ended.code == 1, ended.stderr
    assert "No space left on device" in ended.last_line
    assert "go on with: python -m dspark.precompute" in ended.last_line
    kept = bench.check_published(cache)
    assert 2 <= len(kept) < 8, "some shards fit, not all"
    assert not list(cache.rglob("*.tmp"))
    again = bench.run(cache, "--ignore-free-space", "--resume")
    assert (again.code, bench.check_published(cache)) == (1, kept)
    assert mount("-o", "remount,size=4m", str(small_disk)) == 0
    bench.check_resumes(cache)


def test_a_cache_that_cannot_fit_is_refused_before_the_model_loads(bench, small_disk):
    ended = bench.run(small_disk / "cache")
    assert ended.code == 1
    assert "has 0.00 GB free" in ended.last_line
    assert "loading" not in ended.stderr


def test_a_read_only_file_system_is_refused_before_the_model_loads(bench, small_disk):
    cache = small_disk / "cache"
    stopped = bench.run(cache, "--ignore-free-space", faults=[Fault(CAPTURE, "SIGTERM", 6)])
    assert stopped.code == 143
    assert mount("-o", "remount,ro", str(small_disk)) == 0
    ended = bench.run(cache, "--resume")
    assert ended.code == 1
    assert "Read-only file system" in ended.last_line
    assert "loading" not in ended.stderr
    assert mount("-o", "remount,rw,size=4m", str(small_disk)) == 0
    bench.check_resumes(cache)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_refused_before_the_model_loads(bench, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    ended = bench.run(tmp_path / "closed" / "cache")
    assert ended.code == 1
    assert "Permission denied" in ended.last_line
    assert "loading" not in ended.stderr


def test_a_directory_that_vanishes_ends_the_run(bench, tmp_path):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    running = bench.start(cache, faults=[Fault(CAPTURE, "pause", 8, gate=str(gate))])
    wait_for(tmp_path / "gate.reached")
    cache.rename(tmp_path / "elsewhere")
    gate.touch()
    ended = running.wait()
    assert ended.code == 1, ended.stderr
    assert str(cache) in ended.last_line
    assert "go on with: python -m dspark.precompute" in ended.last_line
    assert "Traceback" not in ended.stderr
    assert not cache.exists()
    bench.check_resumes(cache)
