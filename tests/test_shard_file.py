"""Reading a shard's header and record: nothing that a file says is believed."""

import json
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from containers import container, data_start
from dspark.disk.shard_file import (
    MAX_HEADER_BYTES,
    ShardMetadata,
    TensorSpec,
    read_header,
    shard_metadata,
)
from dspark.disk.shard_writer import write_whole_shard
from dspark.errors import CacheError


def write(path: Path, lengths: tuple[int, ...] = (4, 1, 3), **record: Any) -> Path:
    samples = {
        "ids": torch.ones(len(lengths), 4, dtype=torch.int64),
        "states": torch.ones(len(lengths), 4, 3, dtype=torch.bfloat16),
    }
    metadata = ShardMetadata(**{"index": 0, "identity": None, "lengths": lengths, **record})
    write_whole_shard(path, samples, metadata=metadata)
    return path


def test_the_record_comes_back_as_it_was_written(tmp_path):
    path = write(tmp_path / "shard", (4, 0, 3), index=12, identity="cafe", rows=(3, 5, 90))
    found = shard_metadata(read_header(path), path)
    assert found is not None
    assert (found.index, found.identity, found.lengths, found.rows) == (
        12,
        "cafe",
        (4, 0, 3),
        (3, 5, 90),
    )
    assert {name: len(digests) for name, digests in found.digests.items()} == {
        "ids": 3,
        "states": 3,
    }


def test_a_shard_by_another_writer_has_no_record(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "shard", metadata={"format": "pt"})
    header = read_header(tmp_path / "shard")
    assert header.metadata == {"format": "pt"}
    assert shard_metadata(header, tmp_path / "shard") is None


GOOD = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}


def changed(**entry: Any) -> dict[str, Any]:
    return {"a": GOOD["a"] | entry}


HOSTILE = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "size alone": container(b"", size=2),
    "size of 2**64 - 1": container(GOOD, b"xx", size=2**64 - 1),
    "size one beyond the file": container(GOOD, size=len(json.dumps(GOOD)) + 1),
    "size of nothing": container(b"", b"xx"),
    "no JSON": container(b"{'a': 1}"),
    "not UTF-8": container(b'{"\xff": 1}'),
    "a list": container([]),
    "a number": container(b"1"),
    "ten thousand levels of lists": container(b"[" * 10_000 + b"]" * 10_000),
    "a million levels of objects": container(b'{"a":' * 1_000_000),
    "a number of 5000 digits": container(b'{"a": ' + b"9" * 5000 + b"}"),
    "an entry that is no object": container({"a": [1, 2]}),
    "an entry that is null": container({"a": None}),
    "no dtype": container({"a": {"shape": [2], "data_offsets": [0, 2]}}, b"xx"),
    "unknown dtype": container(changed(dtype="F4"), b"xx"),
    "dtype that is a list": container(changed(dtype=["U8"]), b"xx"),
    "no shape": container({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, b"xx"),
    "negative dimension": container(changed(shape=[-1, -2]), b"xx"),
    "fractional dimension": container(changed(shape=[2.0]), b"xx"),
    "boolean dimension": container(changed(shape=[True, 2]), b"xx"),
    "shape that is text": container(changed(shape="2"), b"xx"),
    "shape that is null": container(changed(shape=None), b"xx"),
    "shape of 2**200 elements": container(changed(shape=[2**50] * 4), b"xx"),
    "shape that wraps around 64 bits": container(changed(shape=[2**63, 2, 2]), b"xx"),
    "no offsets": container({"a": {"dtype": "U8", "shape": [2]}}, b"xx"),
    "one offset": container(changed(data_offsets=[0]), b"xx"),
    "three offsets": container(changed(data_offsets=[0, 1, 2]), b"xx"),
    "negative offset": container(changed(data_offsets=[-2, 0]), b"xx"),
    "offsets in reverse": container(changed(data_offsets=[2, 0]), b"xx"),
    "offsets beyond the file": container(changed(data_offsets=[2, 4]), b"xx"),
    "span unlike the shape": container(changed(data_offsets=[0, 3]), b"xxx"),
    "huge offsets": container(changed(data_offsets=[2**62, 2**62 + 2]), b"xx"),
    "overlap": container(GOOD | {"b": changed(data_offsets=[1, 3])["a"]}, b"xxx"),
    "same place twice": container(GOOD | {"b": GOOD["a"]}, b"xx"),
    "gap": container(GOOD | {"b": changed(data_offsets=[3, 5])["a"]}, b"xxxxx"),
    "data missing": container(GOOD, b"x"),
    "data left over": container(GOOD, b"xxx"),
    "metadata that is a list": container({"__metadata__": [], **GOOD}, b"xx"),
    "metadata that is null": container({"__metadata__": None, **GOOD}, b"xx"),
    "metadata of numbers": container({"__metadata__": {"a": 1}, **GOOD}, b"xx"),
    "metadata of objects": container({"__metadata__": {"dspark": {}}, **GOOD}, b"xx"),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_an_error_that_names_the_file(tmp_path, raw):
    path = tmp_path / "shard-000003.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CacheError, match=r"shard-000003.safetensors is damaged") as caught:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(raw) + 2**20
    assert "--resume" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_the_plain_header_that_the_hostile_ones_are_made_of_is_read(tmp_path):
    (tmp_path / "shard").write_bytes(container(GOOD, b"xx"))
    assert read_header(tmp_path / "shard").tensors["a"].spec == TensorSpec(torch.uint8, (2,))


def test_a_shape_that_only_many_huge_numbers_make_is_refused_quickly(tmp_path):
    header = changed(shape=[2**63] * 200_000)
    (tmp_path / "shard").write_bytes(container(header, b"xx"))
    with pytest.raises(CacheError, match="damaged"):
        read_header(tmp_path / "shard")


def test_a_header_beyond_the_limit_of_the_library_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "shard"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER_BYTES)  # a hole: nothing is written
    tracemalloc.start()
    try:
        with pytest.raises(CacheError, match="cannot hold a header"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "shard")


