"""Reading rows of a sharded tensor cache straight to where they are wanted.

One copy, from the page cache into the caller's memory; only real tokens are read and what follows
them is zeroed. What a header says is kept once it has been checked, 4 bytes per row (32 more with
checksums), so that a shard that was closed meanwhile is read again at the cost of opening it.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from dspark.disk.limits import check_fits_memory
from dspark.disk.manifest import check_shard_indices, shard_path
from dspark.disk.shard_file import (
    Header,
    ShardMetadata,
    TensorSpec,
    damaged,
    numpy_dtype,
    open_regular,
    read_header_fd,
    shard_metadata,
)
from dspark.errors import CacheError
from dspark.reading.open_shards import (
    MAX_OPEN_SHARDS,
    OPEN_SHARDS,
    READS_IN_FLIGHT,
    OpenShard,
    ShardKey,
    Task,
    run_reads,
    unreadable,
)

Check = Literal["names", "headers", "checksums"]
CHECKS: tuple[Check, ...] = ("names", "headers", "checksums")

_PIECE_BYTES = 4 * 2**20  # a large row is read in pieces of this size, several at once
_BYTES_WORTH_A_THREAD = 2**20  # waking a thread costs as much as reading some hundred kilobytes
_SIZE_CHECK_THREADS = 8
_SIZES_PER_TASK = 100
_reader_numbers = count()


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What is kept of a shard's header.

    Attributes:
        signature: `OpenShard.signature` of the file whose header it was.
        header_digest: `Header.digest`.
        begins: Per tensor the byte of the file at which row 0 begins.
        lengths: [rows] int32, real tokens of each row.
        digests: Per tensor [rows] uint64, xxh3_64 of each row's real tokens; empty unless
            checksums are wanted.
    """

    signature: tuple[int, ...]
    header_digest: str
    begins: Mapping[str, int]
    lengths: npt.NDArray[np.int32]
    digests: Mapping[str, npt.NDArray[np.uint64]]


