"""States that are not finite: found before they are written, and told from a finished cache.

A row with such a state either stops the run, or keeps its place with zero states and a zero loss
mask. Which rows those are follows from the shards alone, so that a resumed run knows as well.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from dspark.data.tokens import Tokens
from dspark.disk.manifest import shard_path
from dspark.disk.shard_file import read_header, shard_metadata
from dspark.job.forward import ShardSettings
from dspark.plan import count_shards, shard_rows

_LAST = "target_last_hidden_states"


def find_bad_state(hidden_nC: Tensor, last_nH: Tensor, layer_ids: Sequence[int]) -> str | None:
    """Describe the first state that is not finite, or return None.

    Args:
        hidden_nC: [n, L·H], the captured layers side by side.
        last_nH: [n, H], the final state.
        layer_ids: The L captured layers.
    """
    size = last_nH.shape[-1]
    for states, names in ((hidden_nC, [f"layer {i}" for i in layer_ids]), (last_nH, ["the end"])):
        # One pass and no temporary. Finite states may overflow the sum: only then look closely.
        if torch.isfinite(states.sum(dtype=torch.float32)):
            continue
        for token, column in (~torch.isfinite(states)).nonzero()[:1].tolist():
            value = states[token, column].item()
            return f"the state of token {token} at {names[column // size]} is {value}"
    return None


def masked_rows(cache_dir: str, tokens: Tokens, settings: ShardSettings) -> Iterator[int]:
    """Yield the rows of a cache that were kept with zero states: no norm puts out such.

    Args:
        cache_dir: The cache, with every shard in place.
        tokens: The tokenized input.
        settings: What decides the shards' content.

    Raises:
        CacheError: If the header of a shard cannot be read.
    """
    spec = settings.row_specs[_LAST]

    @cache
    def digest_of_zeros(length: int) -> str:
        return xxhash.xxh3_64_hexdigest(bytes(length * spec.nbytes // spec.shape[0]))

    num_shards = count_shards(num_rows=tokens.counts.rows, shard_size=settings.shard_size)
    for index in range(num_shards):
        path = Path(shard_path(cache_dir, index))
        found = shard_metadata(read_header(path), path)
        digests = found.digests[_LAST] if found else ()
        rows = shard_rows(index, num_rows=tokens.counts.rows, shard_size=settings.shard_size)
        for row, digest in zip(rows, digests, strict=True):
            if digest == digest_of_zeros(int(tokens.lengths[row])):
                yield row
