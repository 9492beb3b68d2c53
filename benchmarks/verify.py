r"""How fast `dspark.verify` reads: GB/s per core, from the page cache.

    python benchmarks/verify.py [--gigabytes 4] [--directory /dev/shm]

Writes a cache of random states (bf16, H 2560, 5 layers, rows of 1 to 4096 tokens), reads it once to
have it in memory, then checks it with one thread and with one per core. The last line is JSON.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from dspark.cache import (
    build_cache_manifest,
    compute_batch_cache,
    write_manifest,
    write_shard,
    write_target_weights,
)
from dspark.checks.cache_check import check_cache, default_workers

SEQ, HIDDEN, LAYERS, ROWS_PER_SHARD = 4096, 2560, [1, 10, 18, 26, 35], 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="real bytes (default: 4)")
    parser.add_argument("--directory", help="where the cache is written (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        write_cache(directory, int(args.gigabytes * 1e9))
        check_cache(directory, num_workers=default_workers())  # into the page cache
        results = [
            measure(directory, workers)
            for workers in sorted({1, default_workers()})
            for _ in range(args.repeats)
        ]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    for result in results:
        print("{threads} threads: {wall:.2f} GB/s, {core:.2f} GB per core second".format(**result))
    print(json.dumps({"best_gigabytes_per_core_second": max(r["core"] for r in results)}))


def measure(directory: str, workers: int) -> dict[str, float]:
    """Return GB of real data read, hashed and compared, per second and per second of a core.

    The second is what counts where other programs use the machine as well.
    """
    begun, cpu = time.perf_counter(), time.process_time()
    report = check_cache(directory, num_workers=workers)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    assert report.is_right, report.problems
    gigabytes = report.bytes_read / 1e9
    return {"threads": workers, "wall": gigabytes / seconds, "core": gigabytes / cpu_seconds}


def write_cache(directory: str, real_bytes: int) -> None:
    """Write a cache whose real tokens take about `real_bytes`."""
    token_bytes = 2 * HIDDEN * (len(LAYERS) + 1) + 16
    shards = max(1, round(real_bytes / (token_bytes * ROWS_PER_SHARD * SEQ / 2)))
    manifest = build_cache_manifest(
        target_model="random",
        target_model_type="qwen3",
        target_text_config=SimpleNamespace(
            vocab_size=1024, hidden_size=HIDDEN, num_hidden_layers=36
        ),
        seq_length=SEQ,
        dtype="bf16",
        num_samples=shards * ROWS_PER_SHARD,
        shard_size=ROWS_PER_SHARD,
        target_layer_ids=LAYERS,
        train_data_path="random",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256="0" * 64,
    )
    Path(directory).mkdir(exist_ok=True)
    write_manifest(directory, manifest)
    weight = SimpleNamespace(weight=torch.zeros(1024, HIDDEN))
    write_target_weights(directory, weight, weight, torch.bfloat16)
    for index in range(shards):
        write_shard(directory, index, compute_batch_cache(random_batch(index), torch.bfloat16))
    write_manifest(directory, manifest | {"complete": True})


def random_batch(seed: int) -> SimpleNamespace:
    """Return one shard's rows, of 1 to SEQ tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, SEQ + 1, (ROWS_PER_SHARD,), generator=random)
    real = torch.arange(SEQ) < lengths[:, None]
    states = torch.randn(ROWS_PER_SHARD, SEQ, HIDDEN, generator=random).bfloat16()
    return SimpleNamespace(
        input_ids=torch.randint(1024, (ROWS_PER_SHARD, SEQ), generator=random) * real,
        loss_mask=real.long(),
        target_hidden_states=states.repeat(1, 1, len(LAYERS)),
        target_last_hidden_states=states,
        lengths=lengths,
    )


if __name__ == "__main__":
    main()
