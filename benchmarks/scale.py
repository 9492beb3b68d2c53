r"""How the work spreads over ranks: measured for one and two, planned for hundreds.

    python benchmarks/scale.py                         the plan: seconds
    python benchmarks/scale.py --target-model DIR      also the run: one rank, then two

The plan deals shards of 256 rows of 1,300,000 conversations to 512 ranks and says by how much the
slowest has more tokens than the mean. The run computes the same shards with one rank and with two,
one thread each, and compares the seconds between the first and the last forward. The last line is
JSON.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dspark.plan import count_shards, deal_shards

ROWS, SHARD_SIZE, RANKS, SEQ_LENGTH = 1_300_000, 256, 512, 4096
# Tokens per conversation of open chat corpora: most are short, a few are cut at the row's end.
MEDIAN, SPREAD = 420, 1.0  # of a log-normal distribution
RUN_ROWS, RUN_SHARD, RUN_SEQ = 24, 2, 256


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", help="a directory: also run it with one and two ranks")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    result = plan()
    print(f"{platform.machine()}, {os.cpu_count()} cores")
    print(
        "{rows:,} rows in {shards:,} shards over {ranks} ranks: the slowest has "
        "{excess:.2%} more tokens than the mean; planned in {seconds:.2f} s".format(**result)
    )
    if args.target_model:
        result |= run(args.target_model, args.repeats)
        print(
            "one rank {one_rank:.1f} s, two ranks {two_ranks:.1f} s: {speedup:.2f} times".format(
                **result
            )
        )
    print(json.dumps(result))


def plan() -> dict[str, float]:
    """Deal the shards of drawn lengths."""
    random = np.random.default_rng(0)
    lengths = np.minimum(
        random.lognormal(np.log(MEDIAN), SPREAD, ROWS).astype(int) + 16, SEQ_LENGTH
    )
    begun = time.perf_counter()
    starts = np.arange(count_shards(num_rows=ROWS, shard_size=SHARD_SIZE)) * SHARD_SIZE
    tokens = dict(enumerate(np.add.reduceat(lengths, starts).tolist()))
    shares = deal_shards(tokens, num_shares=RANKS)
    loads = np.array([sum(tokens[index] for index in share) for share in shares])
    return {
        "rows": ROWS,
        "shards": len(tokens),
        "ranks": RANKS,
        "excess": float(loads.max() / loads.mean() - 1),
        "seconds": time.perf_counter() - begun,
    }


def run(target: str, repeats: int) -> dict[str, float]:
    """Compute the same shards with one rank and with two, and return the best seconds of each."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        chats = write_chats(root / "chats.jsonl")
        seconds = {
            ranks: min(
                run_ranks(target, chats, root / f"{ranks}-{repeat}", ranks)
                for repeat in range(repeats)
            )
            for ranks in (1, 2)
        }
    return {
        "one_rank": seconds[1],
        "two_ranks": seconds[2],
        "speedup": seconds[1] / seconds[2],
    }


def run_ranks(target: str, chats: Path, cache: Path, ranks: int) -> float:
    """Return the seconds that the forwards and the writing took, as the command says itself."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "-m", "dspark.precompute"),
        *("--target-model", target, "--input-data", str(chats), "--output-dir", str(cache)),
        *("--seq-length", str(RUN_SEQ), "--batch-size", "1", "--shard-size", str(RUN_SHARD)),
        *("--device", "cpu", "--num-workers", "1", "--on-bad-row", "skip"),
    ]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, check=True)
    found = re.search(r"wrote (\d+) rows.* ([\d,]+) tokens/s", done.stderr)
    assert found is not None, done.stderr
    record = json.loads((cache / "manifest.json").read_bytes())
    tokens: int = record["provenance"]["counts"]["tokens"]
    return tokens / int(found[2].replace(",", ""))


def write_chats(path: Path) -> Path:
    """Write conversations of drawn lengths."""
    random = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "rain", "over", "hills"]
    with path.open("w") as file:
        for _ in range(RUN_ROWS):
            count = int(np.clip(random.lognormal(np.log(100), 0.6), 20, 220))
            answer = " ".join(random.choice(words, count))
            messages = [
                {"role": "user", "content": "Tell me a story."},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


if __name__ == "__main__":
    main()
