"""The target's embedding and head, stored beside its hidden states.

    CACHE/target_weights.safetensors
        embed_tokens.weight   cache dtype [V, H]   what a draft may start from
        lm_head.weight        cache dtype [V, H]   from last hidden states to logits

Both have their own storage, tied or not. `dspark.cache` is where users find these functions.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import xxhash

from dspark.cache_manifest import _CACHE_NAME
from dspark.manifest import identity_on_disk
from dspark.publish import StagedFile
from dspark.shard_file import (
    METADATA_KEY,
    Header,
    TensorSpec,
    damaged,
    decode_json,
    encode_header,
    place_tensors,
    raw_bytes,
    read_header,
)

_TARGET_WEIGHTS_NAME = "target_weights.safetensors"
_READ_BYTES = 16 * 2**20
_WEIGHT_KEYS = ("embed_tokens.weight", "lm_head.weight")


def _target_weights_path(cache_dir: str) -> str:
    return str(Path(cache_dir) / _TARGET_WEIGHTS_NAME)


def write_target_weights(
    cache_dir: str, embed_tokens: torch.nn.Module, lm_head: torch.nn.Module, dtype: torch.dtype
) -> str:
    """Persist the target's embedding and head, each with its own storage, and return the path.

    The safetensors metadata has one key, ``dspark``: a JSON object with ``identity``, the digest of
    the identity of the manifest in `cache_dir` (null without one), and ``xxh3_64``, a digest per
    tensor.

    Args:
        cache_dir: The cache.
        embed_tokens: Has ``weight`` [V, H]; may be the same tensor as that of `lm_head`.
        lm_head: Has ``weight`` [V, H].
        dtype: What to store them in.

    Raises:
        OSError: If the file cannot be written.
    """
    modules = dict(zip(_WEIGHT_KEYS, (embed_tokens, lm_head), strict=True))
    weights = {name: cast(torch.Tensor, module.weight) for name, module in modules.items()}
    places = place_tensors({k: TensorSpec(dtype, tuple(w.shape)) for k, w in weights.items()})
    digests = dict.fromkeys(weights, "0" * 16)
    record = {
        "identity": identity_on_disk(cache_dir, cache_name=_CACHE_NAME),
        "xxh3_64": digests,
    }
    data_start = len(encode_header(places, {METADATA_KEY: json.dumps(record, sort_keys=True)}))
    path = _target_weights_path(cache_dir)
    with StagedFile(Path(path)) as file:
        for name, weight in weights.items():
            data = raw_bytes(weight.detach().to("cpu", dtype).contiguous())
            digests[name] = xxhash.xxh3_64_hexdigest(data)
            file.write(data, data_start + places[name].begin)
        header = encode_header(places, {METADATA_KEY: json.dumps(record, sort_keys=True)})
        file.write(memoryview(header), 0)
    return path


def read_target_weight_modules(cache_dir: str) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Load the target's embedding and head.

    Returns:
        Two objects with ``weight`` [V, H] in the cache dtype: the embedding and the head.

    Raises:
        FileNotFoundError: If the weights file is missing.
        CacheError: If it is damaged.
    """
    from safetensors.torch import load_file

    path = Path(_target_weights_path(cache_dir))
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist. Run the same precompute command with --resume to write it."
        )
    missing = sorted(set(_WEIGHT_KEYS) - read_header(path).tensors.keys())
    if missing:
        raise damaged(path, f"it has no {', '.join(missing)}")
    tensors = load_file(path)
    embed_tokens, lm_head = (SimpleNamespace(weight=tensors[key]) for key in _WEIGHT_KEYS)
    return embed_tokens, lm_head


def check_target_weights(cache_dir: str, *, identity: str | None) -> None:
    """Compare the weights file with its own digests and with the cache it should belong to.

    Args:
        cache_dir: The cache.
        identity: Digest of the manifest's identity.

    Raises:
        FileNotFoundError: If the file is missing.
        CacheError: If it is damaged or of another cache.
    """
    path = Path(_target_weights_path(cache_dir))
    header = read_header(path)
    record = decode_json(header.metadata.get(METADATA_KEY, "{}"), path)
    if record.get("identity") != identity:
        raise damaged(path, "it belongs to another cache")
    digests = record.get("xxh3_64")
    for name in _WEIGHT_KEYS:
        if name not in header.tensors or not isinstance(digests, dict) or name not in digests:
            raise damaged(path, f"it has no {name}, or no checksum of it")
        if digest_of(path, header, name) != digests[name]:
            raise damaged(path, f"the data of {name} do not match their checksum")


def digest_of(path: Path, header: Header, name: str) -> str:
    """Return the xxh3_64 of a tensor's bytes in a file, as 16 hex digits."""
    place = header.tensors[name]
    digest = xxhash.xxh3_64()
    left = place.end - place.begin
    with path.open("rb") as file:
        file.seek(header.data_start + place.begin)
        while left and (block := file.read(min(left, _READ_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
