"""Proof on the spot that a target's states are what they claim to be.

Two rows run through the target: one full, one that is the first's beginning and then padding; then
the full one alone. Five things must hold, each of which some model or layout breaks:

    captured states   = the model's own ``output_hidden_states``
    the short row     = the same tokens of the full row: padding is not attended, nor is the future
    the row alone     = the row in the batch: a mask of ones is taken like a mask with padding
    head(last)        = the model's own logits, once the scale and cap of its head are known
    nothing           is NaN or infinite
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig

from dspark.errors import TargetError
from dspark.model.capture import Captured, Target, as_bsh, forward_options
from dspark.model.head import declared_transform
from dspark.schema.logits import HeadTransform, head_product

_FULL, _SHORT = 12, 7
# Largest difference allowed, as a share of each token's largest magnitude: of states between two
# runs of the same batch; of logits from those states; of states between two rows, which kernels may
# sum up in another order.
_SAME_RUN = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.01}
_LOGITS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.03}
_OTHER_ROW = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}

_ADVICE = "Report this model type; --no-target-check uses it at your own risk."


def check_target(target: Target) -> None:
    """Run a dummy batch and compare it with transformers' own states and logits.

    Sets ``target.head`` to the transform that was found to give the model's logits.

    Raises:
        TargetError: If a state or the logits differ; names the layer and by how much.
    """
    input_ids, mask = _dummy_batch(target)
    every_layer = range(-1, target.num_layers)
    captured = target.capture(input_ids, mask, layer_ids=every_layer)
    alone = target.capture(input_ids[:1], mask[:1], layer_ids=every_layer)
    reference = _reference(target, input_ids, mask)
    real = mask.bool()
    _check_padding(target, captured, alone)
    _check_states(target, captured, reference, real)
    target.head = _settle_head(target, captured.last, reference.logits, real)


def _dummy_batch(target: Target) -> tuple[Tensor, Tensor]:
    """Return ids [2, 12] and mask: ordinary tokens, the second row cut to 7 and padded."""
    reserved = _reserved_ids(target.config)
    ordinary = [i for i in range(min(target.vocab_size, 4096)) if i not in reserved]
    spread = [ordinary[i * len(ordinary) // _FULL] for i in range(_FULL)]
    input_ids = torch.tensor([spread, spread], device=target.device)
    mask = torch.ones_like(input_ids)
    input_ids[1, _SHORT:] = getattr(target.text_config, "pad_token_id", None) or 0
    mask[1, _SHORT:] = 0
    return input_ids, mask


def _reserved_ids(config: PretrainedConfig) -> set[int]:
    """Return the ids that `config` or a part of it gives a meaning, such as the end of text."""
    found: set[int] = set()

    def walk(node: dict[str, Any]) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value)
            elif str(key).endswith(("token_id", "token_index")):
                found.update(value if isinstance(value, list) else [value])

    walk(config.to_dict())
    return found


@torch.no_grad()
def _reference(target: Target, input_ids: Tensor, mask: Tensor) -> Any:
    """Run the whole model, head included, and return its own states and logits."""
    output = target.causal_lm(
        input_ids=input_ids,
        attention_mask=mask,
        output_hidden_states=True,
        **forward_options(target.causal_lm),
    )
    if getattr(output, "hidden_states", None) is None:
        raise TargetError(
            f"{type(target.model).__name__} returns no hidden_states when asked for them, so its "
            f"states cannot be checked. {_ADVICE}"
        )
    return output


def _check_states(target: Target, captured: Captured, reference: Any, real: Tensor) -> None:
    """Compare every layer that ran with the model's own `hidden_states`.

    What such a list ends with differs between models: the last state is held against the logits.
    """
    theirs = reference.hidden_states
    # A layer that did not run (cross-attention without an image) is not in the list.
    mine = [
        (layer_id, state)
        for layer_id, state in enumerate(captured.layers[:-1], start=-1)
        if layer_id < 0 or state.data_ptr() != captured.layers[layer_id].data_ptr()
    ]
    if len(theirs) != len(mine) + 1:
        raise TargetError(
            f"{type(target.model).__name__} returned {len(theirs)} hidden_states of {len(mine)} "
            f"layers that ran, expected {len(mine) + 1}. {_ADVICE}"
        )
    wrong = _first_wrong(mine, theirs[:-1], real)
    if wrong is not None and len(mine) > 1:
        # State-space models list the outputs of all layers, so the input of layer 0 is missing.
        wrong = _first_wrong(mine[1:], theirs[:-2], real) and wrong
    if wrong is not None:
        raise TargetError(
            f"layer {wrong[0]} of {type(target.model).__name__}: the captured state differs from "
            f"the model's own by {wrong[1]:.2e} of a token's largest value. {_ADVICE}"
        )


def _first_wrong(
    mine: Sequence[tuple[int, Tensor]], theirs: Sequence[Tensor], real: Tensor
) -> tuple[int, float] | None:
    """Return id and difference of the first layer that is off, None if all agree."""
    batch, seq = real.shape
    for (layer_id, state), other in zip(mine, theirs, strict=True):
        here = real.to(state.device)
        other = as_bsh(other, batch, seq, state.shape[-1]).to(state.device)
        off = _difference(state[here], other[here])
        if not off <= _SAME_RUN.get(state.dtype, 0.05):
            return layer_id, off
    return None


def _check_padding(target: Target, captured: Captured, alone: Captured) -> None:
    """Compare the padded row with the same tokens of the full one, and that with itself alone."""
    for layer_id, (state, lone) in enumerate(zip(captured.layers, alone.layers, strict=True), -1):
        if not (torch.isfinite(state[0]).all() and torch.isfinite(state[1, :_SHORT]).all()):
            raise TargetError(
                f"layer {layer_id} of {type(target.model).__name__}: states of ordinary tokens are "
                f"not finite in {state.dtype}. Are the weights whole? A model that overflows needs "
                "another --compute-dtype."
            )
        off = max(
            _difference(state[1, :_SHORT], state[0, :_SHORT]),
            _difference(state[0], lone[0]),
        )
        if not off <= _OTHER_ROW.get(state.dtype, 0.1):
            raise TargetError(
                f"layer {layer_id} of {type(target.model).__name__}: states change by {off:.2e} of "
                "a token's largest value with the tokens after them or with padding. The model is "
                "not a causal decoder, or attends to padding; it cannot be a target."
            )


def _difference(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference of two [N, H], as a share of each token's largest magnitude."""
    if not mine.numel():
        return 0.0
    mine, theirs = mine.double(), theirs.double()
    largest = theirs.abs().amax(dim=-1).clamp_min(1e-30)
    return float(((mine - theirs).abs().amax(dim=-1) / largest).max())


