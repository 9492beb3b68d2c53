"""Batch memory that loader workers fill and the main process hands out, used again and again.

    one anonymous shared file per group of workers, made by the main process
        flags    one byte per block: 0 free, 1 filled and not yet let go by the main process
        blocks   [worker][tensor][block], each as large as that tensor of a full batch

A worker alone sets its flags, the main process alone clears them, when the last reference to a
block is gone; the queue between them orders the rest. What crosses that queue is the number of a
block. While a user keeps more batches than there are blocks, the next ones come in shared files of
their own, which need no open descriptor once they have arrived, so any number can be kept.
"""

import math
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from dspark.reading.batch_memory import Batch

_groups: "weakref.WeakValueDictionary[str, SharedBlocks]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor on its way: its dtype and shape, and the block or the file that it lies in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    source: Any  # int, or the DupFd of a file


class SharedBatch(Batch):
    """A batch of a worker that arrives in the main process as a plain dict of tensors."""

    def __init__(self, batch: Batch, group: str, sources: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self._arrives = (
            group,
            {
                name: _Part(tensor.dtype, tuple(tensor.shape), sources[name])
                for name, tensor in batch.items()
            },
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, self._arrives


class SharedBlocks:
    """The blocks of one group of workers.

    Args:
        capacities: Per tensor the bytes of a full batch.
        num_workers: Workers of the group.
        blocks: How many batches of each worker can be under way or in use at once before memory
            has to be made for more.
    """

    def __init__(self, capacities: Mapping[str, int], *, num_workers: int, blocks: int) -> None:
        self.key = uuid4().hex
        self.names = tuple(capacities)
        self.blocks = blocks
        self._capacities = [_whole_pages(capacity) for capacity in capacities.values()]
        self._num_flags = num_workers * len(capacities) * blocks
        self._owner = os.getpid()
        size = _whole_pages(self._num_flags) + num_workers * blocks * sum(self._capacities)
        self._fd = os.memfd_create("dspark-batches")
        os.ftruncate(self._fd, size)
        self._attach()

    @staticmethod
    def available() -> bool:
        """Whether the system has anonymous shared files."""
        return hasattr(os, "memfd_create")

    def install(self, worker: int) -> None:
        """Make the dataset of this worker read into its blocks; a ``worker_init_fn``."""
        info = torch.utils.data.get_worker_info()
        assert info is not None, "install runs in a loader worker"
        info.dataset.memory = WorkerMemory(self, worker)  # type: ignore[attr-defined]

    def number(self, worker: int, name: str, block: int) -> int:
        """Return the number of a block, counted over all workers and tensors."""
        return (worker * len(self.names) + self.names.index(name)) * self.blocks + block

    def memory(self, number: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the first `nbytes` of a block, as an array that is the base of all its views."""
        group, block = divmod(number, self.blocks)
        worker, tensor = divmod(group, len(self.names))
        begin = _whole_pages(self._num_flags)
        begin += worker * self.blocks * sum(self._capacities)
        begin += self.blocks * sum(self._capacities[:tensor]) + block * self._capacities[tensor]
        return np.frombuffer(self._map, np.uint8, nbytes, begin)

    def lend(self, number: int, nbytes: int) -> torch.Tensor:
        """Return a filled block, which is free again when the last reference to it is gone."""
        lease = self.memory(number, nbytes)
        weakref.finalize(lease, self._let_go, number).atexit = False
        return torch.from_numpy(lease)

    def _let_go(self, number: int) -> None:
        if os.getpid() == self._owner:  # a forked child drops its references, not the owner's
            self.flags[number] = 0

    def _attach(self) -> None:
        self._map = mmap.mmap(self._fd, 0)
        self.flags = np.frombuffer(self._map, np.uint8, self._num_flags)
        weakref.finalize(self, os.close, self._fd).atexit = False
        _groups[self.key] = self

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("_map", "flags")}
        return {**state, "_fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fd = state["_fd"].detach()
        self._attach()


class WorkerMemory:
    """Batch memory of one worker; see `BatchMemory`.

    Args:
        shared: The blocks of the worker's group.
        worker: Its number.
    """

    def __init__(self, shared: SharedBlocks, worker: int) -> None:
        self._shared = shared
        self._worker = worker
        self._taken: dict[str, int | _File] = {}

    def take(self, name: str, nbytes: int, *, capacity: int) -> torch.Tensor:
        """See `BatchMemory.take`."""
        for block in range(self._shared.blocks):
            number = self._shared.number(self._worker, name, block)
            if not self._shared.flags[number]:
                self._taken[name] = number
                return torch.from_numpy(self._shared.memory(number, nbytes))
        file = _File(nbytes)
        self._taken[name] = file
        return _map_file(file.fd, nbytes)

    def hand_over(self, batch: Batch) -> Batch:
        """See `BatchMemory.hand_over`."""
        sources: dict[str, Any] = {}
        for name, taken in self._taken.items():
            if isinstance(taken, int):
                self._shared.flags[taken] = 1
                sources[name] = taken
            else:
                sources[name] = reduction.DupFd(taken.fd)
        self._taken = {}
        return SharedBatch(batch, self._shared.key, sources)


class _File:
    """An anonymous shared file, open as long as this object lives."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("dspark-batch")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, nbytes)


def _map_file(fd: int, nbytes: int) -> torch.Tensor:
    # Unlike Python's mmap, torch keeps no descriptor with the mapping.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)


def _receive(group: str, parts: Mapping[str, _Part]) -> Batch:
    """Make the batch of a worker from what came through the queue."""
    return {name: _receive_part(_groups[group], part) for name, part in parts.items()}


def _receive_part(shared: SharedBlocks, part: _Part) -> torch.Tensor:
    nbytes = math.prod(part.shape) * part.dtype.itemsize
    if isinstance(part.source, int):
        flat = shared.lend(part.source, nbytes)
    else:
        fd = part.source.detach()
        try:
            flat = _map_file(fd, nbytes)
        finally:
            os.close(fd)
    return flat.view(part.dtype).view(part.shape)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
