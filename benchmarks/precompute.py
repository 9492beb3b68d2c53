"""What dspark adds to the bare forward of the target, and what the plain way costs.

    (a) plain    every row padded to --seq-length, the whole causal LM, a shard in memory, save_file
    (b) forward  the decoder alone over the same real tokens, in the best batching, nothing kept
    (c) dspark   the same rows captured, checked, digested, written, flushed and published

One process, the model loaded once, alternating runs, the best of each. Prints a table and, as the
last line, the same as JSON.

    python benchmarks/precompute.py --target-model DIR --input-data chats.jsonl
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

from bench_cache import cache_settings
from dspark.cache import DTYPE_MAP
from dspark.chat import ChatEncoder, load_tokenizer
from dspark.data.encoding import encode_rows
from dspark.data.rows import open_rows
from dspark.data.tokens import RowRules, Tokens, write_tokens
from dspark.job.forward import ShardSettings, forwards, shard_batches
from dspark.job.pipeline import write_shards
from dspark.model.capture import Target
from dspark.model.layers import text_config_of
from dspark.plan import count_shards
from dspark.target import default_layer_ids, load_config, load_target
from process_memory import peak_bytes, reset_peak

MB = 1e6


@dataclass(frozen=True)
class Setup:
    """Everything that is ready before the clock starts."""

    target: Target
    tokens: Tokens
    settings: ShardSettings
    directory: Path

    @property
    def num_shards(self) -> int:
        """Shards of all rows."""
        return count_shards(num_rows=self.tokens.counts.rows, shard_size=self.settings.shard_size)


@dataclass
class Measured:
    """The best time of one way, and what it took."""

    seconds: float = float("inf")
    core_seconds: float = float("inf")
    guard_seconds: float = 0.0  # in checksums and fsync, on whatever thread
    peak_mb: float = 0.0
    disk_mb: float = 0.0


def plain(setup: Setup) -> None:
    """(a): what one writes first."""
    settings, tokens = setup.settings, setup.tokens
    for index in range(setup.num_shards):
        first = index * settings.shard_size
        rows = range(first, min(first + settings.shard_size, tokens.counts.rows))
        batches = [
            _plain_batch(setup, rows[i : i + settings.batch_size])
            for i in range(0, len(rows), settings.batch_size)
        ]
        samples = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        save_file(samples, setup.directory / f"shard-{index:06d}.safetensors")


@torch.no_grad()
def _plain_batch(setup: Setup, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    settings = setup.settings
    shape = (len(rows), settings.seq_length)
    input_ids = torch.full(shape, settings.pad_token_id)
    loss_mask, attention_mask = torch.zeros(2, *shape, dtype=torch.int64)
    for place, row in enumerate(rows):
        ids, mask = setup.tokens.row(row)
        input_ids[place, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        loss_mask[place, : len(ids)] = torch.from_numpy(mask.astype("int64"))
        attention_mask[place, : len(ids)] = 1
    output = setup.target.model(
        input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True
    )
    states = output.hidden_states
    hidden = torch.cat([states[layer_id + 1] for layer_id in settings.layer_ids], dim=-1)
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask.clone(),
        "target_hidden_states": hidden.to(settings.dtype),
        "target_last_hidden_states": states[-1].to(settings.dtype),
    }


def bare_forward(setup: Setup, *, alone: bool) -> None:
    """(b): the decoder over the real tokens, every row alone or in dspark's micro-batches."""
    bare = _without_hooks(setup.target)
    for index in range(setup.num_shards):
        batches = shard_batches(index, setup.tokens, setup.settings)
        if alone:
            batches = [[row] for batch in batches for row in batch]
        for _ in forwards(bare, batches, setup.tokens, setup.settings):
            pass


def _without_hooks(target: Target) -> Target:
    return Target(target.model, [target.num_layers - 1])  # the final state needs no hook


def dspark(setup: Setup) -> None:
    """(c): the product."""
    write_shards(
        str(setup.directory),
        range(setup.num_shards),
        setup.target,
        setup.tokens,
        setup.settings,
    )


def measure(setup: Setup, way: Callable[[Setup], None], best: Measured) -> None:
    """Run one way once, from an empty directory, and keep its best time and largest peak."""
    for path in setup.directory.iterdir():
        path.unlink()
    before = reset_peak()
    begin, core_begin = time.perf_counter(), time.process_time()
    with _guards_timed() as guards:
        way(setup)
    best.seconds = min(best.seconds, time.perf_counter() - begin)
    best.core_seconds = min(best.core_seconds, time.process_time() - core_begin)
    best.guard_seconds = max(best.guard_seconds, sum(guards))
    best.peak_mb = max(best.peak_mb, (peak_bytes() - before) / MB)
    blocks = sum(path.stat().st_blocks for path in setup.directory.iterdir())
    best.disk_mb = blocks * 512 / MB


