"""DSpark's cache: what the frozen target knows of every token, on disk.

    CACHE/
        manifest.json                 sorted keys; see `build_cache_manifest`
        target_weights.safetensors    embed_tokens.weight [V, H], lm_head.weight [V, H]
        shard-000000.safetensors      rows 0 … shard_size-1; the last shard may be shorter
        shard-000001.safetensors      …

    in a shard of n rows, with S = seq_length, H = hidden_size and L = len(target_layer_ids):

        input_ids                  int64        [n, S]
        loss_mask                  int64, 0/1   [n, S]
        target_hidden_states       cache dtype  [n, S, L·H]   layers side by side
        target_last_hidden_states  cache dtype  [n, S, H]     output of the final norm

Nothing is shifted: the states at position i are those after reading token i, and ``loss_mask[i]``
speaks of ``input_ids[i]``. Rows are padded on the right; masks and states with zeros. Format 1 is
that of NVIDIA NeMo AutoModel: each reads the other's caches.

Importing this module needs neither transformers nor datasets.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from dspark.disk.manifest import (
    existing_shard_indices,
    identity_digest,
    identity_on_disk,
    manifest_path,
    shard_path,
)
from dspark.disk.shard_file import ShardMetadata
from dspark.disk.shard_writer import write_whole_shard
from dspark.errors import CacheError
from dspark.offline_cache import CachedTensorDataset, build_loader, collate
from dspark.reading.cache_loader import CacheLoader
from dspark.schema.cache_manifest import (
    _CACHE_NAME,
    DTYPE_MAP,
    build_cache_manifest,
    ensure_manifest_complete,
    manifest_mismatch_fields,
    pad_token_id,
    read_manifest,
    row_specs,
    tokenizer_chat_template_sha256,
    write_manifest,
)
from dspark.schema.cache_manifest import _FORMAT_VERSION as _FORMAT_VERSION
from dspark.schema.cache_manifest import _IDENTITY_EXEMPT_FIELDS as _IDENTITY_EXEMPT_FIELDS
from dspark.schema.target_weights import _TARGET_WEIGHTS_NAME as _TARGET_WEIGHTS_NAME
from dspark.schema.target_weights import _target_weights_path as _target_weights_path
from dspark.schema.target_weights import (
    read_target_weight_modules,
    target_logits,
    write_target_weights,
)

__all__ = [
    "CACHE_KEYS",
    "DTYPE_MAP",
    "CachedDSparkDataset",
    "build_cache_manifest",
    "build_cached_dspark_dataloader",
    "compute_batch_cache",
    "ensure_manifest_complete",
    "existing_shard_indices",
    "manifest_mismatch_fields",
    "manifest_path",
    "read_manifest",
    "read_target_weight_modules",
    "shard_path",
    "target_logits",
    "tokenizer_chat_template_sha256",
    "write_manifest",
    "write_shard",
    "write_target_weights",
]


CACHE_KEYS = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")

# The one tensor whose padding is not zero.
_PADDED_KEYS = ("input_ids",)


def compute_batch_cache(target_batch: Any, cache_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Convert one captured batch into the tensors of the cache.

    Args:
        target_batch: Any object with ``input_ids`` [B, S], ``loss_mask`` [B, S],
            ``target_hidden_states`` [B, S, L·H] and ``target_last_hidden_states`` [B, S, H], on
            any device; optionally ``lengths`` [B], the real tokens of each row.
        cache_dtype: The dtype of the states.

    Returns:
        The tensors of `CACHE_KEYS`, contiguous, on the CPU: ids and mask int64, states in
        `cache_dtype`; and ``lengths`` int64 where the batch has them.
    """
    dtypes = (torch.int64, torch.int64, cache_dtype, cache_dtype)
    samples = {
        key: getattr(target_batch, key).detach().to("cpu", dtype).contiguous()
        for key, dtype in zip(CACHE_KEYS, dtypes, strict=True)
    }
    lengths = getattr(target_batch, "lengths", None)
    if lengths is not None:
        samples["lengths"] = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    return samples


def write_shard(cache_dir: str, shard_index: int, samples: dict[str, torch.Tensor]) -> str:
    """Write one shard and return its path.

    Beyond a row's length only ``input_ids`` are stored; the states of padding become zeros.

    Args:
        cache_dir: The cache. A manifest in it gives the shard its identity.
        shard_index: The shard's number.
        samples: The tensors of `CACHE_KEYS`, each with one row per sample; optionally ``lengths``
            [n], without which every row counts as full, and ``rows`` [n], their numbers in the
            source. Other keys are refused.

    Raises:
        CacheError: If a tensor is missing, unknown, or does not fit the others, "missing required"
            in the first case; or the index is negative.
        OSError: If it cannot be written.
    """
    if shard_index < 0:
        raise CacheError(f"shard indices count from 0, got {shard_index}")
    missing = [key for key in CACHE_KEYS if key not in samples]
    if missing:
        raise CacheError(f"shard {shard_index}: missing required tensors {missing}")
    unknown = sorted(samples.keys() - {*CACHE_KEYS, "lengths", "rows"})
    if unknown:
        raise CacheError(f"shard {shard_index}: unknown tensors {unknown}; expected {CACHE_KEYS}")
    lengths, rows = _check_fit(shard_index, samples)
    metadata = ShardMetadata(
        index=shard_index,
        identity=identity_on_disk(cache_dir, cache_name=_CACHE_NAME),
        lengths=tuple(lengths),
        rows=rows,
    )
    tensors = {key: samples[key] for key in CACHE_KEYS}
    path = shard_path(cache_dir, shard_index)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    write_whole_shard(Path(path), tensors, metadata=metadata, padded=_PADDED_KEYS)
    return path


