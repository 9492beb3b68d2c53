"""Tiny random models of the kinds a user names, each built from its configuration with one seed.

All are float32, in eval mode, on the CPU, with a vocabulary of 128 unless asked otherwise. Save one
with ``model.save_pretrained(directory)`` to load it as a target.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def build(config: PretrainedConfig, *, multimodal: bool = False, seed: int = 0) -> PreTrainedModel:
    """Return a model of `config` with random weights, the same for the same seed."""
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config)
        # Fresh weights have zero biases and unit norms, which hide a part that is left out.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.tie_weights()
    return model.float().eval()


def tiny_qwen3(**changes: Any) -> PreTrainedModel:
    """Dense, q/k norms, untied head."""
    return build(Qwen3Config(**{**COMMON, **changes}))


def tiny_llama(**changes: Any) -> PreTrainedModel:
    """Dense, untied head."""
    return build(LlamaConfig(**{**COMMON, **changes}))


def tiny_tied(**changes: Any) -> PreTrainedModel:
    """Dense, the head is the embedding."""
    return tiny_qwen3(**{"tie_word_embeddings": True, **changes})


def tiny_qwen3moe(**changes: Any) -> PreTrainedModel:
    """Mixture of experts in every layer."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return build(Qwen3MoeConfig(**{**COMMON, **experts, **changes}))


def tiny_gpt2(**changes: Any) -> PreTrainedModel:
    """The `transformer.h` layout, learned positions, tied head."""
    own = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
    common = {key: COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    return build(GPT2Config(**{**common, **own, **changes}))


def tiny_gemma2(**changes: Any) -> PreTrainedModel:
    """Scaled embeddings, soft-capped logits, every second layer with a sliding window of 8."""
    own = {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
    return build(Gemma2Config(**{**COMMON, **own, "tie_word_embeddings": True, **changes}))


def tiny_gemma3(**changes: Any) -> PreTrainedModel:
    """A multimodal wrapper: a vision tower as deep as the text decoder in `text_config`."""
    text = {**COMMON, "sliding_window": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config={**text, **changes},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=100,
        boi_token_index=101,
        eoi_token_index=102,
    )
    return build(config, multimodal=True)
