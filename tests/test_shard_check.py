"""Whether a shard is the one that it should be: every way in which it may not be is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from containers import data_start
from dspark.disk.shard_check import ExpectedShard, ShardCheck, TensorRules, check_shard
from dspark.disk.shard_file import ShardMetadata, TensorSpec, read_header
from dspark.disk.shard_writer import write_whole_shard
from dspark.errors import CacheError

SPECS = {
    "ids": TensorSpec(torch.int64, (4,)),
    "states": TensorSpec(torch.float32, (4, 2)),
}
PADDING = {"ids": 9, "states": 0}
EXPECTED = ShardMetadata(index=3, identity="ab", lengths=(4, 1, 3))


def a_shard(path: Path, *, metadata: ShardMetadata = EXPECTED, ids_padding: int = 9) -> Path:
    rows = len(metadata.lengths)
    real = torch.arange(4) < torch.tensor(metadata.lengths).view(rows, 1)
    ids = torch.where(real, torch.arange(4 * rows).view(rows, 4), ids_padding)
    states = real.unsqueeze(-1) * torch.arange(8.0 * rows).view(rows, 4, 2)
    samples = {"ids": ids, "states": states}
    write_whole_shard(path, samples, metadata=metadata, padded=("ids",))
    return path


@pytest.fixture
def shard(tmp_path):
    return a_shard(tmp_path / "shard-000003.safetensors")


def problem(path: Path, expected: ShardMetadata = EXPECTED) -> str:
    """Return what the check says about a shard that does not pass."""
    with pytest.raises(CacheError, match=path.name) as caught:
        check_shard(path, SPECS, expected, padding=PADDING)
    return str(caught.value)


def change_byte(path: Path, place: int, *, mask: int = 1) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= mask
    path.write_bytes(raw)


def test_a_whole_shard_passes_and_its_record_comes_back(shard):
    found = check_shard(shard, SPECS, EXPECTED, padding=PADDING)
    assert replace(found, digests={}) == EXPECTED
    assert set(found.digests) == {"ids", "states"}


def test_a_missing_shard_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_shard(tmp_path / "shard", SPECS, EXPECTED)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(EXPECTED, index=4), "written as shard 3, not 4"),
        (replace(EXPECTED, identity="cd"), "another run"),
        (replace(EXPECTED, identity=None), "another run"),
        (replace(EXPECTED, lengths=(4, 1, 2)), "lengths are not those of this run"),
        (replace(EXPECTED, rows=(0, 1, 5)), "rows are not those of this run"),
        (replace(EXPECTED, lengths=(4, 1)), "not TensorPlace"),
    ],
)
def test_a_shard_of_another_place_or_run_is_refused(shard, other, says):
    assert says in problem(shard, other)


@pytest.mark.parametrize(
    "specs",
    [
        {"ids": SPECS["ids"]},
        SPECS | {"more": SPECS["ids"]},
        SPECS | {"states": TensorSpec(torch.float32, (4, 3))},
        SPECS | {"states": TensorSpec(torch.float16, (4, 2))},
    ],
    ids=["one tensor too many", "one too few", "other width", "other dtype"],
)
def test_other_tensors_than_expected_are_refused(shard, specs):
    with pytest.raises(CacheError, match="is damaged"):
        check_shard(shard, specs, EXPECTED)


def test_a_shard_without_a_record_is_refused(shard):
    save_file(load_file(shard), shard)
    assert "no dspark metadata" in problem(shard)


def every_real_byte(path: Path) -> list[int]:
    """Return one byte of the file for each real token of each tensor."""
    places, places_of = read_header(path).tensors, []
    for name, spec in SPECS.items():
        for row, length in enumerate(EXPECTED.lengths):
            begin = data_start(path) + places[name].begin + row * spec.nbytes
            places_of += [begin + token * spec.nbytes // 4 for token in range(length)]
    return places_of


def test_a_changed_bit_in_any_real_token_is_found(shard):
    whole = shard.read_bytes()
    for place in every_real_byte(shard):
        change_byte(shard, place, mask=0x40)
        assert "do not match their checksum" in problem(shard)
        shard.write_bytes(whole)


def test_a_changed_bit_in_any_padding_is_found(shard):
    whole, real = shard.read_bytes(), set(every_real_byte(shard))
    first, size = data_start(shard), shard.stat().st_size
    real_bytes = {place + byte for place in real for byte in range(8)}  # both tokens take 8 bytes
    padding = sorted(set(range(first, size)) - real_bytes)
    assert padding
    for place in padding:
        change_byte(shard, place)
        assert "the padding of" in problem(shard)
        shard.write_bytes(whole)


def test_a_changed_bit_all_over_the_header_is_found(shard):
    whole = shard.read_bytes()
    for place in range(0, data_start(shard), 2):
        change_byte(shard, place)
        problem(shard)
        shard.write_bytes(whole)


@pytest.mark.parametrize("bytes_left", [0, 4, 8, 100, -100, -1])
def test_a_shard_cut_short_is_found(shard, bytes_left):
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(bytes_left if bytes_left >= 0 else size + bytes_left)
    problem(shard)


def test_a_shard_with_something_behind_it_is_found(shard):
    with shard.open("ab") as file:
        file.write(b"more")
    problem(shard)


def test_a_shard_that_is_all_zeros_is_found(shard):
    shard.write_bytes(bytes(shard.stat().st_size))
    problem(shard)


def test_other_padding_than_the_caches_is_found(tmp_path):
    path = a_shard(tmp_path / "shard", ids_padding=8)
    assert "the padding of ids in row 1 is not 9" in problem(path)


def test_padding_that_is_not_known_is_not_looked_at(tmp_path):
    path = a_shard(tmp_path / "shard", ids_padding=8)
    check_shard(path, SPECS, EXPECTED, padding={"states": 0})


def test_holes_are_not_read(tmp_path):
    specs = {"states": TensorSpec(torch.float32, (2**16, 4))}
    metadata = ShardMetadata(index=0, identity=None, lengths=(8, 8, 8))
    samples = {"states": torch.ones(3, 2**16, 4)}
    write_whole_shard(tmp_path / "shard", samples, metadata=metadata)
    check = ShardCheck(tmp_path / "shard", TensorRules(specs, {"states": 0}))
    assert list(check.problems(ExpectedShard(0, 3, None, metadata))) == []
    padding = 3 * (2**16 - 8) * 16
    assert check.bytes_skipped <= padding
    if (tmp_path / "shard").stat().st_blocks * 512 < padding // 2:  # the file system keeps holes
        assert check.bytes_skipped > 0.9 * padding
        assert check.bytes_read < 0.1 * padding


def test_where_the_file_system_tells_nothing_of_holes_padding_is_read(shard, monkeypatch):
    def unsupported(*args: Any) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.lseek", unsupported)
    check_shard(shard, SPECS, EXPECTED, padding=PADDING)
    change_byte(shard, -1)
    assert "the padding of states in row 2 is not 0" in problem(shard)


def foreign(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> list[str]:
    """Return what is said about a shard of another writer after a change to its tensors."""
    samples = load_file(a_shard(path))
    change(samples)
    save_file(samples, path, metadata={"format": "pt"})
    limits = {"ids": (0, 100)}
    check = ShardCheck(path, TensorRules(SPECS, limits=limits))
    return list(check.problems(ExpectedShard(3, 3, "ab", foreign=True)))


def test_a_shard_of_another_writer_is_checked_as_far_as_possible(tmp_path):
    assert foreign(tmp_path / "shard", lambda samples: None) == []


@pytest.mark.parametrize("value", [-1, 101, 2**40])
def test_an_id_beyond_the_vocabulary_is_found_without_a_checksum(tmp_path, value):
    def change(samples: dict[str, torch.Tensor]) -> None:
        samples["ids"][1, 0] = value

    assert foreign(tmp_path / "shard", change) == [
        "the data of ids in row 1 are not all in 0 … 100"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_found_without_a_checksum(tmp_path, value):
    def change(samples: dict[str, torch.Tensor]) -> None:
        samples["states"][2, 1, 1] = value

    assert foreign(tmp_path / "shard", change) == ["the data of states in row 2 are not all finite"]


def test_all_that_is_wrong_is_said(tmp_path):
    path = a_shard(tmp_path / "shard")
    change_byte(path, every_real_byte(path)[0])
    change_byte(path, -1)
    check = ShardCheck(path, TensorRules(SPECS, PADDING))
    assert list(check.problems(ExpectedShard(3, 3, "ab", EXPECTED))) == [
        "the data of ids in row 0 do not match their checksum",
        "the padding of states in row 2 is not 0",
    ]
