"""Shrink a model type's default configuration to one that builds in a blink.

Sizes are cut by the names that configurations share; whatever a type needs beyond that is in
`OVERRIDES`. Lists with one entry per layer keep every kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, HIDDEN, HEADS, VOCAB = 4, 32, 4, 128

# Largest value for everything of this name, in whatever part of a configuration.
_SIZES = (
    (
        LAYERS,
        """num_hidden_layers n_layer n_layers num_layers depth decoder_layers encoder_layers
        num_decoder_layers num_encoder_layers num_blocks max_window_layers vision_layers""",
    ),
    (
        HIDDEN,
        """hidden_size n_embd d_model dim embed_dim word_embed_proj_dim n_embed embedding_size
        output_hidden_size out_hidden_size text_hidden_size projection_dim input_embedding_size
        vision_hidden_size audio_hidden_size mm_hidden_size width attention_hidden_size lru_width
        cross_hidden_size emb_dim adapter_in_dim adapter_out_dim altup_hidden_size output_dim
        llm_hidden_size adapter_input_size
        hidden_size_per_layer_input moe_latent_size""",
    ),
    (
        48,
        """intermediate_size ffn_dim n_inner d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim
        shared_expert_intermediate_size moe_intermediate_size dense_intermediate_size mlp_dim
        shared_intermediate_size intermediate_size_mlp expert_ffn_hidden_size dim_ff
        moe_shared_expert_intermediate_size mamba_intermediate_size block_ff_dim
        prefix_dense_intermediate_size projector_hidden_size adapter_hidden_dim
        shared_experts_intermediate_size share_expert_dim""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads heads num_key_value_heads swa_num_attention_heads
        swa_num_key_value_heads linear_num_key_heads linear_num_value_heads linear_num_heads
        index_n_heads indexer_n_heads num_sliding_attention_heads n_mamba_heads
        mamba_n_heads mamba_num_heads num_linear_heads""",
    ),
    (
        8,
        """head_dim kv_channels d_head v_head_dim qk_nope_head_dim qk_rope_head_dim
        linear_key_head_dim linear_value_head_dim dim_head attention_head_dim key_value_size
        swa_head_dim swa_v_head_dim global_head_dim index_head_dim linear_head_dim
        attention_head_size qk_head_dim""",
    ),
    (
        16,
        """kv_lora_rank q_lora_rank mamba_d_state ssm_state_size mamba_head_dim mamba_d_head
        state_size time_step_rank mamba_dt_rank chunk_size mamba_chunk_size o_lora_rank
        query_pre_attn_scalar laurel_rank""",
    ),
    (
        4,
        """num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim
        n_shared_experts mamba_n_groups n_groups num_experts_per_layer zero_expert_num
        num_query_tokens index_topk_freq""",
    ),
    (
        2,
        "num_experts_per_tok top_k moe_k moe_topk num_experts_per_token top_k_experts mamba_expand",
    ),
    (1, "topk_group n_group"),
    (28, "image_size"),
    (14, "patch_size"),
    (
        VOCAB,
        """vocab_size vocab_size_per_layer_input max_position_embeddings n_positions max_seq_len
        n_ctx max_target_positions max_source_positions codebook_size num_embeddings""",
    ),
)
_LARGEST = {name: size for size, names in _SIZES for name in names.split()}
_NOT_ARGUMENTS = {
    "model_type",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "dtype",
    "per_layer_config",
}
# Sizes whose default None stands for something that does not fit the others here.
_IF_NONE = {"head_dim": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2}
# Ids that mark text; every other `…token_id` marks an image, a sound, … and moves below VOCAB.
_TEXT_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3}

# What a type needs beyond that; ... takes an argument away.
_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_TEXT_ROPE = {"text_config": {"rope_parameters": _ROPE}}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64}
_SWA = {"swa_num_key_value_heads": 2, "num_key_value_heads": 2, "unpadded_vocab_size": 120}
_MOE = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2}
_LOOP = {
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 2,
}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_OVERRIDES: dict[tuple[str, ...], dict[str, Any]] = {
    ("bailing_hybrid",): {"num_expert_group": 1, "topk_group": 1},
    ("bamba", "granitemoehybrid", "falcon_h1"): _MAMBA,
    ("blt",): {"encoder_hash_byte_group_vocab": 100},
    ("chameleon",): {"vocabulary_map": {"<image>": 100, "IMGIMGBS": 101}},
    ("cohere_compass",): {"text_config": {"rope_parameters": _ROPES}},
    ("cohere_compass_text",): {"rope_parameters": _ROPES},
    ("apertus1p5",): {
        "audio_config": {"codebook_dim": 32},
        "image_token_offset": 128,
        "audio_token_offset": 256,
        "text_config": {"vocab_size": 512},
        "vision_config": {"base_channels": 32},
    },
    ("dbrx",): {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2, "hidden_size": HIDDEN},
    },
    ("deepseek_ocr2",): {"text_config": {**_MOE, "mlp_layer_types": ["sparse"] * LAYERS}},
    ("dory",): {  # its configuration counts every layer twice on disk
        "num_hidden_layers": 2 * LAYERS,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    ("dots1",): {**_MOE, "n_shared_experts": 1},
    ("dots3_note_text",): {"moe_intermediate_size": 48, "index_topk": 8},
    ("emu3",): {
        "vocabulary_map": {"<image>": 100},
        "vq_config": {"base_channels": 32, "embed_dim": 4, "latent_channels": 4},
    },
    ("ernie4_5_vl_moe",): {
        "text_config": {
            "moe_intermediate_size": [48, 48],
            "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        }
    },
    ("gemma3n_text",): {"layer_types": _KINDS, "num_kv_shared_layers": 2},
    ("glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl"): _TEXT_ROPE,
    ("qwen2_5_omni_thinker",): {**_TEXT_ROPE, "vision_start_token_id": 110},
    ("qwen3_omni_moe_thinker",): {**_TEXT_ROPE, "vision_start_token_id": 110},
    ("glm4v_moe",): {"text_config": {"rope_parameters": _ROPE, "head_dim": 16}},
    ("granite4_vision",): {
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "1/2",
    },
    ("hunyuan_vl",): _TEXT_ROPE,
    ("inkling_text", "inkling2_text"): _SWA,
    ("inkling_mm_model", "inkling2"): {"text_config": _SWA},
    ("inkling2_loop",): {"text_config": _SWA | _LOOP},
    ("inkling2_loop_text",): _SWA | _LOOP,
    ("janus",): {"vq_config": {"base_channels": 32, "latent_channels": 32}},
    ("lfm2_moe",): {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    ("longcat_flash",): {"num_layers": 2},
    ("mamba2",): {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    ("mimo_v2_flash",): {"num_key_value_heads": 2},
    ("mistral4",): {"head_dim": 16, "qk_head_dim": 16},
    ("mistral_large4",): {"text_config": {"kv_source_layers": [0, 1, 2, 3]}},
    ("mllama",): {"text_config": {"cross_attention_layers": [1]}},
    ("molmo2",): {"adapter_config": {"vision_feature_layer": [3, 1]}},
    ("muse_spark",): {
        "text_config": {"moe_hidden_size": 48},
        "audio_config": {"hidden_sizes": [16] * 4, "depths": [1] * 4},
    },
    ("nemotron",): {"rope_parameters": {"partial_rotary_factor": 0.5}},
    ("qwen4_exp_text",): _INDEXER,
    ("qwen4_exp",): {"text_config": _INDEXER},
    ("reformer",): {
        "is_decoder": True,
        "axial_pos_shape": [16, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "local", "local", "local"],
        "attention_head_size": 8,
    },
    ("step3p7",): {"text_config": {"sliding_window": 8}},
    ("xlstm",): {"num_heads": 4, "embedding_dim": HIDDEN, "chunk_size": 64},
    ("xmod",): {"default_language": "en_XX"},
    ("zamba",): {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 2,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 16,
    },
    ("zamba2",): {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_headdim": 16,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 16,
    },
}
OVERRIDES = {name: changes for names, changes in _OVERRIDES.items() for name in names}


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return a small configuration of `model_type`; raises what its class raises."""
    config_class = CONFIG_MAPPING[model_type]
    arguments = _shrunk(config_class().to_dict(), iter(range(100, VOCAB)))
    _merge(arguments, OVERRIDES.get(model_type, {}))
    return config_class(**arguments)


