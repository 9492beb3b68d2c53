"""Which rows each rank reads in which order."""

import itertools

import numpy as np
import pytest

from dspark.reading.sampler import RowSampler


def shares(num_rows: int, world_size: int, **options: object) -> list[list[int]]:
    """What every rank reads in one epoch."""
    options = {"shuffle": True} | options
    return [
        list(RowSampler(num_rows, world_size=world_size, rank=rank, **options))
        for rank in range(world_size)
    ]


def test_rows_come_as_they_are_stored_unless_they_are_shuffled():
    assert list(RowSampler(7, shuffle=False)) == [0, 1, 2, 3, 4, 5, 6]


def test_the_order_of_a_seed_and_epoch_never_changes():
    sampler = RowSampler(10, shuffle=True, seed=3)
    assert list(sampler) == [0, 4, 9, 7, 1, 5, 6, 3, 8, 2]
    sampler.set_epoch(1)
    assert list(sampler) == [0, 6, 2, 1, 3, 7, 4, 9, 8, 5]


def test_every_seed_and_every_epoch_has_an_order_of_its_own():
    orders = set()
    for seed, epoch in itertools.product(range(5), range(5)):
        sampler = RowSampler(30, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        order = tuple(sampler)
        assert sorted(order) == list(range(30))
        orders.add(order)
    assert len(orders) == 25


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_read_all_rows_and_repeat_only_what_the_uneven_end_needs(
    num_rows, world_size, shuffle
):
    parts = shares(num_rows, world_size, shuffle=shuffle)
    read = [row for part in parts for row in part]
    assert len({len(part) for part in parts}) == 1
    assert set(read) == set(range(num_rows))
    assert len(read) - num_rows == (-num_rows % world_size if num_rows else 0)
    assert {len(RowSampler(num_rows, shuffle=shuffle, world_size=world_size))} == {len(parts[0])}


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_with_drop_last_no_row_is_read_twice_and_all_ranks_read_as_many(num_rows, world_size):
    parts = shares(num_rows, world_size, drop_last=True)
    read = [row for part in parts for row in part]
    assert {len(part) for part in parts} == {num_rows // world_size}
    assert len(set(read)) == len(read)


def test_the_rows_that_are_read_again_are_the_first_of_the_order():
    assert shares(7, 3, shuffle=False) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]


def test_all_ranks_together_read_a_prefix_of_one_order():
    order = list(RowSampler(24, shuffle=True))
    parts = shares(24, 3)
    for steps in range(1, 9):
        together = {row for part in parts for row in part[:steps]}
        assert together == set(order[: 3 * steps])


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_a_window_keeps_reads_within_so_many_shards(window):
    num_rows, shard_size = 47, 4
    sampler = RowSampler(num_rows, shuffle=True, shard_size=shard_size, shuffle_window=window)
    order = np.array(list(sampler))
    assert sorted(order) == list(range(num_rows))
    shard_of = order // shard_size
    place = {shard: np.flatnonzero(shard_of == shard) for shard in range(12)}
    for places in place.values():
        assert places.max() - places.min() < window * shard_size
    if window > 1:
        assert any(np.diff(places).max() > 1 for places in place.values() if len(places) > 1)


def test_a_window_is_filled_with_other_shards_in_every_epoch():
    sampler = RowSampler(40, shuffle=True, shard_size=4, shuffle_window=2)
    windows = set()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        windows.add(frozenset(row // 4 for row in list(sampler)[:8]))
    assert all(len(window) == 2 for window in windows)
    assert len(windows) > 1


def test_naming_the_epoch_that_stands_keeps_the_place_in_it_and_another_one_drops_it():
    sampler = RowSampler(9, shuffle=True)
    whole = list(sampler)
    sampler.start = 4
    sampler.set_epoch(0)
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole
    sampler.start = 4
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    assert list(sampler) == whole


def test_from_any_place_the_ranks_read_the_rest_of_the_order():
    for start, world_size in itertools.product(range(12), (1, 2, 5)):
        parts = []
        for rank in range(world_size):
            sampler = RowSampler(11, shuffle=True, world_size=world_size, rank=rank)
            order = sampler.order().tolist()
            sampler.start = start
            parts.append(list(sampler))
        in_turn = [row for step in zip(*parts, strict=True) for row in step]
        assert in_turn[: 11 - start] == order[start:]
        assert len(in_turn) - (11 - start) == -(11 - start) % world_size


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be in 0 … 1, got 2"),
        ({"rank": -1}, "rank must be"),
        ({"shuffle_window": 0}, "shuffle_window must be at least 1 shard, got 0"),
        ({"seed": -1}, "seed must be a whole number from 0 on, got -1"),
        ({"seed": None}, "seed must be a whole number from 0 on, got None"),
    ],
)
def test_arguments_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RowSampler(5, **({"shuffle": True} | wrong))


@pytest.mark.parametrize("epoch", [-1, "1", None, 1.5])
def test_an_epoch_that_is_none_is_refused(epoch):
    with pytest.raises(ValueError, match="epoch must be a whole number from 0 on"):
        RowSampler(5, shuffle=True).set_epoch(epoch)


def test_numbers_of_any_type_are_kept_as_pythons_own():
    sampler = RowSampler(5, shuffle=True, seed=np.int64(3))
    sampler.set_epoch(np.int64(2))
    assert type(sampler.epoch) is type(sampler.settings()["seed"]) is int
