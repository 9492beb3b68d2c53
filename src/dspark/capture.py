"""One forward of the frozen target, and the hidden states it leaves behind.

Layer ids of a target with n layers, and what transformers calls the same state:

    -1          hidden_states[0]      input of layer 0: embedding scale, learned positions included
    0 ... n-2   hidden_states[i + 1]  output of decoder layer i
    n-1         hidden_states[n]      output of the final norm, which is what the head reads

Shape letters: B batch, S sequence, L captured layers, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dspark.errors import TargetError
from dspark.layers import find_text_stack, text_config_of


@dataclass(frozen=True)
class Captured:
    """The hidden states of one micro-batch; padded positions hold nothing of meaning.

    Attributes:
        layers: One [B, S, H] tensor per captured layer, in the order of the layer ids.
        last: [B, S, H], the post-norm state that the head reads.
    """

    layers: tuple[Tensor, ...]
    last: Tensor

    @property
    def hidden_states(self) -> Tensor:
        """[B, S, L * H]: the captured layers side by side."""
        return torch.cat(self.layers, dim=-1)


class Target:
    """A frozen causal language model that is only asked for hidden states.

    Attributes:
        model: The whole model. Only its decoder is run by `capture`.
        config: Its configuration; `text_config` is that of the text decoder.
        layer_ids: The layers to capture.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self.model = model.train(False).requires_grad_(False)
        self.config: PretrainedConfig = model.config
        self.text_config = text_config_of(model.config)
        self.layer_ids = list(layer_ids)
        self._stack = find_text_stack(model)
        self._options = _forward_options(self._stack.decoder)
        # Layers whose output the model overwrites later in the same forward.
        self._overwritten: set[int] = set()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._stack.layers)

    @property
    def hidden_size(self) -> int:
        """Width of every captured state."""
        return int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Number of token ids the text configuration declares."""
        return int(self.text_config.vocab_size)

    @property
    def embed_tokens(self) -> nn.Module:
        """The input embedding; has a ``weight`` of [V, H]."""
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    @property
    def lm_head(self) -> nn.Module:
        """The output head; has a ``weight`` of [V, H]."""
        head: nn.Module | None = self.model.get_output_embeddings()
        if head is None:
            raise TargetError(
                f"{type(self.model).__name__} has no output head, so its states do not lead to a "
                "distribution over tokens. Name a causal language model."
            )
        return head

    @property
    def device(self) -> torch.device:
        """Where `capture` wants its inputs."""
        return next(self.embed_tokens.parameters()).device

    def capture(self, input_ids: Tensor, attention_mask: Tensor) -> Captured:
        """Run the decoder once and return its hidden states.

        Args:
            input_ids: [B, S] int64, padded on the right.
            attention_mask: [B, S], 1 for real tokens, 0 for padding.

        Returns:
            States in the compute dtype, on the devices that made them.
        """
        inputs = {
            "input_ids": input_ids.to(self.device),
            "attention_mask": attention_mask.to(self.device),
        }
        states = self._forward(inputs)
        if states is None:  # a layer's output was overwritten: keep a copy of it from now on
            states = self._forward(inputs)
        if states is None:
            raise TargetError(
                f"{type(self.model).__name__} overwrites states that were copied when layers "
                f"{sorted(self._overwritten)} returned them. Report this model type."
            )
        return states

    @torch.no_grad()
    def _forward(self, inputs: dict[str, Tensor]) -> Captured | None:
        """Run the decoder; None if it overwrote a captured tensor after the layer returned it."""
        seen: dict[int, tuple[Tensor, int]] = {}
        with self._hooks(seen):
            output = self._stack.decoder(**inputs, **self._options)
        overwritten = {i for i, (state, version) in seen.items() if state._version != version}
        if overwritten:
            self._overwritten |= overwritten
            return None
        last = _first_tensor(output)
        states = {i: self._as_bsh(state, inputs) for i, (state, _) in seen.items()}
        states[self.num_layers - 1] = last
        return Captured(layers=tuple(states[i] for i in self.layer_ids), last=last)

    @contextmanager
    def _hooks(self, seen: dict[int, tuple[Tensor, int]]) -> Iterator[None]:
        """Record into `seen` the states of the layers to capture, with their version counters."""

        def keep(layer_id: int, state: Tensor) -> None:
            if layer_id in self._overwritten:
                state = state.clone()
            seen[layer_id] = (state, state._version)

        handles = []
        try:
            for layer_id in self.layer_ids:
                if layer_id == -1:
                    handles.append(
                        self._stack.layers[0].register_forward_pre_hook(
                            lambda _m, args, kwargs: keep(-1, _layer_input(args, kwargs)),
                            with_kwargs=True,
                        )
                    )
                elif layer_id < self.num_layers - 1:
                    handles.append(
                        self._stack.layers[layer_id].register_forward_hook(
                            lambda _m, _args, out, i=layer_id: keep(i, _first_tensor(out))
                        )
                    )
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _as_bsh(self, state: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Average parallel residual streams: four axes to [B, S, H]."""
        if state.ndim == 3:
            return state
        batch, seq = inputs["input_ids"].shape
        for axis in (2, 0, 1):
            left = [size for i, size in enumerate(state.shape) if i != axis]
            if state.ndim == 4 and left[:2] == [batch, seq]:
                return state.mean(dim=axis)
        raise TargetError(
            f"a decoder layer returned a state of shape {tuple(state.shape)} for {batch} rows of "
            f"{seq} tokens; expected [B, S, H], or four axes of which one counts residual streams."
        )


def _layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state among the arguments of a decoder layer."""
    if args:
        return _first_tensor(args)
    return _first_tensor(kwargs.get("hidden_states", kwargs.get("x")))


def _first_tensor(output: Any) -> Tensor:
    """Return the hidden state of a module's output: a tensor, a tuple or a model output."""
    state = output if isinstance(output, Tensor) or output is None else output[0]
    if not isinstance(state, Tensor):
        raise TargetError(
            f"expected a hidden state first in a {type(output).__name__}, got "
            f"{type(state).__name__}. Report this model type."
        )
    return state


def _forward_options(decoder: PreTrainedModel) -> dict[str, Any]:
    """Return the keywords that make `decoder` return a model output and keep no KV cache."""
    known = inspect.signature(decoder.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    wanted = {"use_cache": False, "return_dict": True}
    return {key: value for key, value in wanted.items() if takes_any or key in known}
