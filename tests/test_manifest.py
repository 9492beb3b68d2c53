"""The manifest: its bytes, what readers believe, and when two of them are the same cache."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.cache import (
    CACHE_KEYS,
    CachedDSparkDataset,
    build_cache_manifest,
    ensure_manifest_complete,
    existing_shard_indices,
    manifest_path,
    read_manifest,
    shard_path,
    write_manifest,
)
from dspark.disk.manifest import (
    MAX_MANIFEST_BYTES,
    abridged,
    check_shard_indices,
    first_missing,
    identity_on_disk,
)
from dspark.errors import CacheError
from dspark_caches import a_manifest, some_samples

FROZEN = """\
{
  "chat_template_sha256": "0000000000000000000000000000000000000000000000000000000000000000",
  "complete": false,
  "dtype": "bf16",
  "format_version": 1,
  "hidden_size": 4,
  "mask_generation_prompt": false,
  "mask_reasoning_content": false,
  "num_hidden_layers": 4,
  "num_samples": 5,
  "seq_length": 6,
  "shard_size": 2,
  "shuffle_seed": 42,
  "target_hidden_dim": 8,
  "target_last_hidden_dim": 4,
  "target_layer_ids": [
    0,
    2
  ],
  "target_model": "org/model",
  "target_model_type": "qwen3",
  "target_vocab_size": 16,
  "train_data_path": "chats.jsonl",
  "train_split": null
}
"""

# What caches older than the completion marker and the input's identity have.
OLD_FIELDS = (
    "format_version",
    "target_model",
    "target_model_type",
    "target_vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "seq_length",
    "dtype",
    "num_samples",
    "shard_size",
    "target_hidden_dim",
    "target_last_hidden_dim",
    "target_layer_ids",
)


def put(directory: Path, content: Any) -> str:
    """Write a manifest as any tool might, and return the cache's path."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (directory / "manifest.json").write_bytes(text)
    return str(directory)


def test_the_bytes_of_a_manifest_are_frozen(tmp_path):
    path = write_manifest(str(tmp_path), a_manifest())
    assert path == manifest_path(str(tmp_path)) == str(tmp_path / "manifest.json")
    assert Path(path).read_text() == FROZEN


def test_sizes_come_from_the_text_config_and_the_layers():
    manifest = a_manifest(target_layer_ids=[0, 1, 3])
    assert manifest["target_vocab_size"] == 16
    assert manifest["num_hidden_layers"] == 4
    assert manifest["target_hidden_dim"] == 3 * 4
    assert manifest["target_last_hidden_dim"] == 4


def test_a_new_manifest_is_incomplete():
    assert a_manifest()["complete"] is False


def test_the_generation_prompt_is_masked_only_on_request():
    assert a_manifest()["mask_generation_prompt"] is False
    assert a_manifest(mask_generation_prompt=True)["mask_generation_prompt"] is True


def test_a_manifest_takes_keywords_alone():
    with pytest.raises(TypeError):
        build_cache_manifest("org/model")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(CacheError, match="dtype must be one of bf16, fp16, fp32, got 'int8'"):
        a_manifest(dtype="int8")


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = a_manifest() | {"complete": True, "of_another_tool": {"a": [1]}}
    write_manifest(str(tmp_path), manifest)
    assert read_manifest(str(tmp_path)) == manifest


def test_a_missing_manifest_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"manifest.json does not exist.* not a DSpark"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("complete", [False, None, 0, 1, "true", [], {}])
def test_anything_but_true_is_incomplete(tmp_path, complete):
    manifest = a_manifest() | {"complete": complete}
    cache_dir = put(tmp_path, manifest)
    with pytest.raises(CacheError, match="incomplete") as caught:
        read_manifest(cache_dir)
    assert str(tmp_path) in str(caught.value)
    assert "--resume" in str(caught.value)
    assert read_manifest(cache_dir, allow_incomplete=True) == manifest
    with pytest.raises(CacheError, match="incomplete"):
        ensure_manifest_complete(manifest, cache_dir)


def test_a_manifest_older_than_the_marker_is_complete():
    ensure_manifest_complete({"format_version": 1}, "cache")


def test_a_manifest_with_the_oldest_fields_alone_is_read(tmp_path):
    manifest = {field: a_manifest()[field] for field in OLD_FIELDS}
    assert read_manifest(put(tmp_path, manifest)) == manifest


def test_a_cache_as_old_tools_wrote_it_is_read(tmp_path):
    put(tmp_path, {field: a_manifest(num_samples=3)[field] for field in OLD_FIELDS})
    rows = some_samples([6, 2, 4])
    for index, span in enumerate((slice(0, 2), slice(2, 3))):
        tensors = {key: rows[key][span].contiguous() for key in CACHE_KEYS}
        save_file(tensors, shard_path(str(tmp_path), index), metadata={"format": "pt"})
    dataset = CachedDSparkDataset(str(tmp_path))
    assert len(dataset) == 3
    for row in range(3):
        assert all(torch.equal(dataset[row][key], rows[key][row]) for key in CACHE_KEYS)


def test_another_format_is_refused(tmp_path):
    cache_dir = put(tmp_path, a_manifest() | {"format_version": 2, "complete": True})
    with pytest.raises(CacheError, match="format_version is 2"):
        read_manifest(cache_dir)