class ShardReader:
    """Reads rows of one cache by their number.

    Args:
        cache_dir: The directory of the shards.
        row_specs: Per tensor the dtype and the shape [S, ...] of one row; S is common to all.
        num_rows: Rows of the cache.
        shard_size: Rows of a shard; the last one may have fewer.
        check: What is verified, and when; see `CachedTensorDataset`.
        mmap: Map the files instead of reading them.
        identity: Digest that shards which record one must record.
        padded: Tensors whose padding carries values: it is read as it is stored or, where a mapping
            gives its value, filled in, so that damage to it does no harm.

    Raises:
        CacheError: If the files on disk are not those of the cache.
        ValueError: If an argument is not what it should be.
    """

    def __init__(
        self,
        cache_dir: str,
        row_specs: Mapping[str, TensorSpec],
        *,
        num_rows: int,
        shard_size: int,
        check: Check,
        mmap: bool,
        identity: str | None,
        padded: Collection[str] | Mapping[str, int],
    ) -> None:
        if check not in CHECKS:
            raise ValueError(f"check must be one of {', '.join(CHECKS)}, got {check!r}")
        tokens = {spec.shape[0] for spec in row_specs.values()}
        if len(tokens) != 1 or min(tokens) < 1:
            raise ValueError(f"rows must share one length S >= 1 in dim 0, got {sorted(tokens)}")
        if num_rows < 0 or shard_size < 1:
            raise ValueError(f"num_rows {num_rows} and shard_size {shard_size} describe no cache")
        check_fits_memory(cache_dir, "a row", sum(spec.nbytes for spec in row_specs.values()))
        self.num_rows = num_rows
        self.shard_size = shard_size
        self.num_shards = -(-num_rows // shard_size)
        self.row_specs = dict(row_specs)
        self.row_tokens = tokens.pop()
        self._cache_dir = cache_dir
        self._check = check
        self._mmap = mmap
        self._identity = identity
        self._fill_values = dict(padded) if isinstance(padded, Mapping) else {}
        self._as_stored = frozenset(padded) - self._fill_values.keys()
        self._number = next(_reader_numbers)
        self._layouts: dict[int, ShardLayout] = {}
        check_shard_indices(cache_dir, self.num_shards)
        if check != "names":
            self._check_sizes()

    def token_bytes(self, name: str) -> int:
        """Bytes of one token of tensor `name`."""
        spec = self.row_specs[name]
        return spec.nbytes // spec.shape[0]

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """Return the number of real tokens of each row; S where a shard does not record it.

        Raises:
            CacheError: If a shard cannot be read or is not the one it should be.
        """
        unknown = {row // self.shard_size for row in rows}.difference(self._layouts)
        for shards in _batched(sorted(unknown), MAX_OPEN_SHARDS):
            OPEN_SHARDS.get(self._keys(shards), self._open)
        return [int(self._layout(row).lengths[row % self.shard_size]) for row in rows]

    def read(
        self, rows: Sequence[int], into: Mapping[str, npt.NDArray[np.uint8]], *, tokens: int
    ) -> None:
        """Read rows; several reads are in flight at once.

        Args:
            rows: Row numbers in 0 … num_rows - 1, in any order.
            into: Per tensor [len(rows), tokens * token_bytes(name)], filled whole.
            tokens: How many tokens of each row are wanted, at least its real ones.

        Raises:
            CacheError: If a shard cannot be read or is not what it should be. `into` is undefined
                then.
        """
        at_once = 1 + sum(rows.nbytes for rows in into.values()) // _BYTES_WORTH_A_THREAD
        at_once = min(at_once, READS_IN_FLIGHT)
        places = defaultdict(list)
        for place, row in enumerate(rows):
            places[row // self.shard_size].append((place, row % self.shard_size))
        for shards in _batched(sorted(places), MAX_OPEN_SHARDS):
            files = OPEN_SHARDS.get(self._keys(shards), self._open)
            run_reads(
                [
                    task
                    for shard, file in zip(shards, files, strict=True)
                    for place, row in places[shard]
                    for name in self.row_specs
                    for task in self._pieces(file, shard, row, name, into[name][place], tokens)
                ],
                at_once=at_once,
            )
            del files  # or one batch of shards would stay open while the next is opened
        if self._check == "checksums":
            run_reads(
                [
                    partial(self._verify, shard, row, name, into[name][place])
                    for shard, pairs in places.items()
                    for place, row in pairs
                    for name in self.row_specs
                ],
                at_once=at_once,
            )

    def _pieces(
        self,
        file: OpenShard,
        shard: int,
        row: int,
        name: str,
        memory: npt.NDArray[np.uint8],
        tokens: int,
    ) -> Iterator[Task]:
        """Yield what fills `memory` with one row of one tensor."""
        layout = self._layouts[shard]
        stored = tokens if name in self._as_stored else int(layout.lengths[row])
        real = stored * self.token_bytes(name)
        assert real <= len(memory), f"{file.path} row {row} is longer than {tokens} tokens"
        begin = layout.begins[name] + row * self.row_specs[name].nbytes
        for start in range(0, real, _PIECE_BYTES):
            piece = memory[start : min(start + _PIECE_BYTES, real)]
            yield partial(file.read_into, piece.data, begin + start)
        if real < len(memory):
            yield partial(self._fill, name, memory[real:])

    def _fill(self, name: str, memory: npt.NDArray[np.uint8]) -> None:
        if value := self._fill_values.get(name, 0):
            memory.view(numpy_dtype(self.row_specs[name].dtype)).fill(value)
        else:
            memory.fill(0)

    def _verify(self, shard: int, row: int, name: str, memory: npt.NDArray[np.uint8]) -> None:
        layout = self._layouts[shard]
        real = memory[: int(layout.lengths[row]) * self.token_bytes(name)]
        found, recorded = xxhash.xxh3_64_intdigest(real.data), int(layout.digests[name][row])
        if found != recorded:
            raise damaged(
                self._path(shard),
                f"the checksum of {name!r} in row {row} is {found:016x}, recorded {recorded:016x}",
            )

    def _open(self, key: ShardKey) -> OpenShard:
        shard = key[1]
        file = OpenShard(self._path(shard))
        known = self._layouts.get(shard)
        if known is None or known.signature != file.signature:
            layout = self._read_layout(file, shard)
            if known is not None and known.header_digest != layout.header_digest:
                raise damaged(file.path, "it was replaced by another while it was in use")
            self._layouts[shard] = layout
        if self._mmap:
            file.map()
        return file

    def _read_layout(self, file: OpenShard, shard: int) -> ShardLayout:
        rows = self._rows_of(shard)
        header = read_header_fd(file.fd, file.path, rows=rows)
        for name, spec in self.row_specs.items():
            wanted = TensorSpec(spec.dtype, (rows, *spec.shape))
            found = header.tensors[name].spec if name in header.tensors else None
            if found != wanted:
                raise damaged(file.path, f"{name!r} is {found}, the manifest says {wanted}")
        metadata = shard_metadata(header, file.path)
        if metadata is not None:
            self._check_metadata(metadata, shard, header)
        # However many rows another writer's file claims, full rows take no memory here.
        full = np.broadcast_to(np.int32(self.row_tokens), rows)
        return ShardLayout(
            file.signature,
            header.digest,
            {name: header.data_start + header.tensors[name].begin for name in self.row_specs},
            full if metadata is None else np.array(metadata.lengths, np.int32),
            self._digests(metadata, file.path, rows),
        )

    def _check_metadata(self, metadata: ShardMetadata, shard: int, header: Header) -> None:
        path, rows = self._path(shard), self._rows_of(shard)
        if len(metadata.lengths) != rows or max(metadata.lengths, default=0) > self.row_tokens:
            raise damaged(
                path,
                f"it records lengths of {len(metadata.lengths)} rows, at most "
                f"{max(metadata.lengths, default=0)}; expected {rows}, at most {self.row_tokens}",
            )
        if self._check == "names":
            return
        if metadata.index != shard:
            raise damaged(path, f"it was written as shard {metadata.index}")
        if None not in (metadata.identity, self._identity) and metadata.identity != self._identity:
            raise damaged(
                path,
                f"it is from another run (identity {metadata.identity}, the manifest's is "
                f"{self._identity})",
            )

    def _digests(
        self, metadata: ShardMetadata | None, path: Path, rows: int
    ) -> dict[str, npt.NDArray[np.uint64]]:
        if self._check != "checksums":
            return {}
        if metadata is None:
            raise CacheError(
                f"{path} has no checksums (another tool wrote it). Read it with check='headers'."
            )
        digests = {}
        for name in self.row_specs:
            texts = metadata.digests.get(name, ())
            try:
                digests[name] = np.array([int(text, 16) for text in texts], np.uint64)
            except (ValueError, OverflowError) as error:
                raise damaged(path, f"a checksum of {name!r} is no number ({error})") from error
            if len(texts) != rows:
                raise damaged(path, f"{name!r} has {len(texts)} checksums for {rows} rows")
        return digests

    def _check_sizes(self) -> None:
        """Compare every file's size with the one its header must lead to."""
        starts = range(0, self.num_shards, _SIZES_PER_TASK)
        with ThreadPoolExecutor(_SIZE_CHECK_THREADS) as pool:
            list(pool.map(self._check_sizes_from, starts))

    def _check_sizes_from(self, start: int) -> None:
        for shard in range(start, min(start + _SIZES_PER_TASK, self.num_shards)):
            self._check_size(shard)

    def _check_size(self, shard: int) -> None:
        path = self._path(shard)
        try:
            fd = open_regular(path)
            try:
                header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        except OSError as error:
            raise unreadable(Path(path), error) from error
        row_bytes = sum(spec.nbytes for spec in self.row_specs.values())
        expected = 8 + header_bytes + self._rows_of(shard) * row_bytes
        if size != expected:
            raise damaged(Path(path), f"it has {size} bytes, expected {expected}")

    def _rows_of(self, shard: int) -> int:
        return min(self.shard_size, self.num_rows - shard * self.shard_size)

    def _path(self, shard: int) -> Path:
        return Path(shard_path(self._cache_dir, shard))

    def _keys(self, shards: Sequence[int]) -> list[ShardKey]:
        return [(self._number, shard) for shard in shards]

    def _layout(self, row: int) -> ShardLayout:
        return self._layouts[row // self.shard_size]


def _batched(values: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
