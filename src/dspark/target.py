"""The frozen target model: read its configuration, choose its layers, load it, capture its states.

Nothing here knows a file of the cache. The parts are found in `dspark.model.layers`, run in
`dspark.model.capture` and proved in `dspark.model.target_check`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils.import_utils import is_accelerate_available

from dspark.errors import TargetError
from dspark.model.capture import Captured, Target
from dspark.model.layers import text_config_of
from dspark.model.target_check import check_target
from dspark.model.tensor_parallel import loading_options

__all__ = [
    "Captured",
    "Target",
    "check_layer_ids",
    "check_seq_length",
    "check_target",
    "default_layer_ids",
    "load_config",
    "load_target",
    "read_model_type",
]


def read_model_type(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> str:
    """Return ``model_type`` as the model's config.json spells it, before any class is chosen.

    Args:
        name: A directory or a hub id.
        revision: The hub revision.
        trust_remote_code: Whether the caller allows the model's own code; nothing is run here.

    Raises:
        TargetError: If there is no configuration, or it names no model type.
    """
    raw = _raw_config(name, revision=revision, trust_remote_code=trust_remote_code)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise TargetError(
            f"the config.json of {name} has model_type={model_type!r}; "
            "expected the name of a transformers model type."
        )
    return model_type


def load_config(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return the configuration of the model, composite for a multimodal one.

    Args:
        name: A directory or a hub id.
        revision: The hub revision.
        trust_remote_code: Whether a configuration class shipped with the model may be run.

    Raises:
        TargetError: If it cannot be read, needs code that is not trusted, or is that of a model
            which is more than a decoder.
    """
    raw = _raw_config(name, revision=revision, trust_remote_code=trust_remote_code)
    if raw.get("auto_map") and not trust_remote_code:
        raise TargetError(
            f"{name} brings its own code (auto_map: {raw['auto_map']}). Read it, then pass "
            "--trust-remote-code to run it; where transformers has a class of its own for "
            f"model_type={raw.get('model_type')!r}, taking auto_map out of the config.json of a "
            "local copy uses that instead."
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a value of the wrong type can raise anything
        raise TargetError(
            f"cannot read the configuration of {name}: {type(error).__name__}: {error}"
        ) from error
    if config.is_encoder_decoder or text_config_of(config).is_encoder_decoder:
        raise TargetError(
            f"{name} ({config.model_type}) is an encoder-decoder (is_encoder_decoder=True); a "
            "target must be a decoder that predicts the next token from the tokens before it."
        )
    return config


def default_layer_ids(*, num_layers: int, num_captured: int) -> list[int]:
    """Spread `num_captured` layers over the target, the first after layer 0, the last post-norm.

    ``round(1 + i * (n - 2) / (k - 1))`` for i = 0 ... k-1, k capped at n-1; ``[n - 1]`` for k = 1.

    Args:
        num_layers: Decoder layers of the target, n.
        num_captured: Layers wanted, k.

    Raises:
        TargetError: If either number is below 1.
    """
    if num_layers < 1 or num_captured < 1:
        raise TargetError(
            f"cannot choose {num_captured} of {num_layers} layers; both must be at least 1."
        )
    count = max(1, min(num_captured, num_layers - 1))
    if count == 1:
        return [num_layers - 1]
    return [round(1 + i * (num_layers - 2) / (count - 1)) for i in range(count)]


def check_layer_ids(ids: Sequence[int], *, num_layers: int) -> list[int]:
    """Return `ids` as a list if they are strictly increasing ids of a target with `num_layers`.

    Raises:
        TargetError: If there are none, or one is out of range, repeated or out of order.
    """
    wrong = [i for i in ids if not -1 <= i < num_layers]
    if not ids or wrong:
        raise TargetError(
            f"layer ids {list(ids)} do not fit a target with {num_layers} layers"
            f"{f' ({wrong} out of range)' if wrong else ''}: use ids from -1 (the embedding) to "
            f"{num_layers - 1} (the post-norm state), at least one."
        )
    if any(a >= b for a, b in pairwise(ids)):
        raise TargetError(
            f"layer ids {list(ids)} must be strictly increasing; use {sorted(set(ids))}."
        )
    return list(ids)


def check_seq_length(config: PretrainedConfig, *, seq_length: int) -> None:
    """Refuse rows that are longer than the positions a model was made for.

    Args:
        config: The model's configuration.
        seq_length: Longest row, in tokens.

    Raises:
        TargetError: If `seq_length` is beyond the position limit.
    """
    text_config = text_config_of(config)
    limit = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return
    ropes = getattr(text_config, "rope_parameters", None) or getattr(
        text_config, "rope_scaling", None
    )
    for rope in [ropes, *ropes.values()] if isinstance(ropes, dict) else []:
        if isinstance(rope, dict) and rope.get("factor") is not None:  # stretched beyond the limit
            original = rope.get("original_max_position_embeddings") or limit
            limit = max(limit, int(original * rope["factor"]))
    if seq_length > limit:
        raise TargetError(
            f"--seq-length {seq_length} is beyond the {limit} positions of {config.model_type}; "
            f"use at most {limit}."
        )


def load_target(
    name: str,
    *,
    layer_ids: Sequence[int],
    device: str | torch.device,
    compute_dtype: torch.dtype,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | dict[str, Any] | None = None,
    tensor_parallel: int = 1,
) -> Target:
    """Load the frozen model and find its text decoder.

    Args:
        name: A directory or a hub id.
        layer_ids: The layers to capture, as `check_layer_ids` wants them.
        device: Where the whole model goes, unless `device_map` spreads it.
        compute_dtype: The dtype in which the weights are loaded and the forward runs.
        attn_implementation: ``eager``, ``sdpa``, …; None for the model's default.
        revision: The hub revision.
        trust_remote_code: Whether code shipped with the model may be run.
        device_map: As transformers takes it; needs the package accelerate.
        tensor_parallel: How many ranks hold the model together; all of them load it at this moment,
            within `dspark.model.tensor_parallel.connected`.

    Raises:
        TargetError: If the model cannot be loaded, needs code that is not trusted, or has a layout
            in which no text decoder is found.
    """
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    check_layer_ids(layer_ids, num_layers=text_config_of(config).num_hidden_layers)
    if device_map is None and tensor_parallel == 1:
        device_map = _whole_on(device)
    wanted = {"attn_implementation": attn_implementation, "device_map": device_map}
    try:
        with loading_options(tensor_parallel) as options:
            model, report = _auto_class(config).from_pretrained(
                name,
                config=config,
                dtype=compute_dtype,
                revision=revision,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **{key: value for key, value in wanted.items() if value is not None},
                **options,
            )
    except Exception as error:  # damaged files and unfit configurations raise anything
        raise TargetError(f"cannot load {name}: {type(error).__name__}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise TargetError(
            f"{name} has no weights for {len(missing)} parameters of {type(model).__name__}, such "
            f"as {missing[0]}; they would be random. Is the checkpoint whole, and its config.json "
            "that of these weights?"
        )
    is_placed = device_map is not None or tensor_parallel > 1
    return Target(model if is_placed else model.to(device), layer_ids)


def _auto_class(config: PretrainedConfig) -> Any:
    """Return the class that chooses the model's own class.

    That is the one which would choose the class that the weights were saved from; some model types
    have a text-only class beside the multimodal one.
    """
    own_code = getattr(config, "auto_map", None) or {}
    saved_from = getattr(config, "architectures", None) or []
    fitting = {
        auto_class: getattr(known.get(type(config), None), "__name__", None)
        for auto_class, known in (
            (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
            (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        )
        if type(config) in known or auto_class.__name__ in own_code
    }
    if not fitting:
        raise TargetError(
            f"transformers has no causal language model for model_type={config.model_type!r}; "
            "docs/targets.md lists the model types that can be targets."
        )
    return next((a for a, name in fitting.items() if name in saved_from), next(iter(fitting)))


def _whole_on(device: str | torch.device) -> dict[str, Any] | None:
    """Return the map that puts all weights on an accelerator without a copy in host memory.

    None where that is not possible (without accelerate) or needed; the model is then moved.
    """
    if torch.device(device).type == "cpu" or not is_accelerate_available():
        return None
    return {"": torch.device(device)}


def _raw_config(name: str, *, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Return the parsed config.json of `name`, through no configuration class."""
    try:
        raw, _ = PretrainedConfig.get_config_dict(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        where = "" if os.path.isdir(name) else "there is no such directory here, and as a Hub id: "
        raise TargetError(f"cannot read the config.json of {name}: {where}{error}") from error
    if not raw:  # what transformers makes of a directory without the file
        raise TargetError(f"cannot read the config.json of {name}: there is none.")
    return raw
