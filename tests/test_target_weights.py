"""The target's embedding and head on disk: bytes, own storage, and damage that is named."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from containers import container, data_start, dspark_record, header_text
from dspark.cache import (
    _target_weights_path,
    read_target_weight_modules,
    write_manifest,
    write_target_weights,
)
from dspark.disk.manifest import identity_digest
from dspark.errors import CacheError
from dspark.schema.logits import HeadTransform
from dspark.schema.target_weights import check_target_weights, target_logits
from dspark_caches import a_manifest
from tiny_models import tiny_gpt2, tiny_tied

NAMES = ("embed_tokens.weight", "lm_head.weight")


def module(weight: torch.Tensor) -> Any:
    return SimpleNamespace(weight=weight)


def write(directory: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    embed_tokens = module(torch.arange(6.0).view(3, 2))
    lm_head = module(torch.arange(6.0).view(3, 2) / 2)
    return Path(write_target_weights(str(directory), embed_tokens, lm_head, dtype))


def test_the_bytes_of_the_weights_are_frozen(tmp_path):
    path = write(tmp_path)
    digests = {NAMES[0]: "4b7d1e38a5a789c3", NAMES[1]: "366ac3bf107b5c99"}
    record = json.dumps({"identity": None, "xxh3_64": digests}, sort_keys=True)
    header = (
        '{"__metadata__":{"dspark":' + json.dumps(record) + "},"
        '"embed_tokens.weight":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},'
        '"lm_head.weight":{"dtype":"BF16","shape":[3,2],"data_offsets":[12,24]}}'
    )
    assert header_text(path).rstrip(" ") == header
    assert path.read_bytes()[data_start(path) :].hex() == (
        "0000" "803f" "0040" "4040" "8040" "a040"  # 0 to 5 in bfloat16
        "0000" "003f" "803f" "c03f" "0040" "2040"  # half of that
    )  # fmt: skip
    expected = "903dc26039b82679df763e5e43913b88c93e05d6c69e23e1a30a11fbf54cf58b"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == expected


def test_the_weights_lie_beside_the_shards(tmp_path):
    assert write(tmp_path) == tmp_path / "target_weights.safetensors"
    assert _target_weights_path("cache") == "cache/target_weights.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["target_weights.safetensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_come_back_in_the_dtype_of_the_cache(tmp_path, dtype):
    write(tmp_path, dtype=dtype)
    embed_tokens, lm_head = read_target_weight_modules(str(tmp_path))
    assert embed_tokens.weight.dtype == lm_head.weight.dtype == dtype
    assert torch.equal(embed_tokens.weight.float(), torch.arange(6.0).view(3, 2))
    assert torch.equal(lm_head.weight.float(), torch.arange(6.0).view(3, 2) / 2)


def test_the_library_of_the_format_reads_them(tmp_path):
    path = write(tmp_path)
    assert sorted(load_file(path)) == sorted(NAMES)
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["dspark"]


@pytest.mark.parametrize("build", [tiny_tied, tiny_gpt2])
def test_tied_weights_are_both_there_and_do_not_share_memory(tmp_path, build):
    model = build()
    embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embed_tokens.weight.data_ptr() == lm_head.weight.data_ptr()
    path = Path(write_target_weights(str(tmp_path), embed_tokens, lm_head, torch.float32))
    assert path.stat().st_size == data_start(path) + 2 * lm_head.weight.nbytes
    found = read_target_weight_modules(str(tmp_path))
    for weights in found:
        assert torch.equal(weights.weight, lm_head.weight)
    found[0].weight.zero_()
    assert torch.equal(found[1].weight, lm_head.weight)


def test_views_are_written_as_tensors_of_their_own(tmp_path):
    plain = write(tmp_path).read_bytes()
    wide = torch.arange(6.0).view(3, 2).repeat_interleave(2, dim=1)
    path = write_target_weights(
        str(tmp_path), module(wide[:, ::2]), module((wide / 2).t()[::2].t()), torch.bfloat16
    )
    assert Path(path).read_bytes() == plain


def test_the_weights_carry_the_identity_of_the_manifest_beside_them(tmp_path):
    assert dspark_record(write(tmp_path))["identity"] is None
    write_manifest(str(tmp_path), a_manifest())
    assert dspark_record(write(tmp_path))["identity"] == identity_digest(a_manifest())


def write_with_extras(directory: Path) -> Path:
    lm_head = SimpleNamespace(weight=torch.ones(3, 2), bias=torch.tensor([1.0, 2.0, 3.0]))
    path = write_target_weights(
        str(directory),
        module(torch.ones(3, 2)),
        lm_head,
        torch.float32,
        transform=HeadTransform(softcap=30.0),
    )
    return Path(path)


def test_what_the_head_does_beyond_a_product_is_stored_and_applied(tmp_path):
    path = write_with_extras(tmp_path)
    assert dspark_record(path)["logits"] == {"final_logit_softcapping": 30.0}
    assert sorted(load_file(path)) == ["embed_tokens.weight", "lm_head.bias", "lm_head.weight"]
    _, lm_head = read_target_weight_modules(str(tmp_path))
    states = torch.tensor([[1.0, 2.0]])
    expected = 30 * torch.tanh((states.sum() + torch.tensor([[1.0, 2.0, 3.0]])) / 30)
    assert torch.allclose(target_logits(lm_head, states), expected)


def test_a_plain_head_has_no_bias_and_its_logits_are_a_product(tmp_path):
    write(tmp_path, dtype=torch.float32)
    _, lm_head = read_target_weight_modules(str(tmp_path))
    assert lm_head.bias is None
    states = torch.tensor([[1.0, 2.0]])
    assert torch.equal(target_logits(lm_head, states), states @ lm_head.weight.T)


def test_a_changed_bias_does_not_pass_the_check(tmp_path):
    path = write_with_extras(tmp_path)
    check_target_weights(str(tmp_path), identity=None)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(torch.tensor([3.0]).numpy().tobytes(), b"1234"))
    with pytest.raises(CacheError, match=r"lm_head.bias do not match their checksum"):
        check_target_weights(str(tmp_path), identity=None)


def test_missing_weights_are_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"target_weights.safetensors.*--resume"):
        read_target_weight_modules(str(tmp_path))


def test_an_error_in_the_middle_leaves_no_file(tmp_path):
    broken = SimpleNamespace(weight=torch.empty(3, 2, device="meta"))
    with pytest.raises(NotImplementedError):
        write_target_weights(str(tmp_path), module(torch.zeros(3, 2)), broken, torch.float32)
    assert list(tmp_path.iterdir()) == []


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DAMAGED = {
    "empty": b"",
    "cut in the header": container({NAMES[0]: entry("F32", [1, 1], 0, 4)})[:20],
    "cut in the data": container({NAMES[0]: entry("F32", [2, 1], 0, 8)}, b"1234"),
    "no head": container({NAMES[0]: entry("F32", [1, 1], 0, 4)}, b"1234"),
    "no embedding": container({NAMES[1]: entry("F32", [1, 1], 0, 4)}, b"1234"),
    "nothing in it": container({}),
    "weights of one dimension": container(
        {NAMES[0]: entry("F32", [1], 0, 4), NAMES[1]: entry("F32", [1], 4, 8)}, b"12345678"
    ),
    "weights that are whole numbers": container(
        {NAMES[0]: entry("I32", [1, 1], 0, 4), NAMES[1]: entry("I32", [1, 1], 4, 8)}, b"12345678"
    ),
    "weights of different width": container(
        {NAMES[0]: entry("F32", [1, 1], 0, 4), NAMES[1]: entry("F32", [1, 2], 4, 12)}, b"1" * 12
    ),
}


@pytest.mark.parametrize("raw", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, raw):
    (tmp_path / "target_weights.safetensors").write_bytes(raw)
    with pytest.raises(CacheError, match=r"target_weights.safetensors is damaged"):
        read_target_weight_modules(str(tmp_path))


def test_weights_by_another_writer_are_read(tmp_path):
    weights = {name: torch.ones(3, 2) for name in NAMES}
    save_file(weights, tmp_path / "target_weights.safetensors")
    embed_tokens, _ = read_target_weight_modules(str(tmp_path))
    assert torch.equal(embed_tokens.weight, torch.ones(3, 2))


def test_whole_weights_pass_their_check(tmp_path):
    write(tmp_path)
    check_target_weights(str(tmp_path), identity=None)


def test_missing_weights_do_not_pass_the_check(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_target_weights(str(tmp_path), identity=None)


def test_weights_of_another_cache_do_not_pass_the_check(tmp_path):
    write(tmp_path)
    with pytest.raises(CacheError, match="belongs to another cache"):
        check_target_weights(str(tmp_path), identity="ab" * 32)


@pytest.mark.parametrize("byte", [-1, -13, -24])
def test_one_changed_byte_does_not_pass_the_check(tmp_path, byte):
    path = write(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CacheError, match="do not match their checksum"):
        check_target_weights(str(tmp_path), identity=None)


HOSTILE_RECORDS = ["", "{", "[]", "null", "\ud800", '{"identity": null}'] + [
    json.dumps({"identity": None, "xxh3_64": digests})
    for digests in (None, [], "text", {}, {name: 3 for name in NAMES}, dict.fromkeys(NAMES))
]


@pytest.mark.parametrize("record", HOSTILE_RECORDS)
def test_a_hostile_record_does_not_pass_the_check(tmp_path, record):
    tensors = {NAMES[0]: entry("F32", [1, 1], 0, 4), NAMES[1]: entry("F32", [1, 1], 4, 8)}
    raw = container({"__metadata__": {"dspark": record}, **tensors}, b"12345678")
    (tmp_path / "target_weights.safetensors").write_bytes(raw)
    with pytest.raises(CacheError, match=r"target_weights.safetensors is damaged"):
        check_target_weights(str(tmp_path), identity=None)
