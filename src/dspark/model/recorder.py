"""What the decoder layers of one forward reported."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from dspark.errors import TargetError


class Recorder:
    """Keeps the states of the wanted layers while the layers run.

    A tensor that a layer returns is kept as it is. If the model writes into it afterwards, its
    version counter tells, and the layer is copied from then on (`copied`).

    Args:
        layer_ids: The wanted layers; the final one is not a layer's output and is ignored.
        num_layers: Decoder layers of the target.
        copied: Layers whose state must be copied at once.
    """

    def __init__(
        self, layer_ids: Sequence[int], *, num_layers: int, copied: Collection[int]
    ) -> None:
        self._wanted = sorted(i for i in set(layer_ids) if i < num_layers - 1)
        self._copied = copied
        self._kept: dict[int, tuple[Tensor, int]] = {}
        self._newest: Tensor | None = None
        self._newest_id = -2

    @property
    def highest(self) -> int:
        """The last layer that has to report, -1 if only the input of layer 0 is wanted."""
        return self._wanted[-1] if self._wanted else -1

    def start(self, state: Tensor) -> None:
        """Take the input of layer 0."""
        self.add(-1, state)

    def add(self, layer_id: int, state: Tensor) -> None:
        """Take the output of a layer.

        Raises:
            TargetError: If the layers do not run once each and in order.
        """
        if layer_id <= self._newest_id:
            raise TargetError(
                f"decoder layer {layer_id} ran after layer {self._newest_id}: a model that loops "
                "over its layers has no single output per layer and cannot be a target."
            )
        self._keep_skipped(up_to=layer_id - 1)
        self._newest, self._newest_id = state, layer_id
        if layer_id in self._wanted:
            self._keep(layer_id, state)

    def state(self, layer_id: int) -> Tensor:
        """Return the state of a wanted layer once the forward is over.

        Raises:
            TargetError: If no layer ran.
        """
        self._keep_skipped(up_to=layer_id)
        if layer_id not in self._kept:
            raise TargetError(
                f"no decoder layer up to {layer_id} reported a state, so the layers that were "
                "found are not those that run. This model type cannot be a target."
            )
        return self._kept[layer_id][0]

    def overwritten(self) -> set[int]:
        """Return the layers whose state the model changed after they returned it."""
        return {i for i, (state, version) in self._kept.items() if state._version != version}

    def _keep_skipped(self, *, up_to: int) -> None:
        """A layer that did not run (cross-attention without an image) passed its input on."""
        for layer_id in self._wanted:
            if self._newest is not None and self._newest_id < layer_id <= up_to:
                self._keep(layer_id, self._newest)

    def _keep(self, layer_id: int, state: Tensor) -> None:
        if layer_id in self._copied:
            state = state.clone()
        self._kept[layer_id] = (state, state._version)


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state among the arguments of a decoder layer."""
    return first_tensor(args[0] if args else kwargs.get("hidden_states", tuple(kwargs.values())))


def first_tensor(output: Any) -> Tensor:
    """Return the hidden state of a module's output: a tensor, a tuple or a model output.

    Raises:
        TargetError: If it does not come first.
    """
    state = output if isinstance(output, Tensor) else output[0]
    if not isinstance(state, Tensor):
        raise TargetError(
            f"expected a hidden state first in a {type(output).__name__}, got "
            f"{type(state).__name__}. This model type cannot be a target."
        )
    return state
