"""Where the text decoder sits inside a loaded model.

Every decoder-only model is the same four parts under different names: an embedding, a stack of
layers, a final norm and a head. They are found by structure, never by the model's name: the stack
is the list of ``num_hidden_layers`` modules that belongs to the model of the text configuration,
which tells it from vision and audio towers of the same depth.

    LlamaForCausalLM                    Gemma3ForConditionalGeneration
      model          <- decoder           model
        embed_tokens                        vision_tower
        layers       <- layers              language_model   <- decoder
        norm                                  layers         <- layers
      lm_head                             lm_head
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dspark.errors import TargetError
from dspark.model.head import output_head


@dataclass(frozen=True)
class TextStack:
    """The parts of a model that a capture needs.

    Attributes:
        causal_lm: The innermost model that has both the decoder and a head; the whole model unless
            that is a wrapper around a causal language model.
        embedding: Turns token ids into the decoder's input.
        decoder: What is called with ``input_ids`` and returns the final post-norm state.
        layers: Its decoder layers, in the order in which they run.
        name: Where the layers are, as in ``model.language_model.layers``.
    """

    causal_lm: PreTrainedModel
    embedding: nn.Module
    decoder: PreTrainedModel
    layers: Sequence[nn.Module]
    name: str


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text decoder inside `config` (itself for a plain model)."""
    return config.get_text_config(decoder=True)


def find_text_stack(model: PreTrainedModel) -> TextStack:
    """Find the text decoder and its layers in `model`.

    Raises:
        TargetError: If no list of layers fits the text configuration, or more than one does; the
            message lists every list of modules in the model.
    """
    text_config = text_config_of(model.config)
    num_layers = text_config.num_hidden_layers
    lists = list(_module_lists(model))
    fitting = [
        _stack(owners, list(modules), name)
        for name, modules, owners in lists
        if len(modules) == num_layers and _is_text(owners[-1], text_config)
    ]
    if len(fitting) != 1:
        found = ", ".join(
            f"{name} ({len(modules)} x {type(modules[0]).__name__})" for name, modules, _ in lists
        )
        raise TargetError(
            f"{type(model).__name__} has {len(fitting)} lists of {num_layers} decoder layers that "
            f"belong to its text configuration {type(text_config).__name__}, expected one. "
            f"Lists of modules found: {found or 'none'}. This layout is not supported; "
            "docs/targets.md lists the model types that are."
        )
    return fitting[0]


def _module_lists(
    model: PreTrainedModel,
) -> Iterator[tuple[str, nn.ModuleList, list[PreTrainedModel]]]:
    """Yield every outermost non-empty list of modules and the models around it, outermost first."""

    def walk(
        module: nn.Module, prefix: str, owners: list[PreTrainedModel]
    ) -> Iterator[tuple[str, nn.ModuleList, list[PreTrainedModel]]]:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            if isinstance(child, nn.ModuleList):
                if len(child):
                    yield name, child, owners
            else:
                inner = [*owners, child] if isinstance(child, PreTrainedModel) else owners
                yield from walk(child, f"{name}.", inner)

    return walk(model, "", [model])


def _is_text(owner: PreTrainedModel, text_config: PretrainedConfig) -> bool:
    """Whether `owner` is configured by `text_config` itself or by one of its kind."""
    return owner.config is text_config or type(owner.config) is type(text_config)


def _stack(owners: Sequence[PreTrainedModel], layers: Sequence[nn.Module], name: str) -> TextStack:
    """Put together what belongs to `layers`, the outermost owner first."""
    return TextStack(
        causal_lm=_innermost_with_head(owners),
        embedding=owners[-1].get_input_embeddings(),
        decoder=owners[-1],
        layers=layers,
        name=name,
    )


def _innermost_with_head(owners: Sequence[PreTrainedModel]) -> PreTrainedModel:
    """Return the last of `owners` that has an output head, else the first."""
    return next((o for o in reversed(owners) if output_head(o) is not None), owners[0])
