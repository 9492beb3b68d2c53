"""A shard's bytes: the layout, and the writer that takes rows in any order and leaves holes."""

import hashlib
import itertools
import json
import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from containers import data_start, dspark_record, header_text
from dspark.disk.publish import StagedFile
from dspark.disk.shard_file import ShardMetadata, TensorSpec, read_header
from dspark.disk.shard_writer import ShardLayout, ShardWriter, write_whole_shard

ROW_SPECS = {
    "ids": TensorSpec(torch.int64, (4,)),
    "states": TensorSpec(torch.bfloat16, (4, 3)),
}


def samples(lengths: tuple[int, ...], *, width: int = 4) -> dict[str, torch.Tensor]:
    """Rows whose ids are padded with 9 and whose states are padded with zeros."""
    rows = len(lengths)
    ids = torch.full((rows, width), 9)
    states = torch.zeros(rows, width, 3, dtype=torch.bfloat16)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(length) + 10 * row
        states[row, :length] = (torch.arange(3 * length) + 1).view(length, 3) * (row + 1)
    return {"ids": ids, "states": states}


def write(path: Path, lengths: tuple[int, ...] = (4, 1, 3), **record: Any) -> Path:
    metadata = ShardMetadata(**{"index": 0, "identity": None, "lengths": lengths, **record})
    write_whole_shard(path, samples(lengths), metadata=metadata, padded=("ids",))
    return path


def open_writer(path: Path, lengths: tuple[int, ...] = (4, 1, 3)) -> ShardWriter:
    metadata = ShardMetadata(index=0, identity=None, lengths=lengths)
    return ShardWriter(path, ROW_SPECS, metadata=metadata)


def test_the_bytes_of_a_shard_are_frozen(tmp_path):
    path = write(tmp_path / "shard", (2, 1), index=7, identity="ab", rows=(0, 5))
    record = (
        '{"identity":"ab","index":7,"lengths":[2,1],"rows":[0,5],'
        '"xxh3_64":{"ids":["0cfbaea74a8cc0e5","e6ad1be9a8972875"],'
        '"states":["f93a9ba400ca0280","4a0d39ba825684b2"]}}'
    )
    header = (
        '{"__metadata__":{"dspark":' + json.dumps(record) + "},"
        '"ids":{"dtype":"I64","shape":[2,4],"data_offsets":[0,64]},'
        '"states":{"dtype":"BF16","shape":[2,4,3],"data_offsets":[64,112]}}'
    )
    assert header_text(path).rstrip(" ") == header
    assert path.read_bytes()[data_start(path) :].hex() == (
        # ids: row 0 has tokens 0 and 1, row 1 has token 10; 9 pads
        "0000000000000000" "0100000000000000" "0900000000000000" "0900000000000000"
        "0a00000000000000" "0900000000000000" "0900000000000000" "0900000000000000"
        # states: 1 to 6 for row 0, twice 1 to 3 for row 1, in bfloat16; zeros pad
        "803f00404040" "8040a040c040" "000000000000" "000000000000"
        "00408040c040" "000000000000" "000000000000" "000000000000"
    )  # fmt: skip
    assert (
        hashlib.sha256(path.read_bytes()).hexdigest()
        == "d47941927ab47c3c95051f247589ba4a593dfe67104d5e7c7a3287a337b54a22"
    )


def test_a_shard_without_identity_or_skipped_rows_says_so_in_its_record(tmp_path):
    record = dspark_record(write(tmp_path / "shard"))
    assert record["identity"] is None
    assert sorted(record) == ["identity", "index", "lengths", "xxh3_64"]


def test_the_keys_of_the_record_are_sorted(tmp_path):
    path = write(tmp_path / "shard", rows=(0, 1, 4))
    text = json.loads(header_text(path))["__metadata__"]["dspark"]
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_the_header_is_padded_so_that_the_data_begin_at_a_multiple_of_8(tmp_path):
    for index in range(12):
        path = write(tmp_path / f"{index}", index=10**index)
        assert data_start(path) % 8 == 0


def test_the_digests_are_those_of_the_real_tokens(tmp_path):
    lengths = (4, 1, 3)
    tensors = samples(lengths)
    record = dspark_record(write(tmp_path / "shard", lengths))
    for name, tensor in tensors.items():
        expected = [
            xxhash.xxh3_64_hexdigest(tensor[row, :n].contiguous().view(torch.uint8).numpy())
            for row, n in enumerate(lengths)
        ]
        assert record["xxh3_64"][name] == expected


