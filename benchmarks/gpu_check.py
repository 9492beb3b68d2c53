"""Is the whole path right, and as fast as the device, on the GPU at hand?

Builds a target of random weights in the shape of Qwen3-4B, writes a cache of rows with realistic
lengths to local disk, compares rows of it with transformers' own hidden states, and measures:

    ceiling    FLOP/s of a large matrix product in the compute dtype
    forward    FLOP/s and tokens/s of dspark's forwards, states captured and dropped
    dspark     the same, states converted, copied to the host, digested and written

No network. Under five minutes on one data-centre GPU; ``--device cpu --tiny`` tries the script
anywhere. Prints a table and, as the last line, the same as JSON.

    python benchmarks/gpu_check.py --directory /local/disk
"""

import argparse
import gc
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench_cache import cache_settings, chat_lengths, random_tokens
from dspark.cache import CachedDSparkDataset, write_manifest
from dspark.data.tokens import Tokens
from dspark.job.forward import forwards, shard_batches
from dspark.job.pipeline import write_shards
from dspark.model.capture import Target
from dspark.plan import count_shards
from dspark.target import check_target, default_layer_ids

# Qwen/Qwen3-4B's config.json
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = QWEN3_4B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # of a token's largest magnitude


def build_target(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> Target:
    """Return a target of random weights, made on the device."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=40960, tie_word_embeddings=True)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layer_ids = default_layer_ids(num_layers=config.num_hidden_layers, num_captured=5)
    return Target(model, layer_ids)


def model_flops(target: Target, tokens: Tokens) -> float:
    """Return the floating-point operations of the decoder over all real tokens.

    Two per weight and token, and four per head dimension and pair of tokens in causal attention.
    """
    config = target.text_config
    embedding = target.embed_tokens.weight.numel()
    weights = sum(p.numel() for p in target.model.parameters()) - embedding
    pairs = float((tokens.lengths.astype(np.float64) ** 2).sum()) / 2
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 2.0 * weights * tokens.counts.tokens + attention


def timed(device: torch.device, work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes, the device's queue included."""
    _synchronize(device)
    begin = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_ceiling(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of the best of several square matrix products."""
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    torch.mm(a, b)
    seconds = min(timed(device, lambda: torch.mm(a, b)) for _ in range(10))
    return 2.0 * size**3 / seconds


@torch.no_grad()
def largest_difference(target: Target, cache_dir: str, rows: list[int]) -> float:
    """Return the largest difference to transformers' own states, as a share of each token's."""
    dataset = CachedDSparkDataset(cache_dir, check="checksums")
    worst = 0.0
    for row in rows:
        item = dataset[row]
        length = int(item["loss_mask"].sum())
        ids = item["input_ids"][:length].to(target.device)[None]
        states = target.model(ids, output_hidden_states=True, logits_to_keep=1).hidden_states
        wanted = [states[i + 1] for i in target.layer_ids] + [states[-1]]
        found = torch.cat(
            [item["target_hidden_states"], item["target_last_hidden_states"]], dim=-1
        )[:length].to(target.device)
        parts = found.split(target.hidden_size, dim=-1)
        for part, want in zip(parts, wanted, strict=True):
            scale = want[0].float().abs().amax(-1, keepdim=True)
            worst = max(worst, float(((part.float() - want[0].float()).abs() / scale).max()))
    return worst


def run(args: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Build, write, compare and measure."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = build_target(TINY if args.tiny else QWEN3_4B, device, dtype)
    check_target(target)
    lengths = chat_lengths(args.rows, mean=args.seq_length // 3, longest=args.seq_length)
    tokens = random_tokens(directory / "tokens", lengths, vocab_size=target.vocab_size)
    manifest, settings = cache_settings(
        target,
        tokens,
        seq_length=args.seq_length,
        batch_size=args.batch_size,
        shard_size=args.shard_size,
    )
    num_shards = count_shards(num_rows=tokens.counts.rows, shard_size=args.shard_size)
    cache_dir = str(directory / "cache")

    def forward_alone() -> None:
        for index in range(num_shards):
            for _ in forwards(target, shard_batches(index, tokens, settings), tokens, settings):
                pass

    def whole() -> None:
        write_manifest(cache_dir, manifest)
        write_shards(cache_dir, range(num_shards), target, tokens, settings)

    flops = model_flops(target, tokens)
    ceiling = matmul_ceiling(device, dtype, 512 if args.tiny else 8192)
    first = shard_batches(0, tokens, settings)[:2]
    for _ in forwards(target, first, tokens, settings):  # kernels are chosen on first use
        pass
    forward_seconds = timed(device, forward_alone)
    seconds = timed(device, whole)
    write_manifest(cache_dir, manifest | {"complete": True})
    gc.collect()
    written = sum(path.stat().st_blocks * 512 for path in Path(cache_dir).iterdir())
    worst = largest_difference(target, cache_dir, list(range(0, args.rows, args.rows // 8)))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tokens": tokens.counts.tokens,
        "ceiling_tflops": round(ceiling / 1e12, 2),
        "forward_share_of_ceiling": round(flops / forward_seconds / ceiling, 3),
        "dspark_share_of_ceiling": round(flops / seconds / ceiling, 3),
        "dspark_over_forward": round(seconds / forward_seconds, 3),
        "forward_tokens_per_s": round(tokens.counts.tokens / forward_seconds),
        "dspark_tokens_per_s": round(tokens.counts.tokens / seconds),
        "written_gb_per_s": round(written / 1e9 / seconds, 3),
        "host_peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "device_peak_gb": round(
            torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0, 2
        ),
        "largest_difference": worst,
        "right": worst <= TOLERANCE[dtype] + 2**-8,  # one bf16 rounding more on disk
    }


def main() -> None:
    """Run and print; the last line is JSON. Exits with 1 if the states are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--shard-size", type=int, default=64)
    parser.add_argument("--directory", default=".", help="a local disk with 60 GB free")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        result = run(args, directory)
    finally:
        shutil.rmtree(directory)
    for name, value in result.items():
        print(f"{name:26} {value}")
    print(json.dumps(vars(args) | result))
    raise SystemExit(0 if result["right"] else 1)


if __name__ == "__main__":
    main()
