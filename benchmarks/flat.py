"""Do time per token and memory stay the same for many rows, long rows, large shards?

Random targets write caches of 64 to 4,096 rows and of rows of 80 to 1,000 tokens on average (time
per real token), and of 4,096 rows in shards of 32 and of 4,096 (peak memory of the process). Beside
each time stands that of the bare forward of the same micro-batches. Attention makes a long row
dearer per token in any model; here it is next to nothing, so that what dspark adds shows. Prints a
table and, as the last line, JSON.

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

VOCAB, BATCH_SIZE = 1024, 1


@dataclass(frozen=True)
class Case:
    """One cache to write."""

    rows: int
    mean_length: int
    seq_length: int = 2048
    shard_size: int = 256


@dataclass
class Measured:
    """The best of several rounds."""

    tokens: int = 0
    dspark_us: float = float("inf")  # per real token
    forward_us: float = float("inf")
    peak_mb: float = 0.0  # of the whole process while dspark ran


SMALL = Case(256, 413, seq_length=1024, shard_size=32)
ROWS = [Case(rows, 80) for rows in (64, 512, 4096)]
LENGTHS = [Case(65_536 // mean, mean) for mean in (80, 300, 1000)]
SHARDS = [Case(4096, 413, seq_length=1024, shard_size=size) for size in (32, 4096)]


def random_target(hidden_size: int, num_layers: int) -> Target:
    """Return a target of random weights, nearly all of them in its feed-forward parts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
    )
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), [0])


def measure(case: Case, target: Target, directory: Path, best: Measured) -> None:
    """Write one cache, run its bare forwards, and keep the best times and the largest peak."""
    lengths = chat_lengths(case.rows, mean=case.mean_length, longest=case.seq_length)
    tokens = random_tokens(directory / "tokens", lengths, vocab_size=VOCAB)
    _, settings = cache_settings(
        target,
        tokens,
        seq_length=case.seq_length,
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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    best = {case: Measured() for case in [*ROWS, *LENGTHS, *SHARDS]}
    directory = Path(tempfile.mkdtemp(dir="."))
    try:
        target = random_target(64, 2)
        measure(SMALL, target, directory, Measured())  # what runs first also loads libraries
        for case in SHARDS:
            measure(case, target, directory, best[case])
        target = random_target(512, 4)
        measure(ROWS[0], target, directory, Measured())
        for _ in range(args.rounds):
            for case in [*ROWS, *LENGTHS]:
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
