"""From the last hidden state to the target's logits: the matrix product, and what some models add.

    logits = cap(scale * (last @ weight.T + bias))[..., :num_logits]
    cap(x) = softcap * tanh(x / softcap), or x itself

The weights are stored as tensors, the three numbers by name; most targets need none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.errors import CacheError


@dataclass(frozen=True)
class HeadTransform:
    """What the target does to the matrix product of its head.

    Attributes:
        scale: Factor on the product, bias included.
        softcap: Bound that ``tanh`` puts on the logits; None for no bound.
        num_logits: How many of the head's rows are tokens; None for all of them.
    """

    scale: float = 1.0
    softcap: float | None = None
    num_logits: int | None = None

    @property
    def extras(self) -> dict[str, float]:
        """Name and value of everything beyond the matrix product; empty for most targets."""
        named = {
            "logit_scale": self.scale if self.scale != 1.0 else None,
            "final_logit_softcapping": self.softcap,
            "num_logits": self.num_logits,
        }
        return {name: value for name, value in named.items() if value is not None}

    @classmethod
    def from_extras(cls, extras: Mapping[str, Any]) -> HeadTransform:
        """Return the transform that `extras` spells.

        Raises:
            CacheError: If it has a name or a value that this version cannot apply.
        """
        known = {"logit_scale": "scale", "final_logit_softcapping": "softcap"}
        known |= {"num_logits": "num_logits"}
        wrong = {
            name: value
            for name, value in extras.items()
            if name not in known or isinstance(value, bool) or not isinstance(value, int | float)
        }
        if wrong:
            raise CacheError(
                f"the target's head does {wrong} to its logits, which this version of dspark "
                f"cannot apply (it knows {sorted(known)}). Use the version that wrote the cache."
            )
        return cls(**{known[name]: value for name, value in extras.items()})

    def __call__(self, product: Tensor) -> Tensor:
        """Return the logits [..., num_logits] for `product` [..., V], the output of the head."""
        logits = product[..., : self.num_logits]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


def head_product(last: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``last @ weight.T + bias`` in the dtype of `last`.

    Args:
        last: [..., H] post-norm states.
        weight: [V, H], on the device of `last`.
        bias: [V], or None.
    """
    return torch.nn.functional.linear(
        last, weight.to(last.dtype), None if bias is None else bias.to(last.dtype)
    )
