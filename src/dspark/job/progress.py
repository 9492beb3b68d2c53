"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts the rows and tokens of all ranks, and shows rate and time left.

    Its methods may be called from any thread.

    Args:
        rows: Rows to do.
        bytes_per_token: Bytes that one token takes on disk.
        others: Tells rows and tokens that other ranks have written.
        silent: Whether to show nothing: another rank does.
    """

    def __init__(
        self,
        *,
        rows: int,
        bytes_per_token: int,
        others: Callable[[], tuple[int, int]] = lambda: (0, 0),
        silent: bool = False,
    ) -> None:
        self._total, self._bytes_per_token, self._others = rows, bytes_per_token, others
        self._own = [0, 0]
        self._shards = 0
        self._begun = self._last_shown = time.monotonic()
        self._lock = threading.Lock()
        # Where stderr is no terminal, disable=None shows no bar: then there are lines.
        self._bar = tqdm(
            total=rows, unit="row", disable=True if silent else None, dynamic_ncols=True
        )
        self._lines = bool(self._bar.disable) and not silent

    def add_rows(self, rows: int, tokens: int) -> None:
        """Count rows that this process wrote, with their real tokens."""
        with self._lock:
            self._own[0] += rows
            self._own[1] += tokens
        self.refresh()

    def add_shard(self, shard_index: int) -> None:
        """Count a shard whose rows are all written."""
        with self._lock:
            self._shards += 1
        logger.debug("shard %d is written", shard_index)

    def refresh(self) -> None:
        """Show where the run stands."""
        with self._lock:
            if not self._bar.disable:
                rows, tokens = self._counts()
                self._bar.set_postfix_str(self._rates(tokens), refresh=False)
                self._bar.update(rows - self._bar.n)
            elif self._lines and time.monotonic() - self._last_shown > _SECONDS_BETWEEN_LINES:
                self._show_line()

    def close(self) -> None:
        """Finish the bar."""
        self.refresh()
        with self._lock:
            self._bar.close()

    @property
    def written(self) -> list[int]:
        """Rows, tokens and shards that this process wrote."""
        return [*self._own, self._shards]

    def summary(self, written: Sequence[Sequence[int]]) -> str:
        """What was done and at which rate, in words.

        Args:
            written: Rows, tokens and shards of every rank.
        """
        rows, tokens, shards = (sum(column) for column in zip(*written, strict=True))
        self._others = lambda: (rows - self._own[0], tokens - self._own[1])
        seconds = time.monotonic() - self._begun
        return f"{rows} rows, {shards} shards, {self._rates(tokens)} in {_duration(seconds)}"

    def _counts(self) -> tuple[int, int]:
        rows, tokens = self._others()
        return self._own[0] + rows, self._own[1] + tokens

    def _show_line(self) -> None:
        self._last_shown = time.monotonic()
        rows, tokens = self._counts()
        left = (self._last_shown - self._begun) * (self._total - rows) / max(rows, 1)
        logger.info(
            "%d of %d rows, %s, %s left", rows, self._total, self._rates(tokens), _duration(left)
        )

    def _rates(self, tokens: int) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        written = tokens * self._bytes_per_token
        return f"{tokens / seconds:,.0f} tokens/s, {written / 1e9:.2f} GB written"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
