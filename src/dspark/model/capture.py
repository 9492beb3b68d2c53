"""One forward of the frozen target, and the hidden states it leaves behind.

Layer ids of a target with n layers, and what transformers calls the same state:

    -1          hidden_states[0]      input of layer 0: embedding scale, learned positions included
    0 ... n-2   hidden_states[i + 1]  output of decoder layer i
    n-1         hidden_states[n]      output of the final norm, which is what the head reads

Shape letters: B batch, S sequence, L captured layers, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dspark.errors import TargetError
from dspark.model.head import (
    declared_transform,
    execution_device,
    output_head,
    plain_embedding,
    plain_head,
)
from dspark.model.layers import find_text_stack, text_config_of
from dspark.model.recorder import Recorder, first_tensor, layer_input
from dspark.schema.logits import HeadTransform


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
        """[B, S, L * H]: the captured layers side by side, where the last state is."""
        return torch.cat([layer.to(self.last.device) for layer in self.layers], dim=-1)


class Target:
    """A frozen causal language model that is only asked for hidden states.

    Attributes:
        model: The whole model. Only its decoder is run by `capture`.
        config: Its configuration; `text_config` is that of the text decoder.
        layer_ids: The layers to capture.
        head: What the model does to its head's product. Until `check_target` has proved it, what
            the configuration says.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self.model = model.train(False).requires_grad_(False)
        self.config: PretrainedConfig = model.config
        self.text_config = text_config_of(model.config)
        self.layer_ids = list(layer_ids)
        self.head: HeadTransform = declared_transform(self.text_config)
        self._stack = find_text_stack(model)
        self._options = forward_options(self._stack.decoder)
        # Layers whose output the model overwrites later in the same forward.
        self._overwritten: set[int] = set()

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The innermost part of the model that goes from token ids to logits."""
        return self._stack.causal_lm

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
        """The input embedding; has a ``weight`` [V, H]."""
        return plain_embedding(self._stack.embedding, num_ids=self.vocab_size)

    @property
    def lm_head(self) -> nn.Module:
        """The output head; has a ``weight`` [V, H] and perhaps a ``bias`` [V]."""
        head = output_head(self.causal_lm)
        if head is None:
            raise TargetError(
                f"{type(self.model).__name__} has no output head, so its states do not lead to a "
                "distribution over tokens. Name a causal language model."
            )
        return plain_head(head, hidden_size=self.hidden_size, dtype=self.model.dtype)

    @property
    def device(self) -> torch.device:
        """Where `capture` wants its inputs."""
        return execution_device(self._stack.embedding)

    def capture(
        self, input_ids: Tensor, attention_mask: Tensor, *, layer_ids: Sequence[int] | None = None
    ) -> Captured:
        """Run the decoder once and return its hidden states.

        Args:
            input_ids: [B, S] int64, padded on the right.
            attention_mask: [B, S], 1 for real tokens, 0 for padding.
            layer_ids: Other layers than the target's own.

        Returns:
            States in the compute dtype, on the devices that made them.

        Raises:
            TargetError: If the layers do not run once each, in order, from [B, S, H] to [B, S, H].
        """
        batch, seq = input_ids.shape
        if batch == seq:  # one more column of padding tells the two axes apart in a 4-D state
            input_ids, attention_mask = (
                nn.functional.pad(part, (0, 1)) for part in (input_ids, attention_mask)
            )
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs = {name: _sent(part, self.device) for name, part in inputs.items()}
        states = self._forward(inputs, self.layer_ids if layer_ids is None else list(layer_ids))
        return Captured(layers=tuple(s[:, :seq] for s in states[:-1]), last=states[-1][:, :seq])

    @torch.no_grad()
    def _forward(self, inputs: dict[str, Tensor], layer_ids: list[int]) -> list[Tensor]:
        """Return the states of `layer_ids` and then the last one."""
        for _ in range(2):  # twice if a state was overwritten: then a copy of it is kept
            recorder = Recorder(layer_ids, num_layers=self.num_layers, copied=self._overwritten)
            with ExitStack() as hooks:
                self._hook(recorder, hooks)
                output = self._stack.decoder(**inputs, **self._options)
            overwritten = recorder.overwritten()
            if not overwritten:
                break
            self._overwritten |= overwritten
        last = first_tensor(output)
        batch, seq = inputs["input_ids"].shape
        if last.shape != (batch, seq, self.hidden_size):
            raise TargetError(
                f"the head of {type(self.model).__name__} reads states of shape "
                f"{tuple(last.shape)} for {batch} rows of {seq} tokens and hidden_size "
                f"{self.hidden_size}. This model type cannot be a target."
            )
        states = {self.num_layers - 1: last}
        for layer_id in set(layer_ids) - states.keys():
            states[layer_id] = as_bsh(recorder.state(layer_id), batch, seq, self.hidden_size)
        return [*(states[layer_id] for layer_id in layer_ids), last]

    def _hook(self, recorder: Recorder, hooks: ExitStack) -> None:
        """Have the layers report to `recorder` until `hooks` closes."""
        layers = self._stack.layers
        handles = [
            layers[0].register_forward_pre_hook(
                lambda _layer, args, kwargs: recorder.start(layer_input(args, kwargs)),
                with_kwargs=True,
            )
        ]
        hooks.callback(handles[0].remove)
        for layer_id in range(recorder.highest + 1):
            report = partial(recorder.add, layer_id)
            handle = layers[layer_id].register_forward_hook(
                lambda _layer, _args, output, report=report: report(first_tensor(output))
            )
            hooks.callback(handle.remove)


def _sent(part: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`; from pinned memory to a GPU, so that the caller does not wait for it."""
    if device.type == "cuda" and part.device.type == "cpu":
        return part.pin_memory().to(device, non_blocking=True)
    return part.to(device)


def as_bsh(state: Tensor, batch: int, seq: int, hidden: int) -> Tensor:
    """Average parallel residual streams: a state of four axes, or of several H, to [B, S, H].

    Args:
        state: [B, S, H], [B, S, streams, H], [B, S, streams · H] or [streams, B, S, H], where
            `batch` is not `seq`.
        batch: B.
        seq: S.
        hidden: H.

    Raises:
        TargetError: If `state` has another shape.
    """
    if state.shape == (batch, seq, hidden):
        return state
    if state.ndim == 3 and state.shape[:2] == (batch, seq) and state.shape[-1] % hidden == 0:
        return state.reshape(batch, seq, -1, hidden).mean(dim=2)
    if state.ndim == 4 and state.shape[-1] == hidden:
        if state.shape[:2] == (batch, seq):
            return state.mean(dim=2)
        if state.shape[1:3] == (batch, seq):
            return state.mean(dim=0)
    raise TargetError(
        f"a decoder layer made a state of shape {tuple(state.shape)} for {batch} rows of {seq} "
        f"tokens and hidden_size {hidden}; expected one state per token, or one per token and "
        "residual stream. This model type cannot be a target."
    )


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Return the keywords that make `model` return a model output and keep no KV cache."""
    known = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    wanted = {"use_cache": False, "return_dict": True}
    return {key: value for key, value in wanted.items() if takes_any or key in known}
