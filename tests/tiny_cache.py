"""A finished cache of random numbers, as `dspark.precompute` would leave it, without any model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dspark.cache import (
    DTYPE_MAP,
    build_cache_manifest,
    compute_batch_cache,
    write_manifest,
    write_shard,
    write_target_weights,
)
from dspark.checks.manifest_check import finished_manifest

SEQ, HIDDEN, LAYERS, VOCAB, PAD = 16, 8, [0, 2], 32, 3
LENGTHS = [16, 5, 9, 1, 7, 16, 3, 12, 2, 8, 11]
SHARD_SIZE = 4


def write_tiny_cache(
    cache_dir: Path,
    *,
    seed: int = 0,
    dtype: str = "bf16",
    provenance: bool = True,
    seq: int = SEQ,
    hidden: int = HIDDEN,
    lengths: list[int] | None = None,
    masked_row: int | None = None,
    **identity: Any,
) -> dict[str, Any]:
    """Write a cache of 11 rows in shards of 4, 4 and 3, and return its manifest.

    Args:
        cache_dir: A new directory.
        seed: Another seed is another run: other rows, other states, another identity.
        dtype: Of the states.
        provenance: Whether the manifest has what only dspark's own runs write.
        seq: Tokens of a padded row.
        hidden: Width of the states.
        lengths: Real tokens of each row.
        masked_row: A row that is kept without states and without supervision, as a run does with
            one whose states are not finite.
        identity: Fields of ``provenance.identity`` that are not the usual ones.
    """
    cache_dir.mkdir(parents=True)
    lengths = lengths or LENGTHS
    random = torch.Generator().manual_seed(seed)
    rows = [_random_row(length, seq, hidden, random) for length in lengths]
    manifest = _manifest(seed, dtype, len(rows), seq, hidden)
    if provenance:
        manifest["provenance"] = _provenance(rows, lengths, identity)
    if masked_row is not None:
        manifest["provenance"]["masked_rows"] = [masked_row]
        for key in rows[masked_row].keys() - {"input_ids"}:
            rows[masked_row][key].zero_()
    write_manifest(str(cache_dir), manifest)
    embed, head = (
        SimpleNamespace(weight=torch.randn(VOCAB, hidden, generator=random)) for _ in range(2)
    )
    write_target_weights(str(cache_dir), embed, head, DTYPE_MAP[dtype])
    for index, start in enumerate(range(0, len(rows), SHARD_SIZE)):
        chunk = rows[start : start + SHARD_SIZE]
        batch = SimpleNamespace(
            **{key: torch.stack([row[key] for row in chunk]) for key in chunk[0]},
            lengths=torch.tensor(lengths[start : start + SHARD_SIZE]),
        )
        write_shard(str(cache_dir), index, compute_batch_cache(batch, DTYPE_MAP[dtype]))
    if provenance:
        manifest = finished_manifest(str(cache_dir), manifest)
    else:
        manifest["complete"] = True
    write_manifest(str(cache_dir), manifest)
    return manifest


def _random_row(
    length: int, seq: int, hidden: int, random: torch.Generator
) -> dict[str, torch.Tensor]:
    ids = torch.full((seq,), PAD)
    ids[:length] = torch.randint(VOCAB, (length,), generator=random)
    mask = torch.zeros(seq, dtype=torch.int64)
    mask[length // 2 : length] = 1
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "target_hidden_states": torch.randn(seq, hidden * len(LAYERS), generator=random),
        "target_last_hidden_states": torch.randn(seq, hidden, generator=random),
    }


def _manifest(seed: int, dtype: str, rows: int, seq: int, hidden: int) -> dict[str, Any]:
    return build_cache_manifest(
        target_model="tiny",
        target_model_type="llama",
        target_text_config=SimpleNamespace(
            vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=3
        ),
        seq_length=seq,
        dtype=dtype,
        num_samples=rows,
        shard_size=SHARD_SIZE,
        target_layer_ids=LAYERS,
        train_data_path="chats.jsonl",
        train_split=None,
        shuffle_seed=seed,
        mask_reasoning_content=False,
        chat_template_sha256=hashlib.sha256(b"template").hexdigest(),
    )


def _provenance(
    rows: list[dict[str, torch.Tensor]], lengths: list[int], identity: dict[str, Any]
) -> dict[str, Any]:
    content = hashlib.sha256()
    for row, length in zip(rows, lengths, strict=True):
        content.update(np.int64(length).tobytes())
        content.update(row["input_ids"][:length].to(torch.int32).numpy().tobytes())
        content.update(row["loss_mask"][:length].to(torch.uint8).numpy().tobytes())
    return {
        "counts": {
            "rows": len(rows),
            "skipped": {},
            "supervised_tokens": sum(int(row["loss_mask"].sum()) for row in rows),
            "tokens": sum(lengths),
        },
        "created_with": {"dspark": "0.1.0", "torch": "2.13.0"},
        "identity": {
            "attn_implementation": "default",
            "compute_dtype": "float32",
            "pad_token_id": PAD,
            "rows_sha256": content.hexdigest(),
            **identity,
        },
    }
