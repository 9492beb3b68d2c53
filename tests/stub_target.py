"""Tokens, settings and a target whose states are a function of the ids, for the pipeline."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dspark.cache import shard_path
from dspark.chat import Conversation
from dspark.data.encoding import BadRow
from dspark.data.tokens import RowRules, Tokens, write_tokens
from dspark.disk.manifest import identity_digest
from dspark.job.forward import ShardSettings
from dspark.job.pipeline import write_shards
from dspark.model.capture import Captured
from dspark.schema.cache_manifest import row_specs
from dspark_caches import a_manifest

SEQ_LENGTH, SHARD_SIZE, PAD = 24, 4, 5
LENGTHS = [24, 23, 11, 24, 1, 8, 7, 19, 2, 23, 6]
SHARDS = range(3)
LAYERS = [-1, 0, 2, 3]
WIDTH = 32


def make_tokens(directory: Path, *, skipped: Sequence[int] = ()) -> Tokens:
    """Write rows of random ids; their first id is their number, by which stubs know them."""
    random = np.random.default_rng(0)

    def encoded() -> Iterator[Any]:
        for row, length in enumerate(LENGTHS):
            ids = random.integers(0, 128, length, dtype=np.int32)
            ids[0] = row
            mask = (np.arange(length) % 3 == 2).astype(np.uint8)
            if row in skipped:
                yield BadRow(row, "somewhere", "no user", "no user")
            else:
                yield row, Conversation(ids, mask, False)

    return write_tokens(directory, encoded(), RowRules(skip_bad_rows=True), key={})


def make_manifest(dtype: str = "fp32") -> dict[str, Any]:
    return a_manifest(
        target_text_config=SimpleNamespace(vocab_size=128, hidden_size=WIDTH, num_hidden_layers=4),
        seq_length=SEQ_LENGTH,
        dtype=dtype,
        num_samples=len(LENGTHS),
        shard_size=SHARD_SIZE,
        target_layer_ids=LAYERS,
    )


def make_settings(dtype: str = "fp32", **changes: Any) -> ShardSettings:
    manifest = make_manifest(dtype)
    fields = {
        "row_specs": row_specs(manifest),
        "identity": identity_digest(manifest),
        "shard_size": SHARD_SIZE,
        "batch_size": 2,
        "pad_token_id": PAD,
        "layer_ids": LAYERS,
    }
    return ShardSettings(**(fields | changes))


class StubTarget:
    """States that are a function of the ids alone; `spoil` may change them, or raise."""

    device = torch.device("cpu")

    def __init__(self, spoil: Any = lambda ids, states: None) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # ids and mask by first id
        self._spoil = spoil

    def capture(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Captured:
        self.shapes.append(tuple(input_ids.shape))
        for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
            self.rows[ids[0]] = (ids, mask)
        base = input_ids.unsqueeze(-1) + torch.arange(WIDTH) / WIDTH
        states = [base * (place + 1) for place in range(len(LAYERS))]
        states = [
            state * attention_mask.unsqueeze(-1) + 7 * (1 - attention_mask.unsqueeze(-1))
            for state in states
        ]
        self._spoil(input_ids, states)
        return Captured(tuple(states), states[-1].clone())


def run(
    cache: Path, target: Any, tokens: Tokens, settings: ShardSettings, **options: Any
) -> dict[int, bytes]:
    """Write all shards and return their bytes by number."""
    cache.mkdir(exist_ok=True)
    write_shards(str(cache), SHARDS, target, tokens, settings, **options)
    return {index: Path(shard_path(str(cache), index)).read_bytes() for index in SHARDS}


def rows_of(cache: Path) -> list[dict[str, torch.Tensor]]:
    """Return every row on disk, in order, as another library reads it."""
    shards = [load_file(shard_path(str(cache), index)) for index in SHARDS]
    return [
        {name: tensor[row] for name, tensor in shard.items()}
        for shard in shards
        for row in range(len(shard["input_ids"]))
    ]
