"""A DataLoader over a sharded tensor cache that knows where it stands.

Its state is the epoch and the number of rows that all ranks together have had of it, which means
the same for every number of workers and ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.utils.data

from dspark.reading.batch_memory import Batch
from dspark.reading.sampler import RowSampler
from dspark.reading.worker_memory import SharedBlocks


@dataclass(slots=True)
class _Pass:
    """One pass over an epoch: how many rows of its order all ranks have had."""

    epoch: int
    rows_done: int


class _Batches(torch.utils.data.BatchSampler):
    """Batches of an order that is fixed when a pass begins, not when its first batch is wanted.

    torch may ask for an iterator more than once as it begins, so the rows are drawn by `draw`.
    """

    _rows: Sequence[int] = ()

    def draw(self) -> None:
        """Take the rows of the next pass from the sampler."""
        self._rows = list(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return self._cut(iter(self._rows))

    def _cut(self, rows: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(islice(rows, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


class CacheLoader(torch.utils.data.DataLoader[Batch]):
    """Batches of a cache; resumable to the exact next one.

    A pass that is finished moves the sampler on to the next epoch, so that every pass over the
    loader has an order of its own, whether or not `sampler.set_epoch` is called. A pass that is
    broken off does not: the next one begins the same epoch anew.

    Args:
        dataset: A `CachedTensorDataset`.
        row_bytes: Per tensor the bytes of one row, untrimmed.
        sampler: Its rows for this rank.
        batch_size: Rows of a batch.
        options: Of `torch.utils.data.DataLoader`.
    """

    sampler: RowSampler
    batch_size: int

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Batch],
        *,
        row_bytes: Mapping[str, int],
        sampler: RowSampler,
        batch_size: int,
        **options: Any,
    ) -> None:
        super().__init__(dataset, sampler=sampler, batch_size=batch_size, **options)
        self._batches = _Batches(sampler, batch_size, self.drop_last)
        self._row_bytes = row_bytes
        self._blocks: SharedBlocks | None = None  # those of persistent workers
        self._pass: _Pass | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Begin a pass; with workers, they start to read at once."""
        self._pass = _Pass(self.sampler.epoch, self.sampler.start)
        self._batches.draw()
        blocks = self._blocks
        if self.num_workers > 0 and self._iterator is None and SharedBlocks.available():
            blocks = self._make_blocks()
            self.worker_init_fn = blocks.install
            self._blocks = blocks if self.persistent_workers else None
        try:
            return self._deliver(super().__iter__(), self._pass, blocks)
        finally:
            self.worker_init_fn = None  # blocks are for one group of workers

    @property
    def _index_sampler(self) -> _Batches:
        """What torch takes the batches of a pass from."""
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, the same on every rank.

        Batches that workers have read ahead do not count; those given out do.
        """
        epoch, rows_done = self.sampler.epoch, self.sampler.start
        if self._pass is not None and self._pass.epoch == epoch:
            rows_done = self._pass.rows_done
        return {"epoch": epoch, "rows_done": rows_done, **self.sampler.settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass begin with the batch after the last one of `state`.

        Args:
            state: Of `state_dict`, with any number of workers and ranks and any batch size.

        Raises:
            ValueError: If it is the state of other rows or of another order, or not a state.
        """
        settings = self.sampler.settings()
        differing = [
            f"{key} is {state.get(key)!r} there and {value!r} here"
            for key, value in settings.items()
            if state.get(key) != value
        ]
        if differing:
            raise ValueError(
                f"the state is not this loader's: {', '.join(differing)}. "
                "Build the loader with the settings of the interrupted run."
            )
        lacking = [key for key in ("epoch", "rows_done") if key not in state]
        if lacking:
            raise ValueError(f"the state has no {' and no '.join(lacking)}")
        self.sampler.set_place(state["epoch"], state["rows_done"])
        self._pass = None

    def _make_blocks(self) -> SharedBlocks:
        capacities = {name: self.batch_size * nbytes for name, nbytes in self._row_bytes.items()}
        # Of each worker's batches, so many are read ahead, and the user has one while asking for
        # the next.
        blocks = (self.prefetch_factor or 2) + 2
        return SharedBlocks(capacities, num_workers=self.num_workers, blocks=blocks)

    def _deliver(
        self, batches: Iterator[Batch], this: _Pass, blocks: SharedBlocks | None
    ) -> Iterator[Batch]:
        # `blocks` has to live as long as the workers of this pass, whatever other passes begin.
        rows_per_step = self.batch_size * self.sampler.world_size

        def count(batch: Batch) -> Batch:
            this.rows_done = min(this.rows_done + rows_per_step, self.sampler.num_rows)
            return batch

        yield from map(count, batches)  # a loop's variable would keep the batch that was let go
        if self.sampler.epoch == this.epoch:
            self.sampler.set_epoch(this.epoch + 1)
