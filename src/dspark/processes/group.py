"""The ranks of one run: what they agree on, and what each of them does.

Ranks talk through the launcher's key-value store, at the start, at the end and when one of them
fails. In between none waits for another.

    from_first       rank 0 finds something out, the others learn it
    first_then_all   every rank does something, once rank 0 has been able to
    collect          every rank contributes a value, rank 0 learns them

Without a launcher there is one rank, and nothing of this does anything.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from dspark.processes.heartbeat import Heartbeat

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_SECONDS = (0.02, 1.0)  # at first, and after a while
_LEAVE_SECONDS = 5.0  # for the others to hear the end from a store that ends with rank 0
_T = TypeVar("_T")


class Group:
    """All ranks of a run, seen from one of them.

    Args:
        rank: This one.
        world_size: How many there are.
        store: What they talk through; None for a single rank.
        is_restarted: Whether a launcher started them anew after one of them had failed.

    Attributes:
        tensor_parallel: How many ranks run one copy of the target together.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: "Store | None" = None,
        *,
        is_restarted: bool = False,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.store = store
        self.is_restarted = is_restarted
        self.tensor_parallel = 1
        self._heartbeat = None if store is None else Heartbeat(store, rank, world_size)

    @property
    def label(self) -> str:
        """What names this rank in a message; nothing where there is no other."""
        return "" if self.store is None else f"rank {self.rank} on {socket.gethostname()}: "

    @property
    def is_first(self) -> bool:
        """Whether this rank decides, reports and finishes."""
        return self.rank == 0

    @property
    def share(self) -> int:
        """Which share of the shards this rank computes; ranks of one target have the same."""
        return self.rank // self.tensor_parallel

    @property
    def num_shares(self) -> int:
        """Among how many the shards are shared out."""
        return self.world_size // self.tensor_parallel

    @property
    def writes(self) -> bool:
        """Whether this rank, of those that run one target together, writes its shards."""
        return self.rank % self.tensor_parallel == 0

    def split_target(self, num_ranks: int) -> None:
        """Have every `num_ranks` neighbouring ranks run one copy of the target together.

        Raises:
            ValueError: If the number of ranks is no multiple of `num_ranks`.
        """
        if self.world_size % num_ranks:
            raise ValueError(
                f"--tensor-parallel {num_ranks} does not divide the {self.world_size} ranks of "
                f"this run. Start it under torchrun with {num_ranks} ranks or a multiple of them."
            )
        self.tensor_parallel = num_ranks

    def from_first(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on rank 0, as JSON allows; it is not called elsewhere.

        Raises:
            PeerFailed: If rank 0 fails.
        """
        if self._heartbeat is None:
            return make()
        if self.is_first:
            value = make()
            self._put(f"first/{name}", value)
            return value
        return self._wait_for(f"first/{name}")

    def first_then_all(self, name: str, make: Callable[[], _T]) -> _T:
        """Return what `make` returns on this rank; it is called once rank 0 has done so.

        What all ranks would refuse for the same reason is so refused by one.

        Raises:
            PeerFailed: If rank 0 fails.
        """
        if not self.is_first:
            self.from_first(name, bool)
            return make()
        value = make()
        self.from_first(name, bool)
        return value

    def collect(
        self, name: str, value: Any, *, while_waiting: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Tell rank 0 a value, as JSON allows; the other ranks go on at once.

        Args:
            name: What it is.
            value: This rank's.
            while_waiting: Called now and then on rank 0.

        Returns:
            On rank 0 the values of all ranks, by rank; elsewhere nothing.

        Raises:
            PeerFailed: If one of them fails.
        """
        if self._heartbeat is None:
            return [value]
        self._put(f"collect/{name}/{self.rank}", value)
        if not self.is_first:
            return []
        keys = [f"collect/{name}/{rank}" for rank in range(self.world_size)]
        return [self._wait_for(key, while_waiting) for key in keys]

    def check(self) -> None:
        """Raise `PeerFailed` if another rank has failed, for a rank that is within a shard."""
        if self._heartbeat is not None:
            self._heartbeat.check(may_finish=True)

    def count(self, rows: int, tokens: int) -> None:
        """Add to what this rank has written; rank 0 hears of it now and then."""
        if self._heartbeat is not None:
            self._heartbeat.count(rows, tokens)

    def others_counts(self) -> tuple[int, int]:
        """On rank 0: the rows and tokens that the others have written, as far as it has heard."""
        return (0, 0) if self._heartbeat is None else self._heartbeat.others_counts()

    @contextlib.contextmanager
    def watched(
        self, report: Callable[[BaseException], None] = lambda error: None
    ) -> Iterator["Group"]:
        """Watch the others as long as the block runs, tell them if it fails, and end with them.

        Args:
            report: Tells the user why the run fails. It is called on one rank, before any ends.

        Raises:
            PeerFailed: If another rank failed first.
        """
        if self._heartbeat is None:
            try:
                yield self
            except BaseException as error:
                report(error)
                raise
            return
        try:
            with self._heartbeat.running(report):
                yield self
                self.collect("end", True)
                self.from_first("end", bool)  # nobody leaves before all are done
        finally:
            self._leave()

    def _leave(self) -> None:
        """Say goodbye; where the store lives in rank 0, it waits until the others have gone."""
        assert self.store is not None
        with contextlib.suppress(RuntimeError):  # nothing depends on it any more
            self.store.set(f"left/{self.rank}", "")
            if self.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                deadline = time.monotonic() + _LEAVE_SECONDS
                goodbyes = [f"left/{rank}" for rank in range(self.world_size)]
                while not self.store.check(goodbyes) and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS[0])

    def _put(self, key: str, value: Any) -> None:
        assert self.store is not None
        assert self._heartbeat is not None
        with self._heartbeat.answering():
            self.store.set(key, json.dumps(value))

    def _wait_for(self, key: str, while_waiting: Callable[[], None] = lambda: None) -> Any:
        assert self.store is not None
        assert self._heartbeat is not None
        pause, longest = _POLL_SECONDS
        while True:
            with self._heartbeat.answering():
                if self.store.check([key]):
                    return json.loads(self.store.get(key))
            self._heartbeat.check()
            while_waiting()
            time.sleep(pause)
            pause = min(1.2 * pause, longest)


def cores_of_rank() -> int:
    """Return the processor cores that belong to this process, of those its machine has."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(len(os.sched_getaffinity(0)) // ranks, 1)
