"""What a capture returns: transformers' own states, whatever the layers hand out."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from dspark.errors import TargetError
from dspark.model.capture import Target, as_bsh
from dspark.model.recorder import first_tensor
from tiny_models import tiny_gemma3, tiny_gemma3n, tiny_gpt2, tiny_mllama, tiny_qwen3, tiny_qwen3moe

EVERY = [-1, 0, 1, 2, 3]


def batch(lengths=(9, 5, 7)):
    """Ids and mask, padded on the right with an id that is also an ordinary token."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, :length] = torch.randint(3, 90, (length,), generator=generator)
        mask[row, :length] = 1
    return input_ids, mask


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def same(mine, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine.layers, theirs.layers, strict=True))


@pytest.mark.parametrize("build", [tiny_qwen3, tiny_gpt2, tiny_gemma3])
def test_layer_i_is_hidden_states_i_plus_1(build):
    model = build()
    input_ids, mask = batch()
    captured = Target(model, EVERY).capture(input_ids, mask)
    output = model(input_ids, attention_mask=mask, output_hidden_states=True)
    for mine, theirs in zip(captured.layers, output.hidden_states, strict=True):
        torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], rtol=0, atol=1e-6)
    assert torch.equal(captured.layers[-1], captured.last)


def test_states_lie_side_by_side_in_the_order_of_the_ids():
    captured = Target(tiny_qwen3(), [0, 2]).capture(*batch())
    assert captured.hidden_states.shape == (3, 9, 64)
    assert torch.equal(captured.hidden_states[..., 32:], captured.layers[1])


class Wrapped(nn.Module):
    """A layer whose output comes in another container; unpacked again by its neighbour below."""

    def __init__(self, layer, wrap):
        super().__init__()
        self.layer, self.wrap = layer, wrap
        self.attention_type = getattr(layer, "attention_type", None)  # some decoders look at it

    def forward(self, state, *args, **kwargs):
        state = state if isinstance(state, torch.Tensor) else state[0]
        return self.wrap(self.layer(state, *args, **kwargs))


class Unwrapped(nn.Module):
    """A final norm that takes any container."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, state):
        return self.norm(state if isinstance(state, torch.Tensor) else state[0])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: (state,),
        lambda state: (state, torch.zeros(3, 4)),
        lambda state: BaseModelOutput(last_hidden_state=state),
    ],
    ids=["tensor", "tuple", "router", "output"],
)
def test_a_layer_may_return_a_tensor_a_tuple_or_a_model_output(wrap):
    model = tiny_qwen3()
    plain = Target(model, EVERY).capture(*batch())
    model.model.layers = nn.ModuleList(Wrapped(layer, wrap) for layer in model.model.layers)
    model.model.norm = Unwrapped(model.model.norm)
    captured = Target(model, EVERY).capture(*batch())
    assert captured.layers[1].shape == (3, 9, 32)
    assert same(captured, plain)


def test_each_row_of_a_batch_is_what_it_is_alone():
    target = Target(tiny_qwen3moe(), EVERY)
    input_ids, mask = batch((9, 5, 7, 3, 8, 1, 6))
    captured = target.capture(input_ids, mask)
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = target.capture(input_ids[row : row + 1, :length], mask[row : row + 1, :length])
        for mine, theirs in zip(captured.layers, alone.layers, strict=True):
            largest = theirs[0].abs().amax(-1, keepdim=True)
            assert ((mine[row, :length] - theirs[0]).abs() <= 1e-5 * largest).all()


def test_a_second_call_gives_the_same_and_leaves_the_first_alone():
    target = Target(tiny_qwen3(), EVERY)
    first = target.capture(*batch())
    kept = [layer.clone() for layer in first.layers]
    target.capture(*batch((4, 4)))
    assert same(target.capture(*batch()), first)
    assert all(torch.equal(a, b) for a, b in zip(first.layers, kept, strict=True))


def test_no_hook_is_left_behind():
    model = tiny_qwen3()
    before = hooks_of(model)
    Target(model, EVERY).capture(*batch())
    assert hooks_of(model) == before


def test_no_hook_is_left_behind_by_an_exception():
    model = tiny_qwen3()
    before = hooks_of(model)
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Target(model, EVERY).capture(*batch())
    handle.remove()
    assert hooks_of(model) == before


def test_the_head_is_never_called():
    model = tiny_qwen3()
    plain = Target(model, EVERY).capture(*batch())
    model.lm_head.forward = lambda *_: pytest.fail("the head was called")
    assert same(Target(model, EVERY).capture(*batch()), plain)


def test_nothing_is_kept_for_a_gradient_or_a_cache(monkeypatch):
    model = tiny_qwen3()
    outputs = []
    model.model.register_forward_hook(lambda _m, _args, output: outputs.append(output))
    captured = Target(model.train(), EVERY).capture(*batch())
    assert not model.training
    assert not any(layer.requires_grad for layer in (*captured.layers, captured.last))
    assert "past_key_values" not in outputs[0] or outputs[0].past_key_values is None


class InPlace(nn.Module):
    """A layer that adds to its input in place, as some remote code does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.attention_type = getattr(layer, "attention_type", None)  # some decoders look at it

    def forward(self, state, *args, **kwargs):
        change = self.layer(state, *args, **kwargs) - state
        return state.add_(change)


