"""The manifest: a cache's commit record, and the names of the files beside it.

    CACHE/
        manifest.json              what was run, and whether it finished
        shard-000000.safetensors   rows 0 … shard_size-1
        shard-000001.safetensors   …

``complete`` is false before the first shard and true after the last. A manifest without that key
predates it and counts as finished. ``provenance.identity`` holds what decides a cache's content
beyond the manifest's own fields; nothing else in ``provenance`` is ever compared.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from dspark.disk.limits import check_depth
from dspark.disk.publish import publish_bytes
from dspark.errors import CacheError

MANIFEST_NAME = "manifest.json"
IDENTITY_EXEMPT_FIELDS = ("format_version", "complete")  # the state on disk, not what was run
MAX_MANIFEST_BYTES = 64 * 2**20  # a digest per shard is 60 bytes: a million shards fit

_SHARD_NAME = re.compile(r"shard-(\d{6,})\.safetensors")


def manifest_path(cache_dir: str) -> str:
    """Return the path of the manifest of `cache_dir`."""
    return str(Path(cache_dir) / MANIFEST_NAME)


def shard_path(cache_dir: str, shard_index: int) -> str:
    """Return the path of shard `shard_index` of `cache_dir`."""
    return os.path.join(cache_dir, f"shard-{shard_index:06d}.safetensors")


def existing_shard_indices(cache_dir: str) -> set[int]:
    """Return the numbers of the shards that lie under their final name in `cache_dir`."""
    if not os.path.isdir(cache_dir):
        return set()
    # No Path per file: there may be tens of thousands, and every start of a training waits here.
    matches = map(_SHARD_NAME.fullmatch, os.listdir(cache_dir))
    return {int(match[1]) for match in matches if match and match[0] == _canonical(match)}


def _canonical(match: re.Match[str]) -> str:
    return f"shard-{int(match[1]):06d}.safetensors"


def check_shard_indices(cache_dir: str, num_shards: int) -> None:
    """Refuse a cache whose shards are not exactly 0 … `num_shards` - 1.

    Raises:
        CacheError: Naming the shards that are missing or not the manifest's.
    """
    found = existing_shard_indices(cache_dir)
    unexpected = {index for index in found if index >= num_shards}
    missing = num_shards - (len(found) - len(unexpected))
    if missing or unexpected:
        raise CacheError(
            f"{cache_dir}: the shard indices on disk are not 0 … {num_shards - 1} as its manifest "
            f"says: {missing} missing ({first_missing(found, num_shards)}), unexpected "
            f"{abridged(unexpected)}. Run the same precompute command with --resume, or copy the "
            "cache again."
        )


def first_missing(found: Collection[int], num_shards: int, *, most: int = 8) -> str:
    """Return as text the lowest numbers below `num_shards` that are not in `found`.

    `num_shards` may be anything: a damaged manifest may claim more shards than memory can list.
    """
    missing = (index for index in range(num_shards) if index not in found)
    some = list(islice(missing, most + 1))
    return ", ".join([*map(str, some[:most]), *["…"] * (len(some) > most)]) or "none"


def abridged(values: Collection[int], *, most: int = 8) -> str:
    """Return whole numbers as text, sorted, with a count in place of those beyond `most`."""
    shown = ", ".join(map(str, sorted(values)[:most])) or "none"
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def write_json_manifest(cache_dir: str, manifest: Mapping[str, Any], *, owner: str = "run") -> str:
    """Publish a manifest in one step, keys sorted; create `cache_dir` if needed.

    Returns:
        Its path.

    Raises:
        OSError: If it cannot be written; an older manifest is then still whole.
    """
    path = manifest_path(cache_dir)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    publish_bytes(Path(path), manifest_text(manifest).encode(), owner=owner)
    return path


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as it is written: keys sorted, indented by 2."""
    return json.dumps(manifest, sort_keys=True, indent=2) + "\n"


def read_json_manifest(cache_dir: str, *, cache_name: str) -> dict[str, Any]:
    """Read a manifest without judging its fields.

    Args:
        cache_dir: The cache.
        cache_name: What the cache is called in messages.

    Raises:
        FileNotFoundError: If there is none.
        CacheError: If it is not a JSON object.
    """
    path = Path(manifest_path(cache_dir))
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: {cache_dir} is not a {cache_name} cache. "
            "Give the --output-dir of a finished precompute run."
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CacheError(
            f"{path} has {path.stat().st_size} bytes, more than any manifest needs "
            f"({MAX_MANIFEST_BYTES}). Copy it anew."
        )
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{path} is damaged: not JSON ({error}). Copy it anew.") from error
    if not isinstance(manifest, dict):
        raise CacheError(f"{path} is damaged: a JSON {type(manifest).__name__}, not an object")
    check_depth(manifest, path)
    return manifest


def check_complete(manifest: Mapping[str, Any], cache_dir: str, *, cache_name: str) -> None:
    """Refuse a cache whose producer did not finish.

    Raises:
        CacheError: If ``complete`` is there and anything but true.
    """
    if manifest.get("complete", True) is not True:
        raise CacheError(
            f"{cache_dir} is an incomplete {cache_name} cache (complete="
            f"{manifest['complete']!r}): its precompute run was interrupted or is still going. "
            "Run the same precompute command with --resume to finish it."
        )


def identity_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides a cache's content, flat.

    These are the manifest's fields without `IDENTITY_EXEMPT_FIELDS`, and those of
    ``provenance.identity`` under ``provenance.identity.<key>``.
    """
    skip = {*IDENTITY_EXEMPT_FIELDS, "provenance"}
    fields = {key: value for key, value in manifest.items() if key not in skip}
    provenance = manifest.get("provenance")
    identity = provenance.get("identity") if isinstance(provenance, dict) else None
    if isinstance(identity, dict):
        fields |= {f"provenance.identity.{key}": value for key, value in identity.items()}
    return fields


def identity_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `identity_fields` as canonical JSON, in hex."""
    text = json.dumps(identity_fields(manifest), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def identity_on_disk(cache_dir: str, *, cache_name: str) -> str | None:
    """Return `identity_digest` of the manifest in `cache_dir`, or None where there is none.

    Raises:
        CacheError: If the manifest is not a JSON object.
    """
    if not Path(manifest_path(cache_dir)).is_file():
        return None
    return identity_digest(read_json_manifest(cache_dir, cache_name=cache_name))
