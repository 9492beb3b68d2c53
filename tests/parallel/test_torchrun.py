"""Under the real launcher: one machine, two machines, restarts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from injection import Fault, to_json
from ranks import stamps
from tiny_target import cache_files

SECONDS = 240
COMMAND = ("-m", "dspark.precompute")
FAULTY = str(Path(__file__).with_name("faulty.py"))


def torchrun(launcher: Sequence[str], command: Sequence[str]) -> subprocess.Popen[str]:
    """Start ``torchrun`` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def node(number: int, port: str) -> list[str]:
    """Arguments for one of two machines with one rank each."""
    return [
        *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", port),
    ]


def messages(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("dspark.precompute: error")]


def test_the_launcher_of_torch_starts_ranks_that_write_the_same_cache(bench, tmp_path):
    cache = tmp_path / "cache"
    launched = torchrun(["--standalone", "--nproc-per-node", "2"], [*COMMAND, *bench.argv(cache)])
    _, stderr = launched.communicate(timeout=SECONDS)
    assert launched.returncode == 0, stderr
    assert stderr.count("capturing layers") == 1
    assert "wrote 26 rows, 7 shards" in stderr
    bench.check_finished(cache)


@pytest.mark.parallel
def test_two_machines_write_the_same_cache(bench, tmp_path):
    cache, port = tmp_path / "cache", free_port()
    nodes = [torchrun(node(i, port), [*COMMAND, *bench.argv(cache)]) for i in range(2)]
    texts = [one.communicate(timeout=SECONDS)[1] for one in nodes]
    assert [one.returncode for one in nodes] == [0, 0], texts
    bench.check_finished(cache)


@pytest.mark.parallel
def test_a_rank_that_dies_on_one_machine_ends_the_other(bench, tmp_path):
    cache, port = tmp_path / "cache", free_port()
    fault = Fault("dspark.model.capture.Target.capture", "kill", 4)
    command = [FAULTY, "1", to_json([fault]), *bench.argv(cache)]
    nodes = [torchrun(node(i, port), command) for i in range(2)]
    nodes[1].communicate(timeout=SECONDS)
    begun = time.monotonic()
    _, stderr = nodes[0].communicate(timeout=SECONDS)
    assert time.monotonic() - begun < 60
    assert [bool(one.returncode) for one in nodes] == [True, True]
    assert len(messages(stderr)) == 1
    assert "rank 1 has not been heard of" in stderr
    bench.check_published(cache)


@pytest.mark.parallel
def test_a_machine_that_is_gone_ends_the_other(bench, tmp_path):
    cache, port, gate = tmp_path / "cache", free_port(), tmp_path / "gate"
    fault = Fault("dspark.model.capture.Target.capture", "pause", 4, gate=str(gate))
    command = [FAULTY, "0", to_json([fault]), *bench.argv(cache)]
    nodes = [torchrun(node(i, port), command) for i in range(2)]
    while not Path(f"{gate}.reached").exists():
        assert nodes[0].poll() is None
        time.sleep(0.05)
    children = subprocess.run(
        ["pgrep", "-P", str(nodes[0].pid)], capture_output=True, text=True, check=True
    )
    for pid in [nodes[0].pid, *map(int, children.stdout.split())]:
        os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    _, stderr = nodes[1].communicate(timeout=SECONDS)
    assert time.monotonic() - begun < 60
    assert nodes[1].returncode != 0
    assert len(messages(stderr)) == 1, stderr
    nodes[0].communicate(timeout=SECONDS)


@pytest.mark.parallel
def test_ranks_that_are_started_anew_go_on_by_themselves(bench, tmp_path):
    cache = tmp_path / "cache"
    fault = Fault("os.replace", "kill", 3, path="shard-", moment="after")
    launched = torchrun(
        ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"],
        [FAULTY, "1", to_json([fault]), *bench.argv(cache)],
    )
    _, stderr = launched.communicate(timeout=SECONDS)
    assert launched.returncode == 0, stderr
    bench.check_finished(cache)
    assert len(stamps(cache)) == 8


@pytest.mark.parallel
@pytest.mark.real_model
def test_any_number_of_ranks_writes_the_cache_of_smollm2_that_one_process_writes(smollm2, tmp_path):
    chats = Path(__file__).parents[1] / "data" / "chats_12.jsonl"
    arguments = [
        *("--target-model", str(smollm2), "--input-data", str(chats), "--seq-length", "128"),
        *("--batch-size", "1", "--shard-size", "5", "--device", "cpu", "--num-workers", "1"),
    ]
    for ranks in (1, 2, 3, 5):  # three shards, the last of two rows
        launched = torchrun(
            ["--standalone", "--nproc-per-node", str(ranks)],
            [*COMMAND, *arguments, "--output-dir", str(tmp_path / str(ranks))],
        )
        _, stderr = launched.communicate(timeout=SECONDS)
        assert launched.returncode == 0, stderr
        assert cache_files(tmp_path / str(ranks)) == cache_files(tmp_path / "1")
