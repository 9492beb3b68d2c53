"""How the ranks of a run notice that one of them is gone, and end together.

Every two seconds a rank tells the store that it lives and what it has written. A rank that fails
says so there. One that dies cannot: rank 0 watches all the others, and they watch it.

    beat/<rank>    [number, rows, tokens]
    claimed        the first failure, as JSON: who finds it tells the user,
    failed         and only then, here, the other ranks: a launcher kills all when one ends

One thread talks to the store. Another ends this process when that is due, since the first may hang
together with the network. Within a minute of a rank's end every process is gone.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING

from dspark.processes.interrupts import GRACE_SECONDS, PeerFailed, Stopped

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0
_SILENCE_SECONDS = 25.0  # after which a rank, or the store, counts as dead
_UNWIND_SECONDS = 20.0  # for a main thread that is busy to end by itself
_REPORT_SECONDS = 10.0  # for the first rank that fails to tell the user
_POLL_SECONDS = 0.05
_CLAIMED, _FAILED = "claimed", "failed"


@dataclass(frozen=True)
class Failure:
    """Why the ranks of a run end.

    Attributes:
        cause: What happened, in words.
        may_finish: Whether the others may finish a shard that takes seconds: the rank was told to
            stop, as they will be.
    """

    cause: str
    may_finish: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """Return what a rank that raises `error` says to the others."""
        words = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        cause = f"rank {rank} on {socket.gethostname()}: {words or type(error).__name__}"
        return cls(cause, may_finish=isinstance(error, Stopped))


class Heartbeat:
    """Beats for one rank, and watches the others.

    Args:
        store: What the ranks talk through.
        rank: This one.
        world_size: How many there are.

    Attributes:
        failure: Why this rank has to end, once it is known.
    """

    def __init__(self, store: "Store", rank: int, world_size: int) -> None:
        self.failure: Failure | None = None
        self._store, self._rank = store, rank
        self._written = [0, 0]
        self._others: dict[int, list[int]] = {}
        self._watched = range(1, world_size) if rank == 0 else range(1)
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._answered = time.monotonic()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._wakes = False
        self._report: Callable[[BaseException], None] = lambda error: None
        self._is_lost = False

    def count(self, rows: int, tokens: int) -> None:
        """Add to what this rank has written; told with the next beat."""
        self._written[0] += rows
        self._written[1] += tokens

    def others_counts(self) -> tuple[int, int]:
        """Rows and tokens that the other ranks have written, as far as rank 0 has heard."""
        told = list(self._others.values())
        return sum(rows for _, rows, _ in told), sum(tokens for _, _, tokens in told)

    def check(self, *, may_finish: bool = False) -> None:
        """Raise `PeerFailed` if another rank has failed or is gone.

        Args:
            may_finish: Whether this rank is at something that a `Failure` may let it finish.
        """
        if self.failure is not None and not (may_finish and self.failure.may_finish):
            raise PeerFailed(self.failure.cause)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Raise `PeerFailed` where a call of the store in the block finds that it is gone."""
        try:
            yield
        except RuntimeError as error:
            raise PeerFailed(self._lost(error).cause) from error

    @contextlib.contextmanager
    def running(self, report: Callable[[BaseException], None]) -> Iterator[None]:
        """Beat and watch while the block runs; wake it with `PeerFailed` when it has to end.

        Args:
            report: Tells the user; called for the first failure, on one rank.

        Raises:
            PeerFailed: If the block raises and another rank has failed before.
        """
        self._report = report
        self._wakes = threading.current_thread() is threading.main_thread()
        previous = signal.signal(signal.SIGINT, self._on_interrupt) if self._wakes else None
        self._heard = {rank: (b"", time.monotonic()) for rank in self._watched}
        self._beat(0)
        for loop in (self._talk, self._guard):
            threading.Thread(target=loop, name="dspark-heartbeat", daemon=True).start()
        try:
            yield
        except PeerFailed:
            raise
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            with self._ending:  # from here on nobody wakes this rank
                self._over.set()
            if self._wakes:
                signal.signal(signal.SIGINT, previous)

    def _tell(self, error: BaseException) -> None:
        """Say that this rank fails, unless another has done so before."""
        failure = Failure.of(error, self._rank)
        if not self._claim(failure, error):
            logger.debug("another rank failed before: %s", failure.cause)
            raise PeerFailed(self._first_failure().cause) from error

    def _claim(self, failure: Failure, error: BaseException) -> bool:
        """Tell the user and then the other ranks of a failure, if it is the first."""
        text = json.dumps(asdict(failure))
        try:
            is_first = self._store.compare_set(_CLAIMED, "", text).decode() == text
            if is_first:
                self._report(error)
                self._store.set(_FAILED, text)
                return True
            deadline = time.monotonic() + _REPORT_SECONDS
            while not self._store.check([_FAILED]) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            return False
        except RuntimeError as gone:  # the store, and with it whoever else could tell
            logger.debug("the store does not answer: %s", gone)
            if self._is_first_loss():
                self._report(error)
            return True

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.check()
        raise KeyboardInterrupt

    def _talk(self) -> None:
        number = 0
        while not self._over.wait(_BEAT_SECONDS) and self.failure is None:
            number += 1
            try:
                self._beat(number)
                failure = self._find_failure()
            except RuntimeError as error:
                failure = self._lost(error)
            self._answered = time.monotonic()
            self.failure = self.failure or failure

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self._rank}", json.dumps([number, *self._written]))

    def _find_failure(self) -> Failure | None:
        silent = [rank for rank in self._watched if not self._hear(rank)]
        if silent and not self._store.check([_CLAIMED]):
            gone = PeerFailed(
                f"rank {silent[0]} has not been heard of for {_SILENCE_SECONDS:.0f} s"
            )
            self._claim(Failure.of(gone, self._rank), gone)
        return self._first_failure() if self._store.check([_FAILED]) else None

    def _first_failure(self) -> Failure:
        """The failure that was told first."""
        return Failure(**json.loads(self._store.get(_CLAIMED)))

    def _hear(self, rank: int) -> bool:
        """Whether a rank has been heard of lately."""
        key, (last, since) = f"beat/{rank}", self._heard[rank]
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat == last:
            return time.monotonic() - since < _SILENCE_SECONDS
        self._heard[rank] = (beat, time.monotonic())
        self._others[rank] = json.loads(beat)
        return True

    def _guard(self) -> None:
        """Wait for a failure, and for the main thread to end after it; else end the process."""
        while self.failure is None:
            if self._over.wait(_BEAT_SECONDS / 4):
                return
            if time.monotonic() - self._answered > _SILENCE_SECONDS:
                self.failure = self._lost(TimeoutError(f"for {_SILENCE_SECONDS:.0f} s"))
        stops = self.failure.may_finish
        with self._ending:
            if self._over.is_set() or not self._wakes:
                return
            os.kill(os.getpid(), signal.SIGTERM if stops else signal.SIGINT)
        if not self._over.wait(_UNWIND_SECONDS + (GRACE_SECONDS if stops else 0)):
            logger.error("%s; this process does not end by itself", self.failure.cause)
            os._exit(1)  # a hang would hold the whole job

    def _lost(self, error: Exception) -> Failure:
        """The store does not answer, so this rank is alone; one per machine tells the user."""
        lost = PeerFailed(f"the launcher, or the machine of rank 0, does not answer ({error})")
        if self._is_first_loss() and os.environ.get("LOCAL_RANK", "0") == "0":
            self._report(lost)
        return Failure.of(lost, self._rank)

    def _is_first_loss(self) -> bool:
        """Whether nothing in this process has found before that the store is gone."""
        with self._ending:
            is_first, self._is_lost = not (self._is_lost or self._over.is_set()), True
        return is_first
