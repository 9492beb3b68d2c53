"""Passes over a loader: order, ranks, and going on where another run stood."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from dspark.cache import CACHE_KEYS, CachedDSparkDataset, build_cached_dspark_dataloader
from dspark.offline_cache import build_loader, collate
from dspark.reading.cache_loader import CacheLoader
from dspark.reading.sampler import RowSampler
from tensor_caches import SmallCache, assert_rows, row_numbers, write_cache
from tiny_cache import LENGTHS, SHARD_SIZE, write_tiny_cache

BATCH = 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> SmallCache:
    return write_cache(tmp_path_factory.mktemp("cache"))


def rank_loader(
    cache: SmallCache, *, world_size: int, rank: int, num_workers: int = 0, batch_size: int = BATCH
) -> CacheLoader:
    """The loader that `build_loader` makes for one rank, without a process group."""
    dataset = cache.open()
    return CacheLoader(
        dataset,
        row_bytes={name: spec.nbytes for name, spec in dataset.row_specs.items()},
        sampler=RowSampler(len(dataset), shuffle=True, world_size=world_size, rank=rank),
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=collate,
    )


def test_a_pass_gives_every_row_once_and_whole(cache):
    loader = build_loader(cache.open(), batch_size=4, shuffle=True)
    batches = list(loader)
    assert len(loader) == len(batches) == 3
    rows = row_numbers(batches)
    assert [len(part) for part in rows] == [4, 4, 3]
    assert sorted(row for part in rows for row in part) == list(range(11))
    for batch, part in zip(batches, rows, strict=True):
        assert_rows(batch, cache, part)


def test_the_same_seed_gives_the_same_order_and_another_seed_another(cache):
    orders = [
        row_numbers(list(build_loader(cache.open(), batch_size=4, shuffle=True, seed=seed)))
        for seed in (5, 5, 6)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_a_finished_pass_moves_on_to_the_next_epoch_and_one_broken_off_does_not(cache):
    loader = build_loader(cache.open(), batch_size=4, shuffle=True)
    first = row_numbers([next(iter(loader))])
    whole = row_numbers(list(loader))
    assert whole[:1] == first
    assert loader.sampler.epoch == 1
    assert row_numbers(list(loader)) != whole


def test_set_epoch_through_the_loader_decides_the_order(cache):
    loader = build_loader(cache.open(), batch_size=4, shuffle=True)
    epochs = [row_numbers(list(loader)) for _ in range(3)]
    loader.sampler.set_epoch(1)
    assert row_numbers(list(loader)) == epochs[1]
    loader.sampler.set_epoch(0)
    assert row_numbers(list(loader)) == epochs[0]


def test_drop_last_leaves_out_what_does_not_fill_a_batch(cache):
    loader = build_loader(cache.open(), batch_size=4, shuffle=True, drop_last=True)
    assert [len(rows) for rows in row_numbers(list(loader))] == [4, 4]


@pytest.mark.parametrize("drop_last", [False, True])
def test_seven_rows_on_two_ranks(tmp_path, drop_last):
    cache = write_cache(tmp_path, num_rows=7)
    parts = []
    for rank in range(2):
        loader = CacheLoader(
            cache.open(),
            row_bytes={"ids": 96, "states": 120},
            sampler=RowSampler(7, shuffle=True, world_size=2, rank=rank, drop_last=drop_last),
            batch_size=2,
            drop_last=drop_last,
            collate_fn=collate,
        )
        parts.append(row_numbers(list(loader)))
    sizes = [[len(rows) for rows in part] for part in parts]
    read = [row for part in parts for rows in part for row in rows]
    if drop_last:
        assert sizes == [[2], [2]]
        assert len(set(read)) == 4
    else:
        assert sizes == [[2, 2], [2, 2]]
        assert sorted(set(read)) == list(range(7))


def test_trim_is_the_loaders_own_and_leaves_the_dataset_as_it_was(cache):
    dataset = cache.open()
    rows = [len(batch["ids"][0]) for batch in build_loader(
        dataset, batch_size=1, shuffle=False, trim=True
    )]  # fmt: skip
    assert rows == cache.lengths
    assert len(dataset[rows.index(min(rows))]["ids"]) == 12


def test_distributed_without_a_process_group_says_what_to_do(cache):
    with pytest.raises(ValueError, match="torchrun"):
        build_loader(cache.open(), batch_size=2, shuffle=True, distributed=True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_two_epochs_interrupted_after_any_batch_go_on_with_the_next_one(cache, world_size):
    for rank in range(world_size):
        loader = rank_loader(cache, world_size=world_size, rank=rank)
        whole = [row_numbers(list(loader)) for _ in range(2)]
        for epoch, seen in itertools.product(range(2), range(len(whole[0]) + 1)):
            stopped = rank_loader(cache, world_size=world_size, rank=rank)
            stopped.sampler.set_epoch(epoch)
            batches = iter(stopped)
            before = row_numbers([next(batches) for _ in range(seen)])
            state = json.loads(json.dumps(stopped.state_dict()))

            resumed = rank_loader(cache, world_size=world_size, rank=rank)
            resumed.load_state_dict(state)
            after = [row_numbers(list(resumed)) for _ in range(2 - epoch)]
            assert before == whole[epoch][:seen]
            assert [whole[epoch][:seen] + after[0], *after[1:]] == whole[epoch:]


@pytest.mark.parametrize(("stopped_with", "resumed_with"), [(2, 0), (0, 1), (2, 1)])
def test_batches_read_ahead_by_workers_are_not_lost_or_repeated(cache, stopped_with, resumed_with):
    whole = row_numbers(list(rank_loader(cache, world_size=1, rank=0)))
    stopped = rank_loader(cache, world_size=1, rank=0, num_workers=stopped_with)
    batches = iter(stopped)
    before = row_numbers([next(batches) for _ in range(2)])
    resumed = rank_loader(cache, world_size=1, rank=0, num_workers=resumed_with)
    resumed.load_state_dict(stopped.state_dict())
    assert before + row_numbers(list(resumed)) == whole


def test_the_state_is_the_same_on_all_ranks_and_serves_any_number_of_them(cache):
    states = []
    for rank in range(2):
        loader = rank_loader(cache, world_size=2, rank=rank)
        batches = iter(loader)
        next(batches)
        states.append(loader.state_dict())
    assert states[0] == states[1]
    order = RowSampler(11, shuffle=True).order().tolist()
    resumed = rank_loader(cache, world_size=1, rank=0, batch_size=7)
    resumed.load_state_dict(states[0])
    assert row_numbers(list(resumed)) == [order[4:]]


def test_a_training_loop_that_names_its_epochs_resumes_in_the_middle_of_one(cache):
    def train(loader: CacheLoader, epochs: range, stop_after: int) -> list[list[int]]:
        seen: list[list[int]] = []
        for epoch in epochs:
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                seen += row_numbers([batch])
                if len(seen) == stop_after:
                    return seen
        return seen

    whole = train(rank_loader(cache, world_size=1, rank=0), range(3), 100)
    stopped = rank_loader(cache, world_size=1, rank=0)
    before = train(stopped, range(3), 8)
    resumed = rank_loader(cache, world_size=1, rank=0)
    resumed.load_state_dict(stopped.state_dict())
    assert before + train(resumed, range(1, 3), 100) == whole


def test_the_state_between_passes_is_the_beginning_of_the_next_one(cache):
    loader = rank_loader(cache, world_size=1, rank=0)
    assert (loader.state_dict()["epoch"], loader.state_dict()["rows_done"]) == (0, 0)
    list(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["rows_done"]) == (1, 0)
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["rows_done"]) == (1, 2)
    loader.sampler.set_epoch(7)
    assert (loader.state_dict()["epoch"], loader.state_dict()["rows_done"]) == (7, 0)


def test_the_state_of_another_order_is_refused_naming_what_differs(cache, tmp_path):
    state = build_loader(cache.open(), batch_size=2, shuffle=True, seed=1).state_dict()
    other = build_loader(cache.open(), batch_size=2, shuffle=True, seed=2)
    with pytest.raises(ValueError, match="seed is 1 there and 2 here"):
        other.load_state_dict(state)
    fewer = write_cache(tmp_path, num_rows=5)
    with pytest.raises(ValueError, match="num_rows is 11 there and 5 here"):
        build_loader(fewer.open(), batch_size=2, shuffle=True, seed=1).load_state_dict(state)


def test_the_state_of_other_shards_is_refused_where_rows_are_mixed_within_shards(tmp_path):
    first, second = (
        build_loader(cache.open(), batch_size=2, shuffle=True, shuffle_window=2)
        for cache in (
            write_cache(tmp_path / "2", num_rows=12, shard_size=2),
            write_cache(tmp_path / "3", num_rows=12, shard_size=3),
        )
    )
    with pytest.raises(ValueError, match="shard_size is 2 there and 3 here"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_done": -5}, "rows_done must be a whole number from 0 on, got -5"),
        ({"rows_done": 12}, "rows_done must be at most 11, got 12"),
        ({"epoch": "1"}, "epoch must be a whole number from 0 on, got '1'"),
    ],
)
def test_a_state_with_numbers_that_cannot_be_is_refused(cache, change, message):
    loader = build_loader(cache.open(), batch_size=2, shuffle=True)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(loader.state_dict() | change)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_order_of_a_pass_is_that_of_the_moment_in_which_it_begins(cache, num_workers):
    loader = build_loader(cache.open(), batch_size=2, shuffle=True, num_workers=num_workers)
    expected = row_numbers(list(loader))
    loader = build_loader(cache.open(), batch_size=2, shuffle=True, num_workers=num_workers)
    batches = iter(loader)
    loader.sampler.set_epoch(1)
    assert row_numbers(list(batches)) == expected
    assert loader.sampler.epoch == 1


def test_the_builder_of_dspark_caches_passes_every_keyword_on(tmp_path):
    write_tiny_cache(tmp_path / "cache")
    options = {
        "trim": True,
        "seed": 3,
        "drop_last": True,
        "pin_memory": False,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
        "shuffle_window": 1,
        "check": "checksums",
        "mmap": True,
    }
    loader = build_cached_dspark_dataloader(
        cache_dir=str(tmp_path / "cache"), batch_size=3, shuffle=True, num_workers=1, **options
    )
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.dataset, CachedDSparkDataset)
    order = RowSampler(11, shuffle=True, seed=3, shard_size=SHARD_SIZE, shuffle_window=1).order()
    batches = list(loader)
    assert len(batches) == 3
    for batch, rows in zip(batches, order[:9].reshape(3, 3).tolist(), strict=True):
        longest = max(LENGTHS[row] for row in rows)
        assert {key: tensor.shape[:2] for key, tensor in batch.items()} == dict.fromkeys(
            CACHE_KEYS, (3, longest)
        )
    assert (loader.prefetch_factor, loader.persistent_workers, loader.pin_memory) == (
        3,
        True,
        False,
    )
    assert loader.multiprocessing_context.get_start_method() == "fork"
    reader = loader.dataset._reader
    assert (reader._check, reader._mmap) == ("checksums", True)


@pytest.mark.parametrize("cuda", [False, True])
def test_cuda_decides_how_workers_start_and_whether_memory_is_pinned(cache, monkeypatch, cuda):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: cuda)
    loader = build_loader(cache.open(), batch_size=2, shuffle=True, num_workers=1)
    assert loader.pin_memory is cuda
    method = loader.multiprocessing_context.get_start_method()
    assert method == ("forkserver" if cuda else "fork")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_dataset_also_serves_torchs_own_loader_and_subsets(cache, num_workers):
    subset = torch.utils.data.Subset(cache.open(), [9, 2, 2, 5])
    options = {
        "num_workers": num_workers,
        "multiprocessing_context": "fork" if num_workers else None,
    }
    batches = list(DataLoader(subset, batch_size=3, **options))
    assert row_numbers(batches) == [[9, 2, 2], [5]]
    for batch, rows in zip(batches, ([9, 2, 2], [5]), strict=True):
        assert_rows(batch, cache, rows)


def test_the_loader_itself_keeps_no_batch(cache):
    batches = iter(build_loader(cache.open(), batch_size=2, shuffle=True))
    assert len({next(batches)["states"].data_ptr() for _ in range(5)}) == 1


def test_a_window_is_passed_on_to_the_order(tmp_path: Path):
    cache = write_cache(tmp_path, num_rows=12, shard_size=3)
    loader = build_loader(cache.open(), batch_size=3, shuffle=True, shuffle_window=1)
    assert all(len({row // 3 for row in rows}) == 1 for rows in row_numbers(list(loader)))
