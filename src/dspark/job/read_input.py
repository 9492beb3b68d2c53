"""From the input files to the whole manifest: the last step before a weight is loaded."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark.chat import ChatEncoder
from dspark.data.encoding import encode_rows, read_parts, write_part
from dspark.data.rows import RowSource, open_rows
from dspark.data.tokens import RowRules, Tokens, load_tokens, write_tokens
from dspark.disk.manifest import identity_digest
from dspark.errors import DataError, TargetError
from dspark.job.forward import ShardSettings
from dspark.job.identity import target_identity, tokenizer_identity
from dspark.job.run import Run
from dspark.job.run_log import library_versions
from dspark.job.settings import RunSettings
from dspark.job.workplace import Workplace
from dspark.processes.group import Group, cores_of_rank
from dspark.schema.cache_manifest import row_specs

logger = logging.getLogger(__name__)


def read_input(
    settings: RunSettings,
    workplace: Workplace,
    group: Group,
    recorded: Mapping[str, Any] | None,
) -> Run:
    """Tokenize the input, or take up the tokens of an earlier run, and complete the manifest.

    Args:
        settings: What was decided.
        workplace: Where tokens are kept.
        group: The ranks of the run, which share the work.
        recorded: The manifest of the cache that is resumed: the day that templates see and the
            versions stay those with which it was begun.

    Raises:
        DataError: If the input cannot become rows, or differs between ranks.
        TargetError: If a token id lies beyond the target's embedding.
    """
    args = settings.args
    begun = recorded.get("provenance", {}) if recorded else {}
    today = begun.get("identity", {}).get("template_date") or date.today().isoformat()
    template_date = args.template_date
    if template_date is None:
        template_date = group.from_first("today", lambda: today)
    encoder = ChatEncoder(
        settings.tokenizer,
        seq_length=args.seq_length,
        mask_reasoning_content=args.mask_reasoning_content,
        mask_generation_prompt=args.mask_generation_prompt,
        template_date=template_date,
    )
    pinned = {"template_date": template_date} if encoder.template_reads_clock else {}
    tokens, data = _read_tokens(settings, workplace, group, encoder, pinned)
    largest_id = group.from_first("largest-id", lambda: tokens.largest_id)
    if largest_id >= settings.vocab_size:
        raise TargetError(
            f"the input has token id {largest_id}, but {args.target_model} embeds only "
            f"{settings.vocab_size}. Is this the tokenizer of the target?"
        )
    created_with = begun.get("created_with") or group.from_first("versions", library_versions)
    manifest = settings.manifest(num_samples=tokens.counts.rows) | {
        "provenance": {
            "counts": asdict(tokens.counts),
            "created_with": created_with,
            "data": data,
            "identity": _identity(settings, workplace, group, tokens) | pinned,
        }
    }
    shards = ShardSettings(
        row_specs=row_specs(manifest),
        identity=identity_digest(manifest),
        shard_size=args.shard_size,
        batch_size=args.batch_size,
        pad_token_id=settings.pad_token_id,
        layer_ids=settings.layer_ids,
        mask_bad_states=args.on_bad_state == "mask",
        halve_batches=group.tensor_parallel == 1,
    )
    first = group.from_first("identity", lambda: shards.identity)
    if first != shards.identity:
        raise DataError(
            f"rank {group.rank} makes a cache with identity {shards.identity}, rank 0 one with "
            f"{first}: they do not see the same input, tokenizer or library versions."
        )
    return Run(settings, workplace, group, manifest, tokens, shards)


def identity_of_settings(settings: RunSettings) -> dict[str, Any]:
    """Return that part of ``provenance.identity`` for which nothing has to be read."""
    return {
        "attn_implementation": settings.args.target_attn_implementation or "default",
        "compute_dtype": settings.compute_dtype_name,
        "min_loss_tokens": settings.args.min_loss_tokens,
        "pad_token_id": settings.pad_token_id,
        "tokenizer_sha256": tokenizer_identity(settings.tokenizer),
    }


def _identity(
    settings: RunSettings, workplace: Workplace, group: Group, tokens: Tokens
) -> dict[str, Any]:
    """What decides the cache's content without being a field of the manifest."""

    def weights() -> str:
        commit = getattr(settings.config, "_commit_hash", None)
        return target_identity(settings.args.target_model, commit=commit, hashes=workplace.hashes)

    return {
        **identity_of_settings(settings),
        "rows_sha256": tokens.counts.sha256,
        "target_weights": group.from_first("weights", weights),
    }


