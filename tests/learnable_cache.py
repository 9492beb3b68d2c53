"""A small finished cache from which something can be learnt."""

from pathlib import Path
from types import SimpleNamespace

import torch

from dspark.cache import write_manifest, write_shard, write_target_weights
from dspark_caches import a_manifest


def next_token_cache(directory: Path) -> str:
    """Write a cache whose last states name the next token, with a head that reads them so."""
    vocab, seq_length, rows = 16, 40, 24
    config = SimpleNamespace(vocab_size=vocab, hidden_size=vocab, num_hidden_layers=4)
    manifest = a_manifest(
        target_text_config=config, seq_length=seq_length, num_samples=rows, shard_size=rows
    )
    cache_dir = str(directory)
    write_manifest(cache_dir, manifest)
    ids = torch.arange(rows).view(rows, 1) + 3 * torch.arange(seq_length + 1)
    states = torch.eye(vocab)[ids % vocab].bfloat16()
    last = states[:, 1:]
    samples = {
        "input_ids": ids[:, :-1] % vocab,
        "loss_mask": torch.ones(rows, seq_length, dtype=torch.int64),
        "target_hidden_states": torch.cat([states[:, :-1], last], -1),
        "target_last_hidden_states": last.contiguous(),
    }
    write_shard(cache_dir, 0, samples)
    weight = SimpleNamespace(weight=20 * torch.eye(vocab))
    write_target_weights(cache_dir, weight, weight, torch.bfloat16)
    write_manifest(cache_dir, manifest | {"complete": True})
    return cache_dir