@contextlib.contextmanager
def _guards_timed() -> Iterator[list[float]]:
    """Collect the seconds of every checksum and fsync of the process."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args)
            seconds.append(time.perf_counter() - begin)
            return result

        return call

    with (
        mock.patch.object(os, "fsync", timed(os.fsync)),
        mock.patch.object(xxhash, "xxh3_64_hexdigest", timed(xxhash.xxh3_64_hexdigest)),
    ):
        yield seconds


def prepare(args: argparse.Namespace, *, max_samples: int, directory: Path) -> Setup:
    """Load tokens and target."""
    config = load_config(args.target_model)
    text_config = text_config_of(config)
    layer_ids = default_layer_ids(num_layers=text_config.num_hidden_layers, num_captured=5)
    tokenizer = load_tokenizer(args.target_model)
    encoder = ChatEncoder(tokenizer, seq_length=args.seq_length)
    rows = open_rows([args.input_data], shuffle_seed=None)
    tokens = write_tokens(
        directory / "tokens",
        encode_rows(rows, encoder, num_workers=1),
        RowRules(max_samples=max_samples),
        key={},
    )
    target = load_target(
        args.target_model,
        layer_ids=layer_ids,
        device="cpu",
        compute_dtype=DTYPE_MAP[args.compute_dtype],
    )
    _, settings = cache_settings(
        target,
        tokens,
        seq_length=args.seq_length,
        batch_size=args.batch_size,
        shard_size=args.shard_size,
        dtype=args.dtype,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    (directory / "cache").mkdir()
    return Setup(target, tokens, settings, directory / "cache")


def compare(args: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Measure the three ways and print them."""
    setup = prepare(args, max_samples=args.rows, directory=directory)
    ways: dict[str, Callable[[Setup], None]] = {
        "(a) plain": plain,
        "(b) forward, rows alone": lambda setup: bare_forward(setup, alone=True),
        "(b) forward, micro-batches": lambda setup: bare_forward(setup, alone=False),
        "(c) dspark": dspark,
    }
    if args.without_plain:
        del ways["(a) plain"]
    best = {name: Measured() for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            measure(setup, way, best[name])
    print(f"{'':28} {'seconds':>8} {'cores s':>8} {'tokens/s':>9} {'peak MB':>8} {'disk MB':>8}")
    for name, measured in best.items():
        rate = setup.tokens.counts.tokens / measured.seconds
        print(
            f"{name:28} {measured.seconds:8.1f} {measured.core_seconds:8.1f} {rate:9.0f} "
            f"{measured.peak_mb:8.0f} {measured.disk_mb:8.1f}"
        )
    product = best["(c) dspark"]
    forward = min((m for n, m in best.items() if n.startswith("(b)")), key=lambda m: m.seconds)
    result: dict[str, object] = {
        "tokens": setup.tokens.counts.tokens,
        "dspark_over_forward": round(product.seconds / forward.seconds, 3),
        "dspark_over_forward_in_core_seconds": round(
            product.core_seconds / forward.core_seconds, 3
        ),
        "checksums_and_fsync_share": round(product.guard_seconds / product.seconds, 4),
        "peak_mb_over_forward": round(product.peak_mb - forward.peak_mb, 1),
        "captured_mb_of_three_batches": round(3 * _captured_mb(setup), 1),
    }
    if not args.without_plain:
        result |= {
            "plain_over_dspark": round(best["(a) plain"].seconds / product.seconds, 2),
            "disk_share": round(product.disk_mb / best["(a) plain"].disk_mb, 3),
        }
    return result


def _captured_mb(setup: Setup) -> float:
    """Bytes of the states that the largest micro-batch captures, each captured layer once."""
    config = setup.target.text_config
    per_token = config.hidden_size * len(set(setup.settings.layer_ids)) * 4
    batches = [
        b for i in range(setup.num_shards) for b in shard_batches(i, setup.tokens, setup.settings)
    ]
    largest = max(len(batch) * int(setup.tokens.lengths[batch[0]]) for batch in batches)
    return largest * per_token / MB


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target-model", required=True)
    parser.add_argument("--input-data", required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--shard-size", type=int, default=32)
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPE_MAP))
    parser.add_argument("--compute-dtype", default="fp32", choices=list(DTYPE_MAP))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-plain", action="store_true", help="leave out (a), the slowest")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    directory = Path(tempfile.mkdtemp(dir="."))
    try:
        result = compare(args, directory)
    finally:
        shutil.rmtree(directory)
    machine = {
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
        "torch": torch.__version__,
    }
    print(json.dumps(vars(args) | machine | result))


if __name__ == "__main__":
    main()
