"""The manifest of a DSpark cache: its fields, and what makes two of them the same cache.

Format 1, as NVIDIA NeMo AutoModel writes it, plus ``provenance``: an object whose ``identity``
holds what else decides the content, and whose other keys describe. `dspark.cache` is where users
find these functions.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dspark.disk.manifest import (
    IDENTITY_EXEMPT_FIELDS,
    check_complete,
    identity_fields,
    manifest_path,
    read_json_manifest,
    write_json_manifest,
)
from dspark.disk.shard_file import TensorSpec
from dspark.errors import CacheError

DTYPE_MAP = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_CACHE_NAME = "DSpark"
_FORMAT_VERSION = 1
_IDENTITY_EXEMPT_FIELDS = IDENTITY_EXEMPT_FIELDS
_MAX_SHARD_ROWS, _MAX_SEQ_LENGTH = 2**24, 2**31 - 1  # what readers keep of a shard has a bound
_MASKING_FIELDS = ("mask_reasoning_content", "mask_generation_prompt")  # absent means false


def build_cache_manifest(
    *,
    target_model: str,
    target_model_type: str,
    target_text_config: Any,
    seq_length: int,
    dtype: str,
    num_samples: int,
    shard_size: int,
    target_layer_ids: list[int],
    train_data_path: str,
    train_split: str | None,
    shuffle_seed: int,
    mask_reasoning_content: bool,
    chat_template_sha256: str,
    mask_generation_prompt: bool = False,
) -> dict[str, Any]:
    """Assemble the manifest: the one place that names its fields.

    Args:
        target_model: Name or path of the target, as given.
        target_model_type: Its ``model_type``.
        target_text_config: The configuration of its text decoder; ``vocab_size``, ``hidden_size``
            and ``num_hidden_layers`` are taken from it.
        seq_length: Tokens of a padded row.
        dtype: A key of `DTYPE_MAP`.
        num_samples: Rows of the whole cache.
        shard_size: Rows of a full shard.
        target_layer_ids: Captured layers, strictly increasing.
        train_data_path: The input as given; a JSON list of several.
        train_split: The split as given, or None.
        shuffle_seed: The seed as given.
        mask_reasoning_content: Whether reasoning is left out of the loss mask.
        chat_template_sha256: `tokenizer_chat_template_sha256` of the tokenizer used.
        mask_generation_prompt: Whether the generation prompt is left out of the loss mask.

    Returns:
        A manifest with ``complete`` false, as it must be before the first shard.

    Raises:
        CacheError: If `dtype` is not a key of `DTYPE_MAP`.
    """
    if dtype not in DTYPE_MAP:
        raise CacheError(f"dtype must be one of {', '.join(DTYPE_MAP)}, got {dtype!r}")
    hidden_size = int(target_text_config.hidden_size)
    return {
        "format_version": _FORMAT_VERSION,
        "complete": False,
        "target_model": target_model,
        "target_model_type": target_model_type,
        "target_vocab_size": int(target_text_config.vocab_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": int(target_text_config.num_hidden_layers),
        "seq_length": seq_length,
        "dtype": dtype,
        "num_samples": num_samples,
        "shard_size": shard_size,
        "target_hidden_dim": hidden_size * len(target_layer_ids),
        "target_last_hidden_dim": hidden_size,
        "target_layer_ids": list(target_layer_ids),
        "train_data_path": train_data_path,
        "train_split": train_split,
        "shuffle_seed": shuffle_seed,
        "mask_reasoning_content": mask_reasoning_content,
        "mask_generation_prompt": mask_generation_prompt,
        "chat_template_sha256": chat_template_sha256,
    }


def write_manifest(cache_dir: str, manifest: dict[str, Any]) -> str:
    """Publish the manifest in one step and return its path.

    Raises:
        OSError: If it cannot be written.
    """
    return write_json_manifest(cache_dir, manifest)


def read_manifest(cache_dir: str, allow_incomplete: bool = False) -> dict[str, Any]:
    """Load and validate the manifest.

    Args:
        cache_dir: The cache.
        allow_incomplete: Whether an unfinished cache will do: for producers, which compare it with
            what they are about to write.

    Returns:
        The manifest as it is on disk, unknown keys included.

    Raises:
        FileNotFoundError: If there is none.
        CacheError: If it is unfinished, of another format, or a field is missing or wrong.
    """
    manifest = read_json_manifest(cache_dir, cache_name=_CACHE_NAME)
    if manifest.get("format_version") != _FORMAT_VERSION:
        raise CacheError(
            f"{manifest_path(cache_dir)}: format_version is {manifest.get('format_version')!r}, "
            f"this version of dspark reads {_FORMAT_VERSION}."
        )
    for field, (is_valid, expected) in _REQUIRED_FIELDS.items():
        if field not in manifest or not is_valid(manifest[field]):
            found = repr(manifest[field]) if field in manifest else "nothing"
            raise CacheError(
                f"{manifest_path(cache_dir)}: {field} must be {expected}, found {found}. "
                "The manifest is damaged or not a DSpark cache's; copy it anew."
            )
    _check_dims(cache_dir, manifest)
    if not allow_incomplete:
        ensure_manifest_complete(manifest, cache_dir)
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**48


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_layer_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


_COUNT = (_is_count, "a whole number above 0")
_REQUIRED_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "target_model": (_is_text, "text"),
    "target_model_type": (_is_text, "text"),
    "target_vocab_size": _COUNT,
    "hidden_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "seq_length": _COUNT,
    "dtype": (lambda value: value in list(DTYPE_MAP), f"one of {', '.join(DTYPE_MAP)}"),
    "num_samples": _COUNT,
    "shard_size": _COUNT,
    "target_hidden_dim": _COUNT,
    "target_last_hidden_dim": _COUNT,
    "target_layer_ids": (_is_layer_ids, "a list of whole numbers"),
}


def _check_dims(cache_dir: str, manifest: Mapping[str, Any]) -> None:
    rows = min(manifest["shard_size"], manifest["num_samples"])
    for what, value, most in (
        ("rows of a shard", rows, _MAX_SHARD_ROWS),
        ("seq_length", manifest["seq_length"], _MAX_SEQ_LENGTH),
    ):
        if value > most:
            raise CacheError(
                f"{manifest_path(cache_dir)}: {what} must be at most {most}, found {value}. "
                "The manifest is damaged; copy it anew."
            )
    hidden, layers = manifest["hidden_size"], len(manifest["target_layer_ids"])
    found = manifest["target_hidden_dim"], manifest["target_last_hidden_dim"]
    if found != (hidden * layers, hidden):
        raise CacheError(
            f"{manifest_path(cache_dir)}: target_hidden_dim and target_last_hidden_dim are "
            f"{found}, but hidden_size {hidden} and {layers} layers give "
            f"{(hidden * layers, hidden)}. The manifest is damaged; copy it anew."
        )


def ensure_manifest_complete(manifest: dict[str, Any], cache_dir: str) -> None:
    """Reject a cache whose producer did not finish writing.

    Raises:
        CacheError: If ``complete`` is there and anything but true. Without the key, the manifest
            is older than the marker and accepted.
    """
    check_complete(manifest, cache_dir, cache_name=_CACHE_NAME)


def manifest_mismatch_fields(recorded: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Return the names of the fields in which two manifests describe different caches, sorted.

    ``format_version`` and ``complete`` are bookkeeping and never differ; inside ``provenance``
    only ``provenance.identity.<key>`` count. A masking option that is absent is false.
    """
    first, second = _comparable(recorded), _comparable(manifest)
    absent = object()
    keys = sorted(first.keys() | second.keys())
    return [key for key in keys if first.get(key, absent) != second.get(key, absent)]