def _settle_head(target: Target, last: Tensor, logits: Tensor, real: Tensor) -> HeadTransform:
    """Return the transform that turns the stored head's product into the model's own logits."""
    head = target.lm_head
    weight, bias = cast(Tensor, head.weight), cast(Tensor | None, getattr(head, "bias", None))
    product = head_product(last.to(weight.device), weight, bias)
    real = real.to(weight.device)
    product, logits = product[real].double(), logits.to(product.device)[real].double()
    tokens = logits.shape[-1]
    declared = declared_transform(target.text_config)
    if tokens < product.shape[-1]:
        declared = dataclasses.replace(declared, num_logits=tokens)
    product = product[..., :tokens]
    best, off = declared, float("inf")
    for softcap in dict.fromkeys((declared.softcap, None)):
        for scale in (declared.scale, _fitted_scale(product, logits, softcap)):
            guess = dataclasses.replace(declared, scale=scale, softcap=softcap)
            guess_off = _difference(guess(product), logits)
            if guess_off <= _LOGITS.get(last.dtype, 0.05):
                return guess
            best, off = (guess, guess_off) if guess_off < off else (best, off)
    raise TargetError(
        f"the logits of {type(target.model).__name__} are not its head's product with the last "
        f"state: the nearest form, {best}, is off by {off:.2e} of a token's largest logit. "
        f"{_ADVICE}"
    )


def _fitted_scale(product: Tensor, logits: Tensor, softcap: float | None) -> float:
    """Return the factor that brings `product` closest to the uncapped `logits`."""
    if softcap is not None:
        logits = torch.atanh((logits / softcap).clamp(-0.999, 0.999)) * softcap
    scale = float((product * logits).sum() / product.square().sum().clamp_min(1e-30))
    return float(f"{scale:.6g}")
