"""The forward over a shard's rows, and everything that happens behind it.

    main thread      micro-batch ─► target.capture ─► stage ─► queue (bounded)
    writer threads   row by row: check the states ─► digest ─► write to its place ─► publish

Memory is a few micro-batches, however many rows a shard has.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dspark.background import Background
from dspark.capture import Captured, Target
from dspark.errors import TargetError
from dspark.manifest import shard_path
from dspark.plan import micro_batches, shard_rows
from dspark.shard_file import ShardMetadata, TensorSpec
from dspark.shard_writer import ShardWriter
from dspark.staging import StagedStates, make_stager
from dspark.tokens import Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardSettings:
    """What decides the content of every shard of a run, beside target and tokens.

    Attributes:
        row_specs: Dtype and shape [S, ...] of a row of each tensor.
        identity: Digest of the manifest's identity.
        shard_size: Rows of a full shard.
        batch_size: Full rows per forward.
        pad_token_id: What pads ``input_ids``.
        layer_ids: The captured layers.
        mask_bad_states: Whether a row with a state that is not finite is kept with zero states and
            a zero mask; otherwise it stops the run.
    """

    row_specs: Mapping[str, TensorSpec]
    identity: str
    shard_size: int
    batch_size: int
    pad_token_id: int
    layer_ids: Sequence[int]
    mask_bad_states: bool = False

    @property
    def seq_length(self) -> int:
        """Tokens of a full row."""
        return self.row_specs["input_ids"].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the states on disk."""
        return self.row_specs["target_hidden_states"].dtype


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
    threads: int = 1,
    queue_size: int = 2,
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
        threads: Writer threads.
        queue_size: Micro-batches that wait for a writer or are being written.
        owner: See `StagedFile`.

    Raises:
        TargetError: If a state is not finite and `settings` does not mask it.
        OSError: If the disk refuses.
    """
    stage = make_stager(target.device, settings.dtype, in_flight=queue_size + 1)
    unpublished: set[ShardWriter] = set()
    try:
        with Background(threads=threads, queue_size=queue_size) as background:
            for index in shard_indices:
                check_stop(math.inf)
                shard = _open_shard(cache_dir, index, tokens, settings, owner)
                unpublished.add(shard.writer)
                written = []
                clock = _ShardClock(shard)
                for rows, captured in _forwards(target, shard):
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


@dataclass(frozen=True)
class _Shard:
    index: int
    writer: ShardWriter
    first_row: int
    batches: Sequence[Sequence[int]]  # rows of the cache
    tokens: Tokens
    settings: ShardSettings


class _ShardClock:
    """Tells how long the shard in hand will still take, from its tokens so far."""

    def __init__(self, shard: _Shard) -> None:
        self._begun = time.monotonic()
        self._lengths = shard.tokens.lengths
        self._done = 0
        self._left = sum(int(self._lengths[list(rows)].sum()) for rows in shard.batches)

    def seconds_left(self, rows: Sequence[int]) -> float:
        """Count `rows` as done and return the seconds that the others need at their rate."""
        tokens = int(self._lengths[list(rows)].sum())
        self._done += tokens
        self._left -= tokens
        return (time.monotonic() - self._begun) * self._left / max(self._done, 1)


def _open_shard(
    cache_dir: str, index: int, tokens: Tokens, settings: ShardSettings, owner: str
) -> _Shard:
    rows = shard_rows(index, num_rows=tokens.counts.rows, shard_size=settings.shard_size)
    lengths = tokens.lengths[rows.start : rows.stop].tolist()
    batches = micro_batches(lengths, batch_size=settings.batch_size, seq_length=settings.seq_length)
    return _Shard(
        index,
        ShardWriter(
            Path(shard_path(cache_dir, index)),
            settings.row_specs,
            metadata=shard_record(index, tokens, settings),
            owner=owner,
        ),
        rows.start,
        [[rows[position] for position in batch] for batch in batches],
        tokens,
        settings,
    )


def shard_record(index: int, tokens: Tokens, settings: ShardSettings) -> ShardMetadata:
    """Return what shard `index` of these tokens and settings records, without its digests."""
    rows = shard_rows(index, num_rows=tokens.counts.rows, shard_size=settings.shard_size)
    span = slice(rows.start, rows.stop)
    return ShardMetadata(
        index=index,
        identity=settings.identity,
        lengths=tuple(tokens.lengths[span].tolist()),
        rows=tuple(tokens.source_rows[span].tolist()) if tokens.any_skipped else None,
    )


def _forwards(target: Target, shard: _Shard) -> Iterator[tuple[Sequence[int], Captured]]:
    """Yield rows of a shard and their states, a micro-batch at a time.

    Where device memory runs out, a micro-batch is halved. The halves keep its padded length, so
    that their states are the same.
    """
    for batch in shard.batches:
        width = int(shard.tokens.lengths[batch[0]])  # the longest comes first
        pending = [batch]
        while pending:
            rows = pending.pop(0)
            try:
                captured = target.capture(*_padded(shard, rows, width))
            except torch.OutOfMemoryError:
                if len(rows) == 1:
                    raise
                logger.warning(
                    "out of device memory with %d rows of %d tokens: going on with half of them at "
                    "a time. A smaller --batch-size avoids the detour.",
                    len(rows),
                    width,
                )
                pending[:0] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
                torch.cuda.empty_cache()
                continue
            except Exception as error:
                raise TargetError(
                    f"the target failed on rows {list(rows)} of the cache (rows "
                    f"{shard.tokens.source_rows[list(rows)].tolist()} of the source): "
                    f"{type(error).__name__}: {error}"
                ) from error
            yield rows, captured
            del captured


def _padded(shard: _Shard, rows: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Return input_ids and attention_mask [len(rows), width], padded on the right."""
    input_ids = torch.full((len(rows), width), shard.settings.pad_token_id)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for position, row in enumerate(rows):
        ids, _ = shard.tokens.row(row)
        input_ids[position, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        attention_mask[position, : len(ids)] = 1
    return input_ids, attention_mask


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


def find_bad_state(hidden_nC: Tensor, last_nH: Tensor, layer_ids: Sequence[int]) -> str | None:
    """Describe the first state that is not finite, or return None.

    Args:
        hidden_nC: [n, L·H], the captured layers side by side.
        last_nH: [n, H], the final state.
        layer_ids: The L captured layers.
    """
    size = last_nH.shape[-1]
    for states, names in ((hidden_nC, [f"layer {i}" for i in layer_ids]), (last_nH, ["the end"])):
        # One pass and no temporary. Finite states may overflow the sum: only then look closely.
        if torch.isfinite(states.sum(dtype=torch.float32)):
            continue
        for token, column in (~torch.isfinite(states)).nonzero()[:1].tolist():
            value = states[token, column].item()
            return f"the state of token {token} at {names[column // size]} is {value}"
    return None


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
