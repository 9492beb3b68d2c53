"""One writer per directory: the living are respected, the dead are replaced, by exactly one."""

import errno
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty

import pytest

import dspark.processes.lock
from dspark.errors import CacheError
from dspark.processes.lock import STALE_SECONDS, WriterLock, claim_path, lock_lives, read_lock

ELSEWHERE = {
    "boot": "another",
    "host": "node7",
    "pid": 4711,
    "since": "2025-01-31T12:00:00+00:00",
    "started": "1",
    "token": "0123",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "cache" / ".dspark").mkdir(parents=True)
    return tmp_path / "cache" / ".dspark" / "writer.lock"


def a_dead_lock(path: Path) -> dict:
    """Leave the lock of a process that was killed while it held it."""
    imports = (
        "import os; from pathlib import PosixPath; from dspark.processes.lock import WriterLock"
    )
    hold = f"{imports}; WriterLock({path!r}).__enter__(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", hold]).returncode == 9
    return read_lock(path)


def test_a_second_writer_is_refused_by_host_process_and_since(path):
    with WriterLock(path):
        record = read_lock(path)
        with pytest.raises(CacheError) as refused, WriterLock(path):
            pass
        assert read_lock(path) == record
    assert f"process {os.getpid()} on {socket.gethostname()} since {record['since']}" in str(
        refused.value
    )
    assert not list(path.parent.iterdir())


def test_the_lock_of_a_dead_process_is_taken_over_with_a_line_in_the_log(path, caplog):
    record = a_dead_lock(path)
    with WriterLock(path) as lock:
        lock.check()
    (message,) = caplog.messages
    assert f"taking over from process {record['pid']} on {record['host']}" in message
    assert not list(path.parent.iterdir())


def test_a_process_number_that_was_given_again_is_another_process(path):
    with WriterLock(path):
        record = read_lock(path)
    path.write_text(json.dumps(record | {"started": "1"}))
    with WriterLock(path):
        pass


@pytest.mark.parametrize("content", [json.dumps(ELSEWHERE), "", "not JSON", '{"token": "../x"}'])
@pytest.mark.parametrize(("age", "lives"), [(STALE_SECONDS - 30, True), (STALE_SECONDS + 5, False)])
def test_another_hosts_lock_is_dead_when_it_was_not_refreshed_for_60_s(
    path, content, age, lives, monkeypatch
):
    monkeypatch.setattr("dspark.processes.lock._WAIT_SECONDS", 0)
    path.write_text(content)
    os.utime(path, (time.time() - age,) * 2)
    assert lock_lives(path, read_lock(path)) == lives
    if not lives:
        with WriterLock(path):
            pass
        return
    with pytest.raises(CacheError, match=r"node7 since 2025-01-31|process None|cannot be taken"):
        WriterLock(path).__enter__()
    assert path.read_text() == content


def test_where_processes_cannot_be_told_apart_only_time_tells(path, monkeypatch):
    monkeypatch.setattr("dspark.processes.lock._boot", lambda: "")  # as without /proc
    monkeypatch.setattr("dspark.processes.lock._started", lambda pid: None)
    with WriterLock(path) as lock:
        assert lock_lives(path, read_lock(path))
        os.utime(path, (0, 0))
        assert not lock_lives(path, read_lock(path))
        lock.check()


def test_a_writer_refreshes_its_lock(path, monkeypatch):
    monkeypatch.setattr("dspark.processes.lock._REFRESH_SECONDS", 0.01)
    with WriterLock(path):
        os.utime(path, (0, 0))
        end = time.monotonic() + 60
        while path.stat().st_mtime == 0:
            assert time.monotonic() < end, "it was not refreshed"
            time.sleep(0.01)


def test_a_writer_whose_lock_was_taken_over_notices(path):
    with WriterLock(path) as lock:
        lock.check()
        path.write_text(json.dumps(ELSEWHERE))
        with pytest.raises(CacheError, match="was taken over by another run"):
            lock.check()
    assert read_lock(path) == ELSEWHERE, "the other's lock is not this one's to remove"


def test_a_writer_whose_directory_is_gone_notices(path):
    with WriterLock(path) as lock:
        path.unlink()
        with pytest.raises(CacheError, match="is gone: the directory was removed"):
            lock.check()


def _refuse_links(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def _race(path: Path, links: bool, go, ended, results) -> None:
    if not links:
        os.link = _refuse_links
    go.wait()
    try:
        with WriterLock(path) as lock:
            results.put("won")
            ended.wait()
            lock.check()
    except CacheError as error:
        results.put(str(error))


def test_a_slow_taker_does_not_remove_the_lock_of_a_faster_one(path, monkeypatch):
    a_dead_lock(path)
    fast, slow = WriterLock(path), WriterLock(path)
    real = dspark.processes.lock._create

    def create(file: Path, token: str) -> bool:
        if file != path:  # the slow one is about to claim the dead lock, which it has read
            monkeypatch.setattr(dspark.processes.lock, "_create", real)
            fast.__enter__()
        return real(file, token)

    monkeypatch.setattr(dspark.processes.lock, "_create", create)
    with pytest.raises(CacheError, match="is being written by another run"):
        slow.__enter__()
    fast.check()
    fast.__exit__(None, None, None)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_several_that_take_over_at_once_exactly_one_wins(path, links):
    a_dead_lock(path)
    context = multiprocessing.get_context("forkserver")
    go, ended, results = context.Event(), context.Event(), context.Queue()
    racers = [
        context.Process(target=_race, args=(path, links, go, ended, results)) for _ in range(6)
    ]
    for racer in racers:
        racer.start()
    go.set()
    outcomes = [results.get(timeout=120) for _ in racers]
    ended.set()
    for racer in racers:
        racer.join()
    assert outcomes.count("won") == 1, outcomes
    assert all("is being written by another run" in o for o in outcomes if o != "won"), outcomes
    with pytest.raises(Empty):
        results.get_nowait()
    assert not list(path.parent.iterdir()), "nothing is left behind"


def test_a_taker_that_was_killed_holds_nobody_up(path, monkeypatch):
    record = a_dead_lock(path)
    claim_path(path, record).write_text(json.dumps(record | {"token": "abcd"}))
    monkeypatch.setattr("dspark.processes.lock._WAIT_SECONDS", 0)
    with WriterLock(path):
        pass
    assert not list(path.parent.iterdir())


def test_a_lock_appears_with_its_content(path, monkeypatch):
    seen = []

    def link(whole: Path, name: Path) -> None:
        seen.append((name.exists(), read_lock(whole)["pid"]))
        real(whole, name)

    real = os.link
    monkeypatch.setattr(os, "link", link)
    with WriterLock(path):
        assert seen == [(False, os.getpid())]