def _shrunk(values: dict[str, Any], marker_ids: Iterator[int]) -> dict[str, Any]:
    """Return `values` with sizes cut, marker ids below VOCAB and per-layer lists shortened."""
    depths = (values.get(name) for name in _SIZES[0][1].split())
    layers = next((depth for depth in depths if isinstance(depth, int)), 0)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in _NOT_ARGUMENTS:
            continue
        if isinstance(value, list) and len(value) == layers > LAYERS:
            small[name] = [value[i * (layers - 1) // (LAYERS - 1)] for i in range(LAYERS)]
        elif isinstance(value, dict):
            small[name] = _shrunk_part(name, value, marker_ids)
        else:
            small[name] = _shrunk_value(name, value, marker_ids)
    return small


def _shrunk_part(name: str, value: dict[str, Any], marker_ids: Iterator[int]) -> dict[str, Any]:
    if "mrope_section" in value:
        return {**value, "mrope_section": [2, 1, 1]}
    if not name.endswith("config"):
        return value
    kept = {"model_type": value["model_type"]} if "model_type" in value else {}
    return kept | _shrunk(value, marker_ids)


def _shrunk_value(name: str, value: Any, marker_ids: Iterator[int]) -> Any:
    if value is None:
        return _IF_NONE.get(name)
    if name in _TEXT_IDS:
        return _TEXT_IDS[name]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith(("token_id", "token_index")):
        return next(marker_ids)
    return min(value, _LARGEST.get(name, value))


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Write `changes` into `values`, part by part; a change to ... takes the argument away."""
    for name, change in changes.items():
        if isinstance(change, dict) and isinstance(values.get(name), dict):
            _merge(values[name], change)
        elif change is ...:
            values.pop(name, None)
        else:
            values[name] = change
