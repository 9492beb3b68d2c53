"""Small DSpark caches made by hand: manifests, samples and whole directories."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dspark.cache import DTYPE_MAP, build_cache_manifest, write_manifest, write_shard

SEQ_LENGTH = 6
HIDDEN = 4
LAYERS = [0, 2]


def a_manifest(**changes: Any) -> dict[str, Any]:
    """Return the manifest of a cache of five rows in shards of two."""
    fields = {
        "target_model": "org/model",
        "target_model_type": "qwen3",
        "target_text_config": SimpleNamespace(
            vocab_size=16, hidden_size=HIDDEN, num_hidden_layers=4
        ),
        "seq_length": SEQ_LENGTH,
        "dtype": "bf16",
        "num_samples": 5,
        "shard_size": 2,
        "target_layer_ids": LAYERS,
        "train_data_path": "chats.jsonl",
        "train_split": None,
        "shuffle_seed": 42,
        "mask_reasoning_content": False,
        "chat_template_sha256": "0" * 64,
    }
    return build_cache_manifest(**(fields | changes))


def some_samples(
    lengths: list[int], *, first_row: int = 0, dtype: str = "bf16"
) -> dict[str, torch.Tensor]:
    """Return the samples of a shard whose values tell row and position apart; ids pad with 15."""
    rows = len(lengths)
    real = torch.arange(SEQ_LENGTH) < torch.tensor(lengths).view(rows, 1)
    row_numbers = torch.arange(rows).view(rows, 1) + first_row
    ids = (row_numbers + torch.arange(SEQ_LENGTH)) % 15
    states = (ids + 1).unsqueeze(-1) + torch.arange(HIDDEN * len(LAYERS)) / 16
    states = (states * real.unsqueeze(-1)).to(DTYPE_MAP[dtype])
    return {
        "input_ids": torch.where(real, ids, 15),
        "loss_mask": (ids % 2) * real,
        "target_hidden_states": states,
        "target_last_hidden_states": states[..., :HIDDEN].contiguous(),
        "lengths": torch.tensor(lengths),
    }


def make_cache(directory: Path, **changes: Any) -> str:
    """Write a finished cache of five rows in three shards, without weights; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    cache_dir = str(directory)
    manifest = a_manifest(**changes)
    write_manifest(cache_dir, manifest)
    for index, lengths in enumerate(([6, 2], [3, 5], [4])):
        samples = some_samples(lengths, first_row=2 * index, dtype=manifest["dtype"])
        write_shard(cache_dir, index, samples)
    write_manifest(cache_dir, manifest | {"complete": True})
    return cache_dir
