"""Which rows a rank reads, in which order.

One order of all rows per seed and epoch, common to all ranks. Rank r of W takes places r, r + W,
r + 2W, … of it: after k batches of B rows the ranks together have read exactly the first k·B·W
rows, so one number says where an epoch stands, for any number of ranks.
"""

from collections.abc import Iterator
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.utils.data


class RowSampler(torch.utils.data.Sampler[int]):
    """The rows of one rank in the order of an epoch.

    The uneven end: without `drop_last`, the rows at the beginning of the epoch's order are read
    again by the last ranks until all ranks have as many (fewer than `world_size` repeats, none
    for one rank). With it, the rows beyond a multiple of `world_size` are left out. All ranks
    therefore make the same number of steps, even with fewer rows than ranks.

    Args:
        num_rows: Rows of the cache.
        shuffle: Draw a new order for every epoch; otherwise rows come as they are stored.
        seed: What the orders are drawn from, together with the epoch.
        world_size: Number of ranks.
        rank: This rank.
        drop_last: See above.
        shard_size: Rows of a shard; needed with `shuffle_window`.
        shuffle_window: Shuffle the order of the shards, and the rows within every group of this
            many shards that follow one another, so that reads stay near one another. None mixes
            all rows.

    Attributes:
        epoch: The epoch whose order comes next.
        start: The place in that order from which it comes.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        shuffle: bool,
        seed: int = 0,
        world_size: int = 1,
        rank: int = 0,
        drop_last: bool = False,
        shard_size: int = 1,
        shuffle_window: int | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0 … {world_size - 1}, got {rank}")
        if shuffle_window is not None and shuffle_window < 1:
            raise ValueError(f"shuffle_window must be at least 1 shard, got {shuffle_window}")
        self.num_rows = num_rows
        self.world_size = world_size
        self.rank = rank
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0
        self._shuffle = shuffle
        self._seed = _natural(seed, "seed")
        self._shard_size = shard_size
        self._window = shuffle_window

    def __len__(self) -> int:
        """Rows of this rank in a whole epoch."""
        return self._share(self.num_rows)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's rows of the epoch's order, from `start` on, which then is 0 again."""
        order = self.order()
        remaining, self.start = order[self.start :], 0
        share = self._share(len(remaining))
        repeats = share * self.world_size - len(remaining)
        if repeats > 0:
            remaining = np.concatenate([remaining, np.resize(order, repeats)])
        places = remaining[self.rank : share * self.world_size : self.world_size]
        return iter(places.tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next, from its beginning.

        Naming the epoch that is chosen already changes nothing: a resumed one goes on where it
        stood.

        Raises:
            ValueError: If it is no whole number, or negative.
        """
        epoch = _natural(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0

    def order(self) -> npt.NDArray[np.int64]:
        """Return the order of all rows in the chosen epoch, [num_rows]."""
        if not self._shuffle:
            return np.arange(self.num_rows)
        # The raw stream of a bit generator is fixed for ever, what numpy derives from it is not.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, self.epoch]))
        keys = bits.random_raw(self.num_rows)
        if self._window is None:
            return np.argsort(keys, kind="stable")
        num_shards = -(-self.num_rows // self._shard_size)
        place_of_shard = np.argsort(np.argsort(bits.random_raw(num_shards), kind="stable"))
        window_of_row = place_of_shard[np.arange(self.num_rows) // self._shard_size] // self._window
        return np.lexsort((keys, window_of_row))

    def settings(self) -> dict[str, Any]:
        """Return what must be the same for a place in the order to mean the same rows."""
        return {
            "num_rows": self.num_rows,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "shuffle_window": self._window,
            # Where rows are mixed within shards, their number decides what is mixed.
            **({} if self._window is None else {"shard_size": self._shard_size}),
        }

    def set_place(self, epoch: int, rows_done: int) -> None:
        """Choose an epoch and the place in its order that comes next.

        Raises:
            ValueError: If there is no such place.
        """
        rows_done = _natural(rows_done, "rows_done")
        if rows_done > self.num_rows:
            raise ValueError(f"rows_done must be at most {self.num_rows}, got {rows_done}")
        self.epoch, self.start = _natural(epoch, "epoch"), rows_done

    def _share(self, rows: int) -> int:
        return rows // self.world_size if self.drop_last else -(-rows // self.world_size)


def _natural(value: object, name: str) -> int:
    """Return a whole number of any type as an int.

    Raises:
        ValueError: If it is none, or negative.
    """
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} must be a whole number from 0 on, got {value!r}")
    return number
