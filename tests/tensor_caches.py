"""Small sharded caches that hold no tensor of DSpark's, and what their rows should read as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch

from dspark.disk.manifest import shard_path
from dspark.disk.shard_file import ShardMetadata, TensorSpec
from dspark.disk.shard_writer import write_whole_shard
from dspark.offline_cache import CachedTensorDataset

TOKENS, WIDTH, PAD = 12, 5, 7
SPECS = {
    "ids": TensorSpec(torch.int64, (TOKENS,)),
    "states": TensorSpec(torch.bfloat16, (TOKENS, WIDTH)),
}


@dataclass(frozen=True)
class SmallCache:
    """A cache on disk beside the rows that it holds: per tensor [rows, TOKENS, ...]."""

    directory: Path
    rows: dict[str, torch.Tensor]
    lengths: list[int]
    shard_size: int

    def open(self, **options: Any) -> CachedTensorDataset:
        return CachedTensorDataset(
            str(self.directory),
            row_specs=SPECS,
            num_rows=len(self.lengths),
            shard_size=self.shard_size,
            **({"padded": ("ids",)} | options),
        )

    def shard(self, index: int) -> Path:
        return Path(shard_path(str(self.directory), index))


def write_cache(
    directory: Path,
    *,
    num_rows: int = 11,
    shard_size: int = 3,
    identity: str | None = None,
    recorded: bool = True,
) -> SmallCache:
    """Write a cache; token 0 of ``ids`` is the row's number.

    Without `recorded`, the shards are another tool's: no lengths, and padding that is not zero.
    """
    directory.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, TOKENS + 1, (num_rows,), generator=random).tolist()
    ids = torch.randint(1000, 2000, (num_rows, TOKENS), generator=random)
    ids[:, 0] = torch.arange(num_rows)
    states = torch.randn(num_rows, TOKENS, WIDTH, generator=random).bfloat16()
    if recorded:
        for row, length in enumerate(lengths):
            ids[row, length:] = PAD
            states[row, length:] = 0
    cache = SmallCache(directory, {"ids": ids, "states": states}, lengths, shard_size)
    with mock.patch("os.fsync"):  # nothing here has to outlive a power cut
        for index in range(-(-num_rows // shard_size)):
            _write_shard(cache, index, identity=identity, recorded=recorded)
    return cache


def _write_shard(cache: SmallCache, index: int, *, identity: str | None, recorded: bool) -> None:
    part = slice(index * cache.shard_size, (index + 1) * cache.shard_size)
    samples = {name: rows[part].contiguous() for name, rows in cache.rows.items()}
    if recorded:
        metadata = ShardMetadata(index, identity, tuple(cache.lengths[part]))
        write_whole_shard(cache.shard(index), samples, metadata=metadata, padded=("ids",))
    else:
        safetensors.torch.save_file(samples, cache.shard(index))


def row_numbers(batches: Sequence[dict[str, torch.Tensor]]) -> list[list[int]]:
    """Return the rows that batches are made of."""
    return [batch["ids"][:, 0].tolist() for batch in batches]


def assert_rows(batch: dict[str, torch.Tensor], cache: SmallCache, rows: Sequence[int]) -> None:
    """Check every byte, dtype and shape of a batch of untrimmed rows."""
    assert batch.keys() == cache.rows.keys()
    for name, tensor in batch.items():
        expected = cache.rows[name][list(rows)]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), f"{name} of rows {rows}"
