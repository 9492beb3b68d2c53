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
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MllamaConfig,
    OPTConfig,
    PhiConfig,
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


def tiny_opt(**changes: Any) -> PreTrainedModel:
    """The `model.decoder.layers` layout, positions counted from the attention mask."""
    own = {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True}
    return build(OPTConfig(**{**COMMON, **own, **changes}))


def tiny_gpt_neox(**changes: Any) -> PreTrainedModel:
    """The `gpt_neox.layers` layout, attention and MLP in parallel."""
    return build(GPTNeoXConfig(**{**COMMON, "use_parallel_residual": True, **changes}))


def tiny_phi(**changes: Any) -> PreTrainedModel:
    """A head with a bias."""
    return build(PhiConfig(**{**COMMON, "num_key_value_heads": 4, **changes}))


def tiny_cohere(**changes: Any) -> PreTrainedModel:
    """Parallel residual, tied head, logits multiplied by a scale."""
    return build(CohereConfig(**{**COMMON, "logit_scale": 0.25, **changes}))


def tiny_granite(**changes: Any) -> PreTrainedModel:
    """Scaled embeddings and residuals, logits divided by a scale."""
    own = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
    return build(GraniteConfig(**{**COMMON, **own, **changes}))


def tiny_bloom(**changes: Any) -> PreTrainedModel:
    """ALiBi instead of positions, a norm on the embedding."""
    own = {"n_layer": 4, "n_head": 4, "hidden_size": 32, "vocab_size": VOCAB}
    return build(BloomConfig(**{**own, "pad_token_id": 0, **changes}))


def tiny_mamba(**changes: Any) -> PreTrainedModel:
    """A state-space model; its `hidden_states` leave out the input of layer 0."""
    own = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 4, "vocab_size": VOCAB}
    return build(MambaConfig(**{**own, "pad_token_id": 0, **changes}))


def tiny_jamba(**changes: Any) -> PreTrainedModel:
    """State-space and attention layers in turn, with experts in some."""
    own = {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    }
    return build(JambaConfig(**{**COMMON, **own, **changes}))


def tiny_gemma3n(**changes: Any) -> PreTrainedModel:
    """Four parallel residual streams: states [4, B, S, H] between the layers."""
    own = {
        "intermediate_size": [48] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    }
    return build(Gemma3nTextConfig(**{**COMMON, **own, **changes}))


def tiny_mllama(**changes: Any) -> PreTrainedModel:
    """A multimodal wrapper whose layer 1 attends to an image and is skipped without one."""
    text = {**COMMON, "cross_attention_layers": [1], "rope_scaling": None}
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "vision_output_dim": 32,
        "intermediate_layers_indices": [1],
        "supported_aspect_ratios": [[1, 1]],
    }
    config = MllamaConfig(
        text_config={**text, "rope_scaling": rope, **changes},
        vision_config=vision,
        image_token_index=VOCAB - 1,
    )
    return build(config, multimodal=True)
