"""Whether a shard on disk is the one that a run would write."""

import os
from collections.abc import Mapping
from pathlib import Path

import xxhash

from dspark.shard_file import (
    Header,
    ShardMetadata,
    TensorSpec,
    damaged,
    place_tensors,
    read_header_fd,
    shard_metadata,
)


def check_shard(
    path: Path, row_specs: Mapping[str, TensorSpec], expected: ShardMetadata
) -> ShardMetadata:
    """Compare a shard with what it should be, and its data with its own digests.

    Args:
        path: The shard.
        row_specs: Dtype and shape [S, ...] of a row of each tensor.
        expected: Index, identity, lengths and source rows; its digests are not looked at.

    Returns:
        What the shard records, its digests included.

    Raises:
        CacheError: Naming the shard and the first thing that is not as it should be.
        OSError: If it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = read_header_fd(fd, path)
        found = _check_header(header, path, row_specs, expected)
        for name, spec in row_specs.items():
            _check_digests(fd, path, header, name, spec, found)
    finally:
        os.close(fd)
    return found


def _check_header(
    header: Header, path: Path, row_specs: Mapping[str, TensorSpec], expected: ShardMetadata
) -> ShardMetadata:
    rows = len(expected.lengths)
    wanted = place_tensors(
        {name: TensorSpec(spec.dtype, (rows, *spec.shape)) for name, spec in row_specs.items()}
    )
    for name in sorted(wanted.keys() | header.tensors.keys()):
        if wanted.get(name) != header.tensors.get(name):
            raise damaged(path, f"{name} is {header.tensors.get(name)}, not {wanted.get(name)}")
    found = shard_metadata(header, path)
    if found is None:
        raise damaged(path, "it carries no dspark metadata")
    for field in ("index", "identity", "lengths", "rows"):
        if getattr(found, field) != getattr(expected, field):
            raise damaged(path, f"its {field} is not that of this run (it is of another one)")
    for name in row_specs:
        if len(found.digests.get(name, ())) != rows:
            raise damaged(path, f"it has no digest of every row of {name}")
    return found


def _check_digests(
    fd: int, path: Path, header: Header, name: str, spec: TensorSpec, found: ShardMetadata
) -> None:
    begin = header.data_start + header.tensors[name].begin
    token_bytes = spec.nbytes // max(spec.shape[0], 1)
    buffer = bytearray(spec.nbytes)
    for row, length in enumerate(found.lengths):
        real = memoryview(buffer)[: length * token_bytes]
        read_fully(fd, real, begin + row * spec.nbytes, path)
        if xxhash.xxh3_64_hexdigest(real) != found.digests[name][row]:
            raise damaged(path, f"the data of {name} in row {row} do not match their checksum")


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
