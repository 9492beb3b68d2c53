"""Everything about a run that can be decided before a row is read or a weight loaded."""

import argparse
import json
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from dspark.cache import DTYPE_MAP, build_cache_manifest, tokenizer_chat_template_sha256
from dspark.chat import load_tokenizer
from dspark.errors import TargetError
from dspark.model.layers import text_config_of
from dspark.model.tensor_parallel import refuse_unfit
from dspark.target import check_layer_ids, check_seq_length, default_layer_ids, load_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSettings:
    """The decisions of a run.

    Attributes:
        args: The command line.
        config: The target's configuration.
        tokenizer: Its tokenizer, with the chat template to use.
        layer_ids: The layers to capture.
        device: Where the target runs.
        compute_dtype: The dtype of its weights and forward.
    """

    args: argparse.Namespace
    config: PretrainedConfig
    tokenizer: Any
    layer_ids: list[int]
    device: torch.device
    compute_dtype: torch.dtype

    @property
    def compute_dtype_name(self) -> str:
        """The compute dtype as torch spells it, without the "torch."."""
        return str(self.compute_dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        """Number of token ids the target embeds."""
        return int(text_config_of(self.config).vocab_size)

    @property
    def pad_token_id(self) -> int:
        """What pads rows: the tokenizer's pad id, else its EOS, else 0; 0 is a valid id.

        A pad token that was added to the tokenizer alone has no embedding and is passed over.
        """
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None and token_id < self.vocab_size:
                return int(token_id)
        return 0

    def manifest(self, *, num_samples: int) -> dict[str, Any]:
        """Return the manifest of a cache with `num_samples` rows, without provenance."""
        args = self.args
        inputs = args.input_data
        return build_cache_manifest(
            target_model=args.target_model,
            target_model_type=self.config.model_type,
            target_text_config=text_config_of(self.config),
            seq_length=args.seq_length,
            dtype=args.dtype,
            num_samples=num_samples,
            shard_size=args.shard_size,
            target_layer_ids=self.layer_ids,
            train_data_path=inputs[0] if len(inputs) == 1 else json.dumps(inputs),
            train_split=args.split,
            shuffle_seed=args.shuffle_seed,
            mask_reasoning_content=args.mask_reasoning_content,
            mask_generation_prompt=args.mask_generation_prompt,
            chat_template_sha256=tokenizer_chat_template_sha256(self.tokenizer),
        )


def decide_settings(args: argparse.Namespace) -> RunSettings:
    """Read the target's configuration and tokenizer, and decide.

    Raises:
        TargetError: If the configuration, the sequence length, the layer ids or the device do not
            fit.
        DataError: If the chat template cannot be read.
    """
    device, compute_dtype = choose_device(args.device, args.compute_dtype)
    config = load_config(
        args.target_model, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    refuse_unfit(config, num_ranks=args.tensor_parallel, device=device)
    check_seq_length(config, seq_length=args.seq_length)
    layer_ids = choose_layers(
        args.target_layer_ids,
        num_layers=int(text_config_of(config).num_hidden_layers),
        num_captured=args.draft_num_hidden_layers,
    )
    tokenizer = load_tokenizer(
        args.target_model,
        chat_template=args.chat_template,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )
    settings = RunSettings(args, config, tokenizer, layer_ids, device, compute_dtype)
    if (tokenizer.pad_token_id or 0) >= settings.vocab_size:
        logger.warning(
            "the tokenizer's pad token has id %d, but the target embeds only %d: rows are padded "
            "with %d",
            tokenizer.pad_token_id,
            settings.vocab_size,
            settings.pad_token_id,
        )
    return settings


def choose_device(device: str, compute_dtype: str) -> tuple[torch.device, torch.dtype]:
    """Resolve ``auto``: CUDA where it is there, and bf16 on it; else the CPU in fp32.

    Raises:
        TargetError: If the device is unknown, or CUDA is asked for and not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            logger.info("no CUDA device is there: running on the CPU")
    if device == "cuda" and "LOCAL_RANK" in os.environ:  # under torchrun, one GPU per rank
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise TargetError(f"--device {device}: {str(error).splitlines()[0]}") from error
    _refuse_missing(chosen, device)
    if compute_dtype == "auto":
        compute_dtype = "bf16" if chosen.type == "cuda" else "fp32"
    return chosen, DTYPE_MAP[compute_dtype]


def _refuse_missing(chosen: torch.device, device: str) -> None:
    """Refuse a device that this machine does not have."""
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise TargetError(f"--device {device}: torch sees no CUDA device here; use --device cpu")
    if chosen.type in ("cpu", "cuda"):
        return
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise TargetError(f"--device {device} cannot be used here: {reason}") from error


def choose_layers(wanted: list[int] | None, *, num_layers: int, num_captured: int) -> list[int]:
    """Return the layers to capture, and say what serving engines cannot capture.

    Args:
        wanted: The ids asked for, or None to spread `num_captured` layers.
        num_layers: Decoder layers of the target.
        num_captured: How many to capture where none are asked for.

    Raises:
        TargetError: If the ids asked for do not fit the target.
    """
    if wanted is not None:
        layer_ids = check_layer_ids(wanted, num_layers=num_layers)
    else:
        layer_ids = default_layer_ids(num_layers=num_layers, num_captured=num_captured)
        if len(layer_ids) < num_captured:
            logger.warning(
                "--draft-num-hidden-layers %d: the target has %d layers, so %d are captured",
                num_captured,
                num_layers,
                len(layer_ids),
            )
    logger.info("capturing layers %s of %d", layer_ids, num_layers)
    if layer_ids[-1] == num_layers - 1:
        logger.info("layer %d is the post-norm state; SGLang cannot capture it", num_layers - 1)
    if layer_ids[0] == -1:
        logger.warning("layer -1 is the input of layer 0; SGLang cannot capture it at serving time")
    return layer_ids
