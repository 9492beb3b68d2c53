"""Whether a manifest is whole: its own checksum, and its fields among themselves.

A finished manifest that dspark wrote carries ``provenance.manifest_xxh3_64``, a checksum over
everything else in it, so that a changed digit in a field that only describes is found as well.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from dspark.disk.manifest import manifest_text, shard_path
from dspark.disk.shard_file import read_header
from dspark.plan import count_shards
from dspark.schema.target_weights import _target_weights_path, read_head_transform

_SEAL = "manifest_xxh3_64"


def finished_manifest(cache_dir: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a cache whose files are all written.

    Args:
        cache_dir: The cache.
        manifest: Its manifest so far, with ``provenance``.

    Returns:
        The same, complete, with the digest of every file's header, what the target does to its
        logits, and its own checksum.

    Raises:
        CacheError: If a file is damaged.
        OSError: If a file is missing.
    """
    num_shards = count_shards(num_rows=manifest["num_samples"], shard_size=manifest["shard_size"])
    paths = [Path(_target_weights_path(cache_dir))]
    paths += [Path(shard_path(cache_dir, index)) for index in range(num_shards)]
    files = {path.name: read_header(path).digest for path in paths}
    provenance = manifest["provenance"] | {"files": files}
    if extras := read_head_transform(cache_dir).extras:
        provenance["logits"] = extras  # what the target does to the product of its head
    return _sealed({**manifest, "complete": True, "provenance": provenance})


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    provenance = {key: value for key, value in manifest["provenance"].items() if key != _SEAL}
    unsealed = {**manifest, "provenance": provenance}
    digest = xxhash.xxh3_64_hexdigest(manifest_text(unsealed).encode())
    return {**unsealed, "provenance": {**provenance, _SEAL: digest}}


def manifest_problems(text: bytes, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a manifest that can be read.

    Args:
        text: Its bytes on disk.
        manifest: The same, decoded and with every required field.
    """
    if manifest.get("complete", True) is not True:
        yield f"complete is {manifest['complete']!r}: the run that writes it has not finished"
    layer_ids, num_layers = manifest["target_layer_ids"], manifest["num_hidden_layers"]
    if any(a >= b for a, b in pairwise([-2, *layer_ids, num_layers])):
        yield f"target_layer_ids {layer_ids} do not increase from -1 to at most {num_layers - 1}"
    if "provenance" not in manifest:
        return
    provenance = manifest["provenance"]
    if not isinstance(provenance, dict):
        yield f"provenance is a JSON {type(provenance).__name__}, not an object"
        return
    if text != manifest_text(manifest).encode():
        yield "its text is not, byte for byte, what dspark writes for its content"
    for key, keys in (("identity", ("pad_token_id", "rows_sha256")), ("counts", ("rows",))):
        found = provenance.get(key)
        yield from (
            f"provenance.{key}.{name} is missing"
            for name in keys
            if not isinstance(found, dict) or name not in found
        )
    if manifest.get("complete") is True:
        yield from _completion_problems(manifest, provenance)


def _completion_problems(
    manifest: Mapping[str, Any], provenance: Mapping[str, Any]
) -> Iterator[str]:
    if not isinstance(provenance.get("files"), dict):
        yield "provenance.files, the checksums of the files' headers, is missing"
    if _SEAL not in provenance:
        yield f"provenance.{_SEAL}, its own checksum, is missing"
    elif provenance[_SEAL] != _sealed(manifest)["provenance"][_SEAL]:
        yield f"its content does not match provenance.{_SEAL}"
