"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import logging
import threading
import time

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts rows, tokens and shards, and shows rate and time left.

    Its methods may be called from any thread.

    Args:
        rows: Rows to do.
        shards: Shards to do.
        bytes_per_token: Bytes of states that one token takes on disk.
    """

    def __init__(self, *, rows: int, shards: int, bytes_per_token: int) -> None:
        self._rows, self._shards, self._bytes_per_token = rows, shards, bytes_per_token
        self._done_rows = self._done_tokens = self._done_shards = 0
        self._begun = self._last_line = time.monotonic()
        self._lock = threading.Lock()
        # Where stderr is no terminal, disable=None shows no bar: then there are lines.
        self._bar = tqdm(total=rows, unit="row", disable=None, dynamic_ncols=True)
        self._lines = bool(self._bar.disable)

    def add_rows(self, rows: int, tokens: int) -> None:
        """Count rows that were written, with their real tokens."""
        with self._lock:
            self._done_rows += rows
            self._done_tokens += tokens
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(rows)
            if self._lines and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
                self._line()

    def add_shard(self, shard_index: int) -> None:
        """Count a shard whose rows are all written."""
        with self._lock:
            self._done_shards += 1
            logger.debug("shard %d is written", shard_index)

    def close(self) -> None:
        """Finish the bar, or write a last line."""
        with self._lock:
            self._bar.close()
            if self._lines and self._rows:
                self._line()

    def summary(self) -> str:
        """What was done, in words."""
        seconds = time.monotonic() - self._begun
        return (
            f"{self._done_rows} rows, {self._done_shards} shards, {self._rates()} "
            f"in {_duration(seconds)}"
        )

    def _line(self) -> None:
        self._last_line = time.monotonic()
        seconds = self._last_line - self._begun
        left = seconds * (self._rows - self._done_rows) / max(self._done_rows, 1)
        logger.info(
            "%d of %d rows, %d of %d shards, %s, %s left",
            self._done_rows,
            self._rows,
            self._done_shards,
            self._shards,
            self._rates(),
            _duration(left),
        )

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        written = self._done_tokens * self._bytes_per_token
        return f"{self._done_tokens / seconds:,.0f} tokens/s, {written / 1e9:.2f} GB written"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
