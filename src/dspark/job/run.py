"""One precompute run, from its whole manifest to the files of the cache.

    manifest (incomplete) ─► target ─► weights ─► shards ─► manifest (complete)

Several ranks, or several parts without a launcher, share the shards out: each is computed, checked
and published as a whole by one of them.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dspark.cache import DTYPE_MAP, write_manifest, write_target_weights
from dspark.checks.manifest_check import finished_manifest
from dspark.data.tokens import Tokens
from dspark.disk.manifest import (
    check_shard_indices,
    existing_shard_indices,
    manifest_path,
)
from dspark.errors import CacheError, TargetError
from dspark.job.bad_states import masked_rows
from dspark.job.forecast import Forecast, make_forecast
from dspark.job.forward import ShardSettings
from dspark.job.pipeline import follow_shards, write_shards
from dspark.job.progress import Progress
from dspark.job.run_log import describe_run, noted_run
from dspark.job.settings import RunSettings
from dspark.job.survey import Survey
from dspark.job.workplace import Workplace
from dspark.model.capture import Target
from dspark.model.tensor_parallel import connected
from dspark.plan import count_shards, deal_shards, shard_rows
from dspark.processes.group import Group
from dspark.processes.interrupts import StopRequest
from dspark.schema.target_weights import read_head_transform
from dspark.target import check_target, load_target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run whose input is read; nothing of the cache is written yet.

    Attributes:
        settings: What was decided.
        workplace: Where the run keeps its own files.
        group: The ranks of the run.
        manifest: What the cache's manifest will be, still incomplete.
        tokens: The tokenized input.
        shards: What decides the shards.
    """

    settings: RunSettings
    workplace: Workplace
    group: Group
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

    @property
    def is_part(self) -> bool:
        """Whether other processes without a launcher compute the other shards."""
        return self.settings.args.num_parts is not None

    @cached_property
    def survey(self) -> Survey:
        """Looks at the files of the cache."""
        return Survey(self.cache_dir, self.manifest, self.tokens, self.shards)

    @cached_property
    def responsible(self) -> list[int]:
        """The shards that this run is to see to: all, or those of its part."""
        if not self.is_part:
            return list(range(self.num_shards))
        shares = self._deal(range(self.num_shards), self.settings.args.num_parts)
        return shares[self.settings.args.part]

    @cached_property
    def missing(self) -> list[int]:
        """The shards to compute: those that are not there or fail their check."""
        group = self.group
        existing = set(
            group.from_first(  # the same for all, whatever their file systems remember
                "existing", lambda: sorted(existing_shard_indices(self.cache_dir))
            )
        )
        there = [index for index in self.responsible if index in existing]
        mine = there[group.rank :: group.world_size]
        damaged = group.collect("damaged", self.survey.damaged(mine, silent=not group.is_first))
        missing = [index for index in self.responsible if index not in existing]
        return list(group.from_first("missing", lambda: sorted(sum(damaged, missing))))

    @cached_property
    def weights_missing(self) -> bool:
        """Whether embedding and head are not there or not whole."""
        return bool(self.group.from_first("weights-missing", lambda: self.survey.weights_damaged))

    def look_at_files(self) -> None:
        """Find out what is missing, all ranks together."""
        logger.debug("missing: shards %s, weights %s", self.missing, self.weights_missing)

    @property
    def is_finished(self) -> bool:
        """Whether the cache is marked complete and what this run sees to passes its check."""
        complete = self.survey.is_marked_complete
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

    def begin(self) -> None:
        """Write the manifest as incomplete; other parts may have done so before."""
        is_begun = os.path.exists(manifest_path(self.cache_dir))
        if not (self.is_part and is_begun and not self.survey.is_marked_complete):
            write_manifest(self.cache_dir, self.manifest | {"complete": False})

    def write(self) -> None:
        """Compute what is missing and, when nothing is any more, mark the cache complete.

        Raises:
            TargetError: If the target cannot be loaded, fails its check or raises.
            Stopped: If SIGTERM arrived.
            PeerFailed: If another rank failed.
            OSError: If the disk refuses.
        """
        with self._noted():
            if self.missing or self.weights_missing:
                with connected(self.group, self.settings.device):
                    self._compute()
            if self.group.is_first:
                with self.workplace.alone():
                    self._finish()

    def finish(self) -> None:
        """Mark a cache complete whose parts are all done.

        Raises:
            CacheError: If something is missing, with what.
        """
        if self.missing or self.weights_missing:
            raise CacheError(
                f"{self.cache_dir} is not done: {len(self.missing)} of {self.num_shards} shards "
                f"are missing or damaged ({self.missing[:8]} …), the target's weights are "
                f"{'missing' if self.weights_missing else 'there'}. Run the parts they belong to, "
                "or the whole command with --resume."
            )
        self._finish()

    def _noted(self) -> contextlib.AbstractContextManager[None]:
        """Note in the run log when this run begins and how it ends; once per group."""
        if not self.group.is_first:
            return contextlib.nullcontext()
        run = describe_run(
            command=self.settings.args.command,
            batch_size=self.shards.batch_size,
            device=self.settings.device,
            ranks=self.group.world_size,
            tensor_parallel=self.group.tensor_parallel,
        )
        return noted_run(self.workplace.run_log, run)

    def _deal(self, indices: Sequence[int], num_shares: int) -> list[list[int]]:
        tokens = {index: int(self.tokens.lengths[self._rows(index)].sum()) for index in indices}
        return deal_shards(tokens, num_shares=num_shares)

    def _rows(self, index: int) -> slice:
        rows = shard_rows(
            index, num_rows=self.tokens.counts.rows, shard_size=self.shards.shard_size
        )
        return slice(rows.start, rows.stop)

    def _load_target(self) -> Target:
        """Load the target and prove it.

        Raises:
            TargetError: If it cannot be one; noted, so that nobody is told to go on with it, unless
                it only found too little memory.
        """
        try:
            return self._loaded_target()
        except TargetError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                error.add_note("No row was computed.")
            raise

    def _loaded_target(self) -> Target:
        settings, args = self.settings, self.settings.args
        logger.info(
            "loading %s in %s on %s",
            args.target_model,
            settings.compute_dtype_name,
            settings.device,
        )
        target = load_target(
            args.target_model,
            layer_ids=settings.layer_ids,
            device=settings.device,
            compute_dtype=settings.compute_dtype,
            attn_implementation=args.target_attn_implementation,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            device_map=args.device_map,
            tensor_parallel=self.group.tensor_parallel,
        )
        if not args.no_target_check:
            try:
                check_target(target)
            except RuntimeError as error:  # what torch raises; a wrong state is a TargetError
                raise TargetError(
                    f"{args.target_model} fails on the short rows of its check: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return target

    def _load_target_for(self, shards: Sequence[int]) -> Target | None:
        """Load the target, and write its weights if they are missing; None if nobody needs it."""
        writes_weights = self.weights_missing and self.group.share == 0
        if not shards and not writes_weights:
            return None  # there are more ranks than shards
        target = self._load_target()
        if writes_weights:
            self._write_weights(target)
        return target

    def _write_weights(self, target: Target) -> None:
        """Write embedding and head; ranks of one target fetch them together."""
        embed_tokens, lm_head = target.embed_tokens, target.lm_head
        if self.group.is_first:
            write_target_weights(
                self.cache_dir, embed_tokens, lm_head, self.shards.dtype, transform=target.head
            )

    def _compute(self) -> None:
        """Compute this rank's share of what is missing, and wait on rank 0 for the others."""
        group = self.group
        mine = self._deal(self.missing, group.num_shares)[group.share]
        target = self._load_target_for(mine)
        with self._progress() as progress, StopRequest() as stop:
            if target is not None:
                self._compute_shards(mine, target, progress, stop)

            def wait() -> None:
                progress.refresh()
                stop.check(math.inf)

            written = group.collect("written", progress.written, while_waiting=wait)
            logger.info("wrote %s", progress.summary(written or [progress.written]))

    def _compute_shards(
        self, indices: Sequence[int], target: Target, progress: Progress, stop: StopRequest
    ) -> None:
        def check_stop(seconds_left: float) -> None:
            self.group.check()
            stop.check(seconds_left)

        def before_publishing(index: int) -> None:
            self.workplace.check_lock()
            progress.add_shard(index)

        def on_rows(rows: int, tokens: int) -> None:
            self.group.count(rows, tokens)
            progress.add_rows(rows, tokens)

        if not self.group.writes:
            follow_shards(indices, target, self.tokens, self.shards, check_stop)
            return
        write_shards(
            self.cache_dir,
            indices,
            target,
            self.tokens,
            self.shards,
            on_rows=on_rows,
            on_shard=before_publishing,
            check_stop=check_stop,
            owner=self.workplace.owner,
        )

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Progress]:
        """Show the whole group's progress on rank 0, nothing elsewhere."""
        progress = Progress(
            rows=sum(len(self.tokens.lengths[self._rows(index)]) for index in self.missing),
            bytes_per_token=sum(s.nbytes // s.shape[0] for s in self.shards.row_specs.values()),
            others=self.group.others_counts,
            silent=not self.group.is_first,
        )
        try:
            yield progress
        finally:
            progress.close()

    def _finish(self) -> None:
        """Mark the cache complete if every file is there, with the digest of each one's header."""
        if self.is_part and not self._other_parts_are_done():
            logger.info("part %d is done; other parts are not yet", self.settings.args.part)
            return
        if self.survey.is_marked_complete:
            return
        check_shard_indices(self.cache_dir, self.num_shards)
        write_manifest(
            self.cache_dir, finished_manifest(self.cache_dir, self.manifest | self._findings())
        )
        logger.info("%s is finished: %d shards", self.cache_dir, self.num_shards)

    def _other_parts_are_done(self) -> bool:
        """Whether what this part is not responsible for is there and passes its check.

        Raises:
            CacheError: If something is damaged, and no part lives that may be writing it again.
        """
        others = sorted(set(range(self.num_shards)) - set(self.responsible))
        if not existing_shard_indices(self.cache_dir).issuperset(others):
            return False
        damaged = self.survey.damaged(others)
        if not damaged and not self.survey.weights_damaged:
            return True
        if self.workplace.other_parts_live():
            return False
        parts = self._deal(range(self.num_shards), self.settings.args.num_parts)
        to_run = [part for part, share in enumerate(parts) if set(share) & set(damaged)]
        raise CacheError(
            f"{self.cache_dir} is not done: shards {damaged} are damaged. Run part "
            f"{' and '.join(map(str, to_run or [self.settings.args.part]))} again."
        )

    def _findings(self) -> dict[str, Any]:
        """The provenance with what only the written files tell, where they tell something."""
        found = {
            "logits": read_head_transform(self.cache_dir).extras,
            "masked_rows": list(masked_rows(self.cache_dir, self.tokens, self.shards)),
        }
        told = {name: value for name, value in found.items() if value}
        return {"provenance": self.manifest["provenance"] | told}
