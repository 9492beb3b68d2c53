"""One precompute run: from its arguments to the files of the cache.

    prepare_run   device, layers, tokenizer ─► tokens on disk ─► manifest         no weights yet
    Run.write     manifest (incomplete) ─► target ─► weights ─► shards ─► manifest (complete)

What lies in CACHE/.dspark/ helps the next run and is no part of the cache.
"""

import argparse
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PretrainedConfig

from dspark.cache import (
    DTYPE_MAP,
    build_cache_manifest,
    read_manifest,
    tokenizer_chat_template_sha256,
    write_manifest,
    write_target_weights,
)
from dspark.cache_manifest import row_specs
from dspark.capture import Target
from dspark.chat import ChatEncoder, load_tokenizer
from dspark.errors import CacheError, TargetError
from dspark.identity import target_identity, tokenizer_identity
from dspark.layers import text_config_of
from dspark.manifest import existing_shard_indices, identity_digest, manifest_path, shard_path
from dspark.pipeline import ShardSettings, shard_record, write_shards
from dspark.plan import count_shards, shard_rows
from dspark.progress import Progress
from dspark.publish import remove_leftovers
from dspark.rows import open_rows
from dspark.shard_check import check_shard
from dspark.shard_file import ShardMetadata, read_header
from dspark.target import (
    check_layer_ids,
    check_target,
    default_layer_ids,
    load_config,
    load_target,
)
from dspark.target_weights import _target_weights_path
from dspark.tokens import Tokens, load_tokens, write_tokens

logger = logging.getLogger(__name__)

WORKPLACE = ".dspark"
_VERSIONS_OF = ("dspark", "torch", "transformers", "tokenizers", "safetensors", "datasets")


