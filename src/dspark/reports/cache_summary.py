"""What is in a cache: settings, rows, lengths, sizes, and the norms of its states.

manifest       settings, counts                  read
shard headers  lengths                           read, all of them
some rows      norms, supervised positions       read, spread over the cache
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.checks.cache_rows import CacheRow, CacheRows, spread_rows
from dspark.disk.manifest import existing_shard_indices, manifest_path, shard_path
from dspark.disk.shard_file import read_header, shard_metadata
from dspark.plan import count_shards
from dspark.schema.cache_manifest import read_manifest
from dspark.schema.target_weights import _target_weights_path

_HEADER_THREADS = 8
_BINS = 16
_BLOCK = 512  # bytes in st_blocks, whatever the file system's own blocks are


@dataclass(frozen=True)
class NormStatistics:
    """Euclidean norms of one state over the tokens of a sample.

    Attributes:
        name: "layer 8", or "last".
        mean: Mean norm.
        std: Its standard deviation.
        percentiles: Norms at 0, 5, 25, 50, 75, 95 and 100 % of the tokens.
        largest_value: Largest magnitude of a single value.
    """

    name: str
    mean: float
    std: float
    percentiles: Sequence[float]
    largest_value: float


@dataclass(frozen=True)
class LengthHistogram:
    """Rows by their number of real tokens.

    Attributes:
        edges: Bin i holds lengths from ``edges[i]`` to ``edges[i + 1] - 1``.
        rows: Rows in each bin.
        percentiles: Lengths at 0, 25, 50, 75, 95 and 100 % of the rows.
    """

    edges: Sequence[int]
    rows: Sequence[int]
    percentiles: Sequence[int]


@dataclass
class CacheSummary:
    """A cache in numbers.

    Attributes:
        cache_dir: The cache.
        manifest: Its manifest.
        shards: Shards on disk.
        num_shards: Shards of the finished cache.
        tokens: Real tokens, or None where no lengths are recorded.
        supervised_tokens: Tokens whose loss mask is 1, or None where nothing tells.
        apparent_bytes: Sizes of the files.
        disk_bytes: What they take on disk.
        lengths: Rows by length, or None where no lengths are recorded.
        sampled_rows: Rows that norms were taken of.
        norms: Per captured layer, and of the last state.
        norms_by_position: Per state the mean norm at each position of a row, [S or less].
        notes: What could not be told, and why.
    """

    cache_dir: str
    manifest: dict[str, Any]
    shards: int = 0
    num_shards: int = 0
    tokens: int | None = None
    supervised_tokens: int | None = None
    apparent_bytes: int = 0
    disk_bytes: int = 0
    lengths: LengthHistogram | None = None
    sampled_rows: int = 0
    norms: list[NormStatistics] = field(default_factory=list)
    norms_by_position: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Mapping[str, Any]:
        """What the run counted: rows cut, left out, …; empty for caches by other writers."""
        provenance = self.manifest.get("provenance")
        counts = provenance.get("counts") if isinstance(provenance, dict) else None
        return counts if isinstance(counts, dict) else {}

    @property
    def supervised_share(self) -> float | None:
        """Supervised tokens as a share of the real ones."""
        if not self.tokens or self.supervised_tokens is None:
            return None
        return self.supervised_tokens / self.tokens

    def to_json(self) -> dict[str, Any]:
        """Return everything but the curves as JSON; numbers that are not finite become null."""
        content = asdict(self)
        del content["norms_by_position"]
        finite: dict[str, Any] = _finite(content)
        return finite | {"supervised_share": self.supervised_share}


def summarise_cache(
    cache_dir: str,
    *,
    sample_rows: int,
    on_begin: Callable[[int], object] = lambda rows: None,
    on_row: Callable[[], object] = lambda: None,
) -> CacheSummary:
    """Read what a summary needs. An unfinished cache is summarised without the states.

    Args:
        cache_dir: The cache.
        sample_rows: Rows, spread over the cache, that norms are taken of.
        on_begin: Called with the number of rows to sample.
        on_row: Called after each.

    Raises:
        FileNotFoundError: If there is no manifest.
        CacheError: If manifest or headers are damaged.
    """
    manifest = read_manifest(cache_dir, allow_incomplete=True)
    summary = CacheSummary(cache_dir, manifest)
    summary.num_shards = count_shards(
        num_rows=manifest["num_samples"], shard_size=manifest["shard_size"]
    )
    shards = sorted(n for n in existing_shard_indices(cache_dir) if n < summary.num_shards)
    summary.shards = len(shards)
    _add_sizes(summary, shards)
    _add_lengths(summary, shards)
    if manifest.get("complete", True) is not True:
        summary.notes.append("the cache is unfinished: no states were sampled")
    elif sample_rows:
        _add_norms(summary, sample_rows, on_begin, on_row)
    return summary


def _add_sizes(summary: CacheSummary, shards: Sequence[int]) -> None:
    cache_dir = summary.cache_dir
    paths = [manifest_path(cache_dir), _target_weights_path(cache_dir)]
    for path in [*paths, *(shard_path(cache_dir, index) for index in shards)]:
        if os.path.exists(path):
            stat = os.stat(path)
            summary.apparent_bytes += stat.st_size
            summary.disk_bytes += stat.st_blocks * _BLOCK


def _add_lengths(summary: CacheSummary, shards: Sequence[int]) -> None:
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        found = list(pool.map(lambda index: _lengths(summary.cache_dir, index), shards))
    known = [lengths for lengths in found if lengths is not None]
    if len(known) < len(found) or not found:
        summary.notes.append("lengths and tokens are unknown: the shards do not record them")
        return
    lengths = np.concatenate(known)
    summary.tokens = int(lengths.sum())
    supervised = summary.counts.get("supervised_tokens")
    summary.supervised_tokens = supervised if type(supervised) is int else None
    summary.lengths = histogram(lengths, longest=summary.manifest["seq_length"])


def _lengths(cache_dir: str, shard: int) -> npt.NDArray[np.int64] | None:
    path = Path(shard_path(cache_dir, shard))
    record = shard_metadata(read_header(path), path)
    return None if record is None else np.array(record.lengths, np.int64)


def histogram(lengths: npt.NDArray[np.int64], *, longest: int) -> LengthHistogram:
    """Count rows in bins of equal width from 0 to `longest`.

    Args:
        lengths: [rows], at least one, each from 0 to `longest`.
        longest: The most that a length may be.
    """
    edges = np.unique(np.linspace(0, longest + 1, min(_BINS, longest + 1) + 1).astype(np.int64))
    rows, _ = np.histogram(lengths, edges)
    percentiles = np.percentile(lengths, (0, 25, 50, 75, 95, 100), method="nearest")
    return LengthHistogram(edges.tolist(), rows.tolist(), percentiles.tolist())


def _add_norms(
    summary: CacheSummary,
    sample_rows: int,
    on_begin: Callable[[int], object],
    on_row: Callable[[], object],
) -> None:
    rows = CacheRows(summary.cache_dir)
    numbers = spread_rows(len(rows), sample_rows)
    on_begin(len(numbers))
    sample = NormSample([*(f"layer {i}" for i in summary.manifest["target_layer_ids"]), "last"])
    for number in numbers:
        sample.add(rows.read(number))
        on_row()
    summary.sampled_rows = len(numbers)
    summary.norms = sample.statistics()
    summary.norms_by_position = sample.by_position()


class NormSample:
    """Norms of the states of some rows.

    Args:
        names: One per captured layer, and one for the last state.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._norms: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in names}
        self._largest = dict.fromkeys(names, 0.0)

    def add(self, row: CacheRow) -> None:
        """Take the norms of a row's tokens."""
        for name, state_nH in zip(self._norms, [*row.layers, row.last], strict=True):
            values = state_nH.float()
            self._norms[name].append(values.norm(dim=-1).double().numpy())
            self._largest[name] = max(self._largest[name], float(values.abs().max()))

    def statistics(self) -> list[NormStatistics]:
        """Return the statistics of each state over all tokens."""
        # Other writers' states may be infinite: that is to be shown, not warned about.
        with np.errstate(invalid="ignore"):
            return [self._statistics_of(name) for name in self._norms]

    def _statistics_of(self, name: str) -> NormStatistics:
        norms = np.concatenate(self._norms[name])
        return NormStatistics(
            name,
            float(norms.mean()),
            float(norms.std()),
            np.percentile(norms, (0, 5, 25, 50, 75, 95, 100)).tolist(),
            self._largest[name],
        )

    def by_position(self) -> dict[str, list[float]]:
        """Return per state the mean norm at each position that at least one row reaches."""
        return {name: _mean_by_position(rows) for name, rows in self._norms.items()}


def _mean_by_position(rows: Sequence[npt.NDArray[np.float64]]) -> list[float]:
    total = np.zeros(max(map(len, rows)))
    count = np.zeros(len(total))
    for norms in rows:
        total[: len(norms)] += norms
        count[: len(norms)] += 1
    means: list[float] = (total / count).tolist()
    return means


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
