"""From a cache's weights file back to the target's own logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import tiny_models
from dspark.cache import read_target_weight_modules, target_logits, write_target_weights
from dspark.errors import CacheError
from dspark.model.capture import Target
from dspark.model.target_check import check_target
from dspark.schema.logits import HeadTransform
from dspark.schema.target_weights import check_target_weights

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def write(directory, target, dtype=torch.float32):
    return write_target_weights(
        str(directory), target.embed_tokens, target.lm_head, dtype, transform=target.head
    )


@pytest.mark.parametrize(
    "build",
    [
        tiny_models.tiny_qwen3,
        tiny_models.tiny_tied,
        tiny_models.tiny_gpt2,
        tiny_models.tiny_gemma2,
        tiny_models.tiny_cohere,
        tiny_models.tiny_granite,
        tiny_models.tiny_phi,
        tiny_models.tiny_mllama,
    ],
)
def test_stored_weights_give_the_models_own_logits(tmp_path, build):
    model = build()
    target = Target(model, [1])
    check_target(target)
    write(tmp_path, target)
    check_target_weights(str(tmp_path), identity=None)
    _, head = read_target_weight_modules(str(tmp_path))
    last = target.capture(IDS, torch.ones_like(IDS)).last
    expected = model(IDS).logits
    torch.testing.assert_close(target_logits(head, last), expected, rtol=1e-5, atol=1e-5)


def test_tied_weights_are_stored_twice_and_equal(tmp_path):
    target = Target(tiny_models.tiny_tied(), [1])
    path = write(tmp_path, target)
    embed, head = read_target_weight_modules(str(tmp_path))
    assert torch.equal(embed.weight, head.weight)
    assert embed.weight.data_ptr() != head.weight.data_ptr()
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["embed_tokens.weight", "lm_head.weight"]


def test_a_head_bias_is_a_tensor_of_its_own(tmp_path):
    target = Target(tiny_models.tiny_phi(), [1])
    path = write(tmp_path, target, torch.bfloat16)
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["embed_tokens.weight", "lm_head.bias", "lm_head.weight"]
        assert torch.equal(file.get_tensor("lm_head.bias"), target.lm_head.bias.bfloat16())


def test_what_the_head_adds_is_in_the_metadata_by_name_and_value(tmp_path):
    path = write(tmp_path, Target(tiny_models.tiny_gemma2(), [1]))
    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["dspark"])
    assert record["logits"] == {"final_logit_softcapping": 3.0}


def test_a_plain_head_says_nothing(tmp_path):
    path = write(tmp_path, Target(tiny_models.tiny_qwen3(), [1]))
    with safe_open(path, "pt") as file:
        assert "logits" not in json.loads(file.metadata()["dspark"])


def test_a_corrupted_bias_is_found(tmp_path):
    path = write(tmp_path, Target(tiny_models.tiny_phi(), [1]))
    with safe_open(path, "pt") as file:
        bias = file.get_tensor("lm_head.bias")
    data = bytearray(Path(path).read_bytes())
    data[data.index(bias.numpy().tobytes())] ^= 1
    Path(path).write_bytes(data)
    with pytest.raises(CacheError, match=r"lm_head\.bias"):
        check_target_weights(str(tmp_path), identity=None)


@pytest.mark.parametrize(
    "transform",
    [HeadTransform(), HeadTransform(scale=0.5, softcap=30.0, num_logits=100)],
)
def test_a_transform_survives_its_spelling(transform):
    assert HeadTransform.from_extras(json.loads(json.dumps(transform.extras))) == transform


@pytest.mark.parametrize(
    "extras", [{"temperature": 2}, {"logit_scale": "2"}, {"logit_scale": True}]
)
def test_a_transform_of_another_version_is_refused(extras):
    with pytest.raises(CacheError, match="cannot apply"):
        HeadTransform.from_extras(extras)


def test_the_cap_bounds_the_scaled_product():
    product = torch.tensor([1e3, 4.0])
    expected = 2.0 * torch.tanh(torch.tensor([500.0, 2.0]) / 2.0)
    assert torch.allclose(HeadTransform(scale=0.5, softcap=2.0)(product), expected)
