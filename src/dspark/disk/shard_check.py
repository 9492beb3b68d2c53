"""Whether a shard on disk is the one that it should be: header, record, real tokens and padding.

    header      the bytes that dspark would write, or of another writer what is known
    real tokens one xxh3_64 per row and tensor, read once, in pieces
    padding     one known value; holes of the file are zeros without being read

A resumed run and `dspark.verify` share this check. Memory is one piece, whatever a header says.
"""

import errno
import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dspark.disk.shard_file import (
    METADATA_KEY,
    Header,
    ShardMetadata,
    TensorSpec,
    damaged,
    encode_header,
    numpy_dtype,
    open_regular,
    place_tensors,
    read_header_fd,
    shard_metadata,
)

_PIECE_BYTES = 2**20  # stays in the processor's cache between reading and hashing
_SEEK_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP}


@dataclass(frozen=True)
class TensorRules:
    """What the values of a cache's tensors must be, beyond their checksums.

    Attributes:
        row_specs: Dtype and shape [S, ...] of a row of each tensor.
        padding: Per tensor the value after the real tokens; of others it is not looked at.
        limits: Per tensor of whole numbers the smallest and the largest value allowed.
    """

    row_specs: Mapping[str, TensorSpec]
    padding: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpectedShard:
    """Which shard it should be.

    Attributes:
        index: Its number.
        num_rows: Its rows.
        identity: Digest that its record must have.
        record: All that it must record, where that is known; its digests are not looked at.
        foreign: Whether it may lack a record, or an identity in it: no run of dspark wrote it.
    """

    index: int
    num_rows: int
    identity: str | None
    record: ShardMetadata | None = None
    foreign: bool = False


def check_shard(
    path: Path,
    row_specs: Mapping[str, TensorSpec],
    expected: ShardMetadata,
    *,
    padding: Mapping[str, int] | None = None,
) -> ShardMetadata:
    """Compare a shard with what it should be, and its data with its own digests.

    Args:
        path: The shard.
        row_specs: Dtype and shape [S, ...] of a row of each tensor.
        expected: Index, identity, lengths and source rows; its digests are not looked at.
        padding: See `TensorRules`.

    Returns:
        What the shard records, its digests included.

    Raises:
        CacheError: Naming the shard and the first thing that is not as it should be.
        OSError: If it cannot be read.
    """
    check = ShardCheck(path, TensorRules(row_specs, padding or {}))
    rows = len(expected.lengths)
    for problem in check.problems(ExpectedShard(expected.index, rows, expected.identity, expected)):
        raise damaged(path, problem)
    assert check.metadata is not None, "without a record there is a problem"
    return check.metadata


