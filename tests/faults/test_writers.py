"""Several runs on one directory, one after the other or at once, and what they leave."""

import json
import os
import socket

from bench import wait_for
from injection import Fault

CAPTURE = "dspark.model.capture.Target.capture"


def test_of_runs_that_race_for_a_directory_one_wins_and_the_others_name_it(bench, tmp_path):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    # Whoever has the lock waits here: the others must find it taken, however slow they are.
    pause = Fault("os.open", "pause", path="input_ids.bin", gate=str(gate))
    runs = {run.pid: run for run in (bench.start(cache, faults=[pause]) for _ in range(4))}
    wait_for(tmp_path / "gate.reached")
    winner = json.loads((cache / ".dspark" / "writer.lock").read_bytes())
    first = runs.pop(winner["pid"])
    for run in runs.values():
        ended = run.wait()
        assert ended.code == 1, ended.stderr
        assert (
            f"is being written by another run: process {winner['pid']} on {socket.gethostname()} "
            f"since {winner['since']}"
        ) in ended.last_line
        assert "loading" not in ended.stderr
    gate.touch()
    ended = first.wait()
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)


def test_a_run_beside_one_that_writes_shards_is_refused_and_disturbs_nothing(bench, tmp_path):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    first = bench.start(cache, faults=[Fault(CAPTURE, "pause", 9, gate=str(gate))])
    wait_for(tmp_path / "gate.reached")
    ended = bench.run(cache, "--resume")
    assert ended.code == 1
    assert f"process {first.pid} on {socket.gethostname()} since " in ended.last_line
    gate.touch()
    ended = first.wait()
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)


def test_the_run_after_a_killed_one_says_whom_it_follows(bench, tmp_path):
    cache = tmp_path / "cache"
    killed = bench.start(cache, faults=[Fault(CAPTURE, "kill", 9)])
    assert killed.wait().code == -9
    ended = bench.run(cache, "--resume")
    assert ended.code == 0, ended.stderr
    taking_over = f"taking over from process {killed.pid} on {socket.gethostname()}"
    assert ended.stderr.count(taking_over) == 1
    assert "left by a run that died" in ended.stderr
    bench.check_finished(cache)


def test_without_hard_links_and_locks_all_is_the_same(bench, tmp_path):
    cache = tmp_path / "new" / "nested" / "cache"
    faults = [
        Fault("os.link", "EPERM", 0),
        Fault("fcntl.flock", "ENOLCK", 0),
        Fault("fcntl.lockf", "ENOLCK", 0),
        Fault("fcntl.fcntl", "ENOLCK", 0),
    ]
    killed = bench.run(cache, faults=[*faults, Fault(CAPTURE, "kill", 9)])
    assert killed.code == -9, killed.stderr
    ended = bench.run(cache, "--resume", faults=faults)
    assert ended.code == 0, ended.stderr
    bench.check_finished(cache)


def test_every_file_has_the_mode_that_the_umask_asks_for(bench):
    umask = os.umask(0)
    os.umask(umask)
    files = [path for path in bench.reference.rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o666 & ~umask)}


def test_each_run_is_a_line_of_the_log_and_says_how_it_ended(bench, tmp_path):
    cache = tmp_path / "cache"
    bench.run(cache, faults=[Fault(CAPTURE, "SIGTERM", 6)])
    bench.run(cache, "--resume", faults=[Fault(CAPTURE, "raise", 3)])
    bench.run(cache, "--resume", faults=[Fault(CAPTURE, "kill", 3)])
    ended = bench.run(cache, "--resume", "--batch-size", "4")
    assert ended.code == 0, ended.stderr
    assert "batch_size is 4, not 2: the last bits of states may differ" in ended.stderr
    text = (cache / ".dspark" / "runs.jsonl").read_text()
    outcomes = [json.loads(line)["outcome"] for line in text.splitlines()]
    assert outcomes[0] == "Stopped: stopped by SIGTERM"
    assert outcomes[1].startswith("TargetError: the target failed on rows")
    assert outcomes[2:] == ["killed", "finished"]
