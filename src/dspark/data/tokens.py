"""The whole input, rendered, checked and tokenized once, on disk.

    CACHE/.dspark/tokens-<16 hex digits of what decides them>/
        input_ids.bin     int32 [tokens]    the kept rows, one after the other
        loss_mask.bin     uint8 [tokens]
        lengths.bin       int64 [rows]
        source_rows.bin   int64 [rows]      each kept row's number in the source
        tokens.json       what was read, how, the counts, checksums of the files; written last

Every bad row, the number of rows and their size are known from here on, before the first forward.
The files take about five bytes per token and are mapped into memory, so a million rows cost none.
They are reused while every input file has the same size and time and every option is the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dspark.chat import Conversation
from dspark.data.encoding import BadRow, Encoded
from dspark.disk.publish import StagedFile, publish_bytes
from dspark.errors import DataError

TOKENS_NAME = "tokens.json"
_ARRAYS: Mapping[str, npt.DTypeLike] = {
    "input_ids": np.int32,
    "loss_mask": np.uint8,
    "lengths": np.int64,
    "source_rows": np.int64,
}


@dataclass
class TokenCounts:
    """What the checking pass found.

    Attributes:
        rows: Rows kept.
        tokens: Their real tokens.
        supervised_tokens: Tokens whose loss mask is 1.
        cut_rows: Rows longer than ``seq_length``.
        source_rows: Rows looked at.
        skipped: Rows left out, by reason.
        warnings: What the encoder had to say about the template, once each.
        sha256: Hash of the kept rows' lengths, ids and masks, in order.
    """

    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    cut_rows: int = 0
    source_rows: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    sha256: str = ""


@dataclass(frozen=True)
class Tokens:
    """The tokenized input, mapped from disk.

    Attributes:
        directory: Where it lies.
        counts: What the checking pass found.
        lengths: int64 [rows].
        source_rows: int64 [rows].
    """

    directory: Path
    counts: TokenCounts
    lengths: npt.NDArray[np.int64]
    source_rows: npt.NDArray[np.int64]
    _ids: npt.NDArray[np.int32]
    _mask: npt.NDArray[np.uint8]
    _ends: npt.NDArray[np.int64]

    def row(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return ids and loss mask of kept row `row`, each of its real length."""
        span = slice(int(self._ends[row] - self.lengths[row]), int(self._ends[row]))
        return self._ids[span], self._mask[span]

    @property
    def any_skipped(self) -> bool:
        """Whether the kept rows are not simply the first rows of the source."""
        return bool(self.counts.skipped)

    @property
    def largest_id(self) -> int:
        """The largest token id in the input."""
        return int(self._ids.max())


@dataclass(frozen=True)
class RowRules:
    """Which rows are kept.

    Attributes:
        skip_bad_rows: Whether a row that cannot be encoded is left out and counted; otherwise it
            is an error.
        min_loss_tokens: Rows with fewer supervised tokens are left out and counted.
        max_samples: Stop after this many rows kept; None for all.
    """

    skip_bad_rows: bool = False
    min_loss_tokens: int = 0
    max_samples: int | None = None

    def keeps(self, item: Encoded) -> bool:
        """Whether a row is kept."""
        if isinstance(item, BadRow):
            return False
        return int(item[1].loss_mask.sum()) >= self.min_loss_tokens

    def last_of_part(self) -> Callable[[Encoded], bool]:
        """Return what tells, row by row, that no later row of the same part is asked for."""
        kept = 0

        def is_last(item: Encoded) -> bool:
            nonlocal kept
            kept += self.keeps(item)
            stopped = isinstance(item, BadRow) and not self.skip_bad_rows
            return stopped or kept == self.max_samples

        return is_last