def test_the_library_of_the_format_reads_the_same_tensors(tmp_path):
    path = write(tmp_path / "shard")
    loaded = load_file(path)
    expected = samples((4, 1, 3))
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["dspark"]
        assert torch.equal(file.get_slice("states")[1], expected["states"][1])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_every_dtype_goes_to_disk_and_back(tmp_path, dtype):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    metadata = ShardMetadata(index=0, identity=None, lengths=(2, 2))
    write_whole_shard(tmp_path / "shard", {"x": tensor}, metadata=metadata)
    assert torch.equal(load_file(tmp_path / "shard")["x"], tensor)
    assert read_header(tmp_path / "shard").tensors["x"].spec == TensorSpec(dtype, (2, 2))


def test_tensors_lie_as_the_library_itself_lays_them(tmp_path):
    tensors = {
        name: torch.zeros(2, 3, dtype=dtype)
        for name, dtype in (("b", torch.float32), ("a", torch.bool), ("c", torch.int64))
    } | {"d": torch.zeros(2, 3, dtype=torch.bfloat16), "aa": torch.zeros(2, 3)}
    save_file(tensors, tmp_path / "theirs")
    metadata = ShardMetadata(index=0, identity=None, lengths=(3, 3))
    write_whole_shard(tmp_path / "ours", tensors, metadata=metadata)
    ours, theirs = (read_header(tmp_path / name).tensors for name in ("ours", "theirs"))
    assert ours == theirs


ALL_WRITES = [(name, row) for name in ROW_SPECS for row in range(3)]


@pytest.mark.parametrize("seed", range(5))
def test_row_by_row_in_any_order_gives_the_bytes_of_the_whole_shard(tmp_path, seed):
    whole = write(tmp_path / "whole")
    tensors, lengths = samples((4, 1, 3)), (4, 1, 3)
    writer = open_writer(tmp_path / "rows")
    for name, row in random.Random(seed).sample(ALL_WRITES, len(ALL_WRITES)):
        values = tensors[name][row] if name == "ids" else tensors[name][row, : lengths[row]]
        writer.write(name, row, values.contiguous())
    digest = writer.publish()
    assert (tmp_path / "rows").read_bytes() == whole.read_bytes()
    assert digest == read_header(whole).digest


def test_rows_may_be_written_by_several_threads(tmp_path):
    lengths = tuple(row % 5 for row in range(64))
    tensors = samples(lengths)
    whole = write(tmp_path / "whole", lengths)
    writer = open_writer(tmp_path / "rows", lengths)
    with ThreadPoolExecutor(4) as pool:
        for name, row in itertools.product(tensors, range(64)):
            pool.submit(writer.write, name, row, tensors[name][row])
    # States beyond a row's length came along here; they are zeros, so the bytes are the same.
    writer.publish()
    assert (tmp_path / "rows").read_bytes() == whole.read_bytes()


def test_the_digest_of_the_header_covers_its_size_and_its_text(tmp_path):
    path = write(tmp_path / "shard")
    head = path.read_bytes()[: data_start(path)]
    assert read_header(path).digest == xxhash.xxh3_64_hexdigest(head)


def test_padding_takes_no_disk_and_reads_as_zeros(tmp_path):
    width, rows = 4096, 16
    spec = TensorSpec(torch.float32, (width, 64))  # one row: 1 MiB
    metadata = ShardMetadata(index=0, identity=None, lengths=(16,) * rows)
    writer = ShardWriter(tmp_path / "shard", {"states": spec}, metadata=metadata)
    for row in range(rows):
        writer.write("states", row, torch.ones(16, 64))
    writer.publish()
    apparent, on_disk = (
        (tmp_path / "shard").stat().st_size,
        (tmp_path / "shard").stat().st_blocks * 512,
    )
    assert apparent == data_start(tmp_path / "shard") + rows * spec.nbytes
    if keeps_holes(tmp_path):
        assert on_disk < 0.05 * apparent
    states = load_file(tmp_path / "shard")["states"]
    assert states[:, :16].eq(1).all()
    assert not states[:, 16:].any()


def keeps_holes(directory: Path) -> bool:
    """Whether the file system of `directory` keeps holes: the place where tests run may not."""
    with (directory / "hole").open("wb") as file:
        file.truncate(2**20)
    return (directory / "hole").stat().st_blocks == 0


def test_the_file_is_the_header_and_the_exact_bytes_of_the_tensors(tmp_path):
    path = write(tmp_path / "shard", (4, 1, 3))
    assert path.stat().st_size == data_start(path) + 3 * 4 * 8 + 3 * 4 * 3 * 2


