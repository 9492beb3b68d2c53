#!/usr/bin/env python3
r"""Time and peak memory of a capture against a full causal-LM forward.

    python benchmarks/capture.py --model models/smollm2-135m-instruct
    python benchmarks/capture.py --model Qwen/Qwen3-4B --device cuda --dtype bf16 --batch-size 8

Random token ids of realistic lengths, three ways, best of alternating rounds:

    full      rows padded to --seq-length, the whole model with output_hidden_states: what a plain
              script does; its logits alone are batch x seq_length x vocabulary
    padded    the same padded rows, `Target.capture`: what leaving out logits and cache saves
    capture   rows padded to the longest of their micro-batch, sorted by length: what dspark does

Prints a table and, last, a JSON line. Memory is the peak above what the loaded model takes.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

import process_memory
from bench_cache import chat_lengths
from dspark.target import Target, default_layer_ids, load_config, load_target

Batch = tuple[Tensor, Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Measure and print."""
    args = parse_args()
    config = load_config(args.model).get_text_config(decoder=True)
    layer_ids = default_layer_ids(num_layers=config.num_hidden_layers, num_captured=5)
    target = load_target(
        args.model, layer_ids=layer_ids, device=args.device, compute_dtype=DTYPES[args.dtype]
    )
    lengths = chat_lengths(args.rows, mean=args.mean_length, longest=args.seq_length)
    lengths.sort(reverse=True)
    padded = batches(lengths, args.batch_size, target.vocab_size, width=args.seq_length)
    trimmed = batches(lengths, args.batch_size, target.vocab_size, width=None)
    ways: dict[str, tuple[list[Batch], Callable[[Batch], object]]] = {
        "full": (padded, lambda batch: full_forward(target, batch)),
        "padded": (padded, lambda batch: target.capture(*batch)),
        "capture": (trimmed, lambda batch: target.capture(*batch)),
    }
    best = dict.fromkeys(ways, float("inf"))
    memory = dict.fromkeys(ways, 0)
    for _ in range(args.rounds):
        for name, (inputs, run) in ways.items():
            seconds, peak = measure(inputs, run, args.device)
            best[name], memory[name] = min(best[name], seconds), max(memory[name], peak)
    report(best, memory, tokens=sum(lengths), args=args)


def parse_args() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--mean-length", type=int, default=160)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def batches(lengths: list[int], size: int, vocab: int, *, width: int | None) -> list[Batch]:
    """Return ids and masks of `size` rows each, padded to `width` or to their longest row."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for start in range(0, len(lengths), size):
        part = lengths[start : start + size]
        ids = torch.randint(vocab, (len(part), width or part[0]), generator=generator)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(part)[:, None]).long()
        made.append((ids * mask, mask))
    return made


@torch.no_grad()
def full_forward(target: Target, batch: Batch) -> object:
    """Run the whole model, head included, and keep all of its hidden states."""
    ids, mask = (part.to(target.device) for part in batch)
    return target.causal_lm(input_ids=ids, attention_mask=mask, output_hidden_states=True)


def measure(inputs: list[Batch], run: Callable[[Batch], object], device: str) -> tuple[float, int]:
    """Return seconds and peak bytes above the start for all of `inputs`."""
    reset, peak = device_memory(device)
    before = reset()
    started = time.perf_counter()
    for batch in inputs:
        run(batch)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, peak() - before


def device_memory(device: str) -> tuple[Callable[[], int], Callable[[], int]]:
    """Return what starts a new peak and gives the bytes in use, and what gives the peak."""
    if torch.device(device).type != "cuda":
        return process_memory.reset_peak, process_memory.peak_bytes

    def reset() -> int:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    return reset, torch.cuda.max_memory_allocated


def report(
    best: dict[str, float], memory: dict[str, int], *, tokens: int, args: argparse.Namespace
) -> None:
    """Print the table and the JSON line."""
    print(f"{args.model}, {args.dtype} on {args.device}, {torch.get_num_threads()} threads: "
          f"{args.rows} rows, {tokens} real tokens, seq_length {args.seq_length}")  # fmt: skip
    print(f"{'':8} {'seconds':>9} {'tokens/s':>9} {'speedup':>8} {'peak MB':>8}")
    for name, seconds in best.items():
        speedup = best["full"] / seconds
        print(f"{name:8} {seconds:9.2f} {tokens / seconds:9.0f} {speedup:7.2f}x "
              f"{memory[name] / 1e6:8.0f}")  # fmt: skip
    print(json.dumps({"tokens": tokens, "seconds": best, "peak_bytes": memory}))


if __name__ == "__main__":
    main()
