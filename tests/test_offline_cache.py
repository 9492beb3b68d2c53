"""Rows of a cache as items: what they hold, and what becomes of a cache that is not right."""

import gc
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch

from dspark.disk.manifest import shard_path
from dspark.disk.shard_file import TensorSpec, read_header
from dspark.errors import CacheError
from dspark.offline_cache import CachedTensorDataset, collate
from dspark.reading.open_shards import MAX_OPEN_SHARDS
from tensor_caches import PAD, SPECS, TOKENS, SmallCache, assert_rows, write_cache

EVERY_WAY = [
    pytest.param({"check": check, "mmap": mmap}, id=f"{check}-{'mapped' if mmap else 'read'}")
    for check in ("names", "headers", "checksums")
    for mmap in (False, True)
]


@pytest.fixture
def cache(tmp_path: Path) -> SmallCache:
    return write_cache(tmp_path)


def open_shard_files(cache: SmallCache) -> list[str]:
    """The names of the shards of `cache` that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sorted(Path(link).name for link in links if Path(link).parent == cache.directory)


# rows


@pytest.mark.parametrize("options", EVERY_WAY)
def test_items_are_the_rows_that_were_written(cache, options):
    dataset = cache.open(**options)
    assert len(dataset) == 11
    for row in range(-11, 11):
        item = dataset[row]
        assert_rows({name: tensor[None] for name, tensor in item.items()}, cache, [row % 11])


@pytest.mark.parametrize("options", EVERY_WAY)
def test_rows_asked_for_together_come_in_that_order_repeats_included(cache, options):
    wanted = [10, 0, 4, 4, 3, 10]
    assert_rows(collate(cache.open(**options).__getitems__(wanted)), cache, wanted)


def test_a_cache_without_lengths_is_read_whole(tmp_path):
    cache = write_cache(tmp_path, recorded=False)
    assert_rows(collate(cache.open().__getitems__(range(11))), cache, range(11))


def test_trimmed_rows_are_cut_to_the_longest_of_those_read_together(cache):
    dataset = cache.open(trim=True)
    rows = [row for row, length in enumerate(cache.lengths) if length <= 7]
    longest = max(cache.lengths[row] for row in rows)
    batch = collate(dataset.__getitems__(rows))
    assert longest < TOKENS
    for name, tensor in batch.items():
        assert torch.equal(tensor, cache.rows[name][rows, :longest])
        assert tensor.is_contiguous()


def test_a_padding_value_that_is_given_is_filled_in_whatever_the_file_holds(cache):
    dataset = cache.open(padded={"ids": 99})
    for row, length in enumerate(cache.lengths):
        assert dataset[row]["ids"][:length].tolist() == cache.rows["ids"][row, :length].tolist()
        assert set(dataset[row]["ids"][length:].tolist()) <= {99}


def test_padding_is_zero_in_memory_that_held_a_longer_row_before(cache):
    dataset = cache.open()
    longest, shortest = (pick(range(11), key=lambda row: cache.lengths[row]) for pick in (max, min))
    before = dataset[longest]["states"].data_ptr()
    item = dataset[shortest]
    assert item["states"].data_ptr() == before
    assert not item["states"][cache.lengths[shortest] :].any()


def test_samples_of_several_reads_are_stacked(cache):
    dataset = cache.open()
    assert_rows(collate([dataset[3], dataset[8]]), cache, [3, 8])


def test_tensors_of_a_batch_do_not_share_memory_with_one_another(cache):
    batch = collate(cache.open().__getitems__([0, 1]))
    assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == len(SPECS)
    for tensor in batch.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("row", [11, -12, 10**30])
def test_past_the_end_is_an_index_error(cache, row):
    with pytest.raises(IndexError, match=str(row)):
        cache.open()[row]


@pytest.mark.parametrize("trim", [False, True])
def test_no_rows_are_an_empty_list(cache, trim):
    assert cache.open(trim=trim).__getitems__([]) == []


def test_an_empty_cache_has_no_rows(tmp_path):
    cache = write_cache(tmp_path, num_rows=0)
    assert list(cache.open()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"check": "everything"},
        {"shard_size": 0},
        {"num_rows": -1},
        {"row_specs": {}},
        {"row_specs": {**SPECS, "other": TensorSpec(torch.int64, (TOKENS + 1,))}},
    ],
)
def test_arguments_that_describe_no_cache_are_refused(cache, wrong):
    fitting = {"row_specs": SPECS, "num_rows": 11, "shard_size": 3}
    with pytest.raises(ValueError, match=r"check|shard_size|share one length"):
        CachedTensorDataset(str(cache.directory), **(fitting | wrong))


# what is held open


def test_nothing_stays_open_before_a_row_is_read(cache):
    cache.open()
    assert open_shard_files(cache) == []


def test_the_least_recently_used_shards_are_closed_first(tmp_path):
    cache = write_cache(tmp_path, num_rows=MAX_OPEN_SHARDS + 6, shard_size=1)
    dataset = cache.open()
    for row in range(MAX_OPEN_SHARDS):
        dataset[row]
    dataset[0]
    for row in range(MAX_OPEN_SHARDS, MAX_OPEN_SHARDS + 6):
        dataset[row]
    still_open = open_shard_files(cache)
    assert len(still_open) == MAX_OPEN_SHARDS
    assert cache.shard(0).name in still_open
    assert not {cache.shard(index).name for index in range(1, 7)} & set(still_open)


def test_a_batch_of_more_shards_than_may_be_open_is_read(tmp_path):
    cache = write_cache(tmp_path, num_rows=2 * MAX_OPEN_SHARDS + 5, shard_size=1)
    rows = list(range(len(cache.lengths)))[::-1]
    assert_rows(collate(cache.open(trim=False).__getitems__(rows)), cache, rows)
    assert len(open_shard_files(cache)) == MAX_OPEN_SHARDS


def test_two_datasets_share_what_a_process_may_hold_open(tmp_path):
    first, second = (write_cache(tmp_path / n, num_rows=50, shard_size=1) for n in "ab")
    for dataset in (first.open(), second.open()):
        for row in range(50):
            dataset[row]
    assert len(open_shard_files(first)) + len(open_shard_files(second)) == MAX_OPEN_SHARDS
    assert len(open_shard_files(second)) == 50


def test_a_dataset_that_was_read_can_be_pickled(cache):
    dataset = cache.open()
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert_rows(collate(copy.__getitems__([0, 7])), cache, [0, 7])


def test_threads_may_read_one_dataset_at_once(cache):
    dataset, wrong = cache.open(), []

    def read() -> None:
        for row in [*range(11)] * 20:
            if not torch.equal(dataset[row]["states"], cache.rows["states"][row]):
                wrong.append(row)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# memory


def test_memory_is_used_again_once_nothing_refers_to_it(cache):
    dataset = cache.open()
    places = {
        collate(dataset.__getitems__([row, row + 1]))["states"].data_ptr() for row in range(9)
    }
    assert len(places) == 1


def test_every_tensor_of_a_batch_begins_on_a_page(cache):
    dataset = cache.open()
    kept = [collate(dataset.__getitems__([row])) for row in range(11)]
    assert {tensor.data_ptr() % 4096 for batch in kept for tensor in batch.values()} == {0}


def test_memory_is_bounded_after_many_batches_were_kept(cache):
    dataset = cache.open()
    kept = [collate(dataset.__getitems__([0, 1]))["states"].data_ptr() for _ in range(20)]
    kept = [collate(dataset.__getitems__([0, 1])) for _ in range(20)]
    del kept
    gc.collect()
    idle = dataset.memory._idle["states"]
    assert 0 < len(idle) <= 2


def test_a_smaller_batch_does_not_make_a_larger_one_fit_where_it_does_not(cache):
    dataset = cache.open()
    for rows in ([1], [0, 1, 2, 3, 4], [5], [5, 6, 7, 8]):
        assert_rows(collate(dataset.__getitems__(rows)), cache, rows)


def test_whatever_is_kept_of_a_batch_stays_what_it_was(cache):
    dataset = cache.open()
    rows = [4, 5]
    states = cache.rows["states"][rows]
    keep = {
        "slice": (collate(dataset.__getitems__(rows))["states"][1:, 2:4], states[1:, 2:4]),
        "view": (collate(dataset.__getitems__(rows))["states"].view(-1), states.view(-1)),
        "sample": (dataset.__getitems__(rows)[1]["states"], states[1]),
        "array": (
            torch.from_numpy(
                collate(dataset.__getitems__(rows))["states"].view(torch.int16).numpy()
            ),
            states.view(torch.int16),
        ),
        "detached": (collate(dataset.__getitems__(rows))["states"].detach(), states),
    }
    gc.collect()
    for _ in range(5):
        dataset.__getitems__([0, 10])
    for how, (kept, expected) in keep.items():
        assert torch.equal(kept, expected), how


def test_items_can_be_written_to_without_harm_to_later_ones(cache):
    dataset = cache.open(mmap=True)
    dataset[0]["states"].fill_(1)
    assert torch.equal(dataset[0]["states"], cache.rows["states"][0])


# damage


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"states":{', b'"stated":{'))


def other_dtype(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" '))


def remove(path: Path) -> None:
    path.unlink()


def take_neighbour(path: Path) -> None:
    path.write_bytes(path.with_name("shard-000002.safetensors").read_bytes())


def garble_record(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'\\"lengths\\"', b'\\"LENGTHS\\"'))


DAMAGES = [cut, zero, empty, rename_tensor, other_dtype, remove, take_neighbour, garble_record]


@pytest.mark.parametrize("damage", [cut, zero, empty, remove])
def test_a_shard_of_the_wrong_size_is_named_when_the_cache_is_opened(cache, damage):
    damage(cache.shard(1))
    with pytest.raises(CacheError, match=r"shard-000001\.safetensors|missing \(1\)"):
        cache.open()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("check", ["headers", "checksums"])
def test_a_damaged_shard_is_named_with_its_remedy_and_never_ends_a_loop_early(cache, damage, check):
    dataset = cache.open(check=check)
    damage(cache.shard(1))
    with pytest.raises(CacheError, match=r"shard-000001\.safetensors.*--resume"):
        for _ in dataset:
            pass


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("mmap", [False, True])
def test_damage_under_a_running_reader_is_an_error_that_names_the_shard(cache, damage, mmap):
    dataset = cache.open(mmap=mmap)
    dataset[3]
    damage(cache.shard(1))
    with pytest.raises(CacheError, match=r"shard-000001\.safetensors"):
        dataset[4]


def test_a_shard_that_ends_while_it_is_being_read_is_an_error_that_names_it(cache, monkeypatch):
    dataset = cache.open()
    dataset[3]
    monkeypatch.setattr("dspark.reading.open_shards.OpenShard.is_current", lambda shard: True)
    os.truncate(cache.shard(1), 500)
    with pytest.raises(CacheError, match=r"shard-000001\.safetensors.*it ends at byte"):
        dataset[5]


def test_a_shard_that_was_copied_anew_is_read_on(cache):
    dataset = cache.open()
    dataset[3]
    content = cache.shard(1).read_bytes()
    cache.shard(1).unlink()
    cache.shard(1).write_bytes(content)
    assert torch.equal(dataset[4]["states"], cache.rows["states"][4])


def test_a_shard_of_another_run_is_refused(tmp_path):
    cache = write_cache(tmp_path / "one", identity="one")
    other = write_cache(tmp_path / "two", identity="two")
    cache.shard(1).write_bytes(other.shard(1).read_bytes())
    with pytest.raises(CacheError, match=r"shard-000001.*another run"):
        cache.open(identity="one")[3]
    assert cache.open(identity="one", check="names")[3]


def test_names_are_checked_first_of_all(cache):
    cache.shard(3).rename(cache.shard(4))
    with pytest.raises(CacheError, match=r"missing \(3\), unexpected 4"):
        cache.open(check="names")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_bit_in_a_real_token_is_found_by_its_checksum(cache, name, mmap):
    path = cache.shard(1)
    header = read_header(path)
    place = header.data_start + header.tensors[name].begin
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    dataset = cache.open(check="checksums", mmap=mmap)
    assert dataset[4]
    with pytest.raises(CacheError, match=rf"shard-000001.*checksum of '{name}' in row 0"):
        dataset[3]


def test_checksums_that_are_not_there_cannot_be_asked_for(tmp_path):
    cache = write_cache(tmp_path, recorded=False)
    with pytest.raises(CacheError, match="no checksums"):
        cache.open(check="checksums")[0]


def test_damaged_padding_of_states_reaches_nobody(cache):
    row = min(range(3), key=lambda row: cache.lengths[row])
    header = read_header(cache.shard(0))
    end = header.data_start + header.tensors["states"].begin + (row + 1) * SPECS["states"].nbytes
    with open(shard_path(str(cache.directory), 0), "r+b") as file:
        file.seek(end - 2)
        file.write(b"\xff\xff")
    assert cache.lengths[row] < TOKENS
    assert torch.equal(cache.open()[row]["states"], cache.rows["states"][row])
    assert set(cache.open()[row]["ids"][cache.lengths[row] :].tolist()) == {PAD}
