"""The ranks of one run: what they agree on, and how they end together.

Under ``torchrun`` every process is a rank; without it there is one. Ranks talk through the
launcher's key-value store, at the start, at the end and when one of them fails. In between none
waits for another.

    from_first   rank 0 finds something out, the others learn it
    collect      every rank contributes a value, rank 0 learns them
    check        raises where another rank has failed

A rank that fails says so in the store. One that dies cannot, so rank 0 watches the heartbeats of
all and all watch that of rank 0: within a minute every rank has ended.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dspark.interrupts import PeerFailed

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0
_SILENCE_SECONDS = 30.0  # after which a rank counts as dead
_UNWIND_SECONDS = 20.0  # for a main thread that is busy elsewhere to end by itself
_POLL_SECONDS = 0.1
_FAILED, _BEAT, _COUNTS = "failed", "beat", "counts"


class Group:
    """All ranks of a run, seen from one of them.

    Args:
        rank: This one.
        world_size: How many there are.
        store: What they talk through; None for a single rank.
        tensor_parallel: How many ranks run one copy of the target together.

    Raises:
        ValueError: If `world_size` is no multiple of `tensor_parallel`.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        *,
        tensor_parallel: int = 1,
    ) -> None:
        if world_size % tensor_parallel:
            raise ValueError(
                f"--tensor-parallel {tensor_parallel} does not divide the {world_size} ranks of "
                "this run. Start it under torchrun with a multiple of it."
            )
        self.rank, self.world_size = rank, world_size
        self.tensor_parallel = tensor_parallel
        self._store = store
        self._counts = [0, 0]
        self._failure: str | None = None
        self._ended = threading.Event()

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

    def from_first(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on rank 0, as JSON allows; it is not called elsewhere.

        Raises:
            PeerFailed: If rank 0 fails.
        """
        if self._store is None:
            return make()
        if self.is_first:
            value = make()
            self._store.set(f"first/{name}", json.dumps(value))
            return value
        return self._wait_for(f"first/{name}")

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
        if self._store is None:
            return [value]
        self._store.set(f"collect/{name}/{self.rank}", json.dumps(value))
        if not self.is_first:
            return []
        keys = [f"collect/{name}/{rank}" for rank in range(self.world_size)]
        return [self._wait_for(key, while_waiting) for key in keys]

    def check(self) -> None:
        """Raise `PeerFailed` if another rank has failed."""
        if self._failure is not None:
            raise PeerFailed(self._failure)

    def count(self, rows: int, tokens: int) -> None:
        """Add to what this rank has written; told to rank 0 with the next heartbeat."""
        self._counts[0] += rows
        self._counts[1] += tokens

    def others_counts(self) -> tuple[int, int]:
        """Rows and tokens that the other ranks have written, as far as they have told."""
        if self._store is None:
            return 0, 0
        keys = [f"{_COUNTS}/{rank}" for rank in range(self.world_size) if rank != self.rank]
        told = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        return sum(rows for rows, _ in told), sum(tokens for _, tokens in told)

    @contextmanager
    def watched(self) -> Iterator["Group"]:
        """Beat and watch the others as long as the block runs; tell them if it fails."""
        if self._store is None:
            yield self
            return
        threading.Thread(target=self._watch, name="dspark-group", daemon=True).start()
        try:
            yield self
        except PeerFailed:
            raise
        except KeyboardInterrupt as error:
            if self._failure is not None:  # it was this group's own way of waking the main thread
                raise PeerFailed(self._failure) from error
            self._tell(error)
            raise
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._ended.set()
        self._store.set(f"{_BEAT}/{self.rank}", "done")

    def _tell(self, error: BaseException) -> None:
        assert self._store is not None
        message = f"rank {self.rank} on {socket.gethostname()}: {error or type(error).__name__}"
        self._store.compare_set(_FAILED, "", message)

    def _wait_for(self, key: str, while_waiting: Callable[[], None] = lambda: None) -> Any:
        assert self._store is not None
        while not self._store.check([key]):
            self.check()
            while_waiting()
            time.sleep(_POLL_SECONDS)
        return json.loads(self._store.get(key))

    def _watch(self) -> None:
        """Beat, listen, and wake the main thread when another rank has failed."""
        watched = range(1, self.world_size) if self.is_first else range(1)
        silent_since = dict.fromkeys(watched, time.monotonic())
        last = dict.fromkeys(watched, b"")
        beats = 0
        while not self._ended.wait(_BEAT_SECONDS):
            beats += 1
            try:
                self._beat(beats)
                self._failure = self._find_failure(silent_since, last)
            except Exception as error:  # the store is gone, and with it the launcher
                self._failure = f"the launcher does not answer: {error}"
            if self._failure is not None:
                break
        if self._failure is None or self._ended.is_set():
            return
        os.kill(os.getpid(), signal.SIGINT)
        if not self._ended.wait(_UNWIND_SECONDS):
            logger.error("%s; the main thread does not end, so the process does", self._failure)
            os._exit(1)  # a hang would hold the whole job

    def _beat(self, beats: int) -> None:
        assert self._store is not None
        self._store.set(f"{_BEAT}/{self.rank}", str(beats))
        self._store.set(f"{_COUNTS}/{self.rank}", json.dumps(self._counts))

    def _find_failure(self, silent_since: dict[int, float], last: dict[int, bytes]) -> str | None:
        assert self._store is not None
        if self._store.check([_FAILED]):
            return self._store.get(_FAILED).decode()
        now = time.monotonic()
        for rank in silent_since:
            key = f"{_BEAT}/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != last[rank] or beat == b"done":
                last[rank], silent_since[rank] = beat, now
            elif now - silent_since[rank] > _SILENCE_SECONDS:
                message = f"rank {rank} has not been heard of for {_SILENCE_SECONDS:.0f} s"
                self._store.compare_set(_FAILED, "", message)
                return message
        return None


def join_group(*, tensor_parallel: int = 1) -> Group:
    """Return the group that the launcher started this process in, or one of a single rank.

    Raises:
        ValueError: If the number of ranks does not fit `tensor_parallel`.
    """
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return Group(tensor_parallel=tensor_parallel)
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
    return Group(rank, world_size, PrefixStore("dspark", store), tensor_parallel=tensor_parallel)
