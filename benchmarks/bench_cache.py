"""A cache's tokens and settings without the command around them, for the benchmarks beside it."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark.chat import Conversation
from dspark.data.encoding import Encoded
from dspark.data.tokens import RowRules, Tokens, write_tokens
from dspark.job.forward import ShardSettings
from dspark.model.capture import Target
from dspark.schema.cache_manifest import build_cache_manifest, row_specs


def chat_lengths(rows: int, *, mean: int, longest: int) -> list[int]:
    """Return lengths that are spread like those of chat data: log-normal."""
    spread = 0.8
    median = mean / np.exp(spread**2 / 2)
    drawn = np.random.default_rng(0).lognormal(np.log(median), spread, rows)
    return np.clip(drawn, min(16, longest), longest).astype(int).tolist()


def random_tokens(directory: Path, lengths: Sequence[int], *, vocab_size: int) -> Tokens:
    """Return rows of random ids of these lengths, wholly supervised."""
    random = np.random.default_rng(0)

    def encoded() -> Generator[Encoded, None, None]:
        for row, length in enumerate(lengths):
            ids = random.integers(0, vocab_size, length, dtype=np.int32)
            yield row, Conversation(ids, np.ones(length, dtype=np.uint8), truncated=False)

    return write_tokens(directory, encoded(), RowRules(), key={})


def cache_settings(
    target: Target,
    tokens: Tokens,
    *,
    seq_length: int,
    batch_size: int,
    shard_size: int,
    dtype: str = "bf16",
    pad_token_id: int = 0,
) -> tuple[dict[str, Any], ShardSettings]:
    """Return the manifest of a cache of these tokens, and what its shards are written with."""
    manifest = build_cache_manifest(
        target_model="benchmark",
        target_model_type=target.config.model_type,
        target_text_config=target.text_config,
        seq_length=seq_length,
        dtype=dtype,
        num_samples=tokens.counts.rows,
        shard_size=shard_size,
        target_layer_ids=target.layer_ids,
        train_data_path="benchmark",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256="",
    )
    settings = ShardSettings(
        row_specs=row_specs(manifest),
        identity="",
        shard_size=shard_size,
        batch_size=batch_size,
        pad_token_id=pad_token_id,
        layer_ids=target.layer_ids,
    )
    return manifest, settings
