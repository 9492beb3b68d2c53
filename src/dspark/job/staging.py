"""From captured states to rows in host memory, in the cache dtype.

On a CPU target every row is converted, and its layers laid side by side, in one pass into a buffer
that each writing thread keeps. On CUDA that is done on the device, and the result travels through
pinned buffers on a stream of its own, so that the next forward does not wait for it.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from dspark.model.capture import Captured


class StagedStates(Protocol):
    """The states of one micro-batch on their way to the host."""

    def row(self, position: int, length: int) -> tuple[Tensor, Tensor]:
        """Return one row's states; valid until the calling thread asks for another row.

        Args:
            position: The row within the micro-batch.
            length: Its real tokens.

        Returns:
            [length, L·H] and [length, H], contiguous, on the CPU, in the cache dtype.
        """
        ...

    def release(self) -> None:
        """Give the memory back. No row is asked for afterwards."""
        ...


def make_stager(
    device: torch.device, dtype: torch.dtype, *, in_flight: int
) -> Callable[[Captured], StagedStates]:
    """Return what stages the micro-batches of a target on `device`.

    Args:
        device: Where the target's final state comes from.
        dtype: The cache dtype.
        in_flight: Micro-batches that are staged at the same time at most.
    """
    if device.type == "cuda":
        return _CudaStager(dtype, in_flight=in_flight).stage
    buffers = threading.local()
    return lambda captured: _CpuStates(captured, dtype, buffers)


class _CpuStates:
    def __init__(self, captured: Captured, dtype: torch.dtype, buffers: threading.local) -> None:
        self._captured = captured
        self._dtype = dtype
        self._buffers = buffers

    def row(self, position: int, length: int) -> tuple[Tensor, Tensor]:
        layers, last = self._captured.layers, self._captured.last
        size = last.shape[-1]
        hidden_nC = self._buffer("hidden", length, size * len(layers))
        last_nH = self._buffer("last", length, size)
        for place, layer_BSH in enumerate(layers):
            hidden_nC[:, place * size : (place + 1) * size].copy_(layer_BSH[position, :length])
        last_nH.copy_(last[position, :length])
        return hidden_nC, last_nH

    def release(self) -> None:
        pass

    def _buffer(self, name: str, length: int, width: int) -> Tensor:
        """A buffer of this thread: faulting in fresh pages for every row costs more than a copy."""
        flat: Tensor | None = getattr(self._buffers, name, None)
        if flat is None or flat.numel() < length * width:
            flat = torch.empty(length * width, dtype=self._dtype)
            setattr(self._buffers, name, flat)
        return flat[: length * width].view(length, width)


class _CudaStager:
    """Converts on the device and copies through `in_flight` recycled pairs of pinned buffers."""

    def __init__(self, dtype: torch.dtype, *, in_flight: int) -> None:
        self._dtype = dtype
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: SimpleQueue[dict[str, Tensor]] = SimpleQueue()
        for _ in range(in_flight):
            self._free.put({})

    def stage(self, captured: Captured) -> "_CudaStates":
        device = captured.last.device
        layers = [layer.to(device, non_blocking=True) for layer in captured.layers]
        device_states = {
            "hidden": torch.cat(layers, dim=-1).to(self._dtype),
            "last": captured.last.to(self._dtype),
        }
        buffers = self._free.get()
        stream = self._stream_of(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        host_states = {}
        with torch.cuda.stream(stream):
            for name, states in device_states.items():
                host_states[name] = _pinned(buffers, name, states)
                host_states[name].copy_(states, non_blocking=True)
                states.record_stream(stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        return _CudaStates(host_states, copied, lambda: self._free.put(buffers))

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _pinned(buffers: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    flat = buffers.get(name)
    if flat is None or flat.numel() < like.numel():
        flat = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
        buffers[name] = flat
    return flat[: like.numel()].view(like.shape)


class _CudaStates:
    def __init__(
        self, states: dict[str, Tensor], copied: torch.cuda.Event, release: Callable[[], None]
    ) -> None:
        self._states = states
        self._copied = copied
        self._release = release

    def row(self, position: int, length: int) -> tuple[Tensor, Tensor]:
        self._copied.synchronize()
        states = self._states
        return states["hidden"][position, :length], states["last"][position, :length]

    def release(self) -> None:
        self._release()
