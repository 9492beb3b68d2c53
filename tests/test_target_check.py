"""The check before the first row: it passes what is right and names what is not."""

import pytest
import torch
from torch import nn

import tiny_models
from dspark.errors import TargetError
from dspark.model.capture import Target
from dspark.model.target_check import check_target

KINDS = {
    "dense": (tiny_models.tiny_qwen3, {}),
    "tied": (tiny_models.tiny_tied, {}),
    "mixture of experts": (tiny_models.tiny_qwen3moe, {}),
    "learned positions": (tiny_models.tiny_gpt2, {}),
    "positions from the mask": (tiny_models.tiny_opt, {}),
    "alibi": (tiny_models.tiny_bloom, {}),
    "parallel residual": (tiny_models.tiny_gpt_neox, {}),
    "parallel residual, scaled": (tiny_models.tiny_cohere, {"logit_scale": 0.25}),
    "divided logits": (tiny_models.tiny_granite, {"logit_scale": 0.25}),
    "head bias": (tiny_models.tiny_phi, {}),
    "soft-capped": (tiny_models.tiny_gemma2, {"final_logit_softcapping": 3.0}),
    "multimodal wrapper": (tiny_models.tiny_gemma3, {}),
    "skipped layer": (tiny_models.tiny_mllama, {}),
    "parallel streams": (tiny_models.tiny_gemma3n, {"final_logit_softcapping": 30.0}),
    "state space": (tiny_models.tiny_mamba, {}),
    "hybrid": (tiny_models.tiny_jamba, {}),
}


@pytest.fixture(params=KINDS, scope="module")
def kind(request):
    build, extras = KINDS[request.param]
    return Target(build(), range(-1, 4)), extras


def test_every_kind_of_decoder_passes_and_its_head_is_known(kind):
    target, extras = kind
    check_target(target)
    assert target.head.extras == pytest.approx(extras)


def test_every_kind_gives_a_padded_row_the_states_it_has_alone(kind):
    target, _ = kind
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(3, 90, (4, 21), generator=generator)
    mask = torch.ones_like(input_ids)
    lengths = [21, 12, 5, 1]
    for row, length in enumerate(lengths):
        input_ids[row, length:] = 0
        mask[row, length:] = 0
    together = target.capture(input_ids, mask)
    for row, length in enumerate(lengths):
        alone = target.capture(input_ids[row : row + 1, :length], mask[row : row + 1, :length])
        for mine, theirs in zip(together.layers, alone.layers, strict=True):
            largest = theirs[0].abs().amax(-1, keepdim=True)
            assert ((mine[row, :length] - theirs[0]).abs() <= 1e-5 * largest).all()


def test_a_wrong_layer_is_named_with_its_difference(monkeypatch):
    target = Target(tiny_models.tiny_qwen3(), [1])
    layers = target._stack.layers
    monkeypatch.setattr(layers[2], "forward", _shifted(layers[2].forward, target))
    with pytest.raises(TargetError, match=r"layer 2 of Qwen3ForCausalLM: .* by \d\.\d\de-\d\d"):
        check_target(target)


def _shifted(forward, target):
    """A layer that gives the capture another state than the whole model."""
    calls = []

    def shifted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs) + (1e-3 if len(calls) == 1 else 0.0)

    return shifted


def test_logits_that_the_head_does_not_explain_are_refused():
    model = tiny_models.tiny_qwen3()
    model.lm_head = nn.Sequential(nn.GELU(), model.lm_head)
    model.lm_head.weight = model.lm_head[1].weight
    with pytest.raises(TargetError, match="are not its head's product"):
        check_target(Target(model, [1]))


def test_a_scale_that_no_name_declares_is_found():
    model = tiny_models.tiny_qwen3()
    model.lm_head.register_forward_hook(lambda _m, _args, logits: logits * 0.37)
    target = Target(model, [1])
    check_target(target)
    assert target.head.extras == pytest.approx({"logit_scale": 0.37})


def test_half_precision_does_not_hide_what_the_head_does():
    model = tiny_models.tiny_qwen3().bfloat16()
    model.lm_head.register_forward_hook(lambda _m, _args, logits: logits * 1.15)
    target = Target(model, [1])
    check_target(target)
    assert target.head.scale == pytest.approx(1.15, rel=0.01)


def test_half_precision_does_not_hide_logits_that_the_head_does_not_explain():
    model = tiny_models.tiny_qwen3().bfloat16()
    add = torch.zeros(model.config.vocab_size, dtype=torch.bfloat16)
    add[::7] = 1.0
    model.lm_head.register_forward_hook(
        lambda _m, _args, logits: logits + add * logits.abs().amax() * 0.1
    )
    with pytest.raises(TargetError, match="are not its head's product"):
        check_target(Target(model, [1]))


def test_a_declared_scale_that_the_model_does_not_apply_is_dropped():
    model = tiny_models.tiny_qwen3()
    model.config.logit_scale = 0.5
    target = Target(model, [1])
    assert target.head.scale == 0.5
    check_target(target)
    assert target.head.extras == {}


def test_rows_of_a_padded_vocabulary_are_no_tokens():
    model = tiny_models.tiny_qwen3()
    model.lm_head.register_forward_hook(lambda _m, _args, logits: logits[..., :120])
    target = Target(model, [1])
    check_target(target)
    assert target.head.extras == {"num_logits": 120}


def test_a_state_that_is_not_a_number_fails():
    model = tiny_models.tiny_qwen3()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(TargetError, match=r"layer 1 .* not finite in torch\.float32"):
        check_target(Target(model, [1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes(dtype):
    check_target(Target(tiny_models.tiny_qwen3().to(dtype), [1]))


def test_attention_to_padding_fails(monkeypatch):
    model = tiny_models.tiny_qwen3()
    layer = model.model.layers[1]
    forward = layer.forward

    def leaking(state, *args, **kwargs):
        return forward(state + state.mean(dim=1, keepdim=True), *args, **kwargs)

    monkeypatch.setattr(layer, "forward", leaking)
    with pytest.raises(TargetError, match=r"layer 1 .* with the tokens after them"):
        check_target(Target(model, [1]))


def test_another_attention_without_padding_fails(monkeypatch):
    model = tiny_models.tiny_qwen3()
    layer = model.model.layers[1]
    forward = layer.forward

    def sees_all_alone(state, *args, **kwargs):  # as a prefix language model does
        leak = state.mean(dim=1, keepdim=True) if len(state) == 1 else 0
        return forward(state + leak, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", sees_all_alone)
    with pytest.raises(TargetError, match=r"layer 1 .* or with padding"):
        check_target(Target(model, [1]))


def test_a_model_that_returns_no_states_of_its_own_cannot_be_checked():
    model = tiny_models.tiny_qwen3()
    forward = model.forward

    def without(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.hidden_states = None
        return output

    model.forward = without
    with pytest.raises(TargetError, match="returns no hidden_states"):
        check_target(Target(model, [1]))
