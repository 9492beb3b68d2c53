"""What a shard file is: a safetensors file with a record of its rows in the metadata.

    8 bytes     size of the header, little-endian
    header      JSON: __metadata__ {"dspark": "<JSON>"}, then {name: {dtype, shape, data_offsets}}
    data        every tensor [rows, S, ...], one after the other, widest dtype first, then by name

The states of padding are zero. `dspark.disk.shard_writer` leaves them as holes, which take no
disk. The JSON in ``__metadata__`` has sorted keys:

    identity    digest of the manifest's identity, or null
    index       the shard's number
    lengths     real tokens of each row
    rows        each row's number in the source; only where source rows were left out
    xxh3_64     {tensor: [16 hex digits per row, over its real tokens]}

Format of the container: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import reprlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from dspark.errors import CacheError

METADATA_KEY = "dspark"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_HEADER_BYTES, _HEADER_BYTES_PER_ROW = 2**20, 2**10  # several times what a shard needs

_MAX_DIMENSIONS = 64  # torch's own limit; it also keeps the product of a shape small

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The dtype and shape of a tensor that is not in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: bytes `begin` to `end` of the data section."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """What dspark keeps of a shard beside its tensors.

    Attributes:
        index: The shard's number.
        identity: Digest of the manifest's identity, or None when written without one.
        lengths: Real tokens of each row.
        rows: Each row's number in the source, or None where none was left out.
        digests: Per tensor, per row: xxh3_64 of the real tokens as 16 hex digits.
    """

    index: int
    identity: str | None
    lengths: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    digests: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text under the ``dspark`` key of the safetensors metadata."""
        value: dict[str, Any] = {
            "identity": self.identity,
            "index": self.index,
            "lengths": list(self.lengths),
            "xxh3_64": {name: list(digests) for name, digests in self.digests.items()},
        }
        if self.rows is not None:
            value["rows"] = list(self.rows)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Header:
    """A safetensors header that has been checked against the size of its file.

    Attributes:
        tensors: Where each tensor lies.
        metadata: The string-to-string map under ``__metadata__``.
        data_start: Byte of the file at which the data section begins.
        digest: xxh3_64 of the header's bytes, its leading size included, as 16 hex digits.
    """

    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]
    data_start: int
    digest: str


def place_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, TensorPlace]:
    """Lay tensors out one after the other, as the safetensors library orders them."""
    places = {}
    begin = 0
    for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
        end = begin + specs[name].nbytes
        places[name] = TensorPlace(specs[name], begin, end)
        begin = end
    return places


def encode_header(places: Mapping[str, TensorPlace], metadata: Mapping[str, str]) -> bytes:
    """Return the leading size and the header, padded with spaces to a multiple of 8 bytes."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, place in places.items():
        content[name] = {
            "dtype": _DTYPE_NAMES[place.spec.dtype],
            "shape": list(place.spec.shape),
            "data_offsets": [place.begin, place.end],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the numpy dtype of the same name; numpy has no bfloat16.

    Raises:
        TypeError: If there is none.
    """
    return np.dtype(str(dtype).removeprefix("torch."))


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Nothing is believed: sizes are compared with the file before anything is allocated.

    Raises:
        CacheError: If the file is not whole or its header is not what safetensors allows.
        OSError: If it cannot be read.
    """
    fd = open_regular(path)
    try:
        return read_header_fd(fd, path)
    finally:
        os.close(fd)


def open_regular(path: Path) -> int:
    """Return a descriptor of `path` for reading, if it is a file or a link to one.

    Raises:
        CacheError: If it is anything else; a pipe, for one, would be waited for.
        OSError: If it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise damaged(path, "it is not a regular file")
    return fd


def read_header_fd(fd: int, path: Path, *, rows: int | None = None) -> Header:
    """`read_header` for an open file.

    Args:
        fd: The file.
        path: Its name, for messages.
        rows: Rows that the file should have, where that is known: they bound the header's size,
            and with it the memory that decoding takes.
    """
    file_size = os.fstat(fd).st_size
    prefix = os.pread(fd, 8, 0)
    size = int.from_bytes(prefix, "little")
    most = _HEADER_BYTES + (MAX_HEADER_BYTES if rows is None else rows * _HEADER_BYTES_PER_ROW)
    if len(prefix) < 8 or size > min(most, MAX_HEADER_BYTES, file_size - 8):
        raise damaged(path, f"{file_size} bytes cannot hold a header of {size} bytes")
    text = os.pread(fd, size, 8)
    if len(text) < size:
        raise damaged(path, f"its header ends after {len(text)} of {size} bytes")
    content = decode_json(text, path)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, "__metadata__ is not a map of strings")
    tensors = {name: _decode_place(name, entry, path) for name, entry in content.items()}
    _check_cover(tensors, file_size - 8 - size, path)
    return Header(tensors, metadata, 8 + size, xxhash.xxh3_64_hexdigest(prefix + text))


def shard_metadata(header: Header, path: Path) -> ShardMetadata | None:
    """Return what dspark recorded in a shard, or None for a file by another writer.

    Raises:
        CacheError: If the record is there but not what `ShardMetadata` describes.
    """
    if METADATA_KEY not in header.metadata:
        return None
    value = decode_json(header.metadata[METADATA_KEY], path)
    try:
        rows = value.get("rows")
        return ShardMetadata(
            index=_natural(value["index"]),
            identity=None if value["identity"] is None else _text(value["identity"]),
            lengths=tuple(map(_natural, value["lengths"])),
            rows=None if rows is None else tuple(map(_natural, rows)),
            digests={name: tuple(map(_text, v)) for name, v in value["xxh3_64"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged(path, f"its dspark metadata cannot be read ({error!r})") from error


def damaged(path: Path, what: str) -> CacheError:
    """Return the error for a shard or weights file that is not what it should be."""
    return CacheError(
        f"{path} is damaged: {what}. Remove it and run the same precompute command with --resume "
        "to write it again, or copy it anew."
    )


def decode_json(text: bytes | str, path: Path) -> dict[str, Any]:
    """Return the JSON object in `text`, which was read from the header of `path`.

    Raises:
        CacheError: If it is none.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise damaged(path, f"its header is a JSON {type(content).__name__}, not an object")
    return content


def _decode_place(name: str, entry: Any, path: Path) -> TensorPlace:
    try:
        dtype = _DTYPES[entry["dtype"]]
        spec = TensorSpec(dtype, _shape(entry["shape"]))
        begin, end = map(_natural, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"the header entry of {name!r} cannot be read ({error!r})") from error
    if end - begin != spec.nbytes:
        raise damaged(path, f"{name!r} spans {end - begin} bytes, its shape needs {spec.nbytes}")
    return TensorPlace(spec, begin, end)


def _check_cover(tensors: Mapping[str, TensorPlace], data_bytes: int, path: Path) -> None:
    position = 0
    for name, place in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != position:
            raise damaged(path, f"{name!r} begins at byte {place.begin}, expected {position}")
        position = place.end
    if position != data_bytes:
        raise damaged(path, f"its data has {data_bytes} bytes, its header describes {position}")


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"expected at most {_MAX_DIMENSIONS} dimensions in a list")
    return tuple(map(_natural, value))


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a whole number below 2**63, got {reprlib.repr(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {reprlib.repr(value)}")
    return value
