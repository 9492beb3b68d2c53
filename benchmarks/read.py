r"""How fast a cache is read: rows per second and GB/s, beside a memory copy and the plain way.

    python benchmarks/read.py [--rows 16] [--rounds 3] [--directory DIR]

Writes two caches of bf16 rows, 2,048 tokens by 15,360 and 3,072 wide: one of full rows and one
whose lengths are those of real chats. Reads them with 0 and 2 workers in batches of 1 and 8, from
the page cache and after dropping it:

    memcpy   the same bytes, copied into memory that was used before
    plain    safe_open, get_slice(name)[row] for every tensor, torch.stack
    dspark   build_loader; "trimmed" cuts each batch to its longest row

The contenders take turns; the best round of each counts. On a machine that is shared with other
work, the ratios per second of a core say more than those on the clock. Then it reads 10 epochs and
looks at the resident memory, and opens a cache of 10,000 shards. The last line is JSON.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors import safe_open

from dspark.disk.manifest import shard_path
from dspark.disk.shard_file import ShardMetadata, TensorSpec
from dspark.disk.shard_writer import write_whole_shard
from dspark.offline_cache import Batch, CachedTensorDataset, build_loader

TOKENS, ROWS_PER_SHARD = 2048, 8
SPECS = {
    "input_ids": TensorSpec(torch.int64, (TOKENS,)),
    "loss_mask": TensorSpec(torch.int64, (TOKENS,)),
    "target_hidden_states": TensorSpec(torch.bfloat16, (TOKENS, 15360)),
    "target_last_hidden_states": TensorSpec(torch.bfloat16, (TOKENS, 3072)),
}
ROW_BYTES = sum(spec.nbytes for spec in SPECS.values())
# 16 quantiles of the lengths of 512 chats of several turns, in a shuffled order.
CHAT_LENGTHS = [352, 178, 753, 297, 142, 452, 1184, 246, 331, 202, 629, 274, 106, 506, 395, 847]

Pass = Callable[[], Iterable[Any]]


class Rate(NamedTuple):
    """Rows per second on the clock, and per second of a core of this process."""

    clock: float
    cores: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="full rows, 75 MB each (default: 16)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where the caches are written (default: temporary)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        full = write_cache(Path(directory, "full"), [TOKENS] * args.rows)
        chats = write_cache(Path(directory, "chats"), CHAT_LENGTHS)
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
        print("| page cache | workers | batch | way | GB/s | rows/s | GB per second of a core |")
        print("|---|---:|---:|---|---:|---:|---:|")
        results = {
            (state, workers, batch_size): compare(
                full, chats, state, workers, batch_size, args.rounds if state == "warm" else 1
            )
            for state in ("warm", "cold")
            for workers in (0, 2)
            for batch_size in (1, 8)
        }
        summary = summarize(results)
        summary["resident_growth_mib_over_10_epochs"] = resident_growth(full)
        clock, cores = opening_seconds(Path(directory, "many"))
        summary["seconds_to_open_10000_shards_clock"] = round(clock, 2)
        summary["seconds_to_open_10000_shards_cores"] = round(cores, 2)
    print(json.dumps(summary))


def write_cache(directory: Path, lengths: Sequence[int]) -> CachedTensorDataset:
    """Write a cache of random rows and open it."""
    directory.mkdir()
    for index, start in enumerate(range(0, len(lengths), ROWS_PER_SHARD)):
        part = lengths[start : start + ROWS_PER_SHARD]
        samples = {
            name: torch.ones(len(part), *spec.shape).to(spec.dtype) for name, spec in SPECS.items()
        }
        path = Path(shard_path(str(directory), index))
        write_whole_shard(path, samples, metadata=ShardMetadata(index, None, tuple(part)))
    return CachedTensorDataset(
        str(directory), row_specs=SPECS, num_rows=len(lengths), shard_size=ROWS_PER_SHARD
    )


class PlainDataset(torch.utils.data.Dataset[Batch]):
    """A row as a slice of every tensor, from files that stay open."""

    def __init__(self, directory: str, num_rows: int) -> None:
        self._directory, self._num_rows = directory, num_rows
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Batch:
        shard, row = divmod(index, ROWS_PER_SHARD)
        if shard not in self._files:
            self._files[shard] = safe_open(shard_path(self._directory, shard), "pt")
        return {name: self._files[shard].get_slice(name)[row] for name in SPECS}


def plain_loader(dataset: CachedTensorDataset, **options: Any) -> Pass:
    """Return passes over a cache in the plain way."""
    plain = PlainDataset(dataset.cache_dir, len(dataset))
    return torch.utils.data.DataLoader(plain, shuffle=True, **options).__iter__


def copies(rows: int, batch_size: int) -> Pass:
    """Return passes that copy the bytes of `rows` rows, a batch at a time."""
    source = torch.ones(batch_size * ROW_BYTES // 8, dtype=torch.int64)
    target = source.clone()
    return lambda: (target.copy_(source) for _ in range(rows // batch_size))


def compare(
    full: CachedTensorDataset,
    chats: CachedTensorDataset,
    state: str,
    workers: int,
    batch_size: int,
    rounds: int,
) -> dict[str, Rate]:
    """Return the rows per second of every contender, and print them."""
    options = {
        "batch_size": batch_size,
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "multiprocessing_context": "fork" if workers else None,
    }
    contenders: dict[str, tuple[CachedTensorDataset, Pass]] = {
        "memcpy": (full, copies(len(full), batch_size)),
        "plain": (full, plain_loader(full, **options)),
        "dspark": (full, build_loader(full, shuffle=True, **options).__iter__),
        "plain, chats": (chats, plain_loader(chats, **options)),
        "dspark, chats": (chats, build_loader(chats, shuffle=True, **options).__iter__),
        "dspark, chats, trimmed": (
            chats,
            build_loader(chats, shuffle=True, trim=True, **options).__iter__,
        ),
    }
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for measured in [False] + [True] * rounds:  # the first round is for starting and warming up
        for name, (dataset, one_pass) in contenders.items():
            set_page_cache(dataset, state)
            begun, of_cores = time.perf_counter(), time.process_time()
            for _ in one_pass():
                pass
            if measured:
                seconds[name].append((time.perf_counter() - begun, time.process_time() - of_cores))
    rates = {}
    for name, (dataset, _) in contenders.items():
        clock, cores = (len(dataset) / min(column) for column in zip(*seconds[name], strict=True))
        rates[name] = Rate(clock, cores)
        print(
            f"| {state} | {workers} | {batch_size} | {name} | {clock * ROW_BYTES / 1e9:.2f} "
            f"| {clock:.1f} | {f'{cores * ROW_BYTES / 1e9:.2f}' if not workers else ''} |",
            flush=True,
        )
    return rates


def set_page_cache(dataset: CachedTensorDataset, state: str) -> None:
    """Make the next read of a cache come from the page cache ("warm") or from the disk ("cold").

    Some systems reclaim pages that were not used for seconds, so warm files are read just before.
    """
    scratch = bytearray(4 * 2**20)
    for path in Path(dataset.cache_dir).iterdir():
        with path.open("rb", buffering=0) as file:
            if state == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while state == "warm" and file.readinto(scratch):
                pass


def summarize(results: dict[tuple[str, int, int], dict[str, Rate]]) -> dict[str, float]:
    """Return the ratios that matter, the worst of both batch sizes, page cache warm, no workers."""
    warm = [results["warm", 0, batch_size] for batch_size in (1, 8)]

    def worst(of: str, to: str, field: str) -> float:
        return min(getattr(rates[of], field) / getattr(rates[to], field) for rates in warm)

    return {
        f"{label}_{field}": round(worst(of, to, field), 2)
        for field in ("clock", "cores")
        for label, of, to in (
            ("of_memcpy", "dspark", "memcpy"),
            ("times_plain", "dspark", "plain"),
            ("trimmed_times_plain", "dspark, chats, trimmed", "plain, chats"),
        )
    }


def resident_growth(dataset: CachedTensorDataset) -> float:
    """Return by how many MiB this process grows from its first to its tenth epoch."""
    loader = build_loader(dataset, batch_size=4, shuffle=True)
    sizes = []
    for _ in range(10):
        for _ in loader:
            pass
        sizes.append(psutil.Process().memory_info().rss / 2**20)
    return sizes[-1] - sizes[0]


def opening_seconds(directory: Path) -> tuple[float, float]:
    """Return how long a cache of 10,000 small shards takes to open, the best of three.

    On the clock and in seconds of a core, as in `Rate`.
    """
    directory.mkdir()
    specs = {"ids": TensorSpec(torch.int64, (4,))}
    first = Path(shard_path(str(directory), 0))
    write_whole_shard(
        first, {"ids": torch.zeros(1, 4, dtype=torch.int64)}, metadata=ShardMetadata(0, None, (4,))
    )
    content = first.read_bytes()
    for index in range(1, 10_000):
        Path(shard_path(str(directory), index)).write_bytes(content)
    seconds = []
    for _ in range(3):
        begun, of_cores = time.perf_counter(), time.process_time()
        CachedTensorDataset(str(directory), row_specs=specs, num_rows=10_000, shard_size=1)
        seconds.append((time.perf_counter() - begun, time.process_time() - of_cores))
    return min(seconds)


if __name__ == "__main__":
    main()