def _read_tokens(
    settings: RunSettings,
    workplace: Workplace,
    group: Group,
    encoder: ChatEncoder,
    pinned: Mapping[str, Any],
) -> tuple[Tokens, Any]:
    """Return the tokens, and what was read as JSON."""
    args = settings.args
    rows = open_rows(
        args.input_data,
        split=args.split,
        dataset_config=args.dataset_config,
        shuffle_seed=None if args.no_shuffle else args.shuffle_seed,
    )
    rules = RowRules(args.on_bad_row == "skip", args.min_loss_tokens, args.max_samples)
    key = {
        "data": rows.description,
        "files": rows.fingerprint,
        "manifest": settings.manifest(num_samples=1),
        "rules": asdict(rules),
        "templates": settings.tokenizer.chat_template,  # the manifest knows one of several
        "tokenizer_sha256": tokenizer_identity(settings.tokenizer),
        "versions": library_versions(),
        **pinned,
    }
    directory = workplace.tokens(key)
    if not group.from_first("tokens-found", lambda: load_tokens(directory, key) is not None):
        _make_tokens(directory, rows, encoder, rules, key, group, num_workers=args.num_workers)
    tokens = load_tokens(directory, key, check=False)  # rank 0 has done so for all
    if tokens is None:
        raise DataError(
            f"rank {group.rank} does not find the tokens that rank 0 made in {directory}. All "
            "ranks need the same --output-dir, input files and library versions."
        )
    if group.is_first:
        _report_tokens(tokens, args.seq_length)
    return tokens, rows.description


def _make_tokens(
    directory: Path,
    rows: RowSource,
    encoder: ChatEncoder,
    rules: RowRules,
    key: Mapping[str, Any],
    group: Group,
    *,
    num_workers: int,
) -> None:
    """Encode the rows, each rank its share, and have rank 0 write them down."""
    workers = num_workers or cores_of_rank()
    if group.world_size == 1:
        encoded = encode_rows(rows, encoder, workers)
    else:
        group.from_first("tokens-begin", lambda: directory.mkdir(parents=True, exist_ok=True))
        parts = [directory / f"part-{rank}.bin" for rank in range(group.world_size)]
        silent = None if group.is_first else True
        with tqdm(desc="tokenizing", unit="row", disable=silent, leave=False) as bar:
            write_part(
                parts[group.rank],
                rows,
                encoder,
                num_workers=workers,
                share=group.rank,
                num_shares=group.world_size,
                is_last=rules.last_of_part(),
                on_row=lambda: bar.update(group.world_size),  # the others are about as far
            )
        group.collect("tokens-encoded", True)
        encoded = read_parts(parts)

    def write() -> None:
        with tqdm(desc="checking rows", unit="row", disable=None, leave=False) as bar:
            write_tokens(directory, encoded, rules, key=key, on_row=bar.update)
        for part in directory.glob("part-*.bin"):
            part.unlink()

    group.from_first("tokens-written", write)


def _report_tokens(tokens: Tokens, seq_length: int) -> None:
    counts = tokens.counts
    for warning in counts.warnings:
        logger.warning("%s", warning)
    for reason, rows in counts.skipped.items():
        logger.warning("%d rows are left out: %s", rows, reason)
    if not counts.supervised_tokens:
        logger.warning(
            "no token is supervised: there is nothing to train a draft on. Look at a row with "
            "python -m dspark.inspect; is --seq-length %d long enough to reach an answer?",
            seq_length,
        )
    logger.info(
        "%d of %d rows are kept, %d of them cut at %d tokens",
        counts.rows,
        counts.source_rows,
        counts.cut_rows,
        seq_length,
    )
