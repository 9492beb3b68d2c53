"""Ranks that meet, agree and fail together: here as threads of one process."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from dspark.processes import heartbeat
from dspark.processes.group import Group
from dspark.processes.interrupts import PeerFailed, Stopped
from dspark.processes.rendezvous import join_group, meet

SECONDS = 60  # more than any of these takes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.05)
    monkeypatch.delenv("RANK", raising=False)


class Ranks:
    """Runs a function once per rank, and keeps what each tells the user."""

    def __init__(self, world_size: int, store: HashStore | None = None) -> None:
        self.store = store or HashStore()
        self.store.set_timeout(timedelta(seconds=SECONDS))
        self.world_size = world_size
        self.reports: list[tuple[int, str]] = []

    def run(self, act: Callable[[Group], Any], *, restarted: set[int] | None = None) -> list[Any]:
        """Return what `act` returns or raises on each rank."""

        def one(rank: int) -> Any:
            group = meet(
                self.store, rank, self.world_size, is_restarted=rank in (restarted or set())
            )
            try:
                with group.watched(lambda error: self.reports.append((rank, str(error)))):
                    return act(group)
            except BaseException as error:
                return error

        with ThreadPoolExecutor(self.world_size) as pool:
            return [future.result(SECONDS) for future in map_all(pool, one, self.world_size)]


def map_all(pool: ThreadPoolExecutor, act: Callable[[int], Any], count: int) -> list[Any]:
    return [pool.submit(act, number) for number in range(count)]


def test_a_process_without_a_launcher_is_a_group_of_one():
    group = join_group()
    assert (group.rank, group.world_size, group.is_first, group.writes) == (0, 1, True, True)
    assert group.label == ""
    with group.watched():
        assert group.from_first("value", lambda: {"a": 1}) == {"a": 1}
        assert group.first_then_all("thing", lambda: 5) == 5
        assert group.collect("part", 3) == [3]
        group.count(1, 2)
        group.check()
        assert group.others_counts() == (0, 0)


def test_a_group_of_one_reports_its_failure_too():
    reports = []
    with pytest.raises(OSError, match="disk"), Group().watched(reports.append):
        raise OSError("disk full")
    assert [str(error) for error in reports] == ["disk full"]


def test_what_the_first_rank_finds_out_all_ranks_know():
    made = []

    def act(group: Group) -> Any:
        def make() -> list[int]:
            made.append(group.rank)
            return [1, 2]

        return group.from_first("value", make)

    assert Ranks(3).run(act) == [[1, 2]] * 3
    assert made == [0]


def test_the_first_rank_learns_what_the_others_contribute_in_their_order():
    assert Ranks(4).run(lambda group: group.collect("part", group.rank * 10)) == [
        [0, 10, 20, 30],
        *[[]] * 3,
    ]


def test_the_other_ranks_begin_once_the_first_has_been_able_to():
    order = []

    def act(group: Group) -> int:
        def make() -> int:
            if group.is_first:
                time.sleep(0.1)
            order.append(group.rank)
            return group.rank

        return group.first_then_all("thing", make)

    assert Ranks(3).run(act) == [0, 1, 2]
    assert order[0] == 0


@pytest.mark.parametrize("slow", [0, 2])
def test_no_rank_leaves_before_all_are_done(slow):
    done, left = threading.Event(), []
    store = HashStore()

    def one(rank: int) -> None:
        with meet(store, rank, 3).watched():
            if rank == slow:
                time.sleep(0.2)
                done.set()
        left.append(done.is_set())

    with ThreadPoolExecutor(3) as pool:
        for future in map_all(pool, one, 3):
            future.result(SECONDS)
    assert left == [True] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_when_one_rank_fails_all_end_and_that_one_tells_why(failing):
    def act(group: Group) -> Any:
        if group.rank == failing:
            raise ValueError("bad row 7")
        return group.from_first("never", lambda: group.collect("never", 1))

    ranks = Ranks(3)
    ended = ranks.run(act)
    assert isinstance(ended[failing], ValueError)
    others = [error for rank, error in enumerate(ended) if rank != failing]
    assert all(isinstance(error, PeerFailed) for error in others)
    assert ranks.reports == [(failing, "bad row 7")]


def test_of_ranks_that_fail_for_the_same_reason_one_tells():
    def act(group: Group) -> Any:
        raise ValueError("the model is not there")

    ranks = Ranks(4)
    ended = ranks.run(act)
    assert len(ranks.reports) == 1
    assert sum(isinstance(error, ValueError) for error in ended) == 1
    assert sum(isinstance(error, PeerFailed) for error in ended) == 3


def test_the_user_is_told_before_any_other_rank_ends():
    told = threading.Event()
    ended_first = []

    def one(rank: int, store: HashStore) -> None:
        def report(error: BaseException) -> None:
            time.sleep(0.3)
            told.set()

        group = meet(store, rank, 3)
        try:
            with group.watched(report):
                if rank == 1:
                    raise ValueError("broken")
                group.from_first("never", lambda: group.collect("never", 1))
        except (ValueError, PeerFailed):
            ended_first.append(told.is_set())

    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        for future in map_all(pool, lambda rank: one(rank, store), 3):
            future.result(SECONDS)
    assert ended_first == [True] * 3


def test_a_rank_that_was_told_to_stop_lets_the_others_finish_their_shard():
    def act(group: Group) -> str:
        if group.rank == 1:
            raise Stopped(15)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            group.check()  # as between the micro-batches of a shard
        return "finished"

    ended = Ranks(2).run(act)
    assert isinstance(ended[0], PeerFailed), "and then it ends as well"


def test_within_a_shard_a_failure_elsewhere_is_noticed():
    noticed = []

    def act(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("broken")
        while True:
            try:
                group.check()
            except PeerFailed:
                noticed.append(group.rank)
                raise
            time.sleep(0.01)

    Ranks(2).run(act)
    assert noticed == [0]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_is_not_heard_of_any_more_ends_the_others(monkeypatch, silent):
    monkeypatch.setattr(heartbeat, "_SILENCE_SECONDS", 0.5)
    over = threading.Event()

    def act(group: Group) -> Any:
        if group.rank == silent:
            assert group._heartbeat is not None
            group._heartbeat._over.set()  # as if its process were gone
            over.wait(SECONDS)
            raise SystemExit
        try:
            group.from_first("never", lambda: group.collect("never", 1))
        finally:
            over.set()

    ranks = Ranks(2)
    ended = ranks.run(act)
    assert isinstance(ended[1 - silent], PeerFailed)
    assert ranks.reports[0] == (1 - silent, f"rank {silent} has not been heard of for 0 s")


def test_the_first_rank_hears_what_the_others_have_written():
    heard = []

    def act(group: Group) -> None:
        group.count(2, 100 + group.rank)
        group.count(1, 0)
        while group.is_first and group.others_counts() != (6, 203):
            time.sleep(0.01)
        heard.append(group.rank)

    Ranks(3).run(act)
    assert sorted(heard) == [0, 1, 2]


def test_a_store_that_is_gone_ends_a_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    ranks = Ranks(2)

    def act(group: Group) -> None:
        def gone(*_: object) -> None:
            raise RuntimeError("connection reset by peer")

        group.store = type("Gone", (), {"set": gone, "check": gone})()
        group.from_first("value", lambda: 1)

    ended = ranks.run(act)
    assert all(isinstance(error, PeerFailed) for error in ended)
    assert "does not answer (connection reset by peer)" in ranks.reports[0][1]


def test_a_group_that_is_started_anew_hears_nothing_of_the_one_before():
    store = HashStore()
    Ranks(3, store).run(lambda group: group.from_first("value", lambda: "old"))
    # A rank of a third group came as far as saying hello, and was killed.
    store.set("dspark/hello/1", '"a ticket that nobody holds"')
    ranks = Ranks(2, store)
    assert ranks.run(lambda group: group.from_first("value", lambda: "new")) == ["new"] * 2
    assert not ranks.reports


def test_all_ranks_know_that_one_of_them_was_started_anew():
    assert Ranks(3).run(lambda group: group.is_restarted) == [False] * 3
    assert Ranks(3).run(lambda group: group.is_restarted, restarted={2}) == [True] * 3
    assert Ranks(3).run(lambda group: group.is_restarted, restarted={0}) == [True] * 3


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(ConnectionError, match=r"ranks \[1, 2\] did not come"):
        meet(HashStore(), 0, 3, seconds=0.1)
    with pytest.raises(ConnectionError, match="rank 0 does not answer"):
        meet(HashStore(), 1, 3, seconds=0.1)


def test_a_launcher_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr("dspark.processes.rendezvous._JOIN_SECONDS", 0.2)
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConnectionError, match="rank 1 does not reach the launcher"):
        join_group()


def test_ranks_of_one_target_have_the_same_share_and_one_writes():
    groups = [Group(rank, 6) for rank in range(6)]
    for group in groups:
        group.split_target(2)
    assert [group.share for group in groups] == [0, 0, 1, 1, 2, 2]
    assert [group.writes for group in groups] == [True, False] * 3
    assert {group.num_shares for group in groups} == {3}


def test_a_target_is_not_split_over_a_number_of_ranks_that_does_not_fit():
    with pytest.raises(ValueError, match="--tensor-parallel 4 does not divide the 6 ranks"):
        Group(0, 6).split_target(4)