@pytest.mark.parametrize("field", OLD_FIELDS)
def test_a_missing_field_is_an_error_that_names_it(tmp_path, field):
    manifest = {name: a_manifest()[name] for name in OLD_FIELDS if name != field}
    with pytest.raises(CacheError, match=field):
        read_manifest(put(tmp_path, manifest))


COUNTS = (
    "target_vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "seq_length",
    "num_samples",
    "shard_size",
    "target_hidden_dim",
    "target_last_hidden_dim",
)


@pytest.mark.parametrize("value", [0, -1, True, None, "4", 4.0, 1e300, [4], {}, 2**48, 2**64])
@pytest.mark.parametrize("field", COUNTS)
def test_a_count_that_is_none_is_an_error_that_names_it(tmp_path, field, value):
    cache_dir = put(tmp_path, a_manifest() | {field: value, "complete": True})
    with pytest.raises(CacheError, match=field):
        read_manifest(cache_dir)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_model", None),
        ("target_model", ["org/model"]),
        ("target_model_type", 3),
        ("dtype", "float32"),
        ("dtype", ["bf16"]),
        ("dtype", None),
        ("target_layer_ids", []),
        ("target_layer_ids", None),
        ("target_layer_ids", "02"),
        ("target_layer_ids", {"0": 2}),
        ("target_layer_ids", [0, "2"]),
        ("target_layer_ids", [0, 2.0]),
        ("target_layer_ids", [False, True]),
        ("target_hidden_dim", 4),
        ("target_last_hidden_dim", 8),
        ("format_version", "1"),
        ("format_version", None),
        ("format_version", [1]),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(tmp_path, field, value):
    cache_dir = put(tmp_path, a_manifest() | {field: value, "complete": True})
    with pytest.raises(CacheError, match=field):
        read_manifest(cache_dir)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"manifest"',
        b"\xff\xfe\x00",
        b'{"a": \xff}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b"\0" * 100,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path, text):
    with pytest.raises(CacheError, match=r"manifest.json is damaged"):
        read_manifest(put(tmp_path, text))


def test_a_manifest_nested_as_deep_as_json_can_be_is_read_or_refused(tmp_path):
    for depth in (500, 900, 960, 990):
        nested: dict[str, Any] = {}
        for _ in range(depth):
            nested = {"a": nested}
        text = json.dumps(a_manifest() | {"complete": True})[:-1] + ', "provenance": {"identity": '
        text += '{"a":' * depth + "1" + "}" * depth + "}}"
        try:
            identity_on_disk(put(tmp_path, text.encode()), cache_name="DSpark")
        except CacheError:
            continue


def test_a_manifest_that_is_far_too_large_is_not_read(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)  # a hole: nothing is written
    tracemalloc.start()
    try:
        with pytest.raises(CacheError, match="more than any manifest needs"):
            read_manifest(str(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_manifest_is_replaced_in_one_step(tmp_path):
    write_manifest(str(tmp_path), a_manifest())
    with pytest.raises(TypeError):
        write_manifest(str(tmp_path), a_manifest() | {"complete": object()})
    assert (tmp_path / "manifest.json").read_text() == FROZEN
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_shards_are_numbered_with_six_digits_or_more(tmp_path):
    assert shard_path("cache", 3) == "cache/shard-000003.safetensors"
    assert shard_path("cache", 1_234_567) == "cache/shard-1234567.safetensors"


def test_only_shards_under_their_final_name_exist(tmp_path):
    names = [
        "shard-000000.safetensors",
        "shard-000007.safetensors",
        "shard-1234567.safetensors",
        "shard-7.safetensors",
        "shard-0000008.safetensors",
        "shard-٠٠٠٠٠٩.safetensors",
        "shard-000010.safetensors.bak",
        ".shard-000011.safetensors.run.0123456789abcdef0123456789abcdef.tmp",
        "manifest.json",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert existing_shard_indices(str(tmp_path)) == {0, 7, 1_234_567}


def test_a_directory_that_does_not_exist_has_no_shards(tmp_path):
    assert existing_shard_indices(str(tmp_path / "nowhere")) == set()


def test_the_right_shards_are_accepted(tmp_path):
    for index in range(3):
        Path(shard_path(str(tmp_path), index)).touch()
    check_shard_indices(str(tmp_path), 3)


@pytest.mark.parametrize(
    ("present", "says"),
    [
        ([0, 2], r"1 missing \(1\), unexpected none"),
        ([], r"3 missing \(0, 1, 2\), unexpected none"),
        ([0, 1, 2, 3], r"0 missing \(none\), unexpected 3"),
        ([1, 2, 3], r"1 missing \(0\), unexpected 3"),
    ],
)
def test_other_shards_than_the_manifest_says_are_named(tmp_path, present, says):
    for index in present:
        Path(shard_path(str(tmp_path), index)).touch()
    with pytest.raises(CacheError, match=f"shard indices.*{says}"):
        check_shard_indices(str(tmp_path), 3)


def test_a_manifest_may_claim_more_shards_than_memory_can_list(tmp_path):
    tracemalloc.start()
    try:
        with pytest.raises(CacheError, match="shard indices"):
            check_shard_indices(str(tmp_path), 2**47)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_long_lists_of_shards_are_cut_short():
    assert abridged([]) == "none"
    assert abridged([3, 1]) == "1, 3"
    assert abridged(range(20), most=3) == "0, 1, 2 and 17 more"
    assert first_missing({0, 1}, 2) == "none"
    assert first_missing({0}, 20, most=3) == "1, 2, 3, …"