def test_states_that_the_model_overwrites_are_kept_as_they_were():
    model = tiny_qwen3()
    plain = Target(model, EVERY).capture(*batch())
    for place in (1, 2):
        model.model.layers[place] = InPlace(model.model.layers[place])
    target = Target(model, EVERY)
    for _ in range(2):
        captured = target.capture(*batch())
        for mine, theirs in zip(captured.layers, plain.layers, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_parallel_streams_are_averaged():
    model = tiny_gemma3n()
    input_ids, mask = batch((4, 4, 4, 4))  # as many rows and tokens as streams
    raw = []
    hook = model.model.layers[1].register_forward_hook(
        lambda _layer, _args, output: raw.append(first_tensor(output))
    )
    captured = Target(model, [1]).capture(input_ids, mask)
    hook.remove()
    assert raw[0].shape[0] == 4
    expected = raw[0].mean(dim=0)[:, :4]
    assert captured.layers[0].shape == (4, 4, 32)
    assert torch.equal(captured.layers[0], expected)


@pytest.mark.parametrize("layout", ["bskh", "kbsh", "bs(kh)"])
def test_streams_are_found_wherever_they_lie(layout):
    streams = torch.arange(2 * 5 * 3 * 8.0).view(2, 5, 3, 8)
    laid_out = {"bskh": streams, "kbsh": streams.permute(2, 0, 1, 3), "bs(kh)": streams.flatten(2)}
    assert torch.equal(as_bsh(laid_out[layout], 2, 5, 8), streams.mean(dim=2))


@pytest.mark.parametrize(
    "shape", [(5, 2, 8), (2, 8, 5), (2, 5), (5, 2, 3, 8), (2, 6, 8), (2, 5, 12), (2, 5, 3, 4)]
)
def test_a_state_of_another_shape_is_refused(shape):
    with pytest.raises(TargetError, match="one state per token"):
        as_bsh(torch.ones(shape), 2, 5, 8)


def test_a_head_that_reads_states_of_another_width_is_refused():
    model = tiny_qwen3()
    model.model.norm.forward = lambda state: torch.cat([state, state], dim=-1)
    with pytest.raises(TargetError, match=r"reads states of shape \(3, 9, 64\)"):
        Target(model, [0]).capture(*batch())


def test_a_layer_that_is_skipped_passes_its_input_on():
    captured = Target(tiny_mllama(), EVERY).capture(*batch())
    assert torch.equal(captured.layers[2], captured.layers[1])
    assert not torch.equal(captured.layers[3], captured.layers[2])


def test_a_model_that_loops_over_its_layers_is_refused():
    model = tiny_qwen3()
    once = model.model.forward
    model.model.forward = lambda *args, **kwargs: (once(*args, **kwargs), once(*args, **kwargs))[1]
    with pytest.raises(TargetError, match="loops over its layers"):
        Target(model, [0]).capture(*batch())


def test_the_text_decoder_is_found_and_not_the_vision_tower_of_the_same_depth():
    model = tiny_gemma3()
    target = Target(model, [0])
    assert target._stack.name.endswith("language_model.layers")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 128)
    assert target.lm_head.weight.shape == (128, 32)


def test_a_layout_without_a_decoder_lists_what_was_found():
    model = tiny_qwen3()
    model.model.layers = model.model.layers[:3]
    with pytest.raises(TargetError, match=r"model\.layers \(3 x Qwen3DecoderLayer\)"):
        Target(model, [0])


def test_a_layout_with_two_decoders_lists_both():
    model = tiny_qwen3()
    model.model.more_layers = nn.ModuleList(model.model.layers)
    with pytest.raises(TargetError, match=r"2 lists of 4 .*more_layers"):
        Target(model, [0])


def test_a_model_without_a_head_says_so():
    target = Target(tiny_qwen3().model, [0])
    with pytest.raises(TargetError, match="no output head"):
        _ = target.lm_head


def test_quantised_weights_are_stored_as_what_they_compute():
    model = tiny_qwen3()
    weight = model.lm_head.weight.detach().clone()
    model.lm_head = Int8Linear(weight)
    head = Target(model, [0]).lm_head
    assert head.weight.dtype == torch.float32
    torch.testing.assert_close(head.weight, model.lm_head.weight * model.lm_head.scale)
    torch.testing.assert_close(head.bias, model.lm_head.bias)


class Int8Linear(nn.Module):
    """A quantised head: integers and a scale."""

    def __init__(self, weight):
        super().__init__()
        self.scale = weight.abs().max() / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, len(weight)), False)

    def forward(self, state):
        return state @ (self.weight * self.scale).T + self.bias


def test_a_head_without_a_matrix_is_refused():
    model = tiny_qwen3()
    model.lm_head = nn.Bilinear(2, 2, 2)
    with pytest.raises(TargetError, match="no \\[V, H\\] weight"):
        _ = Target(model, [0]).lm_head
