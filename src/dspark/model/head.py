"""The embedding and the head of a target as plain matrices, and what its configuration adds.

Both have to leave the model as [V, H] tensors: the draft starts from the one and learns through the
other. Quantised ones are asked for what they compute, row by row of an identity matrix, so that no
kind of quantisation has to be known here; weights that wait on a disk are fetched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dspark.errors import TargetError
from dspark.model.tensor_parallel import whole
from dspark.schema.logits import HeadTransform

# What model families call a factor on, a divisor of and a cap of the logits.
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
_ROWS = 1024  # of an identity matrix, or token ids, per call of a quantised module


class PlainWeights(nn.Module):
    """The matrix and perhaps the bias of a module that keeps them in another form.

    Attributes:
        weight: [V, H].
        bias: [V], or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)


def declared_transform(text_config: PretrainedConfig) -> HeadTransform:
    """Return the transform that the names in `text_config` promise, not yet proved."""
    scale = 1.0
    for name in _FACTORS:
        scale *= getattr(text_config, name, None) or 1.0
    for name in _DIVISORS:
        scale /= getattr(text_config, name, None) or 1.0
    caps = [getattr(text_config, name, None) for name in _CAPS]
    return HeadTransform(scale=scale, softcap=next((cap for cap in caps if cap), None))


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the head of `model`, None if it has none."""
    try:
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    except (AttributeError, NotImplementedError):  # raised by towers that embed no tokens
        return None
    return head


@torch.no_grad()
def plain_embedding(module: nn.Module, *, num_ids: int) -> nn.Module:
    """Return `module`, or what stands for it, with a ``weight`` [V, H] that can be read.

    Args:
        module: The input embedding.
        num_ids: How many ids to ask for where the weight itself cannot be read.
    """
    if _is_readable(module):
        return _gathered(module)
    device = execution_device(module)
    starts = range(0, num_ids, _ROWS)
    blocks = [torch.arange(i, min(i + _ROWS, num_ids), device=device) for i in starts]
    return PlainWeights(torch.cat([module(ids).cpu() for ids in blocks]))


@torch.no_grad()
def plain_head(module: nn.Module, *, hidden_size: int, dtype: torch.dtype) -> nn.Module:
    """Return `module`, or what stands for it, with a ``weight`` [V, H] that can be read.

    Args:
        module: The output head.
        hidden_size: H, the width of its input.
        dtype: The dtype of its input.
    """
    if _is_readable(module):
        return _gathered(module)
    device = execution_device(module)
    bias = module(torch.zeros(1, hidden_size, dtype=dtype, device=device))[0]
    columns = []
    for start in range(0, hidden_size, _ROWS):
        unit = torch.eye(hidden_size, dtype=dtype)[start : start + _ROWS].to(device)
        columns.append((module(unit) - bias).cpu())
    weight = torch.cat(columns).T.contiguous()
    return PlainWeights(weight, bias.cpu() if bool(bias.any()) else None)


def _gathered(module: nn.Module) -> nn.Module:
    """Return `module`, or its whole weights where several ranks hold a slice each."""
    weight, bias = module.weight, getattr(module, "bias", None)
    parts = [part for part in (weight, bias) if isinstance(part, Tensor)]
    if all(whole(part) is part for part in parts):
        return module
    return PlainWeights(*(whole(part) for part in parts))


def execution_device(module: nn.Module) -> torch.device:
    """Return where `module` computes, also if its weights wait elsewhere (accelerate's offload)."""
    offload: Any = getattr(module, "_hf_hook", None)
    device = getattr(offload, "execution_device", None)
    return next(module.parameters()).device if device is None else torch.device(device)


def _is_readable(module: nn.Module) -> bool:
    """Whether the weight of `module` is here in a floating dtype, or it must be called for it."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TargetError(
            f"{type(module).__name__} has no [V, H] weight to store for training, found "
            f"{type(weight).__name__}. Report this model type."
        )
    return weight.is_floating_point() and weight.itemsize > 1 and not weight.is_meta
