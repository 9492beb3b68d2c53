"""Ending a run when it is told to, at a point from which it can go on.

SIGTERM is how machines are taken away: the shard in hand is finished if that is a matter of
seconds, else dropped. SIGINT is a person at the terminal: the shard in hand is dropped at once.
"""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0


class Stopped(Exception):
    """The run was told to stop, and did; what it had published is kept.

    Attributes:
        signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


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