def load_tokens(directory: Path, key: Mapping[str, Any], *, check: bool = True) -> Tokens | None:
    """Map the tokens in `directory`, or return None if they are not those of `key`.

    Args:
        directory: Where `write_tokens` put them.
        key: JSON that decides them: the input files and every option.
        check: Whether to compare the files with their checksums, which reads all of them.
    """
    try:
        record = json.loads((directory / TOKENS_NAME).read_bytes())
        if record["key"] != json.loads(json.dumps(key)):
            return None
        counts = TokenCounts(**record["counts"])
        if check and record["xxh3_64"] != {name: _file_digest(directory, name) for name in _ARRAYS}:
            return None
        sizes = (counts.tokens, counts.tokens, counts.rows, counts.rows)
        ids, mask, lengths, source_rows = (
            np.memmap(directory / f"{name}.bin", dtype, "r", shape=(size,))
            for (name, dtype), size in zip(_ARRAYS.items(), sizes, strict=True)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not whole: they are made again
    return Tokens(directory, counts, lengths, source_rows, ids, mask, np.cumsum(lengths))


def _file_digest(directory: Path, name: str) -> str:
    with (directory / f"{name}.bin").open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def write_tokens(
    directory: Path,
    encoded: Generator[Encoded, None, None],
    rules: RowRules,
    *,
    key: Mapping[str, Any],
    on_row: Callable[[], object] = lambda: None,
) -> Tokens:
    """Keep the encoded rows in `directory` and map them.

    Args:
        directory: Where the files go; created if needed.
        encoded: The rows, in the order of the source.
        rules: Which of them are kept.
        key: See `load_tokens`.
        on_row: Called after every row, for progress.

    Raises:
        DataError: If a row is bad and the rules do not skip it, or no row is kept.
        OSError: If the disk refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TOKENS_NAME).unlink(missing_ok=True)
    with ExitStack() as stack:
        stack.enter_context(closing(encoded))
        writer = _Writer(
            {name: stack.enter_context(StagedFile(directory / f"{name}.bin")) for name in _ARRAYS}
        )
        for item in encoded:
            _keep_or_count(writer, item, rules)
            on_row()
            if writer.counts.rows == rules.max_samples:
                break
        if not writer.counts.rows:
            raise DataError(f"no row is left to train on: {_explain_none(writer)}")
        counts = writer.finish()
    digests = {name: _file_digest(directory, name) for name in _ARRAYS}
    record = {"key": dict(key), "counts": asdict(counts), "xxh3_64": digests}
    publish_bytes(directory / TOKENS_NAME, json.dumps(record, indent=1).encode())
    tokens = load_tokens(directory, key)
    assert tokens is not None, f"{directory} was written but cannot be read"
    return tokens


class _Writer:
    """Appends kept rows to the files and counts them."""

    def __init__(self, files: Mapping[str, StagedFile]) -> None:
        self.counts = TokenCounts()
        self.skipped: Counter[str] = Counter()
        self._files = files
        self._ends = dict.fromkeys(files, 0)
        self._hash = hashlib.sha256()

    def keep(self, number: int, conversation: Conversation) -> None:
        ids, mask = conversation.input_ids, conversation.loss_mask
        self._append("input_ids", ids)
        self._append("loss_mask", mask)
        self._append("lengths", np.array([len(ids)]))
        self._append("source_rows", np.array([number]))
        for part in (np.int64(len(ids)).tobytes(), ids.tobytes(), mask.tobytes()):
            self._hash.update(part)
        self.counts.rows += 1
        self.counts.tokens += len(ids)
        self.counts.supervised_tokens += int(mask.sum())
        self.counts.cut_rows += conversation.truncated
        for warning in conversation.warnings:
            if warning not in self.counts.warnings:
                self.counts.warnings.append(warning)

    def finish(self) -> TokenCounts:
        self.counts.skipped = dict(sorted(self.skipped.items()))
        self.counts.sha256 = self._hash.hexdigest()
        return self.counts

    def _append(self, name: str, values: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, _ARRAYS[name]).view(np.uint8).data
        self._files[name].write(data, self._ends[name])
        self._ends[name] += len(data)


def _keep_or_count(writer: _Writer, item: Encoded, rules: RowRules) -> None:
    writer.counts.source_rows += 1
    if isinstance(item, BadRow):
        if not rules.skip_bad_rows:
            raise DataError(
                f"{item.where}: {item.message}. Correct the row, or leave such rows out with "
                "--on-bad-row skip."
            )
        writer.skipped[item.reason] += 1
    elif not rules.keeps(item):
        writer.skipped[f"fewer than {rules.min_loss_tokens} supervised tokens"] += 1
    else:
        writer.keep(*item)


def _explain_none(writer: _Writer) -> str:
    if not writer.counts.source_rows:
        return "the input is empty. Check --input-data and --split."
    reasons = "; ".join(f"{count} {reason}" for reason, count in writer.skipped.most_common())
    return f"all {writer.counts.source_rows} rows were left out: {reasons}."
