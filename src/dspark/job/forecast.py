"""What a cache will take, said before anything is computed.

The figures are exact for the files that dspark writes: the layout of every shard follows from the
lengths of its rows. Only file system metadata is not counted.
"""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from dspark.data.tokens import Tokens
from dspark.disk.shard_writer import ShardLayout
from dspark.errors import CacheError
from dspark.job.forward import ShardSettings, shard_record

_PROBE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Forecast:
    """Sizes in bytes of what a run will write.

    Attributes:
        rows: Rows of the whole cache.
        tokens: Their real tokens.
        supervised_tokens: Tokens whose loss mask is 1.
        shards: Shards of the whole cache.
        shards_to_write: Those that this run writes.
        apparent_bytes: What a listing will show for the whole cache, padding included.
        real_bytes: What the whole cache will take on this file system.
        bytes_to_write: What this run will add to it.
        free_bytes: What is free there now.
        keeps_holes: Whether the file system leaves padding unallocated.
    """

    rows: int
    tokens: int
    supervised_tokens: int
    shards: int
    shards_to_write: int
    apparent_bytes: int
    real_bytes: int
    bytes_to_write: int
    free_bytes: int
    keeps_holes: bool

    def table(self) -> str:
        """The figures as aligned lines of text."""
        lines = []
        for name, value in asdict(self).items():
            text = f"{value:,}" if type(value) is int else str(value).lower()
            size = f"  {value / 1e9:,.2f} GB" if name.endswith("bytes") else ""
            lines.append(f"{name.replace('_', ' '):<18} {text:>22}{size}")
        return "\n".join(lines)

    def line(self) -> str:
        """The figures as one sentence."""
        disk = (
            "padding takes no disk"
            if self.keeps_holes
            else ("this file system keeps no holes: short rows cost as much as full ones")
        )
        return (
            f"{self.rows:,} rows, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised; "
            f"{self.shards} shards and the weights: {self.apparent_bytes / 1e9:.2f} GB apparent "
            f"size, {self.real_bytes / 1e9:.2f} GB on disk ({disk}); "
            f"{self.bytes_to_write / 1e9:.2f} GB, {self.shards_to_write} shards among it, to write "
            f"now; {self.free_bytes / 1e9:.2f} GB free"
        )

    def refuse_if_too_large(self, cache_dir: str) -> None:
        """Refuse a run whose output does not fit.

        Raises:
            CacheError: With both figures and what can be done.
        """
        if self.bytes_to_write > self.free_bytes:
            raise CacheError(
                f"the cache needs {self.bytes_to_write / 1e9:.2f} GB more, but the file system of "
                f"{cache_dir} has {self.free_bytes / 1e9:.2f} GB free. Choose fewer rows "
                "(--max-samples), layers (--target-layer-ids) or tokens (--seq-length), another "
                "--output-dir, or go on regardless with --ignore-free-space."
            )


def make_forecast(
    directory: Path,
    tokens: Tokens,
    settings: ShardSettings,
    *,
    num_shards: int,
    missing: Iterable[int],
    weight_bytes: int,
    weights_missing: bool,
) -> Forecast:
    """Work out the sizes of a cache on the file system of `directory`.

    Args:
        directory: Where the cache goes; must exist.
        tokens: The tokenized input.
        settings: What decides the shards.
        num_shards: Shards of the whole cache.
        missing: Those that are to be written.
        weight_bytes: Size of the target's embedding and head in the cache dtype.
        weights_missing: Whether they are to be written.
    """
    status = os.statvfs(directory)
    holes = keeps_holes(directory)
    to_write = set(missing)
    apparent = real = weight_bytes
    added = weight_bytes if weights_missing else 0
    for index in range(num_shards):
        layout = ShardLayout(settings.row_specs, shard_record(index, tokens, settings))
        size = layout.size
        if holes:
            size = status.f_frsize * layout.blocks(status.f_frsize, padded=("input_ids",))
        apparent += layout.size
        real += size
        added += size if index in to_write else 0
    return Forecast(
        rows=tokens.counts.rows,
        tokens=tokens.counts.tokens,
        supervised_tokens=tokens.counts.supervised_tokens,
        shards=num_shards,
        shards_to_write=len(to_write),
        apparent_bytes=apparent,
        real_bytes=real,
        bytes_to_write=added,
        free_bytes=status.f_bavail * status.f_frsize,
        keeps_holes=holes,
    )


def keeps_holes(directory: Path) -> bool:
    """Try whether the file system of `directory` leaves unwritten parts of a file unallocated."""
    path = directory / f".holes.run.{uuid4().hex}.tmp"  # a leftover, if the run is killed here
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, _PROBE_BYTES)
        os.pwrite(fd, b"x", _PROBE_BYTES // 2)
        os.fsync(fd)
        return os.fstat(fd).st_blocks * 512 < _PROBE_BYTES // 2
    finally:
        os.close(fd)
        path.unlink()
