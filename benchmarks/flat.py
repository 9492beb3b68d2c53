"""Do time per token and memory stay the same for many rows, long rows, large shards?

A small random target writes caches of 64 to 4,096 rows, of rows of 80 to 1,000 tokens on average,
and in shards of 32 and of 4,096 rows. Beside the time per real token stands that of the bare
forward of the same micro-batches: attention alone makes a long row dearer per token, most of all in
a small model, so the one here is mostly feed-forward. Prints a table and, as the last line, JSON.

    python benchmarks/flat.py
"""

import argparse
import json
import platform
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench_cache import cache_settings, chat_lengths, random_tokens
from dspark.job.forward import forwards, shard_batches
from dspark.job.pipeline import write_shards
from dspark.model.capture import Target
from dspark.plan import count_shards
from process_memory import peak_bytes, reset_peak

SEQ_LENGTH, BATCH_SIZE, VOCAB = 2048, 4, 1024


@dataclass(frozen=True)
class Case:
    """One cache to write."""

    rows: int
    mean_length: int
    shard_size: int


@dataclass
class Measured:
    """The best of several rounds."""

    tokens: int = 0
    dspark_us: float = float("inf")  # per real token
    forward_us: float = float("inf")
    peak_mb: float = 0.0  # of the whole process while dspark ran


ROWS = [Case(rows, 80, 64) for rows in (64, 256, 1024, 4096)]
LENGTHS = [Case(131_072 // mean, mean, 64) for mean in (80, 250, 500, 1000)]
SHARDS = [Case(4096, 80, shard_size) for shard_size in (32, 4096)]


def small_target() -> Target:
    """Return a target of random weights, most of them in its feed-forward parts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQ_LENGTH,
    )
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), [0, 1])


def measure(case: Case, target: Target, directory: Path, best: Measured) -> None:
    """Write one cache, run its bare forwards, and keep the best times and the largest peak."""
    lengths = chat_lengths(case.rows, mean=case.mean_length, longest=SEQ_LENGTH)
    tokens = random_tokens(directory / "tokens", lengths, vocab_size=VOCAB)
    _, settings = cache_settings(
        target,
        tokens,
        seq_length=SEQ_LENGTH,
        batch_size=BATCH_SIZE,
        shard_size=case.shard_size,
    )
    shards = range(count_shards(num_rows=case.rows, shard_size=case.shard_size))
    cache = directory / "cache"
    cache.mkdir()
    reset_peak()
    begin = time.perf_counter()
    write_shards(str(cache), shards, target, tokens, settings)
    seconds = time.perf_counter() - begin
    best.peak_mb = max(best.peak_mb, peak_bytes() / 1e6)
    shutil.rmtree(cache)
    begin = time.perf_counter()
    for index in shards:
        for _ in forwards(target, shard_batches(index, tokens, settings), tokens, settings):
            pass
    forward_seconds = time.perf_counter() - begin
    best.tokens = tokens.counts.tokens
    best.dspark_us = min(best.dspark_us, seconds / best.tokens * 1e6)
    best.forward_us = min(best.forward_us, forward_seconds / best.tokens * 1e6)


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = small_target()
    cases = list(dict.fromkeys([*ROWS, *LENGTHS, *SHARDS]))
    best = {case: Measured() for case in cases}
    directory = Path(tempfile.mkdtemp(dir="."))
    try:
        measure(cases[0], target, directory, Measured())  # what runs first is slow
        for _ in range(args.rounds):
            for case in cases:
                measure(case, target, directory, best[case])
    finally:
        shutil.rmtree(directory)
    report(best, args)


def report(best: dict[Case, Measured], args: argparse.Namespace) -> None:
    """Print the table and the JSON line."""
    print(f"{'rows':>6} {'mean':>6} {'shard':>6} {'tokens':>8} "
          f"{'dspark us':>10} {'forward us':>10} {'peak MB':>8}")  # fmt: skip
    for case, measured in best.items():
        print(f"{case.rows:6} {case.mean_length:6} {case.shard_size:6} {measured.tokens:8} "
              f"{measured.dspark_us:10.1f} {measured.forward_us:10.1f} "
              f"{measured.peak_mb:8.0f}")  # fmt: skip
    spreads = {
        name: round(max(values) / min(values) - 1, 3)
        for name, values in (
            ("time_over_rows", [best[case].dspark_us for case in ROWS]),
            ("time_over_lengths", [best[case].dspark_us for case in LENGTHS]),
            ("peak_over_shard_sizes", [best[case].peak_mb for case in SHARDS]),
        )
    }
    print(", ".join(f"{name} within {spread:.1%}" for name, spread in spreads.items()))
    cases = [asdict(case) | asdict(measured) for case, measured in best.items()]
    machine = {"machine": platform.machine(), "torch": torch.__version__}
    print(json.dumps(vars(args) | machine | spreads | {"cases": cases}))


if __name__ == "__main__":
    main()
