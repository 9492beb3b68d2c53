"""Single rows of a cache with their real length, for people and for comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.cache import CachedDSparkDataset
from dspark.disk.manifest import shard_path
from dspark.disk.shard_file import ShardMetadata, read_header, shard_metadata


@dataclass(frozen=True)
class CacheRow:
    """One row without its padding; n tokens, L layers, width H.

    Attributes:
        number: Its place in the cache.
        source: Its place in the input, or None where another tool wrote the cache.
        input_ids: int64 [n].
        loss_mask: int64 [n], 0 or 1.
        layers: [n, H] per captured layer, in the order of the manifest.
        last: [n, H].
    """

    number: int
    source: int | None
    input_ids: Tensor
    loss_mask: Tensor
    layers: Sequence[Tensor]
    last: Tensor


class CacheRows:
    """The rows of a finished cache, read one at a time.

    Where a shard does not record lengths, a row ends with its last supervised token: what follows
    may be padding, which nothing tells from tokens.

    Args:
        cache_dir: The cache.

    Attributes:
        manifest: Its manifest.

    Raises:
        FileNotFoundError: If there is no manifest.
        CacheError: If the cache is unfinished or damaged.
    """

    def __init__(self, cache_dir: str) -> None:
        self._dataset = CachedDSparkDataset(cache_dir)
        self._dataset.trim = True  # a row that is read alone then has its real length
        self._cache_dir = cache_dir
        self._known: tuple[int, ShardMetadata | None] = (-1, None)
        self.manifest: dict[str, Any] = self._dataset.manifest

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, number: int) -> CacheRow:
        """Return row `number`.

        Raises:
            IndexError: If there is no such row.
            CacheError: If its shard is damaged.
        """
        sample = self._dataset[number]
        number %= len(self)
        shard, place = divmod(number, self._dataset.shard_size)
        record = self._record(shard)
        source = None
        if record is None:
            end = int(sample["loss_mask"].nonzero()[-1:].sum()) + 1
            sample = {name: tensor[:end] for name, tensor in sample.items()}
        else:
            source = number if record.rows is None else record.rows[place]
        layers = sample["target_hidden_states"].chunk(len(self.manifest["target_layer_ids"]), -1)
        return CacheRow(
            number,
            source,
            sample["input_ids"],
            sample["loss_mask"],
            layers,
            sample["target_last_hidden_states"],
        )

    def _record(self, shard: int) -> ShardMetadata | None:
        if self._known[0] != shard:
            path = Path(shard_path(self._cache_dir, shard))
            self._known = shard, shard_metadata(read_header(path), path)
        return self._known[1]


def spread_rows(num_rows: int, count: int) -> list[int]:
    """Return `count` rows, or all, spread evenly from the first to the last."""
    if count >= num_rows:
        return list(range(num_rows))
    if count == 1:
        return [num_rows // 2]
    return [i * (num_rows - 1) // (count - 1) for i in range(count)]