def test_views_of_a_larger_buffer_are_written_alone(tmp_path):
    tensors = samples((4, 1, 3))
    views = {name: torch.stack([tensor] * 2, dim=1)[:, 1] for name, tensor in tensors.items()}
    assert not any(view.is_contiguous() for view in views.values())
    metadata = ShardMetadata(index=0, identity=None, lengths=(4, 1, 3))
    write_whole_shard(tmp_path / "views", views, metadata=metadata, padded=("ids",))
    assert (tmp_path / "views").read_bytes() == write(tmp_path / "whole").read_bytes()


def test_a_tensor_that_requires_grad_is_written(tmp_path):
    states = torch.ones(1, 2, 3, requires_grad=True)
    metadata = ShardMetadata(index=0, identity=None, lengths=(2,))
    write_whole_shard(tmp_path / "shard", {"states": states}, metadata=metadata)
    assert load_file(tmp_path / "shard")["states"].eq(1).all()


def test_a_shard_has_the_mode_that_the_umask_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        path = write(tmp_path / "shard")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(5, 3, dtype=torch.bfloat16),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, 3, 1, dtype=torch.bfloat16),
        torch.zeros(3, 3, dtype=torch.float16),
    ],
    ids=["too long", "too short", "too wide", "flat", "too deep", "other dtype"],
)
def test_a_row_that_does_not_fit_is_refused_by_name(tmp_path, values):
    writer = open_writer(tmp_path / "shard-000000.safetensors")
    with pytest.raises(ValueError, match=r"shard-000000.safetensors row 2: states must be"):
        writer.write("states", 2, values)
    writer.discard()


@pytest.mark.parametrize("length", [-1, 5])
def test_a_length_outside_the_row_is_refused_and_leaves_no_file(tmp_path, length):
    with pytest.raises(ValueError, match=f"row 1: length {length} does not fit"):
        open_writer(tmp_path / "shard", (4, length))
    assert list(tmp_path.iterdir()) == []


def test_tensors_with_another_number_of_rows_are_refused(tmp_path):
    tensors = samples((4, 1, 3)) | {"ids": torch.zeros(2, 4, dtype=torch.int64)}
    metadata = ShardMetadata(index=0, identity=None, lengths=(4, 1, 3))
    with pytest.raises(ValueError, match="3 lengths for rows"):
        write_whole_shard(tmp_path / "shard", tensors, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_with_a_row_never_written_is_not_published(tmp_path):
    writer = open_writer(tmp_path / "shard")
    for name, row in ALL_WRITES[:-1]:
        writer.write(name, row, samples((4, 1, 3))[name][row])
    with pytest.raises(AssertionError, match="rows never written"):
        writer.publish()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_middle_leaves_no_file(tmp_path, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "shard")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_sized_leaves_nothing_behind(tmp_path, monkeypatch):
    def too_large(fd: int, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr("os.ftruncate", too_large)
    with pytest.raises(OSError, match="File too large"):
        open_writer(tmp_path / "shard")
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_was_discarded_leaves_other_files_alone(tmp_path):
    other = StagedFile(tmp_path / "shard")
    writer = open_writer(tmp_path / "shard")
    writer.discard()
    writer.discard()
    assert list(tmp_path.iterdir()) == [other.temporary]
    other.discard()


def test_the_layout_knows_the_size_of_the_file_before_it_is_written(tmp_path):
    path = write(tmp_path / "shard", (4, 1, 3), rows=(1, 2, 3))
    metadata = ShardMetadata(index=0, identity=None, lengths=(4, 1, 3), rows=(1, 2, 3))
    layout = ShardLayout(ROW_SPECS, metadata)
    assert layout.size == path.stat().st_size
    assert layout.data_start == data_start(path)


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    block_size=st.sampled_from([16, 64, 512, 4096]),
    padded=st.booleans(),
)
def test_the_layout_counts_the_blocks_that_real_tokens_touch(lengths, block_size, padded):
    specs = {
        "ids": TensorSpec(torch.int64, (40,)),
        "states": TensorSpec(torch.bfloat16, (40, 5)),
    }
    layout = ShardLayout(specs, ShardMetadata(index=0, identity=None, lengths=tuple(lengths)))
    touched = set(range(-(-layout.data_start // block_size)))
    for name, spec in specs.items():
        for row, length in enumerate(lengths):
            tokens = 40 if padded and name == "ids" else length
            begin = layout.row_offset(name, row)
            end = begin + tokens * spec.nbytes // 40
            touched |= {byte // block_size for byte in range(begin, end)}
    found = layout.blocks(block_size, padded=("ids",) if padded else ())
    assert found == len(touched)
