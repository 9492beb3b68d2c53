"""A target that several ranks hold together, by transformers' tensor-parallel plan for it.

Each of the ranks holds a slice of every large matrix, sees the same rows and runs the same
forwards. After every attention and every MLP they add up what they have, so the states between
layers are whole on all of them. The ranks of one target are a process group of their own, which
knows nothing of other copies of the target.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig
from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

from dspark.errors import TargetError
from dspark.processes.group import Group

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# A rank may wait long for another, which waits for the disk. Whether that one lives is known from
# its heartbeat, not from here.
_PATIENCE = timedelta(days=1)


def refuse_unfit(config: PretrainedConfig, *, num_ranks: int, device: torch.device) -> None:
    """Refuse a target that cannot be run by several ranks together.

    Args:
        config: The target's configuration.
        num_ranks: How many ranks.
        device: Where each of them runs.

    Raises:
        TargetError: If transformers has no plan for it, its attention heads cannot be dealt out
            evenly, or the device does not fit.
    """
    if num_ranks == 1:
        return
    text_config = config.get_text_config(decoder=True)
    if not getattr(text_config, "base_model_tp_plan", None):
        raise TargetError(
            f"--tensor-parallel {num_ranks}: transformers has no tensor-parallel plan for "
            f"model_type={text_config.model_type!r}. Use --device-map auto on one machine instead."
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text_config, name, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise TargetError(
                f"--tensor-parallel {num_ranks} does not divide the target's {name}={heads}. "
                "Use a number of ranks that does."
            )
    if device.type not in _BACKENDS or (device.type == "cpu" and torch.cuda.is_available()):
        raise TargetError(
            f"--tensor-parallel {num_ranks} on {device}: transformers puts the slices on the GPUs "
            "where there are any. Use --device cuda, or hide them (CUDA_VISIBLE_DEVICES=)."
        )


@contextlib.contextmanager
def connected(group: Group, device: torch.device) -> Iterator[None]:
    """Connect the ranks that hold one copy of the target together while the block runs."""
    size = group.tensor_parallel
    if size == 1 or group.store is None:
        yield
        return
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[device.type],
        store=PrefixStore(f"target/{group.share}", group.store),
        rank=group.rank % size,
        world_size=size,
        timeout=_PATIENCE,
    )
    yield
    dist.destroy_process_group()  # not after an error: it would wait for ranks that do not come


@contextlib.contextmanager
def loading_options(num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yield what makes ``from_pretrained`` load the slices of this rank, while it is called."""
    if num_ranks == 1:
        yield {}
    elif "tp_size" in DistributedConfig.__dataclass_fields__:
        yield {"distributed_config": DistributedConfig(tp_size=num_ranks)}
    else:  # transformers 4 also takes stdout and stderr away from all GPUs but the first
        with contextlib.redirect_stdout(sys.stdout), contextlib.redirect_stderr(sys.stderr):
            yield {"tp_plan": "auto"}


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor of which each rank may hold a slice; all ranks have to ask for it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
