"""The frozen target model: read its configuration, choose its layers, load it, capture its states.

Nothing here knows a file of the cache. The parts are found in `dspark.layers`, run in
`dspark.capture` and proved in `dspark.target_check`.
"""

from __future__ import annotations

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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dspark.capture import Captured, Target
from dspark.errors import TargetError
from dspark.target_check import check_target

__all__ = [
    "Captured",
    "Target",
    "check_layer_ids",
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
        TargetError: If it cannot be read, or needs code that is not trusted.
    """
    raw = _raw_config(name, revision=revision, trust_remote_code=trust_remote_code)
    if "auto_map" in raw and not trust_remote_code:
        _refuse_remote_code(name, raw)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
        return config
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"cannot read the configuration of {name}: {error}") from error


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

    Raises:
        TargetError: If the model cannot be loaded, needs code that is not trusted, or has a layout
            in which no text decoder is found.
    """
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    check_layer_ids(layer_ids, num_layers=config.get_text_config(decoder=True).num_hidden_layers)
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
    loader = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    options: dict[str, Any] = (
        {"attn_implementation": attn_implementation} if attn_implementation else {}
    )
    try:
        model = loader.from_pretrained(
            name,
            config=config,
            dtype=compute_dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            device_map=device_map if device_map is not None else {"": torch.device(device)},
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        raise TargetError(f"cannot load {name}: {error}") from error
    return Target(model, layer_ids)


def _raw_config(name: str, *, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Return the parsed config.json of `name`, through no configuration class."""
    try:
        raw, _ = PretrainedConfig.get_config_dict(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read the config.json of {name}: {error}") from error
    return raw


def _refuse_remote_code(name: str, raw: dict[str, Any]) -> None:
    """Stop before code shipped with a model is run."""
    raise TargetError(
        f"{name} brings its own code (auto_map: {sorted(raw['auto_map'])}). Read it, then pass "
        "--trust-remote-code to run it."
    )
