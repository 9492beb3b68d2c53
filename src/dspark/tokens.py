"""The whole input, rendered, checked and tokenized once, on disk.

    CACHE/.dspark/tokens/
        input_ids.bin     int32 [tokens]    the kept rows, one after the other
        loss_mask.bin     uint8 [tokens]
        lengths.bin       int64 [rows]
        source_rows.bin   int64 [rows]      each kept row's number in the source
        tokens.json       what was read, how, the counts, the hash; written last

Every bad row, the number of rows and their size are known from here on, before the first forward.
The files take about five bytes per token and are mapped into memory, so a million rows cost none.
They are reused while every input file has the same size and time and every option is the same.
"""

import hashlib
import itertools
import json
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.chat import ChatEncoder, Conversation
from dspark.errors import DataError, RowError
from dspark.publish import StagedFile, publish_bytes
from dspark.rows import SourceRow

TOKENS_NAME = "tokens.json"
_ARRAYS: Mapping[str, npt.DTypeLike] = {
    "input_ids": np.int32,
    "loss_mask": np.uint8,
    "lengths": np.int64,
    "source_rows": np.int64,
}
_CHUNK_ROWS = 64
_ROWS_BEFORE_WORKERS = 512  # starting processes costs more than this many rows


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


@dataclass(frozen=True, slots=True)
class _BadRow:
    number: int
    where: str
    reason: str
    message: str


_Encoded = tuple[int, Conversation] | _BadRow


def load_tokens(directory: Path, key: Mapping[str, Any]) -> Tokens | None:
    """Map the tokens in `directory`, or return None if they are not those of `key`.

    Args:
        directory: Where `write_tokens` put them.
        key: JSON that decides them: the input files and every option.
    """
    try:
        record = json.loads((directory / TOKENS_NAME).read_bytes())
        if record["key"] != json.loads(json.dumps(key)):
            return None
        counts = TokenCounts(**record["counts"])
        sizes = (counts.tokens, counts.tokens, counts.rows, counts.rows)
        ids, mask, lengths, source_rows = (
            np.memmap(directory / f"{name}.bin", dtype, "r", shape=(size,))
            for (name, dtype), size in zip(_ARRAYS.items(), sizes, strict=True)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not whole: they are made again
    return Tokens(directory, counts, lengths, source_rows, ids, mask, np.cumsum(lengths))


def write_tokens(
    directory: Path,
    rows: Iterable[SourceRow],
    encoder: ChatEncoder,
    *,
    key: Mapping[str, Any],
    num_workers: int,
    skip_bad_rows: bool = False,
    min_loss_tokens: int = 0,
    max_samples: int | None = None,
    on_row: Callable[[], object] = lambda: None,
) -> Tokens:
    """Render, check and tokenize every row, keep the result in `directory` and map it.

    Args:
        directory: Where the files go; created if needed.
        rows: The input, in order.
        encoder: Makes ids and mask of a row.
        key: See `load_tokens`.
        num_workers: Processes that encode; 1 encodes in this one, as do short inputs.
        skip_bad_rows: Whether a row that cannot be encoded is left out and counted.
        min_loss_tokens: Rows with fewer supervised tokens are left out and counted.
        max_samples: Stop after this many rows kept.
        on_row: Called after every row, for progress.

    Raises:
        DataError: If a row is bad and `skip_bad_rows` is off, or no row is kept.
        OSError: If the disk refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TOKENS_NAME).unlink(missing_ok=True)
    encoded = _encode_rows(rows, encoder, num_workers)
    with ExitStack() as stack:
        stack.enter_context(closing(encoded))
        writer = _Writer(
            {name: stack.enter_context(StagedFile(directory / f"{name}.bin")) for name in _ARRAYS}
        )
        for item in encoded:
            _keep_or_count(writer, item, skip_bad_rows, min_loss_tokens)
            on_row()
            if writer.counts.rows == max_samples:
                break
        if not writer.counts.rows:
            raise DataError(f"no row is left to train on: {_explain_none(writer.counts)}")
        counts = writer.finish()
    record = {"key": dict(key), "counts": asdict(counts)}
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


def _keep_or_count(
    writer: _Writer, item: _Encoded, skip_bad_rows: bool, min_loss_tokens: int
) -> None:
    writer.counts.source_rows += 1
    if isinstance(item, _BadRow):
        if not skip_bad_rows:
            raise DataError(
                f"{item.where}: {item.message}. Correct the row, or leave such rows out with "
                "--on-bad-row skip."
            )
        writer.skipped[item.reason] += 1
    elif int(item[1].loss_mask.sum()) < min_loss_tokens:
        writer.skipped[f"fewer than {min_loss_tokens} supervised tokens"] += 1
    else:
        writer.keep(*item)


def _explain_none(counts: TokenCounts) -> str:
    if not counts.source_rows:
        return "the input is empty. Check --input-data and --split."
    return f"all {counts.source_rows} rows were left out. Try without --on-bad-row skip to see why."


def _encode_rows(
    rows: Iterable[SourceRow], encoder: ChatEncoder, num_workers: int
) -> Generator[_Encoded, None, None]:
    """Yield the rows encoded, in order; in worker processes once there are enough of them."""
    source = iter(rows)
    head = source if num_workers == 1 else itertools.islice(source, _ROWS_BEFORE_WORKERS)
    for row in head:
        yield _encode_row(encoder, row)
    first = next(source, None)
    if first is None:
        return
    context = multiprocessing.get_context("forkserver")  # fork is unsafe beside torch's threads
    with ProcessPoolExecutor(num_workers, context, _init_worker, (encoder,)) as pool:
        pending: deque[Future[list[_Encoded]]] = deque()
        try:
            for chunk in _chunks(itertools.chain((first,), source)):
                pending.append(pool.submit(_encode_chunk, chunk))
                if len(pending) > 4 * num_workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"one of the {num_workers} processes that tokenize was killed, perhaps for want of "
                "memory. Run again with fewer --num-workers."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _chunks(rows: Iterator[SourceRow]) -> Iterator[list[SourceRow]]:
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        yield chunk


def _encode_row(encoder: ChatEncoder, row: SourceRow) -> _Encoded:
    try:
        return row.number, encoder.encode(row.value())
    except RowError as error:
        return _BadRow(row.number, row.where, error.reason, str(error))


_worker_encoder: ChatEncoder  # set once per worker process: sending it with every chunk is slow


def _init_worker(encoder: ChatEncoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder


def _encode_chunk(rows: list[SourceRow]) -> list[_Encoded]:
    return [_encode_row(_worker_encoder, row) for row in rows]
