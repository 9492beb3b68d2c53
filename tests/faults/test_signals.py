"""A run that is told to stop keeps what is finished, says how to go on, and can be finished."""

import os
import signal
import time

import psutil
import pytest

from bench import SECONDS, everything, wait_for
from injection import Fault
from tiny_target import cache_files, write_chats

CAPTURE = "dspark.model.capture.Target.capture"
GRACE = "dspark.processes.interrupts.GRACE_SECONDS"


def test_sigterm_lets_a_short_shard_finish(bench, tmp_path):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[Fault(CAPTURE, "SIGTERM", 6)])  # in the second shard
    kept = bench.check_stopped(cache, ended, "stopped by SIGTERM", 143)
    assert kept == {"shard-000000.safetensors", "shard-000001.safetensors"}
    bench.check_resumes(cache)


def test_sigterm_drops_a_shard_that_needs_longer(bench, tmp_path):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[Fault(GRACE, "= -1"), Fault(CAPTURE, "SIGTERM", 6)])
    kept = bench.check_stopped(cache, ended, "stopped by SIGTERM", 143)
    assert kept == {"shard-000000.safetensors"}
    bench.check_resumes(cache)


def test_sigterm_in_the_last_shard_lets_the_run_finish(bench, tmp_path):
    cache = tmp_path / "cache"
    last = Fault("os.ftruncate", "SIGTERM", path="shard-000006")
    ended = bench.run(cache, faults=[last])
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("os.pwrite", "SIGTERM", 10, path="input_ids.bin"),
        Fault("os.replace", "SIGTERM", path="manifest.json"),
        Fault(CAPTURE, "SIGTERM"),  # the check of the target
    ],
    ids=str,
)
def test_sigterm_before_the_first_shard_stops_at_once(bench, tmp_path, fault):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[fault])
    assert bench.check_stopped(cache, ended, "stopped by SIGTERM", 143) == set()
    bench.check_resumes(cache)


@pytest.mark.parametrize(
    ("fault", "shards"),
    [
        (Fault("os.pwrite", "SIGINT", 10, path="input_ids.bin"), 0),
        (Fault(CAPTURE, "SIGINT", 6), 1),
    ],
    ids=str,
)
def test_sigint_drops_the_shard_in_hand(bench, tmp_path, fault, shards):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[fault])
    assert len(bench.check_stopped(cache, ended, "interrupted", 130)) == shards
    bench.check_resumes(cache)


def test_a_stop_while_resuming_leaves_what_was_there_untouched(bench, tmp_path):
    cache = tmp_path / "cache"
    assert bench.run(cache, faults=[Fault(CAPTURE, "SIGTERM", 10)]).code == 143
    before = {name: stamp for name, stamp in everything(cache).items() if "shard" in name}
    assert bench.run(cache, "--resume", faults=[Fault(CAPTURE, "SIGINT", 3)]).code == 130
    assert everything(cache).items() >= before.items()
    bench.check_resumes(cache)


@pytest.mark.faults
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_whole_group_while_workers_tokenize_is_one_line(
    bench, tmp_path, signum, code
):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    process = tokenizing(bench, tmp_path, cache, gate)
    os.killpg(process.pid, signum)
    gate.touch()
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == code, stderr
    lines = stderr.splitlines()
    assert [line for line in lines if "error" in line.lower() or "Trace" in line] == [lines[-1]]
    assert "go on with: python -m dspark.precompute" in lines[-1]


@pytest.mark.faults
def test_a_killed_tokenizing_worker_ends_the_run_with_one_line(bench, tmp_path):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    process = tokenizing(bench, tmp_path, cache, gate)
    workers_of(process.pid)[0].kill()
    gate.touch()
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, stderr
    assert "one of the 2 processes that tokenize was killed" in stderr.splitlines()[-1]
    assert "go on with: python -m dspark.precompute" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert cache_files(cache) == {}


@pytest.mark.faults
def test_workers_end_when_the_run_is_killed(bench, tmp_path):
    process = tokenizing(bench, tmp_path, tmp_path / "cache", tmp_path / "gate")
    workers = workers_of(process.pid)
    process.kill()
    process.communicate(timeout=SECONDS)
    _, alive = psutil.wait_procs(workers, timeout=SECONDS)
    assert not alive


def tokenizing(bench, tmp_path, cache, gate):
    """Start a process with two workers, and return when it has written what one of them encoded."""
    chats = write_chats(tmp_path / "chats.jsonl", 4000)
    pause = Fault("os.pwrite", "pause", 600, path="input_ids.bin", gate=str(gate))
    options = ("--input-data", str(chats), "--num-workers", "2")
    process = bench.process(cache, *options, faults=[pause], new_group=True)
    wait_for(gate.with_name("gate.reached"))
    return process


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the processes that encode: the grandchildren, since a fork server starts them."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        children = psutil.Process(pid).children()
        if workers := [worker for child in children for worker in child.children()]:
            return workers
        time.sleep(0.05)
    raise AssertionError(f"process {pid} has no workers")
