"""Sharded tensor caches as datasets and loaders, whatever they hold.

A row is one tensor [S, ...] per name; a batch has them side by side, [B, S, ...]. Names, dtypes
and shapes come from the caller, as `TensorSpec`; nothing here knows a particular cache.

    file ── preadv ──► batch memory [B, S, ...]      real tokens alone, several reads in flight
                       padding zeroed                 no tensors per sample, no stacking
"""

import copy
import multiprocessing
import operator
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed
import torch.utils.data

from dspark.disk.shard_file import TensorSpec
from dspark.reading.batch_memory import Batch, BatchMemory, RecycledMemory
from dspark.reading.cache_loader import CacheLoader
from dspark.reading.sampler import RowSampler
from dspark.reading.shard_reader import Check, ShardReader


class Rows(list[Batch]):
    """The rows of one read: a list of samples that are views of one batch.

    Args:
        batch: Per tensor [B, S, ...].
        memory: Where the batch lies.
    """

    def __init__(self, batch: Batch, memory: BatchMemory) -> None:
        num_rows = len(next(iter(batch.values())))
        super().__init__({key: batch[key][row] for key in batch} for row in range(num_rows))
        self._batch = batch
        self._memory = memory

    def collate(self) -> Batch:
        """Return the batch, without a copy."""
        return self._memory.hand_over(self._batch)


class CachedTensorDataset(torch.utils.data.Dataset[Batch]):
    """The rows of a sharded tensor cache, read when they are asked for.

    Opens nothing until a row is needed, at most 64 shards at a time per process, and can be
    pickled, forked and spawned at any time. Tensors belong to whoever asked for them: their memory
    is used again only when no reference to it is left.

    Args:
        cache_dir: The directory of the shards.
        row_specs: Per tensor the dtype and the shape [S, ...] of one row; S is common to all.
        num_rows: Rows of the cache.
        shard_size: Rows of a shard; the last one may have fewer.
        check: How much is believed. "names": which shards there are is compared with `num_rows`
            now, and of a header only what reading needs. "headers": also the size of every file
            now, and each shard's own record of its place and run when it is first touched.
            "checksums": also every row as it is read, which needs caches that have checksums.
        mmap: Map the files instead of reading them. Rows are the same; but a file truncated under
            the running process kills it, where a plain read raises a `CacheError`.
        identity: Digest that shards which record one must record.
        padded: Tensors whose padding carries values: it comes as stored or, where a mapping gives
            its value, is filled in. All others are read up to the real length of a row and zero
            from there.
        trim: Cut the rows that are asked for together to the longest of them, instead of S.

    Raises:
        CacheError: If the files on disk are not those of the cache.
        ValueError: If an argument is not what it should be.
    """

    def __init__(
        self,
        cache_dir: str,
        *,
        row_specs: Mapping[str, TensorSpec],
        num_rows: int,
        shard_size: int,
        check: Check = "headers",
        mmap: bool = False,
        identity: str | None = None,
        padded: Collection[str] | Mapping[str, int] = (),
        trim: bool = False,
    ) -> None:
        self.cache_dir = cache_dir
        self.trim = trim
        self._reader = ShardReader(
            cache_dir,
            row_specs,
            num_rows=num_rows,
            shard_size=shard_size,
            check=check,
            mmap=mmap,
            identity=identity,
            padded=padded,
        )
        self.memory: BatchMemory = RecycledMemory()

    @property
    def shard_size(self) -> int:
        """Rows of a shard; the last one may have fewer."""
        return self._reader.shard_size

    @property
    def row_specs(self) -> Mapping[str, TensorSpec]:
        """Per tensor the dtype and the shape [S, ...] of one row."""
        return self._reader.row_specs

    def __len__(self) -> int:
        return self._reader.num_rows

    def __getitem__(self, index: int) -> Batch:
        """Return one row, per tensor [S, ...].

        Raises:
            IndexError: If `index` lies outside -len(self) … len(self) - 1.
            CacheError: If its shard is damaged, naming it.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Return several rows, which are views of one batch; see `__getitem__`."""
        rows = [self._row(index) for index in indices]
        reader = self._reader
        tokens = max([1, *reader.lengths(rows)]) if self.trim else reader.row_tokens
        memory, batch = {}, {}
        for name, spec in reader.row_specs.items():
            row_bytes = tokens * reader.token_bytes(name)
            flat = self.memory.take(name, len(rows) * row_bytes, capacity=len(rows) * spec.nbytes)
            memory[name] = flat.numpy().reshape(len(rows), row_bytes)
            batch[name] = flat.view(spec.dtype).view(len(rows), tokens, *spec.shape[1:])
        reader.read(rows, memory, tokens=tokens)
        return Rows(batch, self.memory)

    def _row(self, index: int) -> int:
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {self.cache_dir}, which has {len(self)} rows")
        return row % len(self)


def collate(features: Sequence[Batch]) -> Batch:
    """Return samples as one batch, without a copy when they were read as one."""
    if isinstance(features, Rows):
        return features.collate()
    return {key: torch.stack([sample[key] for sample in features]) for key in features[0]}


def build_loader(
    dataset: CachedTensorDataset,
    *,
    batch_size: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    trim: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    multiprocessing_context: str | None = None,
    shuffle_window: int | None = None,
) -> CacheLoader:
    """Build a loader over a cache.

    Args:
        dataset: The cache.
        batch_size: Rows of a batch, on each rank.
        shuffle: Draw a new order for every epoch.
        num_workers: Processes that read; 0 reads in this one.
        distributed: Give each rank of `torch.distributed` its part; see `RowSampler` for the
            uneven end.
        trim: Pad to the longest row of a batch instead of S.
        seed: What the orders are drawn from, together with the epoch.
        drop_last: Leave out what does not fill a batch on every rank.
        pin_memory: Return pinned memory; by default where CUDA is available.
        prefetch_factor: Batches that each worker reads ahead; torch's default is 2.
        persistent_workers: Keep the workers from one pass to the next.
        multiprocessing_context: How workers start; by default "fork", or "forkserver" once this
            process uses CUDA, which does not survive a fork.
        shuffle_window: Mix rows within this many shards only; see `RowSampler`.

    Raises:
        ValueError: If an argument is out of range, or `distributed` without a process group.
    """
    world_size, rank = _world() if distributed else (1, 0)
    sampler = RowSampler(
        len(dataset),
        shuffle=shuffle,
        seed=seed,
        world_size=world_size,
        rank=rank,
        drop_last=drop_last,
        shard_size=dataset.shard_size,
        shuffle_window=shuffle_window,
    )
    dataset = copy.copy(dataset)
    dataset.trim = trim
    return CacheLoader(
        dataset,
        row_bytes={name: spec.nbytes for name, spec in dataset.row_specs.items()},
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        drop_last=drop_last,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        multiprocessing_context=(multiprocessing_context or _start_method())
        if num_workers
        else None,
    )


def _world() -> tuple[int, int]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError(
            "distributed=True needs a process group, and there is none: start the script with "
            "torchrun and call torch.distributed.init_process_group() first"
        )
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def _start_method() -> str | None:
    """Return how workers start by default, or None for the system's own way."""
    wanted = "forkserver" if torch.cuda.is_initialized() else "fork"  # type: ignore[no-untyped-call]
    return wanted if wanted in multiprocessing.get_all_start_methods() else None
