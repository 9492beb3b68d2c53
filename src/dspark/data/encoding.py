"""Rows encoded by all cores of a machine, and by all ranks of a run.

One rank encodes in worker processes, in order. Of several ranks each encodes every n-th chunk of
rows into a file of its own, from which rank 0 reads all of them back in the order of the source.
"""

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dspark.chat import ChatEncoder, Conversation
from dspark.data.rows import SourceRow
from dspark.errors import RowError

_CHUNK_ROWS = 64
_ROWS_BEFORE_WORKERS = 512  # starting processes costs more than this many rows


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be encoded.

    Attributes:
        number: Its number in the source.
        where: Where a person finds it.
        reason: The short phrase by which it is counted.
        message: What is wrong with it.
    """

    number: int
    where: str
    reason: str
    message: str


Encoded = tuple[int, Conversation] | BadRow


def encode_rows(
    rows: Iterable[SourceRow], encoder: ChatEncoder, num_workers: int
) -> Generator[Encoded, None, None]:
    """Yield the rows encoded, in order; in worker processes once there are enough of them.

    Args:
        rows: The input.
        encoder: Makes ids and mask of a row.
        num_workers: Processes that encode; 1 encodes in this one, as do short inputs.

    Raises:
        ChildProcessError: If a worker process is killed.
    """
    source = iter(rows)
    head = source if num_workers == 1 else itertools.islice(source, _ROWS_BEFORE_WORKERS)
    for row in head:
        yield _encode_row(encoder, row)
    first = next(source, None)
    if first is None:
        return
    context = multiprocessing.get_context("forkserver")  # fork is unsafe beside torch's threads
    with ProcessPoolExecutor(num_workers, context, _init_worker, (encoder,)) as pool:
        pending: deque[Future[list[Encoded]]] = deque()
        try:
            for chunk in _chunks(itertools.chain((first,), source)):
                pending.append(pool.submit(_encode_chunk, chunk))
                if len(pending) > 4 * num_workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"one of the {num_workers} processes that tokenize was killed, perhaps for want of "
                "memory: try fewer --num-workers."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def write_part(
    path: Path,
    rows: Iterable[SourceRow],
    encoder: ChatEncoder,
    *,
    num_workers: int,
    share: int,
    num_shares: int,
    is_last: Callable[[Encoded], bool],
    on_row: Callable[[], object] = lambda: None,
) -> None:
    """Encode one share of the rows into a file: every `num_shares`-th chunk, from `share` on.

    Args:
        path: The file.
        rows: The whole input.
        encoder: Makes ids and mask of a row.
        num_workers: As for `encode_rows`.
        share: Which share.
        num_shares: Among how many.
        is_last: Whether nothing after a row will be asked for.
        on_row: Called after every row, for progress.

    Raises:
        ChildProcessError: If a worker process is killed.
        OSError: If the disk refuses.
    """
    chosen = (row for place, row in enumerate(rows) if place // _CHUNK_ROWS % num_shares == share)
    with path.open("wb") as file, closing(encode_rows(chosen, encoder, num_workers)) as encoded:
        for item in encoded:
            _write_item(file, item)
            on_row()
            if is_last(item):
                return


def read_parts(paths: Sequence[Path]) -> Generator[Encoded, None, None]:
    """Yield what `write_part` wrote into the files of all shares, in the order of the source."""
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        for file in itertools.cycle(files):
            items = [item for _ in range(_CHUNK_ROWS) if (item := _read_item(file)) is not None]
            if not items:
                return
            yield from items


def _write_item(file: BinaryIO, item: Encoded) -> None:
    header: dict[str, Any]
    if isinstance(item, BadRow):
        header, arrays = {"bad": asdict(item)}, b""
    else:
        number, conversation = item
        header = {
            "number": number,
            "length": len(conversation.input_ids),
            "truncated": bool(conversation.truncated),
            "warnings": list(conversation.warnings),
        }
        arrays = conversation.input_ids.tobytes() + conversation.loss_mask.tobytes()
    text = json.dumps(header).encode()
    file.write(len(text).to_bytes(8, "little") + text + arrays)


def _read_item(file: BinaryIO) -> Encoded | None:
    prefix = file.read(8)
    if not prefix:
        return None
    header = json.loads(file.read(int.from_bytes(prefix, "little")))
    if "bad" in header:
        return BadRow(**header["bad"])
    length = header["length"]
    ids = np.frombuffer(file.read(4 * length), dtype=np.int32)
    mask = np.frombuffer(file.read(length), dtype=np.uint8)
    return header["number"], Conversation(ids, mask, header["truncated"], tuple(header["warnings"]))


def _chunks(rows: Iterator[SourceRow]) -> Iterator[list[SourceRow]]:
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        yield chunk


def _encode_row(encoder: ChatEncoder, row: SourceRow) -> Encoded:
    try:
        return row.number, encoder.encode(row.value())
    except RowError as error:
        return BadRow(row.number, row.where, error.reason, str(error))


_worker_encoder: ChatEncoder  # set once per worker process: sending it with every chunk is slow


def _init_worker(encoder: ChatEncoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    # Ctrl-C is sent to the whole group: the parent answers it. SIGTERM is how a pool that has lost
    # a process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that it works for is gone: it would wait for rows forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _encode_chunk(rows: list[SourceRow]) -> list[Encoded]:
    return [_encode_row(_worker_encoder, row) for row in rows]