def _check_fit(
    shard_index: int, samples: Mapping[str, torch.Tensor]
) -> tuple[list[int], tuple[int, ...] | None]:
    """Return the lengths and source rows of samples that fit each other."""
    shapes = {key: tuple(samples[key].shape) for key in CACHE_KEYS}
    if [*map(len, shapes.values())] != [2, 2, 3, 3] or len({s[:2] for s in shapes.values()}) != 1:
        raise CacheError(
            f"shard {shard_index}: ids and mask must be [n, S] and states [n, S, width] for the "
            f"same n and S, got {shapes}"
        )
    count, seq_length = shapes["input_ids"]
    lengths = samples["lengths"].tolist() if "lengths" in samples else [seq_length] * count
    rows = tuple(samples["rows"].tolist()) if "rows" in samples else None
    if len(lengths) != count or (rows is not None and len(rows) != count):
        raise CacheError(
            f"shard {shard_index}: lengths {lengths} and rows {rows} must have one value for each "
            f"of {count} samples"
        )
    for row, length in enumerate(lengths):
        if not 0 <= length <= seq_length:
            raise CacheError(f"shard {shard_index} row {row}: length {length} of {seq_length}")
        if samples["loss_mask"][row, length:].any():
            raise CacheError(f"shard {shard_index} row {row}: loss_mask is set beyond {length}")
    return lengths, rows


class CachedDSparkDataset(CachedTensorDataset):
    """Read the shards of a finished cache lazily.

    An item is a dict of `CACHE_KEYS`: ``input_ids`` and ``loss_mask`` int64 [S],
    ``target_hidden_states`` [S, L·H] and ``target_last_hidden_states`` [S, H] in the cache dtype.

    Args:
        cache_dir: The cache.
        check: How much is believed; see `CachedTensorDataset`.
        mmap: Whether to map the shards instead of reading them; see `CachedTensorDataset`.

    Attributes:
        manifest: The cache's manifest.

    Raises:
        FileNotFoundError: If there is no manifest.
        CacheError: If the cache is incomplete, its manifest damaged, or its shard indices are not
            the manifest's.
    """

    def __init__(
        self,
        cache_dir: str,
        *,
        check: Literal["names", "headers", "checksums"] = "headers",
        mmap: bool = False,
    ) -> None:
        self.manifest = read_manifest(cache_dir)
        pad_id = pad_token_id(self.manifest)
        num_samples, shard_size = self.manifest["num_samples"], self.manifest["shard_size"]
        super().__init__(
            cache_dir,
            row_specs=row_specs(self.manifest),
            padded=_PADDED_KEYS if pad_id is None else dict.fromkeys(_PADDED_KEYS, pad_id),
            num_rows=num_samples,
            shard_size=shard_size,
            # Without provenance, fields may have come or gone since the shards were written.
            identity=identity_digest(self.manifest) if "provenance" in self.manifest else None,
            check=check,
            mmap=mmap,
        )


def _collate_cached(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack items of `CachedDSparkDataset` into a batch: every tensor gains dim 0."""
    return collate(features)


def build_cached_dspark_dataloader(
    *,
    cache_dir: str,
    batch_size: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    trim: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    multiprocessing_context: str | None = None,
    shuffle_window: int | None = None,
    check: Literal["names", "headers", "checksums"] = "headers",
    mmap: bool = False,
) -> CacheLoader:
    """Build a dataloader over a finished cache.

    Args:
        cache_dir: The cache.
        batch_size: Rows of a batch, on each rank.
        shuffle: Whether each epoch has an order of its own, drawn from seed and epoch.
            ``loader.sampler.set_epoch`` chooses the epoch; a finished pass moves on to the next.
        num_workers: Worker processes that read; 0 reads in this one.
        distributed: Whether each rank of the default process group reads its own share; see
            `RowSampler` for the uneven end.
        trim: Whether a batch is padded to its longest row instead of ``seq_length``.
        seed: What the orders are drawn from.
        drop_last: Whether rows that do not fill a batch on every rank are left out.
        pin_memory: Whether batches come in pinned memory; by default where CUDA is available.
        prefetch_factor: Batches that each worker reads ahead; by default 2.
        persistent_workers: Whether workers live on from one pass to the next.
        multiprocessing_context: How workers start; by default "fork", or "forkserver" once this
            process uses CUDA.
        shuffle_window: Mix rows within this many shards only, for slow storage; see `RowSampler`.
        check: How much is believed; see `CachedTensorDataset`.
        mmap: Whether to map the shards instead of reading them; see `CachedTensorDataset`.

    Returns:
        A `DataLoader` of dicts of `CACHE_KEYS`, each [B, S, ...], with ``state_dict`` and
        ``load_state_dict``.

    Raises:
        FileNotFoundError: If there is no manifest.
        CacheError: As for `CachedDSparkDataset`.
        ValueError: If an argument is out of range, or `distributed` without a process group.
    """
    return build_loader(
        CachedDSparkDataset(cache_dir, check=check, mmap=mmap),
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        distributed=distributed,
        trim=trim,
        seed=seed,
        drop_last=drop_last,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        multiprocessing_context=multiprocessing_context,
        shuffle_window=shuffle_window,
    )
