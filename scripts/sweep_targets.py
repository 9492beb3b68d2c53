#!/usr/bin/env python3
r"""Which model types of the installed transformers can be targets, and why the others cannot.

    python scripts/sweep_targets.py                     all types, writes docs/targets.md
    python scripts/sweep_targets.py qwen3 gemma3        these alone, prints

Every type of the causal-LM and image-text-to-text mappings is built from its shrunk default
configuration with random weights, saved, loaded as a target, checked, and run through a small
cache. The cache is read back and held against each row run alone, and its head against the model's
own logits. "Supported" means that all of this agreed.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from tiny_configs import VOCAB, tiny_config
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from dspark.cache import (
    CachedDSparkDataset,
    build_cache_manifest,
    read_target_weight_modules,
    target_logits,
    write_manifest,
    write_shard,
    write_target_weights,
)
from dspark.errors import TargetError
from dspark.precompute import _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES
from dspark.target import Target, check_target, default_layer_ids, load_target

DOCS = Path(__file__).resolve().parents[1] / "docs" / "targets.md"
SUPPORTED, UNSUPPORTED = "supported", "not supported"
OTHER, UNBUILDABLE, REFUSED = "not decoder-only", "not buildable here", "refused"
VERDICTS = (SUPPORTED, UNSUPPORTED, REFUSED, OTHER, UNBUILDABLE)

SECONDS, PARAMETERS = 120, 60e6
LENGTHS = (17, 9, 4)
TOLERANCE = 1e-5

# What a type is for, where neither its configuration nor the check can tell.
NOT_DECODERS = {
    "blip": "captions an image: the text decoder attends to it",
    "gemma4_assistant": "a draft that reads its target's states",
    "gemma4_unified_assistant": "a draft that reads its target's states",
    "blt": "a byte model of three stacks: local encoder, global transformer, local decoder",
    "diffusion_gemma": "denoises a canvas of tokens in both directions",
    "idefics": "every layer attends to an image",
    "musicgen": "predicts audio codes",
    "musicgen_melody": "predicts audio codes",
    "paligemma": "a prefix language model: the prompt attends to itself in both directions",
    "pi0": "predicts robot actions",
    "pix2struct": "an encoder-decoder whose encoder reads image patches",
    "prophetnet": "an encoder-decoder",
    "shieldgemma2": "classifies images",
    "vision-encoder-decoder": "an encoder-decoder",
    "xlm": "a masked language model without causal attention",
    "xlnet": "a permutation language model without causal attention",
}


class TooLong(Exception):
    """A type did not finish in time."""


@dataclass(frozen=True)
class Result:
    """What became of a model type."""

    model_type: str
    verdict: str
    reason: str


def main(names: list[str]) -> int:
    """Sweep `names`, or everything; return 1 if a supported share below 95 % is left."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, _stop)
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    results = []
    for name in names or sorted(known):
        started = time.monotonic()
        results.append(judge(name))
        seconds, result = time.monotonic() - started, results[-1]
        print(f"{name:26} {seconds:5.1f} s  {result.verdict}: {result.reason}", flush=True)
    counts = Counter(result.verdict for result in results)
    share = counts[SUPPORTED] / max(1, counts[SUPPORTED] + counts[UNSUPPORTED])
    print(dict(counts), f"{share:.1%} of the decoder-only types that could be built are supported")
    if not names:
        DOCS.parent.mkdir(exist_ok=True)
        DOCS.write_text(document(results, counts, share))
    return 0 if share >= 0.95 else 1


def judge(model_type: str) -> Result:
    """Try one model type from configuration to cache."""
    if model_type in _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES:
        return Result(model_type, REFUSED, "needs its own kernels; capture online instead")
    if model_type in NOT_DECODERS:
        return Result(model_type, OTHER, NOT_DECODERS[model_type])
    signal.alarm(SECONDS)
    try:
        config = tiny_config(model_type)
        if config.is_encoder_decoder:
            return Result(model_type, OTHER, "an encoder-decoder")
        model = build(model_type, config)
    except Exception as error:  # whatever a configuration or model class raises
        return Result(model_type, UNBUILDABLE, _short(error))
    finally:
        signal.alarm(0)
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return Result(model_type, SUPPORTED, try_target(model, Path(directory)))
    except TargetError as error:
        if "not a causal decoder" in str(error):
            return Result(model_type, OTHER, "a token's state depends on later tokens")
        return Result(model_type, UNSUPPORTED, _short(error))
    except Exception as error:  # a model that fails on plain text
        return Result(model_type, UNSUPPORTED, _short(error))
    finally:
        signal.alarm(0)