@dataclass(frozen=True)
class Run:
    """A run whose input is read and whose settings are decided; nothing of the cache is written.

    Attributes:
        args: The command line.
        manifest: What the cache's manifest will be, still incomplete.
        tokens: The tokenized input.
        settings: What decides the shards.
        device: Where the target runs.
        compute_dtype: The dtype of its weights and forward.
    """

    args: argparse.Namespace
    manifest: dict[str, Any]
    tokens: Tokens
    settings: ShardSettings
    device: torch.device
    compute_dtype: torch.dtype

    @property
    def cache_dir(self) -> str:
        """The cache."""
        return str(self.args.output_dir)

    @property
    def num_shards(self) -> int:
        """Shards of the finished cache."""
        return count_shards(num_rows=self.tokens.counts.rows, shard_size=self.settings.shard_size)

    def write(self, *, resume: bool) -> None:
        """Compute what is missing and mark the cache complete.

        Args:
            resume: Whether files that are there are kept if they pass their check.

        Raises:
            TargetError: If the target cannot be loaded or fails its check.
            OSError: If the disk refuses.
        """
        recorded = self._recorded_manifest() if resume else None
        missing = self._missing_shards() if resume else list(range(self.num_shards))
        weights_missing = not (resume and self._weights_are_whole())
        if recorded and recorded.get("complete") is True and not missing and not weights_missing:
            logger.info(
                "%s is complete: all %d shards pass their check", self.cache_dir, self.num_shards
            )
            return
        self._begin(recorded)
        if missing or weights_missing:
            target = self._load_target()
            if weights_missing:
                write_target_weights(
                    self.cache_dir, target.embed_tokens, target.lm_head, self.settings.dtype
                )
            self._compute(target, missing)
        self._finish()

    def _recorded_manifest(self) -> dict[str, Any] | None:
        if not Path(manifest_path(self.cache_dir)).exists():
            return None
        return read_manifest(self.cache_dir, allow_incomplete=True)

    def _missing_shards(self) -> list[int]:
        """The shards to compute: those that are not there or fail their check."""
        existing = existing_shard_indices(self.cache_dir)
        missing = []
        for index in tqdm(range(self.num_shards), "checking shards", disable=None, leave=False):
            if index not in existing:
                missing.append(index)
                continue
            try:
                self._check_shard(index)
            except CacheError as error:
                logger.warning("%s It is written again now.", error)
                missing.append(index)
        logger.info("%d of %d shards are to be computed", len(missing), self.num_shards)
        return missing

    def _check_shard(self, index: int) -> ShardMetadata:
        return check_shard(
            Path(shard_path(self.cache_dir, index)),
            self.settings.row_specs,
            shard_record(index, self.tokens, self.settings),
        )

    def _weights_are_whole(self) -> bool:
        path = Path(_target_weights_path(self.cache_dir))
        try:
            read_header(path)
        except (FileNotFoundError, CacheError):
            return False
        return True

    def _begin(self, recorded: Mapping[str, Any] | None) -> None:
        """Write the manifest as incomplete; the versions that began a cache stay in it."""
        if recorded:
            self.manifest["provenance"]["created_with"] = recorded["provenance"]["created_with"]
        write_manifest(self.cache_dir, self.manifest | {"complete": False})

    def _load_target(self) -> Target:
        args = self.args
        logger.info("loading %s in %s on %s", args.target_model, self.compute_dtype, self.device)
        target = load_target(
            args.target_model,
            layer_ids=self.settings.layer_ids,
            device=self.device,
            compute_dtype=self.compute_dtype,
            attn_implementation=args.target_attn_implementation,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
        )
        check_target(target)
        return target

    def _compute(self, target: Target, missing: Sequence[int]) -> None:
        rows = [
            row
            for index in missing
            for row in shard_rows(
                index,
                num_rows=self.tokens.counts.rows,
                shard_size=self.settings.shard_size,
            )
        ]
        progress = Progress(
            rows=len(rows), shards=len(missing), bytes_per_token=self._bytes_per_token()
        )
        try:
            write_shards(
                self.cache_dir,
                missing,
                target,
                self.tokens,
                self.settings,
                on_rows=progress.add_rows,
                on_shard=progress.add_shard,
            )
        finally:
            progress.close()
        logger.info("wrote %s", progress.summary())

    def _bytes_per_token(self) -> int:
        return sum(spec.nbytes // spec.shape[0] for spec in self.settings.row_specs.values())

    def _finish(self) -> None:
        """Mark the cache complete, with the digest of every file's header."""
        paths = [Path(_target_weights_path(self.cache_dir))]
        paths += [Path(shard_path(self.cache_dir, index)) for index in range(self.num_shards)]
        files = {path.name: read_header(path).digest for path in paths}
        provenance = self.manifest["provenance"] | {"files": files}
        write_manifest(self.cache_dir, self.manifest | {"complete": True, "provenance": provenance})
        logger.info("%s is complete: %d shards", self.cache_dir, self.num_shards)


def prepare_run(args: argparse.Namespace) -> Run:
    """Read the input, decide every setting, and refuse what cannot work, before any weight.

    Raises:
        TargetError: If the target's configuration or the layer ids do not fit.
        DataError: If the input cannot become rows.
        OSError: If the cache's directory cannot be written.
    """
    device, compute_dtype = choose_device(args.device, args.compute_dtype)
    config = load_config(
        args.target_model, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    text_config = text_config_of(config)
    layer_ids = choose_layers(args, int(text_config.num_hidden_layers))
    tokenizer = load_tokenizer(
        args.target_model,
        chat_template=args.chat_template,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )
    workplace = Path(args.output_dir) / WORKPLACE
    workplace.mkdir(parents=True, exist_ok=True)
    remove_leftovers(Path(args.output_dir))
    tokens, data = _prepare_tokens(args, tokenizer, workplace / "tokens")
    if tokens.largest_id >= int(text_config.vocab_size):
        raise TargetError(
            f"the input has token id {tokens.largest_id}, but {args.target_model} embeds only "
            f"{text_config.vocab_size}. Is this the tokenizer of the target?"
        )
    pad_token_id = pad_id_of(tokenizer)
    identity = {
        "attn_implementation": args.target_attn_implementation or "default",
        "compute_dtype": str(compute_dtype).removeprefix("torch."),
        "pad_token_id": pad_token_id,
        "rows_sha256": tokens.counts.sha256,
        "target_weights": target_identity(
            args.target_model,
            commit=getattr(config, "_commit_hash", None),
            memory=workplace / "weights.json",
        ),
        "tokenizer_sha256": tokenizer_identity(tokenizer),
    }
    manifest = _build_manifest(args, config, tokens, layer_ids, tokenizer) | {
        "provenance": {
            "counts": asdict(tokens.counts),
            "created_with": {package: version(package) for package in _VERSIONS_OF},
            "data": data,
            "identity": identity,
        }
    }
    settings = ShardSettings(
        row_specs=row_specs(manifest),
        identity=identity_digest(manifest),
        shard_size=args.shard_size,
        batch_size=args.batch_size,
        pad_token_id=pad_token_id,
        layer_ids=layer_ids,
    )
    return Run(args, manifest, tokens, settings, device, compute_dtype)


def choose_device(device: str, compute_dtype: str) -> tuple[torch.device, torch.dtype]:
    """Resolve ``auto``: CUDA where it is there, and bf16 on it; else the CPU in fp32.

    Raises:
        TargetError: If CUDA is asked for and not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            logger.info("no CUDA device is there: running on the CPU")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise TargetError(f"--device {device}: torch sees no CUDA device here; use --device cpu")
    if compute_dtype == "auto":
        compute_dtype = "bf16" if chosen.type == "cuda" else "fp32"
    return chosen, DTYPE_MAP[compute_dtype]


def choose_layers(args: argparse.Namespace, num_layers: int) -> list[int]:
    """Return the layers to capture, and say what serving engines cannot capture.

    Raises:
        TargetError: If the ids asked for do not fit the target.
    """
    if args.target_layer_ids is not None:
        layer_ids = check_layer_ids(args.target_layer_ids, num_layers=num_layers)
    else:
        wanted = args.draft_num_hidden_layers
        layer_ids = default_layer_ids(num_layers=num_layers, num_captured=wanted)
        if len(layer_ids) < wanted:
            logger.warning(
                "--draft-num-hidden-layers %d: the target has %d layers, so %d are captured",
                wanted,
                num_layers,
                len(layer_ids),
            )
    logger.info("capturing layers %s of %d", layer_ids, num_layers)
    if layer_ids[-1] == num_layers - 1:
        logger.info("layer %d is the post-norm state; SGLang cannot capture it", num_layers - 1)
    if layer_ids[0] == -1:
        logger.warning("layer -1 is the input of layer 0; SGLang cannot capture it at serving time")
    return layer_ids


def pad_id_of(tokenizer: Any) -> int:
    """Return the id that pads rows: the tokenizer's, else its EOS, else 0; 0 is a valid id."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def _prepare_tokens(
    args: argparse.Namespace, tokenizer: Any, directory: Path
) -> tuple[Tokens, Any]:
    """Return the tokenized input, kept from an earlier run if nothing changed, and its source."""
    rows = open_rows(
        args.input_data,
        split=args.split,
        dataset_config=args.dataset_config,
        shuffle_seed=None if args.no_shuffle else args.shuffle_seed,
    )
    encoder_options = {
        "seq_length": args.seq_length,
        "mask_reasoning_content": args.mask_reasoning_content,
        "mask_generation_prompt": args.mask_generation_prompt,
    }
    row_options = {
        "max_samples": args.max_samples,
        "min_loss_tokens": args.min_loss_tokens,
        "skip_bad_rows": args.on_bad_row == "skip",
    }
    key = {
        "dspark": version("dspark"),
        "data": rows.description,
        "files": rows.fingerprint,
        "template_sha256": tokenizer_chat_template_sha256(tokenizer),
        "tokenizer_sha256": tokenizer_identity(tokenizer),
        **encoder_options,
        **row_options,
    }
    tokens = load_tokens(directory, key)
    if tokens is None:
        with tqdm(desc="checking rows", unit="row", disable=None, leave=False) as bar:
            tokens = write_tokens(
                directory,
                rows,
                ChatEncoder(tokenizer, **encoder_options),
                key=key,
                num_workers=args.num_workers or len(os.sched_getaffinity(0)),
                on_row=bar.update,
                **row_options,
            )
    _report_tokens(tokens, args.seq_length)
    return tokens, rows.description


def _report_tokens(tokens: Tokens, seq_length: int) -> None:
    counts = tokens.counts
    for warning in counts.warnings:
        logger.warning("%s", warning)
    for reason, rows in counts.skipped.items():
        logger.warning("%d rows are left out: %s", rows, reason)
    logger.info(
        "%d of %d rows are kept: %d tokens, %d of them supervised, %d rows cut at %d tokens",
        counts.rows,
        counts.source_rows,
        counts.tokens,
        counts.supervised_tokens,
        counts.cut_rows,
        seq_length,
    )


def _build_manifest(
    args: argparse.Namespace,
    config: PretrainedConfig,
    tokens: Tokens,
    layer_ids: list[int],
    tokenizer: Any,
) -> dict[str, Any]:
    inputs = args.input_data
    return build_cache_manifest(
        target_model=args.target_model,
        target_model_type=config.model_type,
        target_text_config=text_config_of(config),
        seq_length=args.seq_length,
        dtype=args.dtype,
        num_samples=tokens.counts.rows,
        shard_size=args.shard_size,
        target_layer_ids=layer_ids,
        train_data_path=inputs[0] if len(inputs) == 1 else json.dumps(inputs),
        train_split=args.split,
        shuffle_seed=args.shuffle_seed,
        mask_reasoning_content=args.mask_reasoning_content,
        mask_generation_prompt=args.mask_generation_prompt,
        chat_template_sha256=tokenizer_chat_template_sha256(tokenizer),
    )
