"""DSpark's schema: what a shard holds, what is refused, and that what is written is read."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from containers import data_start, dspark_record
from dspark import cache
from dspark.cache import (
    CACHE_KEYS,
    DTYPE_MAP,
    CachedDSparkDataset,
    _collate_cached,
    build_cached_dspark_dataloader,
    compute_batch_cache,
    shard_path,
    tokenizer_chat_template_sha256,
    write_manifest,
    write_shard,
)
from dspark.disk.manifest import identity_digest
from dspark.errors import CacheError
from dspark_caches import (
    HIDDEN,
    LAYERS,
    SEQ_LENGTH,
    a_manifest,
    make_cache,
    some_samples,
)


def without_lengths(lengths: list[int]) -> dict[str, torch.Tensor]:
    samples = some_samples(lengths)
    del samples["lengths"]
    return samples


def test_the_names_of_the_page_are_there():
    assert CACHE_KEYS == (
        "input_ids",
        "loss_mask",
        "target_hidden_states",
        "target_last_hidden_states",
    )
    assert {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32} == DTYPE_MAP
    assert (cache._CACHE_NAME, cache._FORMAT_VERSION) == ("DSpark", 1)
    assert cache._IDENTITY_EXEMPT_FIELDS == ("format_version", "complete")
    assert cache._TARGET_WEIGHTS_NAME == "target_weights.safetensors"
    assert set(cache.__all__) >= {
        "CACHE_KEYS",
        "DTYPE_MAP",
        "CachedDSparkDataset",
        "build_cache_manifest",
        "build_cached_dspark_dataloader",
        "compute_batch_cache",
        "ensure_manifest_complete",
        "existing_shard_indices",
        "manifest_mismatch_fields",
        "manifest_path",
        "read_manifest",
        "read_target_weight_modules",
        "shard_path",
        "tokenizer_chat_template_sha256",
        "write_manifest",
        "write_shard",
        "write_target_weights",
    }
    assert all(hasattr(cache, name) for name in cache.__all__)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("CachedDSparkDataset", ["cache_dir"]),
        ("_collate_cached", ["features"]),
        ("_target_weights_path", ["cache_dir"]),
        ("compute_batch_cache", ["target_batch", "cache_dtype"]),
        ("ensure_manifest_complete", ["manifest", "cache_dir"]),
        ("manifest_mismatch_fields", ["recorded", "manifest"]),
        ("read_manifest", ["cache_dir", "allow_incomplete"]),
        ("read_target_weight_modules", ["cache_dir"]),
        ("tokenizer_chat_template_sha256", ["tokenizer"]),
        ("write_manifest", ["cache_dir", "manifest"]),
        ("write_shard", ["cache_dir", "shard_index", "samples"]),
        ("write_target_weights", ["cache_dir", "embed_tokens", "lm_head", "dtype"]),
    ],
)
def test_the_signatures_of_the_page_are_kept(name, parameters):
    signature = inspect.signature(getattr(cache, name))
    positional = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert positional == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "build_cache_manifest",
            {
                "target_model",
                "target_model_type",
                "target_text_config",
                "seq_length",
                "dtype",
                "num_samples",
                "shard_size",
                "target_layer_ids",
                "train_data_path",
                "train_split",
                "shuffle_seed",
                "mask_reasoning_content",
                "chat_template_sha256",
            },
        ),
        ("build_cached_dspark_dataloader", {"cache_dir", "batch_size", "shuffle"}),
    ],
)
def test_what_has_many_settings_takes_keywords_alone(name, parameters):
    signature = inspect.signature(getattr(cache, name)).parameters.values()
    assert {p.kind for p in signature} == {inspect.Parameter.KEYWORD_ONLY}
    assert {p.name for p in signature if p.default is p.empty} == parameters


def a_batch(**changes: object) -> SimpleNamespace:
    samples = without_lengths([6, 3])
    samples |= {key: samples[key].float() for key in CACHE_KEYS[2:]}
    return SimpleNamespace(**(samples | changes))


@pytest.mark.parametrize("dtype", DTYPE_MAP.values(), ids=DTYPE_MAP)
def test_a_batch_becomes_the_tensors_of_the_cache(dtype):
    batch = a_batch(loss_mask=torch.ones(2, SEQ_LENGTH, dtype=torch.bool))
    samples = compute_batch_cache(batch, dtype)
    assert tuple(samples) == CACHE_KEYS
    assert [samples[key].dtype for key in CACHE_KEYS] == [torch.int64, torch.int64, dtype, dtype]
    for key in CACHE_KEYS:
        assert samples[key].is_contiguous()
        assert torch.equal(samples[key], getattr(batch, key).to(samples[key].dtype))


def test_views_of_a_batch_become_tensors_of_their_own():
    wide = torch.arange(2 * SEQ_LENGTH * 16.0).view(2, SEQ_LENGTH, 16)
    states = wide[:, :, ::2].requires_grad_()
    samples = compute_batch_cache(a_batch(target_hidden_states=states), torch.float32)
    found = samples["target_hidden_states"]
    assert found.is_contiguous()
    assert not found.requires_grad
    assert torch.equal(found, states)


@pytest.mark.parametrize("lengths", [[6, 3], torch.tensor([6, 3], dtype=torch.int32)])
def test_the_lengths_of_a_batch_are_passed_on(lengths):
    samples = compute_batch_cache(a_batch(lengths=lengths), torch.float32)
    assert samples["lengths"].dtype == torch.int64
    assert samples["lengths"].tolist() == [6, 3]


def test_a_shard_lies_under_its_name_and_holds_the_samples(tmp_path):
    samples = without_lengths([6, 3])
    path = write_shard(str(tmp_path), 4, samples)
    assert path == shard_path(str(tmp_path), 4)
    loaded = load_file(path)
    assert tuple(sorted(loaded)) == CACHE_KEYS
    for key in CACHE_KEYS:
        assert loaded[key].dtype == samples[key].dtype
        assert torch.equal(loaded[key], samples[key])


def test_without_lengths_every_row_counts_as_full(tmp_path):
    path = Path(write_shard(str(tmp_path), 0, without_lengths([6, 3])))
    assert dspark_record(path)["lengths"] == [SEQ_LENGTH, SEQ_LENGTH]


def test_with_lengths_the_states_of_padding_become_zeros(tmp_path):
    samples = some_samples([6, 3])
    for key in CACHE_KEYS[2:]:
        samples[key][1, 3:] = 7
    path = Path(write_shard(str(tmp_path), 0, samples))
    assert dspark_record(path)["lengths"] == [6, 3]
    loaded = load_file(path)
    for key in CACHE_KEYS[2:]:
        assert not loaded[key][1, 3:].any()
        assert torch.equal(loaded[key][1, :3], samples[key][1, :3])
    assert loaded["input_ids"][1].tolist() == [0 + 1, 1 + 1, 2 + 1, 15, 15, 15]


def test_a_shard_names_the_rows_of_the_source_where_some_were_left_out(tmp_path):
    path = write_shard(str(tmp_path), 0, some_samples([6, 3]) | {"rows": torch.tensor([4, 9])})
    assert dspark_record(Path(path))["rows"] == [4, 9]


def test_a_shard_carries_the_identity_of_the_manifest_beside_it(tmp_path):
    path = Path(write_shard(str(tmp_path), 0, some_samples([6, 3])))
    assert dspark_record(path)["identity"] is None
    write_manifest(str(tmp_path), a_manifest())
    write_shard(str(tmp_path), 0, some_samples([6, 3]))
    assert dspark_record(path)["identity"] == identity_digest(a_manifest())


def test_the_same_samples_give_the_same_bytes(tmp_path):
    paths = [Path(write_shard(str(tmp_path), 0, some_samples([6, 3]))) for _ in range(2)]
    first = paths[0].read_bytes()
    write_shard(str(tmp_path), 0, some_samples([6, 3]))
    assert paths[0].read_bytes() == first


def test_the_samples_may_be_views_of_larger_buffers(tmp_path):
    samples = some_samples([6, 3])
    first = Path(write_shard(str(tmp_path), 0, samples)).read_bytes()
    views = {key: torch.stack([samples[key]] * 3, dim=1)[:, 1] for key in CACHE_KEYS}
    path = Path(write_shard(str(tmp_path), 0, views | {"lengths": samples["lengths"]}))
    assert path.read_bytes() == first
    tensor_bytes = sum(samples[key].nbytes for key in CACHE_KEYS)
    assert path.stat().st_size == data_start(path) + tensor_bytes


@pytest.mark.parametrize("key", CACHE_KEYS)
def test_a_missing_tensor_is_refused_by_name(tmp_path, key):
    samples = some_samples([6, 3])
    del samples[key]
    with pytest.raises(ValueError, match=f"missing required.*{key}"):
        write_shard(str(tmp_path), 0, samples)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    samples = some_samples([6, 3]) | {"logits": torch.zeros(2)}
    with pytest.raises(CacheError, match=r"unknown tensors.*logits"):
        write_shard(str(tmp_path), 0, samples)
    assert list(tmp_path.iterdir()) == []


MISFITS = {
    "ids of another length": {"input_ids": torch.zeros(2, 5, dtype=torch.int64)},
    "ids without rows": {"input_ids": torch.zeros(6, dtype=torch.int64)},
    "mask of another length": {"loss_mask": torch.zeros(2, 7, dtype=torch.int64)},
    "states of another length": {"target_hidden_states": torch.zeros(2, 7, 8)},
    "fewer rows of states": {"target_last_hidden_states": torch.zeros(1, 6, 4)},
    "more rows of mask": {"loss_mask": torch.zeros(3, 6, dtype=torch.int64)},
    "states without a width": {"target_hidden_states": torch.zeros(2, 6)},
    "one length too many": {"lengths": torch.tensor([6, 3, 1])},
    "one length too few": {"lengths": torch.tensor([6])},
    "a length beyond the row": {"lengths": torch.tensor([6, 7])},
    "a negative length": {"lengths": torch.tensor([6, -1])},
    "one source row too few": {"rows": torch.tensor([1])},
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_samples_that_do_not_fit_each_other_are_refused(tmp_path, change):
    with pytest.raises(CacheError, match="shard 3"):
        write_shard(str(tmp_path), 3, some_samples([6, 3], dtype="fp32") | change)
    assert list(tmp_path.iterdir()) == []


def test_supervision_of_padding_is_refused(tmp_path):
    samples = some_samples([6, 3])
    samples["loss_mask"][1, 4] = 1
    with pytest.raises(CacheError, match="shard 0 row 1: loss_mask is set beyond 3"):
        write_shard(str(tmp_path), 0, samples)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_gives_back_the_rows_that_were_written(tmp_path):
    dataset = CachedDSparkDataset(make_cache(tmp_path))
    assert len(dataset) == 5
    assert dataset.manifest["target_layer_ids"] == LAYERS
    written = [some_samples([n], first_row=row) for row, n in enumerate((6, 2, 3, 5, 4))]
    for found, expected in zip(dataset, written, strict=True):
        assert tuple(found) == CACHE_KEYS
        for key in CACHE_KEYS:
            assert found[key].dtype == expected[key].dtype
            assert torch.equal(found[key], expected[key][0])


def test_rows_can_be_counted_from_the_end_and_end_as_lists_do(tmp_path):
    dataset = CachedDSparkDataset(make_cache(tmp_path))
    assert torch.equal(dataset[-1]["input_ids"], dataset[4]["input_ids"])
    for index in (5, -6):
        with pytest.raises(IndexError):
            dataset[index]


def test_an_unfinished_cache_is_not_opened(tmp_path):
    cache_dir = make_cache(tmp_path)
    write_manifest(cache_dir, a_manifest())
    with pytest.raises(ValueError, match="incomplete"):
        CachedDSparkDataset(cache_dir)


def test_a_directory_without_a_manifest_is_not_opened(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        CachedDSparkDataset(str(tmp_path))


@pytest.mark.parametrize(("remove", "add"), [(1, None), (2, None), (None, 3), (0, 3)])
def test_a_cache_with_other_shards_than_its_manifest_says_is_not_opened(tmp_path, remove, add):
    cache_dir = make_cache(tmp_path)
    if add is not None:
        write_shard(cache_dir, add, some_samples([6, 3]))
    if remove is not None:
        Path(shard_path(cache_dir, remove)).unlink()
    with pytest.raises(ValueError, match="shard indices"):
        CachedDSparkDataset(cache_dir)


def test_features_are_stacked_into_a_batch(tmp_path):
    dataset = CachedDSparkDataset(make_cache(tmp_path))
    batch = _collate_cached([dataset[1], dataset[4]])
    assert tuple(batch) == CACHE_KEYS
    assert batch["target_hidden_states"].shape == (2, SEQ_LENGTH, HIDDEN * len(LAYERS))
    assert torch.equal(batch["loss_mask"][1], dataset[4]["loss_mask"])


def test_a_loader_gives_every_row_once_in_batches(tmp_path):
    loader = build_cached_dspark_dataloader(
        cache_dir=make_cache(tmp_path), batch_size=2, shuffle=False
    )
    batches = list(loader)
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    firsts = [int(row[0]) for batch in batches for row in batch["input_ids"]]
    assert firsts == [0, 1, 2, 3, 4]


def test_the_template_is_hashed_as_utf_8_text():
    tokenizer = SimpleNamespace(chat_template="{{ 'é' }}")
    expected = "0f4f23df1761781d59a0ff13d97d1de494f448a25361a745ec2976ac9c6d1225"
    assert tokenizer_chat_template_sha256(tokenizer) == expected


@pytest.mark.parametrize(
    "tokenizer",
    [
        SimpleNamespace(chat_template=None),
        SimpleNamespace(chat_template=""),
        SimpleNamespace(),
        SimpleNamespace(chat_template={"tool_use": "t"}),
    ],
    ids=["none", "empty", "no attribute", "no default"],
)
def test_without_a_template_the_hash_is_that_of_the_empty_string(tokenizer):
    expected = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert tokenizer_chat_template_sha256(tokenizer) == expected


def test_of_several_templates_the_one_in_use_is_hashed():
    several = SimpleNamespace(chat_template={"default": "d", "tool_use": "t"})
    one = SimpleNamespace(chat_template="d")
    assert tokenizer_chat_template_sha256(several) == tokenizer_chat_template_sha256(one)


def test_a_cache_whose_manifest_ends_with_the_layer_ids_is_read(tmp_path):
    cache_dir = make_cache(tmp_path / "new" / "cache")
    fields = list(a_manifest())
    old = fields[2 : fields.index("target_layer_ids") + 1]  # neither complete nor any input
    write_manifest(cache_dir, {"format_version": 1} | {key: a_manifest()[key] for key in old})
    dataset = CachedDSparkDataset(cache_dir)
    assert torch.equal(dataset[4]["input_ids"], some_samples([4], first_row=4)["input_ids"][0])