class ShardCheck:
    """One shard under examination.

    Args:
        path: The shard.
        rules: What its tensors must be.

    Attributes:
        header: Its header, once it has been read.
        metadata: What it records; None before the header is read or if it records nothing.
        bytes_read: Bytes of tensors that were read so far.
        bytes_skipped: Bytes of padding that are holes.
        sums: Per tensor with limits, the sum over its real tokens.
    """

    def __init__(self, path: Path, rules: TensorRules) -> None:
        self.path = path
        self.rules = rules
        self.header: Header | None = None
        self.metadata: ShardMetadata | None = None
        self.bytes_read = self.bytes_skipped = 0
        self.sums = dict.fromkeys(rules.limits, 0)
        self._buffer = np.empty(_PIECE_BYTES, np.uint8)

    def problems(self, expected: ExpectedShard) -> Generator[str, None, None]:
        """Yield what is wrong, as it is found. What a damaged header describes is not read.

        Raises:
            CacheError: If the file is not whole, or its header cannot be read.
            OSError: If it cannot be read.
        """
        fd = open_regular(self.path)
        try:
            self.header = read_header_fd(fd, self.path, rows=expected.num_rows)
            self.metadata = shard_metadata(self.header, self.path)
            wrong = list(self._header_problems(self.header, expected))
            yield from wrong
            if not wrong:
                for name in self.rules.row_specs:
                    yield from self._tensor_problems(fd, self.header, name, expected.num_rows)
        finally:
            os.close(fd)

    def _header_problems(self, header: Header, expected: ExpectedShard) -> Iterator[str]:
        rows = expected.num_rows
        wanted = place_tensors(
            {
                name: TensorSpec(spec.dtype, (rows, *spec.shape))
                for name, spec in self.rules.row_specs.items()
            }
        )
        for name in sorted(wanted.keys() | header.tensors.keys()):
            right, found = wanted.get(name), header.tensors.get(name)
            if self.metadata is None and right and found:  # others order tensors as they like
                right, found = replace(right, begin=0, end=0), replace(found, begin=0, end=0)
            if right != found:
                yield f"{name!r} is {found}, not {right}"
        if self.metadata is not None:
            yield from self._record_problems(self.metadata, expected)
            record = {METADATA_KEY: self.metadata.to_json()}
            if xxhash.xxh3_64_hexdigest(encode_header(wanted, record)) != header.digest:
                yield "its header is not, byte for byte, what dspark writes for its content"
        elif not expected.foreign:
            yield "it carries no dspark metadata"

    def _record_problems(self, found: ShardMetadata, expected: ExpectedShard) -> Iterator[str]:
        rows, tokens = expected.num_rows, _tokens(self.rules.row_specs)
        if found.index != expected.index:
            yield f"it was written as shard {found.index}, not {expected.index}"
        nameless = expected.foreign and found.identity is None
        if found.identity != expected.identity and not nameless:
            yield f"it is of another run: its identity is {found.identity}, not {expected.identity}"
        if len(found.lengths) != rows or max(found.lengths, default=0) > tokens:
            yield (
                f"it records {len(found.lengths)} lengths up to {max(found.lengths, default=0)}, "
                f"expected {rows} up to {tokens}"
            )
        if found.rows is not None and len(found.rows) != rows:
            yield f"it records the source of {len(found.rows)} rows, expected {rows}"
        for name in self.rules.row_specs:
            if len(found.digests.get(name, ())) != rows:
                yield f"it has no checksum of every row of {name}"
        yield from _record_differences(found, expected.record)

    def _tensor_problems(self, fd: int, header: Header, name: str, rows: int) -> Iterator[str]:
        spec, record = self.rules.row_specs[name], self.metadata
        begin = header.data_start + header.tensors[name].begin
        token_bytes = spec.nbytes // spec.shape[0]
        for row in range(rows):
            end = begin + spec.nbytes
            real_end = end if record is None else begin + record.lengths[row] * token_bytes
            digest = xxhash.xxh3_64()
            fault = None
            for piece in self._pieces(fd, begin, real_end):
                digest.update(piece.data)
                fault = fault or self._value_fault(name, piece, with_states=record is None)
            if record is not None and digest.hexdigest() != record.digests[name][row]:
                fault = "do not match their checksum"
            if fault:
                yield f"the data of {name} in row {row} {fault}"
            if name in self.rules.padding and not self._padding_is_right(fd, real_end, end, name):
                yield f"the padding of {name} in row {row} is not {self.rules.padding[name]}"
            begin = end

    def _value_fault(
        self, name: str, piece: npt.NDArray[np.uint8], *, with_states: bool
    ) -> str | None:
        """Say what is wrong with values that no checksum vouches for."""
        dtype = self.rules.row_specs[name].dtype
        if name in self.rules.limits:
            values = _integers(piece, dtype)
            least, most = self.rules.limits[name]
            self.sums[name] += int(values.sum())
            if values.min() < least or values.max() > most:
                return f"are not all in {least} … {most}"
        elif with_states and dtype.is_floating_point:
            states = torch.from_numpy(piece).view(dtype)
            if not torch.isfinite(states.sum(dtype=torch.float64)):
                return "are not all finite"
        return None

    def _padding_is_right(self, fd: int, begin: int, end: int, name: str) -> bool:
        value = self.rules.padding[name]
        if value:
            dtype = self.rules.row_specs[name].dtype
            pieces = self._pieces(fd, begin, end)
            return all(bool((_integers(piece, dtype) == value).all()) for piece in pieces)
        self.bytes_skipped += end - begin
        for start, stop in _written_parts(fd, begin, end):
            self.bytes_skipped -= stop - start
            if any(piece.max() for piece in self._pieces(fd, start, stop)):
                return False
        return True

    def _pieces(self, fd: int, begin: int, end: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield bytes `begin` to `end` of the file, each piece valid until the next."""
        for start in range(begin, end, _PIECE_BYTES):
            piece = self._buffer[: min(_PIECE_BYTES, end - start)]
            read_fully(fd, piece.data, start, self.path)
            self.bytes_read += len(piece)
            yield piece


def read_fully(fd: int, destination: memoryview, offset: int, path: Path) -> None:
    """Fill `destination` (bytes) from byte `offset` of an open file.

    Raises:
        CacheError: If the file ends before.
    """
    while destination:
        count = os.preadv(fd, [destination], offset)
        if count == 0:
            raise damaged(path, f"it ends at byte {offset}")
        destination = destination[count:]
        offset += count


def _record_differences(found: ShardMetadata, wanted: ShardMetadata | None) -> Iterator[str]:
    for name in ("lengths", "rows") if wanted else ():
        if getattr(found, name) != getattr(wanted, name):
            yield f"its {name} are not those of this run: it is of another one"


def _written_parts(fd: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of `begin` to `end` that are no holes; all of it where nothing tells."""
    while begin < end:
        try:
            start = os.lseek(fd, begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end of the file
                return
            if error.errno not in _SEEK_UNSUPPORTED:
                raise
            yield begin, end
            return
        if start >= end:
            return
        begin = min(os.lseek(fd, start, os.SEEK_HOLE), end)
        yield start, begin


def _integers(piece: npt.NDArray[np.uint8], dtype: torch.dtype) -> npt.NDArray[np.int64]:
    return piece.view(numpy_dtype(dtype))


def _tokens(row_specs: Mapping[str, TensorSpec]) -> int:
    return min(spec.shape[0] for spec in row_specs.values())
