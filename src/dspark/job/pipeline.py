"""The forwards over shards, and everything that happens behind them.

    main thread      micro-batch ─► target.capture ─► stage ─► queue (bounded)
    writer threads   row by row: check the states ─► digest ─► write to its place ─► publish

Memory is a few micro-batches, however many rows a shard has.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dspark.data.tokens import Tokens
from dspark.disk.manifest import shard_path
from dspark.disk.shard_writer import ShardWriter
from dspark.errors import TargetError
from dspark.job.background import Background
from dspark.job.bad_states import find_bad_state
from dspark.job.forward import ShardClock, ShardSettings, forwards, shard_batches, shard_record
from dspark.job.staging import StagedStates, make_stager
from dspark.model.capture import Target
from dspark.processes.group import cores_of_rank

logger = logging.getLogger(__name__)


def write_shards(
    cache_dir: str,
    shard_indices: Iterable[int],
    target: Target,
    tokens: Tokens,
    settings: ShardSettings,
    *,
    on_rows: Callable[[int, int], None] = lambda rows, tokens: None,
    on_shard: Callable[[int], None] = lambda index: None,
    check_stop: Callable[[float], None] = lambda seconds_left: None,
    threads: int | None = None,
    queue_size: int | None = None,
    owner: str = "run",
) -> None:
    """Compute shards and publish each one as soon as it is whole.

    Args:
        cache_dir: The cache.
        shard_indices: The shards to write, in this order.
        target: The frozen model.
        tokens: The tokenized input.
        settings: What decides the shards' content.
        on_rows: Called by a writer thread with the rows and real tokens that were written.
        on_shard: Called by a writer thread with the number of a shard before it is published.
        check_stop: Called between micro-batches with the seconds that the shard in hand will still
            take (infinite before it has begun); what it raises ends the run.
        threads: Writer threads; by default one beside a CPU target, which uses every core itself,
            and up to four beside a GPU, whose states one thread could not digest and write in time.
        queue_size: Micro-batches that wait for a writer or are being written; by default one more
            than there are threads.
        owner: See `StagedFile`.

    Raises:
        TargetError: If a state is not finite and `settings` does not mask it.
        OSError: If the disk refuses.
    """
    if threads is None:
        threads = 1 if target.device.type == "cpu" else min(4, cores_of_rank())
    if queue_size is None:
        queue_size = threads + 1
    stage = make_stager(target.device, settings.dtype, in_flight=queue_size + 1)
    unpublished: set[ShardWriter] = set()
    try:
        with Background(threads=threads, queue_size=queue_size) as background:
            for index in shard_indices:
                check_stop(math.inf)
                shard = _open_shard(cache_dir, index, tokens, settings, owner)
                unpublished.add(shard.writer)
                written = []
                batches = shard_batches(index, tokens, settings)
                clock = ShardClock(batches, tokens)
                for rows, captured in forwards(target, batches, tokens, settings):
                    # No name may keep the states: the queue alone bounds how many are alive.
                    task = partial(_write_rows, shard, rows, stage(captured), on_rows)
                    del captured
                    written.append(background.submit(task))
                    del task
                    check_stop(clock.seconds_left(rows))
                background.submit(partial(_publish, shard, written, unpublished, on_shard))
    finally:
        for writer in unpublished:
            writer.discard()


def follow_shards(
    shard_indices: Iterable[int],
    target: Target,
    tokens: Tokens,
    settings: ShardSettings,
    check_stop: Callable[[float], None],
) -> None:
    """Run the forwards of `write_shards` and keep nothing.

    For a rank that holds a part of a target which several ranks run together: they must all run
    the same forwards, and one of them writes.
    """
    for index in shard_indices:
        check_stop(math.inf)
        for _ in forwards(target, shard_batches(index, tokens, settings), tokens, settings):
            pass


@dataclass(frozen=True)
class _Shard:
    index: int
    writer: ShardWriter
    first_row: int
    tokens: Tokens
    settings: ShardSettings


def _open_shard(
    cache_dir: str, index: int, tokens: Tokens, settings: ShardSettings, owner: str
) -> _Shard:
    writer = ShardWriter(
        Path(shard_path(cache_dir, index)),
        settings.row_specs,
        metadata=shard_record(index, tokens, settings),
        owner=owner,
    )
    return _Shard(index, writer, index * settings.shard_size, tokens, settings)


def _write_rows(
    shard: _Shard,
    rows: Sequence[int],
    states: StagedStates,
    on_rows: Callable[[int, int], None],
) -> None:
    try:
        for position, row in enumerate(rows):
            _write_row(shard, row, *states.row(position, int(shard.tokens.lengths[row])))
    finally:
        states.release()
    on_rows(len(rows), int(shard.tokens.lengths[list(rows)].sum()))


def _write_row(shard: _Shard, row: int, hidden_nC: Tensor, last_nH: Tensor) -> None:
    settings, place = shard.settings, row - shard.first_row
    ids, mask = (torch.from_numpy(part.astype("int64")) for part in shard.tokens.row(row))
    padded_ids = torch.full((settings.seq_length,), settings.pad_token_id)
    padded_ids[: len(ids)] = ids
    bad = find_bad_state(hidden_nC, last_nH, settings.layer_ids)
    if bad is not None:
        if not settings.mask_bad_states:
            raise TargetError(
                f"row {row} of the cache (row {shard.tokens.source_rows[row]} of the source): "
                f"{bad} in {hidden_nC.dtype}. Use another --dtype or --compute-dtype, or keep such "
                "rows with zero states and a zero loss mask by --on-bad-state mask."
            )
        logger.warning("row %d of the cache: %s; kept with a zero loss mask", row, bad)
        hidden_nC, last_nH, mask = (torch.zeros_like(t) for t in (hidden_nC, last_nH, mask))
    shard.writer.write("input_ids", place, padded_ids)
    shard.writer.write("loss_mask", place, mask)
    shard.writer.write("target_hidden_states", place, hidden_nC)
    shard.writer.write("target_last_hidden_states", place, last_nH)


def _publish(
    shard: _Shard,
    written: Sequence[Future[None]],
    unpublished: set[ShardWriter],
    on_shard: Callable[[int], None],
) -> None:
    for future in written:
        future.result()
    on_shard(shard.index)
    shard.writer.publish()
    unpublished.discard(shard.writer)
