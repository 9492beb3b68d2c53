"""What of a cache is on disk and as it should be."""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark.cache import read_manifest
from dspark.data.tokens import Tokens
from dspark.disk.manifest import manifest_path, shard_path
from dspark.disk.shard_check import check_shard
from dspark.errors import CacheError
from dspark.job.forward import ShardSettings, shard_record
from dspark.processes.group import cores_of_rank
from dspark.schema.cache_manifest import padding_values
from dspark.schema.target_weights import check_target_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """Compares the files of a cache with what they should be.

    Attributes:
        cache_dir: The cache.
        manifest: What its manifest should say, complete or not.
        tokens: The tokenized input.
        shards: What decides the shards.
    """

    cache_dir: str
    manifest: Mapping[str, Any]
    tokens: Tokens
    shards: ShardSettings

    def damaged(self, indices: Sequence[int], *, silent: bool = False) -> list[int]:
        """Return those of some shards that fail their check, each with a warning.

        Args:
            indices: Shards that should be there.
            silent: Whether to show no progress.

        Raises:
            OSError: If one cannot be read, though it is there.
        """
        with ThreadPoolExecutor(cores_of_rank()) as pool:
            passes = pool.map(self._passes, indices)
            bar = tqdm(
                passes,
                "checking shards",
                len(indices),
                disable=True if silent else None,
                leave=False,
            )
            return [index for index, passed in zip(indices, bar, strict=True) if not passed]

    @property
    def weights_damaged(self) -> bool:
        """Whether embedding and head are not there or not whole."""
        try:
            check_target_weights(self.cache_dir, identity=self.shards.identity)
        except FileNotFoundError:
            return True
        except CacheError as error:
            logger.warning("the target's weights have to be written again: %s", error)
            return True
        return False

    @property
    def is_marked_complete(self) -> bool:
        """Whether the manifest on disk says that the cache is complete."""
        if not os.path.exists(manifest_path(self.cache_dir)):
            return False
        return read_manifest(self.cache_dir, allow_incomplete=True).get("complete") is True

    def _passes(self, index: int) -> bool:
        try:
            check_shard(
                Path(shard_path(self.cache_dir, index)),
                self.shards.row_specs,
                shard_record(index, self.tokens, self.shards),
                padding=padding_values(self.manifest),
            )
        except (CacheError, FileNotFoundError) as error:
            logger.warning("shard %d is written again: %s", index, error)
            return False
        return True
