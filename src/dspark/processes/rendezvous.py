"""How the ranks that a launcher started find each other.

``torchrun`` gives every process a rank and the address of one key-value store. The store may
outlive the processes: of a group that was started anew it still holds what the one before has said.
So the living ranks agree on a fresh name first, under which all else is said.

    hello/<rank>        a ticket, new for every process        said by the others
    welcome/<ticket>    the group's name                       said by rank 0
    <name>/here/<rank>  whether that rank was started anew     said by the others
    <name>/restarted    whether any was                        said by rank 0
"""

import json
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dspark.processes.group import Group

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_JOIN_SECONDS = 300.0  # hundreds of ranks may import torch from one shared directory
_CONNECT_SECONDS = 20.0
_POLL_SECONDS = 0.05


def join_group() -> Group:
    """Return the group that a launcher started this process in, or one of a single rank.

    Raises:
        ConnectionError: If the other ranks are not there.
        ValueError: If the launcher does not say where they are.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if world_size == 1 or "RANK" not in os.environ:
        return Group(is_restarted=is_restarted)
    from torch.distributed.rendezvous import rendezvous

    # An agent of torchrun has the store before it starts a rank; elsewhere rank 0 brings it.
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timedelta(seconds=_CONNECT_SECONDS if is_there else _JOIN_SECONDS)
    try:
        store, rank, _ = next(rendezvous("env://", timeout=patience))
        return meet(store, rank, world_size, is_restarted=is_restarted)
    except RuntimeError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConnectionError(
            f"rank {os.environ['RANK']} does not reach the launcher's store at {place}: {error}"
        ) from error


def meet(
    store: "Store",
    rank: int,
    world_size: int,
    *,
    is_restarted: bool = False,
    seconds: float = _JOIN_SECONDS,
) -> Group:
    """Return the group of the ranks that are there at this moment.

    Args:
        store: What all of them reach.
        rank: This one.
        world_size: How many there are.
        is_restarted: Whether this one was started anew.
        seconds: How long to wait for the others.

    Raises:
        ConnectionError: If one of them does not come.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + seconds
    everyone = PrefixStore("dspark", store)
    if rank == 0:
        name = uuid4().hex
        group = PrefixStore(name, everyone)
        restarts = _welcome(everyone, group, name, set(range(1, world_size)), deadline)
        is_restarted = is_restarted or any(restarts)
        group.set("restarted", json.dumps(is_restarted))
        return Group(rank, world_size, group, is_restarted=is_restarted)
    ticket = uuid4().hex
    everyone.set(f"hello/{rank}", json.dumps(ticket))
    name = _answer(everyone, f"welcome/{ticket}", deadline)
    group = PrefixStore(name, everyone)
    group.set(f"here/{rank}", json.dumps(is_restarted))
    return Group(rank, world_size, group, is_restarted=_answer(group, "restarted", deadline))


def _welcome(
    everyone: "Store", group: "Store", name: str, missing: set[int], deadline: float
) -> list[bool]:
    """Tell the ranks the group's name until all are there; return what they say of themselves."""
    said = []
    while True:
        for rank in sorted(missing):
            if group.check([f"here/{rank}"]):
                said.append(json.loads(group.get(f"here/{rank}")))
                missing.discard(rank)
            elif everyone.check([f"hello/{rank}"]):  # perhaps one of a process that is gone
                ticket = json.loads(everyone.get(f"hello/{rank}"))
                everyone.set(f"welcome/{ticket}", json.dumps(name))
        if not missing:
            return said
        if time.monotonic() > deadline:
            raise ConnectionError(f"ranks {sorted(missing)} did not come. Start all of them again.")
        time.sleep(_POLL_SECONDS)


def _answer(store: "Store", key: str, deadline: float) -> Any:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise ConnectionError(f"rank 0 does not answer ({key}). Start all ranks again.")
        time.sleep(_POLL_SECONDS)
    return json.loads(store.get(key))
