"""Writing a shard: sized first, then row by row in any order, its header last.

What is not written reads as zeros and, on file systems with holes, takes no disk: a shard costs
what its real tokens cost. The header's size does not depend on its digests, so the data's place is
known before the first row.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dspark.disk.publish import StagedFile
from dspark.disk.shard_file import (
    METADATA_KEY,
    ShardMetadata,
    TensorSpec,
    encode_header,
    place_tensors,
    raw_bytes,
)

_NO_DIGEST = "0" * 16


class ShardLayout:
    """Where everything of a shard lies, before a byte of it is written.

    Args:
        row_specs: Per tensor the dtype and the shape [S, ...] of one row.
        metadata: The shard's number, identity, lengths and source rows.

    Attributes:
        data_start: Byte at which the data section begins.
        size: Size of the file in bytes, holes included.

    Raises:
        ValueError: If a length lies outside 0 … S.
    """

    def __init__(self, row_specs: Mapping[str, TensorSpec], metadata: ShardMetadata) -> None:
        self.row_specs = dict(row_specs)
        self.metadata = metadata
        rows = len(metadata.lengths)
        for row, length in enumerate(metadata.lengths):
            if not all(0 <= length <= spec.shape[0] for spec in row_specs.values()):
                raise ValueError(
                    f"shard {metadata.index} row {row}: length {length} does not fit rows of "
                    f"{[spec.shape[0] for spec in row_specs.values()]}"
                )
        self._places = place_tensors(
            {name: TensorSpec(spec.dtype, (rows, *spec.shape)) for name, spec in row_specs.items()}
        )
        self.data_start = len(self.header({name: [_NO_DIGEST] * rows for name in row_specs}))
        self.size = self.data_start + max((p.end for p in self._places.values()), default=0)

    def header(self, digests: Mapping[str, list[str]]) -> bytes:
        """Return the header for these digests; its size is always `data_start`."""
        metadata = replace(self.metadata, digests=digests)
        return encode_header(self._places, {METADATA_KEY: metadata.to_json()})

    def row_offset(self, name: str, row: int) -> int:
        """Return the byte of the file at which a row of a tensor begins."""
        return self.data_start + self._places[name].begin + row * self.row_specs[name].nbytes

    def real_bytes(self, name: str, row: int) -> int:
        """Return how many bytes the real tokens of a row of a tensor take."""
        spec = self.row_specs[name]
        return self.metadata.lengths[row] * spec.nbytes // max(spec.shape[0], 1)

    def blocks(self, block_size: int, *, padded: Collection[str] = ()) -> int:
        """Return how many blocks of `block_size` bytes the file takes where holes are kept.

        Args:
            block_size: Bytes that the file system allocates at once.
            padded: The tensors whose padding is written.
        """
        extents: list[npt.NDArray[np.int64]] = [np.array([[0, self.data_start]])]
        lengths = np.array(self.metadata.lengths, dtype=np.int64)
        for name in self._places:  # in the order of the file
            row_bytes, tokens = self.row_specs[name].nbytes, max(self.row_specs[name].shape[0], 1)
            begin = self.row_offset(name, 0) + np.arange(len(lengths)) * row_bytes
            real = np.full_like(lengths, tokens) if name in padded else lengths
            extents.append(np.stack((begin, begin + real * row_bytes // tokens), axis=1))
        spans = np.concatenate(extents)
        spans = spans[spans[:, 1] > spans[:, 0]]
        first, last = spans[:, 0] // block_size, (spans[:, 1] - 1) // block_size
        shared = int((first[1:] == last[:-1]).sum())
        return int((last - first + 1).sum()) - shared


class ShardWriter:
    """Writes one shard, row by row and in any order, then publishes it whole.

    Different rows may be written by different threads.

    Args:
        path: The shard's final name.
        row_specs: Per tensor the dtype and the shape [S, ...] of one row.
        metadata: The shard's number, identity, lengths and source rows; its digests are made here.
        owner: See `StagedFile`.

    Raises:
        ValueError: If a length lies outside 0 … S.
        OSError: If the file cannot be created or sized.
    """

    def __init__(
        self,
        path: Path,
        row_specs: Mapping[str, TensorSpec],
        *,
        metadata: ShardMetadata,
        owner: str = "run",
    ) -> None:
        self.path = path
        self._layout = ShardLayout(row_specs, metadata)
        rows = range(len(metadata.lengths))
        self._digests = {name: [_NO_DIGEST] * len(rows) for name in row_specs}
        self._missing = {(name, row) for name in row_specs for row in rows}
        self._file = StagedFile(path, owner=owner)
        try:
            self._file.resize(self._layout.size)
        except BaseException:
            self._file.discard()
            raise

    def write(self, name: str, row: int, values: torch.Tensor) -> None:
        """Write the beginning of one row of one tensor.

        Args:
            name: The tensor.
            row: The row within the shard.
            values: [n, ...] with n from the row's length to S, contiguous, on the CPU. Tokens
                from n on stay zero.

        Raises:
            ValueError: If dtype or shape are not the row's.
            OSError: If the disk refuses.
        """
        layout = self._layout
        spec, length = layout.row_specs[name], layout.metadata.lengths[row]
        fits = length <= values.shape[0] <= spec.shape[0] and values.shape[1:] == spec.shape[1:]
        if not fits or values.dtype != spec.dtype:
            raise ValueError(
                f"{self.path.name} row {row}: {name} must be {spec.dtype} [{length} to "
                f"{spec.shape[0]}, *{spec.shape[1:]}], got {values.dtype} {tuple(values.shape)}"
            )
        data = raw_bytes(values)
        self._digests[name][row] = xxhash.xxh3_64_hexdigest(data[: layout.real_bytes(name, row)])
        self._file.write(data, layout.row_offset(name, row))
        self._missing.discard((name, row))

    def publish(self) -> str:
        """Write the header, flush, and move the shard onto its name.

        Returns:
            The digest of the header, as `Header.digest`.
        """
        assert not self._missing, f"{self.path.name}: rows never written: {sorted(self._missing)}"
        header = self._layout.header(self._digests)
        assert len(header) == self._layout.data_start
        self._file.write(memoryview(header), 0)
        self._file.publish()
        return xxhash.xxh3_64_hexdigest(header)

    def discard(self) -> None:
        """Remove what was written; do nothing after `publish`."""
        self._file.discard()


def write_whole_shard(
    path: Path,
    samples: Mapping[str, torch.Tensor],
    *,
    metadata: ShardMetadata,
    padded: Collection[str] = (),
    owner: str = "run",
) -> str:
    """Write a shard whose rows are all in memory, to the same bytes as row by row.

    Args:
        path: The shard's final name.
        samples: Per tensor [rows, S, ...]; any device, any strides.
        metadata: As for `ShardWriter`; beyond a row's length, tensors are not stored …
        padded: … except these, whose padding carries values.
        owner: See `StagedFile`.

    Returns:
        The digest of the header.

    Raises:
        ValueError: If the tensors do not have one row per length.
        OSError: If the disk refuses.
    """
    rows = {name: tensor.shape[0] for name, tensor in samples.items()}
    if set(rows.values()) != {len(metadata.lengths)}:
        raise ValueError(f"{path.name}: {len(metadata.lengths)} lengths for rows {rows}")
    specs = {name: TensorSpec(t.dtype, tuple(t.shape[1:])) for name, t in samples.items()}
    writer = ShardWriter(path, specs, metadata=metadata, owner=owner)
    try:
        for row, length in enumerate(metadata.lengths):
            for name, tensor in samples.items():
                values = tensor[row] if name in padded else tensor[row, :length]
                writer.write(name, row, values.detach().cpu().contiguous())
        return writer.publish()
    finally:
        writer.discard()