HOSTILE_RECORDS = {
    "no JSON": "{",
    "a list": "[]",
    "null": "null",
    "nothing": "{}",
    "lone surrogate": "\ud800",
    "deep nesting": "[" * 100_000,
    "negative index": '{"index": -1, "identity": null, "lengths": [], "xxh3_64": {}}',
    "boolean index": '{"index": true, "identity": null, "lengths": [], "xxh3_64": {}}',
    "index of text": '{"index": "0", "identity": null, "lengths": [], "xxh3_64": {}}',
    "no identity": '{"index": 0, "lengths": [], "xxh3_64": {}}',
    "identity that is a number": '{"index": 0, "identity": 1, "lengths": [], "xxh3_64": {}}',
    "lengths that are null": '{"index": 0, "identity": null, "lengths": null, "xxh3_64": {}}',
    "negative length": '{"index": 0, "identity": null, "lengths": [-1], "xxh3_64": {}}',
    "fractional length": '{"index": 0, "identity": null, "lengths": [1.0], "xxh3_64": {}}',
    "lengths of text": '{"index": 0, "identity": null, "lengths": "11", "xxh3_64": {}}',
    "digests in a list": '{"index": 0, "identity": null, "lengths": [], "xxh3_64": []}',
    "digests that are null": (
        '{"index": 0, "identity": null, "lengths": [], "xxh3_64": {"a": null}}'
    ),
    "digests of numbers": '{"index": 0, "identity": null, "lengths": [1], "xxh3_64": {"a": [1]}}',
    "source rows of text": (
        '{"index": 0, "identity": null, "lengths": [1], "rows": "1", "xxh3_64": {}}'
    ),
    "negative source row": (
        '{"index": 0, "identity": null, "lengths": [1], "rows": [-1], "xxh3_64": {}}'
    ),
}


@pytest.mark.parametrize("record", HOSTILE_RECORDS.values(), ids=HOSTILE_RECORDS)
def test_a_hostile_record_is_an_error_that_names_the_file(tmp_path, record):
    path = tmp_path / "shard-000003.safetensors"
    path.write_bytes(container({"__metadata__": {"dspark": record}, **GOOD}, b"xx"))
    header = read_header(path)
    with pytest.raises(CacheError, match=r"shard-000003.safetensors is damaged"):
        shard_metadata(header, path)


@settings(deadline=None, derandomize=True)
@given(raw=st.binary(max_size=200))
def test_no_bytes_at_all_give_anything_but_a_header_or_a_cache_error(raw, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(raw)
    with suppress(CacheError):
        read_header(path)


@settings(deadline=None, derandomize=True)
@given(where=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_byte_of_the_header_gives_a_header_or_a_cache_error(
    where, value, tmp_path_factory
):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    raw = bytearray(write(path).read_bytes())
    raw[where % data_start(path)] = value
    path.write_bytes(raw)
    with suppress(CacheError):
        shard_metadata(read_header(path), path)
