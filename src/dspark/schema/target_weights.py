"""The target's embedding and head, stored beside its hidden states.

    CACHE/target_weights.safetensors
        embed_tokens.weight   cache dtype [V, H]   what a draft may start from
        lm_head.weight        cache dtype [V, H]   from last hidden states to logits
        lm_head.bias          cache dtype [V]      only where the target's head has one

All have their own storage, tied or not. What the target does to its logits after the head's product
is in the metadata, by name and value. `dspark.cache` is where users find these functions.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import xxhash

from dspark.disk.limits import check_fits_memory
from dspark.disk.manifest import identity_on_disk
from dspark.disk.publish import StagedFile
from dspark.disk.shard_file import (
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
from dspark.schema.cache_manifest import _CACHE_NAME
from dspark.schema.logits import HeadTransform, head_product

_TARGET_WEIGHTS_NAME = "target_weights.safetensors"
_READ_BYTES = 16 * 2**20
_WEIGHT_KEYS = ("embed_tokens.weight", "lm_head.weight")
_BIAS_KEY = "lm_head.bias"


def _target_weights_path(cache_dir: str) -> str:
    return str(Path(cache_dir) / _TARGET_WEIGHTS_NAME)


def write_target_weights(
    cache_dir: str,
    embed_tokens: torch.nn.Module,
    lm_head: torch.nn.Module,
    dtype: torch.dtype,
    *,
    transform: HeadTransform | None = None,
) -> str:
    """Persist the target's embedding and head, each with its own storage, and return the path.

    The safetensors metadata has one key, ``dspark``: a JSON object with ``identity``, the digest of
    the identity of the manifest in `cache_dir` (null without one), ``xxh3_64``, a digest per
    tensor, and, where `transform` does something, ``logits``: what it does.

    Args:
        cache_dir: The cache.
        embed_tokens: Has ``weight`` [V, H]; may be the same tensor as that of `lm_head`.
        lm_head: Has ``weight`` [V, H] and perhaps ``bias`` [V].
        dtype: What to store them in.
        transform: What the target does to the product of its head; None for nothing.

    Raises:
        OSError: If the file cannot be written.
    """
    modules = dict(zip(_WEIGHT_KEYS, (embed_tokens, lm_head), strict=True))
    weights = {name: cast(torch.Tensor, module.weight) for name, module in modules.items()}
    bias = cast(torch.Tensor | None, getattr(lm_head, "bias", None))
    weights |= {} if bias is None else {_BIAS_KEY: bias}
    places = place_tensors({k: TensorSpec(dtype, tuple(w.shape)) for k, w in weights.items()})
    digests = dict.fromkeys(weights, "0" * 16)
    record: dict[str, Any] = {
        "identity": identity_on_disk(cache_dir, cache_name=_CACHE_NAME),
        "xxh3_64": digests,
    }
    if transform is not None and transform.extras:
        record["logits"] = transform.extras
    data_start = len(encode_header(places, {METADATA_KEY: json.dumps(record, sort_keys=True)}))
    path = _target_weights_path(cache_dir)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
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
        Two objects with ``weight`` [V, H] in the cache dtype: the embedding and the head. The head
        also has ``bias`` [V] or None and ``transform``, for `target_logits`.

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
    header = read_header(path)
    missing = sorted(set(_WEIGHT_KEYS) - header.tensors.keys())
    if missing:
        raise damaged(path, f"it has no {', '.join(missing)}")
    specs = [header.tensors[key].spec for key in _WEIGHT_KEYS]
    if not all(spec.dtype.is_floating_point and len(spec.shape) == 2 for spec in specs):
        raise damaged(path, f"its weights are {specs}, expected floating-point [V, H]")
    if specs[0].shape[1] != specs[1].shape[1]:
        raise damaged(path, f"embedding {specs[0].shape} and head {specs[1].shape} differ in width")
    check_fits_memory(path, "its data", path.stat().st_size)
    tensors = load_file(path)
    embed_tokens, lm_head = (SimpleNamespace(weight=tensors[key]) for key in _WEIGHT_KEYS)
    lm_head.bias, lm_head.transform = tensors.get(_BIAS_KEY), _transform(header, path)
    return embed_tokens, lm_head


def target_logits(lm_head: SimpleNamespace, last_hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the target's own logits, soft-capping, scale and bias of its head included.

    Args:
        lm_head: The head that `read_target_weight_modules` returned, moved to the device of
            `last_hidden_states` where that is another.
        last_hidden_states: [..., H], as cached in ``target_last_hidden_states``.

    Returns:
        [..., V] in the dtype of `last_hidden_states`.
    """
    transform = getattr(lm_head, "transform", None) or HeadTransform()
    bias = getattr(lm_head, "bias", None)
    return transform(head_product(last_hidden_states, lm_head.weight, bias))


def read_head_transform(cache_dir: str) -> HeadTransform:
    """Return what the target does to the product of its head.

    Raises:
        FileNotFoundError: If the weights file is missing.
        CacheError: If it is damaged or says what this version cannot apply.
    """
    path = Path(_target_weights_path(cache_dir))
    return _transform(read_header(path), path)


def _transform(header: Header, path: Path) -> HeadTransform:
    record = decode_json(header.metadata.get(METADATA_KEY, "{}"), path)
    extras = record.get("logits", {})
    if not isinstance(extras, dict):
        raise damaged(path, f"its metadata says logits={extras!r}")
    return HeadTransform.from_extras(extras)


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
    for name in sorted(header.tensors.keys() | set(_WEIGHT_KEYS)):
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