def _comparable(manifest: Mapping[str, Any]) -> dict[str, Any]:
    fields = identity_fields(manifest)
    return dict.fromkeys(_MASKING_FIELDS, False) | fields


def row_specs(manifest: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Return dtype and shape [S, ...] of one row of each of `CACHE_KEYS`."""
    seq_length, dtype = manifest["seq_length"], DTYPE_MAP[manifest["dtype"]]
    return {
        "input_ids": TensorSpec(torch.int64, (seq_length,)),
        "loss_mask": TensorSpec(torch.int64, (seq_length,)),
        "target_hidden_states": TensorSpec(dtype, (seq_length, manifest["target_hidden_dim"])),
        "target_last_hidden_states": TensorSpec(
            dtype, (seq_length, manifest["target_last_hidden_dim"])
        ),
    }


def pad_token_id(manifest: Mapping[str, Any]) -> int | None:
    """Return the id that pads rows, or None where the manifest does not tell."""
    provenance = manifest.get("provenance")
    identity = provenance.get("identity") if isinstance(provenance, dict) else None
    value = identity.get("pad_token_id") if isinstance(identity, dict) else None
    return value if type(value) is int and 0 <= value < 2**63 else None


def padding_values(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return what follows the real tokens of a row, for each of `CACHE_KEYS` where it is known."""
    values = dict.fromkeys(row_specs(manifest), 0) | {"input_ids": pad_token_id(manifest)}
    return {name: value for name, value in values.items() if value is not None}


def value_limits(manifest: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest value of the tensors of whole numbers."""
    return {"input_ids": (0, manifest["target_vocab_size"] - 1), "loss_mask": (0, 1)}


def tokenizer_chat_template_sha256(tokenizer: Any) -> str:
    """Return the SHA-256, in hex, of the chat template that `tokenizer` would use.

    It is that of the empty string where there is none. Of several named templates the tokenizer
    uses the one called "default".
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return hashlib.sha256((template or "").encode()).hexdigest()
