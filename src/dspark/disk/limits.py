"""Bounds on what a file from elsewhere can make this process do.

A manifest or a header of a few bytes can describe terabytes, and a sparse file can have them. What
is described is held against the machine before anything is allocated.
"""

import os
from collections.abc import Iterator
from typing import Any

from dspark.errors import CacheError

_MAX_DEPTH = 64  # of JSON; a manifest needs 4, and encoding it again recurses


def check_fits_memory(where: object, what: str, nbytes: int) -> None:
    """Refuse what this machine cannot hold.

    Args:
        where: The file or directory that describes it.
        what: What it is, for the message.
        nbytes: Its size.

    Raises:
        CacheError: If `nbytes` are more than the machine's memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise CacheError(
            f"{where}: {what} takes {nbytes:,} bytes, this machine has {memory:,} bytes of memory. "
            "If the sizes in it are right, read it on a larger machine."
        )


def check_depth(value: Any, where: object) -> None:
    """Refuse JSON that is nested deeper than `_MAX_DEPTH`.

    Raises:
        CacheError: If it is.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for container in level for item in _containers(container)]
        if not level:
            return
    raise CacheError(f"{where} is damaged: JSON nested more than {_MAX_DEPTH} deep. Copy it anew.")


def _containers(value: Any) -> Iterator[Any]:
    children = value.values() if isinstance(value, dict) else value
    return (child for child in children if isinstance(child, dict | list))
