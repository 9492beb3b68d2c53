"""Ending a run before it is done, at a point from which it can go on.

SIGTERM is how machines are taken away: the shard in hand is finished if that is a matter of
seconds, else dropped; before the first shard, the run stops at once. SIGINT is a person at the
terminal: the shard in hand is dropped at once.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0


class Stopped(BaseException):
    """The run was told to stop, and did; what it had published is kept.

    Like KeyboardInterrupt it is no Exception: a library that catches those must not swallow it.

    Attributes:
        signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


@contextlib.contextmanager
def stopping_at_once() -> Iterator[None]:
    """Raise `Stopped` in the main thread when SIGTERM arrives."""

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)  # a second one must not disturb the cleaning up
        raise Stopped(signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class PeerFailed(BaseException):
    """Another rank of the run has failed, and has said so: this one ends as well, silently."""


class StopRequest:
    """Notes SIGTERM while its ``with`` block runs; outside the main thread it notes nothing."""

    def __init__(self) -> None:
        self._requested = False
        self._previous: Any = None

    def check(self, seconds_left: float) -> None:
        """Stop if that was asked for and the shard in hand needs more than a few seconds.

        Args:
            seconds_left: How long the shard in hand will still take.

        Raises:
            Stopped: If so.
        """
        if self._requested and seconds_left > GRACE_SECONDS:
            raise Stopped(signal.SIGTERM)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True
        logger.warning("SIGTERM: finishing the shard in hand if it takes seconds, else dropping it")
