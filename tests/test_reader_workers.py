"""Reading in worker processes: however they start, whatever the user keeps, at low limits."""

import ast
import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import CacheError
from dspark.offline_cache import build_loader, collate
from dspark.reading import worker_memory
from tensor_caches import SmallCache, assert_rows, row_numbers, write_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> SmallCache:
    return write_cache(tmp_path_factory.mktemp("cache"), num_rows=60, shard_size=7)


def batches_of(cache: SmallCache, **options: Any) -> Any:
    """A loader with two workers over `cache`."""
    options = {"batch_size": 1, "shuffle": False, "num_workers": 2} | options
    return build_loader(cache.open(), **options)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_read_a_dataset_that_this_process_has_read(cache, method):
    dataset = cache.open()
    assert_rows(collate([dataset[0]]), cache, [0])
    loader = build_loader(
        dataset, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=method
    )
    batches = list(loader)
    rows = row_numbers(batches)
    assert sorted(row for part in rows for row in part) == list(range(60))
    for batch, part in zip(batches, rows, strict=True):
        assert_rows(batch, cache, part)


@pytest.mark.parametrize("options", [{"mmap": True}, {"check": "checksums"}])
def test_workers_read_in_every_way(cache, options):
    loader = build_loader(cache.open(**options), batch_size=8, shuffle=False, num_workers=2)
    rows = torch.cat([batch["states"] for batch in loader])
    assert torch.equal(rows, cache.rows["states"])


def test_trimmed_batches_come_out_of_workers_as_they_do_without(cache):
    alone, with_workers = (
        list(batches_of(cache, batch_size=4, trim=True, num_workers=workers)) for workers in (0, 2)
    )
    assert len({batch["ids"].shape for batch in alone}) > 1
    for one, other in zip(alone, with_workers, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_shard_is_an_ordinary_error_that_names_it(tmp_path, num_workers):
    cache = write_cache(tmp_path)
    loader = build_loader(cache.open(), batch_size=2, shuffle=False, num_workers=num_workers)
    os.truncate(cache.shard(2), 300)
    with pytest.raises(CacheError, match=r"shard-000002\.safetensors"):
        list(loader)


def test_any_number_of_batches_can_be_kept_and_needs_no_open_files(cache):
    loader = batches_of(cache)
    before = len(os.listdir("/proc/self/fd"))
    kept = list(loader)
    slices = [batch["states"][0, 2:4] for batch in loader]
    views = [batch["states"].view(-1) for batch in loader]
    assert len(os.listdir("/proc/self/fd")) < before + 10
    del loader
    gc.collect()
    states = cache.rows["states"]
    for row in range(60):
        assert_rows(kept[row], cache, [row])
        assert torch.equal(slices[row], states[row, 2:4])
        assert torch.equal(views[row], states[row].view(-1))


def test_batches_that_are_let_go_leave_their_memory_to_the_next_ones(cache):
    places = {batch["states"].data_ptr() for batch in batches_of(cache)}
    assert len(places) <= 2 * 4  # workers x (2 read ahead + the one in use + the one asked for)


def test_a_small_tensor_that_is_kept_does_not_hold_the_large_one_beside_it(cache):
    places, kept = set(), []
    for batch in batches_of(cache):
        places.add(batch["states"].data_ptr())
        kept.append(batch["ids"])
    assert len(places) <= 2 * 4
    assert torch.equal(torch.cat(kept), cache.rows["ids"])


def test_shared_memory_is_given_back_when_a_pass_and_its_batches_are_gone(cache):
    gc.collect()
    before = len(worker_memory._groups)
    batches = iter(batches_of(cache))
    kept = next(batches)
    assert len(row_numbers(list(batches))) == 59
    del batches
    gc.collect()
    assert len(worker_memory._groups) == before + 1
    del kept
    gc.collect()
    assert len(worker_memory._groups) == before


def drop(kept: list[Any]) -> None:
    kept.clear()
    gc.collect()


def test_a_child_that_forgets_a_batch_does_not_take_it_from_its_parent(cache):
    batches = iter(batches_of(cache))
    kept = [next(batches)]
    child = multiprocessing.get_context("fork").Process(target=drop, args=(kept,))
    child.start()
    child.join()
    assert child.exitcode == 0
    for _ in batches:
        pass
    assert_rows(kept[0], cache, [0])


def test_two_passes_may_run_at_once(cache):
    loader = batches_of(cache, batch_size=6)
    for one, other in zip(loader, loader, strict=True):
        assert torch.equal(one["states"], other["states"])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_was_broken_off_leaves_the_next_one_whole(cache, persistent):
    loader = batches_of(cache, batch_size=6, persistent_workers=persistent)
    for _, batch in zip(range(3), loader, strict=False):
        assert len(batch["ids"]) == 6
    for _ in range(2):
        whole = list(loader)
        assert torch.equal(torch.cat([batch["states"] for batch in whole]), cache.rows["states"])


LOW_LIMITS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
sys.path.insert(0, sys.argv[1])
import psutil
from pathlib import Path
from tensor_caches import SmallCache
from dspark.offline_cache import build_loader

def open_shards(process):
    return sum(file.path.endswith(".safetensors") for file in process.open_files())

def resident(processes):
    return sum(process.memory_info().rss for process in processes) / 2**20

loader = build_loader(
    SmallCache(Path(sys.argv[2]), {}, [0] * 300, 1).open(),
    batch_size=3, shuffle=True, num_workers=2, persistent_workers=True,
)
family, sizes = None, []
for epoch in range(12):
    rows = sorted(row for batch in loader for row in batch["ids"][:, 0].tolist())
    assert rows == list(range(300)), rows
    family = family or [psutil.Process(), *psutil.Process().children()]
    sizes.append(resident(family))
workers = [open_shards(process) for process in family[1:]]
print(len(workers), max(workers), open_shards(family[0]), round(sizes[-1] - sizes[1], 1))
"""


def test_three_hundred_shards_at_128_open_files_with_flat_memory(tmp_path):
    cache = write_cache(tmp_path, num_rows=300, shard_size=1)
    command = [sys.executable, "-c", LOW_LIMITS, str(Path(__file__).parent), str(cache.directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    workers, open_by_a_worker, open_here, grown_mib = done.stdout.split()
    assert (int(workers), int(open_by_a_worker), int(open_here)) == (2, 64, 0)
    assert float(grown_mib) < 8


TWO_RANKS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from pathlib import Path
from tensor_caches import SmallCache, row_numbers
from dspark.offline_cache import build_loader

dist.init_process_group("gloo")
dataset = SmallCache(Path(sys.argv[2]), {}, [0] * 7, 3).open()
for num_workers in (0, 2):
    loader = build_loader(
        dataset, batch_size=2, shuffle=True, num_workers=num_workers, distributed=True
    )
    loader.sampler.set_epoch(1)
    rows = [None, None]
    dist.all_gather_object(rows, row_numbers(list(loader)))
    if dist.get_rank() == 0:
        print("rows", rows)
dist.destroy_process_group()
"""


def test_ranks_of_torchrun_read_parts_that_make_up_the_whole(tmp_path):
    cache = write_cache(tmp_path / "cache", num_rows=7)
    script = tmp_path / "read.py"
    script.write_text(TWO_RANKS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(script), str(Path(__file__).parent), str(cache.directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rows")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    first, second = ast.literal_eval(lines[0].removeprefix("rows "))
    assert [len(rows) for rows in first] == [len(rows) for rows in second] == [2, 2]
    assert {row for part in (first, second) for rows in part for row in rows} == set(range(7))
