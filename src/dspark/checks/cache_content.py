"""Whether the rows of a cache are, in order, those that its identity speaks of.

Checksums prove that a shard is as it was written. The hash of the tokenized input, which is part of
the cache's identity, proves that what was written are the rows of that input.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.reading.shard_reader import ShardReader
from dspark.schema.cache_manifest import row_specs

_IDS, _MASK, _LAST = "input_ids", "loss_mask", "target_last_hidden_states"


def content_problems(cache_dir: str, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Compare ids and masks with the hash of the input and the number of supervised tokens.

    Where rows were kept without states and supervision, their masks are not those of the input,
    and there is nothing to compare but that they are so.

    Args:
        cache_dir: A cache whose shards are whole.
        manifest: Its manifest, with ``provenance``.

    Raises:
        CacheError: If a shard cannot be read.
    """
    masked = masked_rows(manifest)
    if masked:
        yield from _masked_problems(cache_dir, manifest, masked)
        return
    digest = hashlib.sha256()
    supervised = 0
    for ids, mask in _rows(cache_dir, manifest):
        for part in (np.int64(len(ids)), ids.astype(np.int32), mask.astype(np.uint8)):
            digest.update(part.tobytes())
        supervised += int(mask.sum())
    provenance = manifest["provenance"]
    wanted = provenance["identity"]["rows_sha256"], provenance["counts"].get("supervised_tokens")
    if wanted != (digest.hexdigest(), supervised):
        yield (
            f"provenance speaks of rows with hash {wanted[0]} and {wanted[1]} supervised tokens, "
            f"the shards have {digest.hexdigest()} and {supervised}"
        )


def masked_rows(manifest: Mapping[str, Any]) -> list[int]:
    """Return the rows that were kept without states, as the manifest names them."""
    provenance = manifest.get("provenance")
    rows = provenance.get("masked_rows") if isinstance(provenance, dict) else None
    known = range(manifest["num_samples"])
    return [row for row in rows if row in known] if isinstance(rows, list) else []


def _masked_problems(
    cache_dir: str, manifest: Mapping[str, Any], rows: Sequence[int]
) -> Iterator[str]:
    reader = _reader(cache_dir, manifest, _MASK, _LAST)
    for row in rows:
        length = reader.lengths([row])[0]
        into = {
            name: np.empty((1, length * reader.token_bytes(name)), np.uint8)
            for name in (_MASK, _LAST)
        }
        reader.read([row], into, tokens=length)
        if any(memory.any() for memory in into.values()):
            yield f"provenance.masked_rows names row {row}, which has states or supervision"


def _rows(
    cache_dir: str, manifest: Mapping[str, Any]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield ids and mask of each row, of its real length."""
    reader = _reader(cache_dir, manifest, _IDS, _MASK)
    for row in range(reader.num_rows):
        length = reader.lengths([row])[0]
        into = {name: np.empty((1, length * 8), np.uint8) for name in (_IDS, _MASK)}
        reader.read([row], into, tokens=length)
        yield into[_IDS][0].view(np.int64), into[_MASK][0].view(np.int64)


def _reader(cache_dir: str, manifest: Mapping[str, Any], *names: str) -> ShardReader:
    specs = row_specs(manifest)
    return ShardReader(
        cache_dir,
        {name: specs[name] for name in names},
        num_rows=manifest["num_samples"],
        shard_size=manifest["shard_size"],
        check="names",  # the files hold more tensors than are read here, and were checked before
        mmap=False,
        identity=None,
        padded=(),
    )
