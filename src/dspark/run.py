"""One precompute run, from its settings to the files of the cache.

    open_workplace   CACHE/.dspark/ and the lock that makes this run the one writer
    read_input       tokens on disk ─► the whole manifest              no weight is loaded yet
    Run.write        manifest (incomplete) ─► target ─► weights ─► shards ─► manifest (complete)

What lies in CACHE/.dspark/ helps the next run and is no part of the cache.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark.cache import DTYPE_MAP, read_manifest, write_manifest, write_target_weights
from dspark.cache_manifest import padding_values, row_specs
from dspark.capture import Target
from dspark.chat import ChatEncoder
from dspark.errors import CacheError, TargetError
from dspark.forecast import Forecast, make_forecast
from dspark.identity import FileHashes, target_identity, tokenizer_identity
from dspark.interrupts import StopRequest
from dspark.lock import WriterLock
from dspark.manifest import existing_shard_indices, identity_digest, manifest_path, shard_path
from dspark.manifest_check import finished_manifest
from dspark.pipeline import ShardSettings, shard_record, write_shards
from dspark.plan import count_shards, shard_rows
from dspark.progress import Progress
from dspark.publish import remove_leftovers
from dspark.rows import open_rows
from dspark.settings import RunSettings
from dspark.shard_check import check_shard
from dspark.target import check_target, load_target
from dspark.target_weights import check_target_weights
from dspark.tokens import Tokens, load_tokens, write_tokens

logger = logging.getLogger(__name__)

_VERSIONS_OF = ("dspark", "torch", "transformers", "tokenizers", "safetensors", "datasets")


class Workplace:
    """CACHE/.dspark, held by one run.

    What a run puts here is kept only once it is accepted: a refused run leaves the directory as it
    was, tokens of another input included.

    Args:
        path: The directory.
        lock: Held as long as the run lives.

    Attributes:
        hashes: Hashes of weight files, remembered from run to run.
    """

    def __init__(self, path: Path, lock: WriterLock) -> None:
        self.lock = lock
        self.hashes = FileHashes(path / "weights.json")
        self._path = path
        self._found = set(path.glob("tokens-*"))

    def tokens(self, key: Mapping[str, Any]) -> Path:
        """Return where the tokens decided by `key` lie."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self._path / f"tokens-{digest[:16]}"

    def accept(self, tokens: Path) -> None:
        """Keep what this run found out, and `tokens` as the only ones."""
        self.hashes.save()
        self._found = {tokens}

    def remove_rejected(self) -> None:
        """Remove the tokens that are not those of the run accepted last."""
        for directory in set(self._path.glob("tokens-*")) - self._found:
            shutil.rmtree(directory)


@contextlib.contextmanager
def open_workplace(cache_dir: str) -> Iterator[Workplace]:
    """Create the cache's directory if needed and become its one writer.

    Raises:
        CacheError: If another run lives in it.
        OSError: If it cannot be written.
    """
    path = Path(cache_dir) / ".dspark"
    path.mkdir(parents=True, exist_ok=True)
    with WriterLock(path / "writer.lock") as lock:
        for leftover in remove_leftovers(Path(cache_dir)) + remove_leftovers(path):
            logger.info("removed %s, left by a run that died", leftover.name)
        workplace = Workplace(path, lock)
        try:
            yield workplace
        finally:
            workplace.remove_rejected()


