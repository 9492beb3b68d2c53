"""Memory for batches, used again once nobody refers to it.

Touching fresh memory costs more than the copy into it. So what a batch lay in is kept when the last
reference to it is gone (its tensors, their views, arrays made of them), and the next batch goes
there. A batch that is kept by its user is never written to again.
"""

import weakref
from collections import defaultdict
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Batch = dict[str, torch.Tensor]

# numpy's own memory begins 16 bytes into a page; the kernel copies there at a third of its speed.
_ALIGNMENT = 4096
_MOST_IDLE = 2  # per tensor: the batch in use and the one being read


class BatchMemory(Protocol):
    """Where the bytes of a batch's tensors come from."""

    def take(self, name: str, nbytes: int, *, capacity: int) -> torch.Tensor:
        """Return memory that nothing else refers to, with whatever bytes it had.

        Args:
            name: The tensor it is for; memory is used again for tensors of the same name.
            nbytes: What is needed now.
            capacity: The most that a tensor of this name needs. Pages beyond `nbytes` are not
                touched and cost nothing.

        Returns:
            [nbytes] uint8 on the CPU.
        """

    def hand_over(self, batch: Batch) -> Batch:
        """Return a batch made of what was taken last, ready to leave for whoever asked for it."""


class RecycledMemory:
    """Batch memory of one process."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def take(self, name: str, nbytes: int, *, capacity: int) -> torch.Tensor:
        """See `BatchMemory.take`."""
        block = self._reuse(name, capacity)
        # numpy's views of `lease` keep `lease` itself alive, as its base is no array; so do torch
        # tensors made of it. Its end is therefore the end of the last reference to the memory.
        lease = np.frombuffer(block.data, np.uint8, nbytes, -block.ctypes.data % _ALIGNMENT)
        weakref.finalize(lease, self._give_back, name, block).atexit = False
        return torch.from_numpy(lease)

    def hand_over(self, batch: Batch) -> Batch:
        """See `BatchMemory.hand_over`."""
        return batch

    def _reuse(self, name: str, capacity: int) -> npt.NDArray[np.uint8]:
        idle = self._idle[name]
        while idle:
            block = idle.pop()
            if len(block) >= capacity + _ALIGNMENT:
                return block
        return np.empty(capacity + _ALIGNMENT, np.uint8)

    def _give_back(self, name: str, block: npt.NDArray[np.uint8]) -> None:
        # May run at any time in any thread; list operations are atomic, locks could deadlock.
        if len(self._idle[name]) < _MOST_IDLE:
            self._idle[name].append(block)

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self._idle = defaultdict(list)
