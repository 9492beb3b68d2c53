"""What is computed together, and what it will take on disk: pure functions of row lengths.

A shard's micro-batches depend on that shard's rows and the run's settings alone, never on what
ran before, so that a shard has the same bytes however a run is interrupted or shared out.
"""

import heapq
from collections.abc import Mapping, Sequence

MAX_PADDING = 0.05  # of a micro-batch; filling the budget regardless costs more than it saves


def shard_rows(shard_index: int, *, num_rows: int, shard_size: int) -> range:
    """Return the rows of the cache that shard `shard_index` holds."""
    return range(shard_index * shard_size, min(num_rows, (shard_index + 1) * shard_size))


def count_shards(*, num_rows: int, shard_size: int) -> int:
    """Return how many shards `num_rows` rows take."""
    return -(-num_rows // shard_size)


def micro_batches(lengths: Sequence[int], *, batch_size: int, seq_length: int) -> list[list[int]]:
    """Group a shard's rows into forwards of like lengths, longest first.

    A micro-batch holds at most ``batch_size * seq_length`` tokens, padding to its longest row
    included, and closes earlier when padding would pass `MAX_PADDING` of it. As no row is longer
    than ``seq_length``, its attention scores take no more than those of ``batch_size`` full rows.

    Args:
        lengths: Real tokens of each row, each from 0 to `seq_length`.
        batch_size: Full rows that fit into one forward.
        seq_length: Tokens of a full row.

    Returns:
        Row numbers (positions in `lengths`), each exactly once.
    """
    budget = batch_size * seq_length
    batches: list[list[int]] = []
    width = tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        padded = (len(batches[-1]) + 1) * width if batches else 0
        padding = padded - tokens - lengths[row]
        if not batches or padded > budget or padding > MAX_PADDING * padded:
            batches.append([])
            width, tokens = lengths[row], 0
        batches[-1].append(row)
        tokens += lengths[row]
    return batches


def deal_shards(tokens_by_shard: Mapping[int, int], *, num_shares: int) -> list[list[int]]:
    """Share shards out so that every share has about the same number of tokens.

    The largest shard left goes to the share with the fewest tokens so far: at most 4/3 of the best
    possible, and far closer with several shards each (Graham 1969, "Bounds on multiprocessing
    timing anomalies"). Everybody who knows the lengths derives the same shares.

    Args:
        tokens_by_shard: Real tokens of each shard that is to be computed.
        num_shares: Among how many.

    Returns:
        The shards of each share, ascending; empty where there are fewer shards than shares.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0, share) for share in range(num_shares)]  # (tokens, share): a heap
    for shard in sorted(tokens_by_shard, key=lambda shard: (-tokens_by_shard[shard], shard)):
        tokens, share = heapq.heappop(loads)
        shares[share].append(shard)
        heapq.heappush(loads, (tokens + tokens_by_shard[shard], share))
    return [sorted(share) for share in shares]