def build(model_type: str, config: PretrainedConfig) -> PreTrainedModel:
    """Return a tiny model in which no bias is zero and no norm one."""
    wrapped = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto_class = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in auto_class.from_config(config).parameters())
    if size > PARAMETERS:
        raise ValueError(f"its smallest configuration found has {size / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def try_target(model: PreTrainedModel, directory: Path) -> str:
    """Take `model` from disk to a cache that was read back; return what to know about it."""
    model.save_pretrained(directory / "model")
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    target = load_target(
        str(directory / "model"),
        layer_ids=default_layer_ids(num_layers=num_layers, num_captured=num_layers),
        device="cpu",
        compute_dtype=torch.float32,
    )
    check_target(target)
    input_ids, mask = rows_of(target)
    write_cache(directory / "cache", target, input_ids, mask)
    compare(directory / "cache", target, input_ids)
    notes = [f"`{target._stack.name}`"]
    notes += [f"{name} {value:g}" for name, value in target.head.extras.items()]
    notes += ["head bias"] if getattr(target.lm_head, "bias", None) is not None else []
    return ", ".join(notes)


def rows_of(target: Target) -> tuple[Tensor, Tensor]:
    """Return ids of ordinary text and their mask [3, 17]."""
    generator = torch.Generator().manual_seed(7)
    largest = min(target.vocab_size, VOCAB) - 28  # above are the ids that mark images
    input_ids = torch.randint(4, max(5, largest), (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.zeros_like(input_ids)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    return input_ids * mask, mask


def write_cache(directory: Path, target: Target, input_ids: Tensor, mask: Tensor) -> None:
    """Write the rows as a cache of one shard."""
    directory.mkdir()
    cache_dir = str(directory)
    manifest = build_cache_manifest(
        target_model="tiny",
        target_model_type=target.config.model_type,
        target_text_config=target.text_config,
        seq_length=input_ids.shape[1],
        dtype="fp32",
        num_samples=len(input_ids),
        shard_size=len(input_ids),
        target_layer_ids=target.layer_ids,
        train_data_path="none",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256="0" * 64,
    )
    write_manifest(cache_dir, manifest | {"complete": True})
    write_target_weights(
        cache_dir, target.embed_tokens, target.lm_head, torch.float32, transform=target.head
    )
    captured, real = target.capture(input_ids, mask), mask.unsqueeze(-1)
    samples = {
        "input_ids": input_ids,
        "loss_mask": mask,
        "target_hidden_states": captured.hidden_states * real,
        "target_last_hidden_states": captured.last * real,
        "lengths": torch.tensor(LENGTHS),
    }
    write_shard(cache_dir, 0, samples)


def compare(directory: Path, target: Target, input_ids: Tensor) -> None:
    """Hold every cached row against the row run alone, and the stored head against the model."""
    _, head = read_target_weight_modules(str(directory))
    for row, item in enumerate(CachedDSparkDataset(str(directory))):
        length = LENGTHS[row]
        ids = input_ids[row : row + 1, :length]
        alone = target.capture(ids, torch.ones_like(ids))
        for layer_id, mine, theirs in zip(
            [*target.layer_ids, "last"],
            [*item["target_hidden_states"].split(target.hidden_size, dim=-1),
             item["target_last_hidden_states"]],
            [*alone.layers, alone.last],
            strict=True,
        ):  # fmt: skip
            _agree(f"layer {layer_id} of row {row}", mine[:length], theirs[0], TOLERANCE)
        with torch.no_grad():
            logits = target.causal_lm(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            ).logits[0]
        mine = target_logits(head, item["target_last_hidden_states"][:length])
        _agree(f"logits of row {row}", mine, logits, 10 * TOLERANCE)


def _agree(what: str, mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    largest = theirs.abs().amax(dim=-1).clamp_min(1e-30)
    off = float(((mine - theirs).abs().amax(dim=-1) / largest).max())
    if not off <= tolerance:
        raise TargetError(f"the cached {what} differs from the row alone by {off:.1e}")


def document(results: list[Result], counts: Counter[str], share: float) -> str:
    """Return docs/targets.md."""
    lines = [
        "# Model types that can be targets",
        "",
        f"Written by `scripts/sweep_targets.py` with transformers {transformers.__version__}, from "
        f"every model type of its causal-LM and image-text-to-text mappings ({len(results)}).",
        "",
        "A tiny random model of each type was saved, loaded, checked against transformers' own "
        "`output_hidden_states` and logits, and run through a small cache in fp32. Every cached "
        f"row equals the row run alone within {TOLERANCE:g} of each token's largest magnitude in "
        "each layer, and the stored head gives the model's own logits. "
        f"**{share:.1%}** of the decoder-only types that could be built are supported.",
        "",
        "| verdict | types |",
        "|---|---|",
        *(f"| {verdict} | {counts[verdict]} |" for verdict in VERDICTS),
        "",
        "For a supported type the last column says where its layers are and what its head does to "
        "the logits beyond a matrix product.",
        "",
        "| model type | verdict | reason |",
        "|---|---|---|",
        *(f"| `{r.model_type}` | {r.verdict} | {r.reason} |" for r in results),
    ]
    return "\n".join(lines) + "\n"


def _short(error: BaseException) -> str:
    """Return an error as a table cell."""
    text = re.sub(r"\s+", " ", f"{error}".replace("|", "/")).strip() or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def _stop(_signal: int, _frame: FrameType | None) -> Any:
    raise TooLong(f"not done after {SECONDS} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
