"""The target's forwards over the rows of a shard."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.data.tokens import Tokens
from dspark.disk.shard_file import ShardMetadata, TensorSpec
from dspark.errors import TargetError
from dspark.model.capture import Captured, Target
from dspark.plan import micro_batches, shard_rows

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
        halve_batches: Whether a micro-batch that does not fit into device memory is halved; not
            where several ranks must run the same forwards.
    """

    row_specs: Mapping[str, TensorSpec]
    identity: str
    shard_size: int
    batch_size: int
    pad_token_id: int
    layer_ids: Sequence[int]
    mask_bad_states: bool = False
    halve_batches: bool = True

    @property
    def seq_length(self) -> int:
        """Tokens of a full row."""
        return self.row_specs["input_ids"].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the states on disk."""
        return self.row_specs["target_hidden_states"].dtype


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


def shard_batches(index: int, tokens: Tokens, settings: ShardSettings) -> list[list[int]]:
    """Return the micro-batches of shard `index`: rows of the cache, the longest first."""
    rows = shard_rows(index, num_rows=tokens.counts.rows, shard_size=settings.shard_size)
    batches = micro_batches(
        tokens.lengths[rows.start : rows.stop].tolist(),
        batch_size=settings.batch_size,
        seq_length=settings.seq_length,
    )
    return [[rows[position] for position in batch] for batch in batches]


def forwards(
    target: Target,
    batches: Iterable[Sequence[int]],
    tokens: Tokens,
    settings: ShardSettings,
) -> Iterator[tuple[Sequence[int], Captured]]:
    """Yield rows and their states, a micro-batch at a time.

    Where device memory runs out, a micro-batch is halved. The halves keep its padded length, so
    that their states are the same.

    Args:
        target: The frozen model.
        batches: Rows of the cache, the longest of each batch first.
        tokens: The tokenized input.
        settings: What decides the shard's content.

    Raises:
        TargetError: If the model raises, with the rows that made it.
    """
    for batch in batches:
        width = int(tokens.lengths[batch[0]])
        pending = [batch]
        while pending:
            rows = pending.pop(0)
            try:
                captured = target.capture(*_padded(tokens, rows, width, settings.pad_token_id))
            except torch.OutOfMemoryError as error:
                if len(rows) == 1 or not settings.halve_batches:
                    raise _failed_on(rows, tokens, error) from error
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
                raise _failed_on(rows, tokens, error) from error
            yield rows, captured
            del captured  # while the next forward runs, only who took the states holds them


def _padded(
    tokens: Tokens, rows: Sequence[int], width: int, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Return input_ids and attention_mask [len(rows), width], padded on the right."""
    input_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for position, row in enumerate(rows):
        ids, _ = tokens.row(row)
        input_ids[position, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        attention_mask[position, : len(ids)] = 1
    return input_ids, attention_mask


def _failed_on(rows: Sequence[int], tokens: Tokens, error: Exception) -> TargetError:
    return TargetError(
        f"the target failed on rows {list(rows)} of the cache (rows "
        f"{tokens.source_rows[list(rows)].tolist()} of the source): {type(error).__name__}: {error}"
    )


class ShardClock:
    """Tells how long the shard in hand will still take, from its tokens so far."""

    def __init__(self, batches: Iterable[Sequence[int]], tokens: Tokens) -> None:
        self._begun = time.monotonic()
        self._lengths = tokens.lengths
        self._done = 0
        self._left = sum(int(self._lengths[list(rows)].sum()) for rows in batches)

    def seconds_left(self, rows: Sequence[int]) -> float:
        """Count `rows` as done and return the seconds that the others need at their rate."""
        tokens = int(self._lengths[list(rows)].sum())
        self._done += tokens
        self._left -= tokens
        return (time.monotonic() - self._begun) * self._left / max(self._done, 1)