@dataclass(frozen=True)
class Run:
    """A run whose input is read; nothing of the cache is written yet.

    Attributes:
        settings: What was decided.
        workplace: Where the run keeps its own files.
        manifest: What the cache's manifest will be, still incomplete.
        tokens: The tokenized input.
        shards: What decides the shards.
    """

    settings: RunSettings
    workplace: Workplace
    manifest: dict[str, Any]
    tokens: Tokens
    shards: ShardSettings

    @property
    def cache_dir(self) -> str:
        """The cache."""
        return str(self.settings.args.output_dir)

    @property
    def num_shards(self) -> int:
        """Shards of the finished cache."""
        return count_shards(num_rows=self.tokens.counts.rows, shard_size=self.shards.shard_size)

    @cached_property
    def recorded(self) -> dict[str, Any] | None:
        """The manifest on disk."""
        if not os.path.exists(manifest_path(self.cache_dir)):
            return None
        return read_manifest(self.cache_dir, allow_incomplete=True)

    @cached_property
    def missing(self) -> list[int]:
        """The shards to compute: those that are not there or fail their check."""
        existing = existing_shard_indices(self.cache_dir)
        missing = [index for index in range(self.num_shards) if index not in existing]
        for index in tqdm(sorted(existing), "checking shards", disable=None, leave=False):
            path = Path(shard_path(self.cache_dir, index))
            try:
                check_shard(
                    path,
                    self.shards.row_specs,
                    shard_record(index, self.tokens, self.shards),
                    padding=padding_values(self.manifest),
                )
            except CacheError as error:
                logger.warning("shard %d is written again: %s", index, error)
                missing.append(index)
        return sorted(missing)

    @cached_property
    def weights_missing(self) -> bool:
        """Whether embedding and head are not there or not whole."""
        try:
            check_target_weights(self.cache_dir, identity=self.shards.identity)
        except FileNotFoundError:
            return True
        except CacheError as error:
            logger.warning("the target's weights are written again: %s", error)
            return True
        return False

    @property
    def is_finished(self) -> bool:
        """Whether the cache on disk is complete and every file passes its check."""
        complete = self.recorded is not None and self.recorded.get("complete") is True
        return complete and not self.missing and not self.weights_missing

    def forecast(self) -> Forecast:
        """Work out what the cache will take and what is free."""
        hidden, vocab = self.manifest["hidden_size"], self.manifest["target_vocab_size"]
        return make_forecast(
            Path(self.cache_dir),
            self.tokens,
            self.shards,
            num_shards=self.num_shards,
            missing=self.missing,
            weight_bytes=2 * hidden * vocab * DTYPE_MAP[self.manifest["dtype"]].itemsize,
            weights_missing=self.weights_missing,
        )

    def write(self) -> None:
        """Compute what is missing and mark the cache complete.

        Raises:
            TargetError: If the target cannot be loaded, fails its check or raises.
            Stopped: If SIGTERM arrived.
            OSError: If the disk refuses.
        """
        write_manifest(self.cache_dir, self.manifest | {"complete": False})
        if self.missing or self.weights_missing:
            target = self._load_target()
            if self.weights_missing:
                write_target_weights(
                    self.cache_dir, target.embed_tokens, target.lm_head, self.shards.dtype
                )
            self._compute(target, self.missing)
        self._finish()

    def _load_target(self) -> Target:
        settings, args = self.settings, self.settings.args
        dtype = str(settings.compute_dtype).removeprefix("torch.")
        logger.info("loading %s in %s on %s", args.target_model, dtype, settings.device)
        target = load_target(
            args.target_model,
            layer_ids=settings.layer_ids,
            device=settings.device,
            compute_dtype=settings.compute_dtype,
            attn_implementation=args.target_attn_implementation,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            device_map=args.device_map,
        )
        if not args.no_target_check:
            check_target(target)
        return target

    def _compute(self, target: Target, missing: Sequence[int]) -> None:
        shards, num_rows = self.shards, self.tokens.counts.rows
        progress = Progress(
            rows=sum(
                len(shard_rows(index, num_rows=num_rows, shard_size=shards.shard_size))
                for index in missing
            ),
            shards=len(missing),
            bytes_per_token=sum(s.nbytes // s.shape[0] for s in shards.row_specs.values()),
        )

        def before_publishing(index: int) -> None:
            self.workplace.lock.check()
            progress.add_shard(index)

        try:
            with StopRequest() as stop:
                write_shards(
                    self.cache_dir,
                    missing,
                    target,
                    self.tokens,
                    shards,
                    on_rows=progress.add_rows,
                    on_shard=before_publishing,
                    check_stop=stop.check,
                )
        finally:
            progress.close()
        logger.info("wrote %s", progress.summary())

    def _finish(self) -> None:
        """Mark the cache complete, with the digest of every file's header."""
        write_manifest(self.cache_dir, finished_manifest(self.cache_dir, self.manifest))


def read_input(
    settings: RunSettings, workplace: Workplace, recorded: Mapping[str, Any] | None
) -> Run:
    """Tokenize the input, or take up the tokens of an earlier run, and complete the manifest.

    Args:
        settings: What was decided.
        workplace: Where tokens are kept.
        recorded: The manifest of the cache that is resumed: the day that templates see and the
            versions stay those with which it was begun.

    Raises:
        DataError: If the input cannot become rows.
        TargetError: If a token id lies beyond the target's embedding.
    """
    args = settings.args
    begun = recorded.get("provenance", {}) if recorded else {}
    template_date = (
        args.template_date
        or begun.get("identity", {}).get("template_date")
        or date.today().isoformat()
    )
    encoder = ChatEncoder(
        settings.tokenizer,
        seq_length=args.seq_length,
        mask_reasoning_content=args.mask_reasoning_content,
        mask_generation_prompt=args.mask_generation_prompt,
        template_date=template_date,
    )
    pinned = {"template_date": template_date} if encoder.template_reads_clock else {}
    tokens, data = _read_tokens(settings, workplace, encoder, pinned)
    if tokens.largest_id >= settings.vocab_size:
        raise TargetError(
            f"the input has token id {tokens.largest_id}, but {args.target_model} embeds only "
            f"{settings.vocab_size}. Is this the tokenizer of the target?"
        )
    identity = _identity(settings, workplace, tokens) | pinned
    manifest = settings.manifest(num_samples=tokens.counts.rows) | {
        "provenance": {
            "counts": asdict(tokens.counts),
            "created_with": begun.get("created_with", _versions()),
            "data": data,
            "identity": identity,
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
    )
    return Run(settings, workplace, manifest, tokens, shards)


def _identity(settings: RunSettings, workplace: Workplace, tokens: Tokens) -> dict[str, Any]:
    """What decides the cache's content without being a field of the manifest."""
    args = settings.args
    return {
        "attn_implementation": args.target_attn_implementation or "default",
        "compute_dtype": str(settings.compute_dtype).removeprefix("torch."),
        "min_loss_tokens": args.min_loss_tokens,
        "pad_token_id": settings.pad_token_id,
        "rows_sha256": tokens.counts.sha256,
        "target_weights": target_identity(
            args.target_model,
            commit=getattr(settings.config, "_commit_hash", None),
            hashes=workplace.hashes,
        ),
        "tokenizer_sha256": tokenizer_identity(settings.tokenizer),
    }


def _read_tokens(
    settings: RunSettings, workplace: Workplace, encoder: ChatEncoder, pinned: Mapping[str, Any]
) -> tuple[Tokens, Any]:
    """Return the tokens, and what was read as JSON."""
    args = settings.args
    rows = open_rows(
        args.input_data,
        split=args.split,
        dataset_config=args.dataset_config,
        shuffle_seed=None if args.no_shuffle else args.shuffle_seed,
    )
    options = {
        "max_samples": args.max_samples,
        "min_loss_tokens": args.min_loss_tokens,
        "skip_bad_rows": args.on_bad_row == "skip",
    }
    key = {
        "versions": _versions(),
        "data": rows.description,
        "files": rows.fingerprint,
        "manifest": settings.manifest(num_samples=1),
        "tokenizer_sha256": tokenizer_identity(settings.tokenizer),
        **pinned,
        **options,
    }
    directory = workplace.tokens(key)
    tokens = load_tokens(directory, key)
    if tokens is None:
        with tqdm(desc="checking rows", unit="row", disable=None, leave=False) as bar:
            tokens = write_tokens(
                directory,
                rows,
                encoder,
                key=key,
                num_workers=args.num_workers or len(os.sched_getaffinity(0)),
                on_row=bar.update,
                **options,
            )
    _report_tokens(tokens, args.seq_length)
    return tokens, rows.description


def _versions() -> dict[str, str]:
    return {package: version(package) for package in _VERSIONS_OF}


def _report_tokens(tokens: Tokens, seq_length: int) -> None:
    counts = tokens.counts
    for warning in counts.warnings:
        logger.warning("%s", warning)
    for reason, rows in counts.skipped.items():
        logger.warning("%d rows are left out: %s", rows, reason)
    logger.info(
        "%d of %d rows are kept, %d of them cut at %d tokens",
        counts.rows,
        counts.source_rows,
        counts.cut_rows,
        seq_length,
    )
