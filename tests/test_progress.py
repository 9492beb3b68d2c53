"""How far a run is: lines where there is no terminal, a bar where there is one."""

import logging
import threading

import pytest

from dspark.job import progress
from dspark.job.progress import Progress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def lines(caplog):
    """Return what tells the lines so far."""
    caplog.set_level(logging.INFO, logger="dspark")
    return lambda: list(caplog.messages)


def test_a_line_comes_now_and_then_with_rate_and_time_left(clock, lines):
    shown = Progress(rows=100, bytes_per_token=1_000_000)
    clock.now += 10
    shown.add_rows(10, 500)
    assert lines() == []
    clock.now += 40
    shown.add_rows(10, 500)
    (line,) = lines()
    assert "20 of 100 rows" in line
    assert "20 tokens/s" in line
    assert "1.00 GB written" in line
    assert "0:03:20 left" in line
    shown.close()


def test_a_silent_rank_says_nothing(clock, lines):
    shown = Progress(rows=3, bytes_per_token=1, silent=True)
    clock.now += 100
    shown.add_rows(3, 30)
    shown.close()
    assert lines() == []


def test_rows_of_other_ranks_are_counted(clock, lines):
    shown = Progress(rows=30, bytes_per_token=1, others=lambda: (12, 120))
    clock.now += 60
    shown.add_rows(3, 30)
    assert "15 of 30 rows" in lines()[-1]
    shown.close()


def test_the_summary_says_what_all_ranks_did_and_how_long_it_took(clock):
    shown = Progress(rows=8, bytes_per_token=1_000_000)
    shown.add_rows(5, 100)
    shown.add_shard(0)
    shown.add_shard(1)
    assert shown.written == [5, 100, 2]
    clock.now += 3725
    expected = "8 rows, 3 shards, 0 tokens/s, 0.15 GB written in 1:02:05"
    assert shown.summary([shown.written, [3, 50, 1]]) == expected
    shown.close()


def test_a_run_of_no_rows_has_nothing_to_say(clock, lines):
    Progress(rows=0, bytes_per_token=1).close()
    assert lines() == []


def test_threads_may_count_at_the_same_time(clock):
    shown = Progress(rows=4000, bytes_per_token=1)
    threads = [
        threading.Thread(target=lambda: [shown.add_rows(1, 2) for _ in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shown.written == [4000, 8000, 0]
    shown.close()


def test_a_terminal_gets_a_bar_and_no_lines(clock, lines, capsys, monkeypatch):
    class Terminal:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    written: list[str] = []
    monkeypatch.setattr("sys.stderr", Terminal())
    shown = Progress(rows=4, bytes_per_token=1)
    clock.now += 100
    shown.add_rows(4, 8)
    shown.close()
    assert lines() == []
    assert "4/4" in "".join(written)
