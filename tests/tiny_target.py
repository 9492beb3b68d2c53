"""A target directory and chats small enough to run the whole command in well under a second."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chat_fixtures import TEMPLATES, chat, tiny_tokenizer
from tiny_models import tiny_qwen3

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "more"] * 2
SEQ_LENGTH = 64


def write_target(
    directory: Path, *, seed: int = 0, template: str = "chatml", **changes: Any
) -> Path:
    """Write a random Qwen3 with four layers, its tokenizer and its chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    model = tiny_qwen3(**{"vocab_size": 512, **changes})
    if seed:
        with_noise(model, seed)
    model.save_pretrained(directory)
    tiny_tokenizer(TEMPLATES[template]).save_pretrained(directory)
    return directory


def with_noise(model: Any, seed: int) -> None:
    """Move every weight of a model a little."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.01)


def some_chats(rows: int) -> list[dict[str, Any]]:
    """Return conversations of one to three turns, all different, some longer than a row."""
    return [
        chat(*(" ".join(WORDS[: 1 + (row * 5 + turn) % 17]) for turn in range(2 * (1 + row % 3))))
        for row in range(rows)
    ]


def write_chats(path: Path, rows: int | Sequence[dict[str, Any]]) -> Path:
    """Write conversations as JSONL; a number means that many of `some_chats`."""
    chats = some_chats(rows) if isinstance(rows, int) else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in chats))
    return path


def command_line(target: Path, chats: Path, cache: Path) -> list[str]:
    """Return the arguments of a run that writes shards of four rows."""
    return [
        *("--target-model", str(target), "--input-data", str(chats), "--output-dir", str(cache)),
        *("--seq-length", str(SEQ_LENGTH), "--batch-size", "2", "--shard-size", "4"),
        *("--draft-num-hidden-layers", "2", "--device", "cpu", "--num-workers", "1"),
    ]


def cache_files(cache: Path) -> dict[str, bytes]:
    """Return the files that make up a cache, by name."""
    paths = [*cache.glob("*.json"), *cache.glob("*.safetensors")]
    return {path.name: path.read_bytes() for path in sorted(paths)}
