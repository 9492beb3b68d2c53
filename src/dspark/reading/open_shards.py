"""What one process keeps open to read shards: a few files and a few threads.

Both are shared by all readers of the process, and start afresh in a forked child, in which the
parent's threads do not run.
"""

import mmap
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import numpy as np

from dspark.disk.shard_file import damaged
from dspark.errors import CacheError

_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
# Fewer where the process may open few files: the rest is for its other needs.
MAX_OPEN_SHARDS = 64 if _OPEN_FILES == resource.RLIM_INFINITY else min(64, max(_OPEN_FILES // 2, 1))
READS_IN_FLIGHT = 8

Task = Callable[[], None]
ShardKey = tuple[int, int]  # number of the reader, number of the shard


class OpenShard:
    """One shard file, open for reading at any place by any number of threads.

    It is closed with the last reference to it.

    Args:
        path: The file.

    Attributes:
        fd: The descriptor, until `map`.
        signature: What tells this file from one that replaces it.

    Raises:
        CacheError: If it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: mmap.mmap | None = None
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        self._close = weakref.finalize(self, os.close, self.fd)
        self.signature = _signature(os.fstat(self.fd))

    def is_current(self) -> bool:
        """Whether the file is still the one under its name, as it was when it was opened."""
        try:
            return self.signature == _signature(os.stat(self.path))
        except OSError:
            return False

    def map(self) -> None:
        """Read through a mapping from now on.

        A file that is truncated while it is mapped kills the process that touches the lost part.
        """
        self._mapped = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        self._close()

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` (bytes) from byte `offset` of the file.

        Raises:
            CacheError: If the file ends before, or cannot be read.
        """
        if self._mapped is not None:
            source = np.frombuffer(self._mapped, np.uint8, len(memory), offset)
            np.copyto(np.frombuffer(memory, np.uint8), source)
            return
        while memory:
            try:
                done = os.preadv(self.fd, [memory], offset)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not done:
                raise damaged(self.path, f"it ends at byte {offset}, {len(memory)} too early")
            memory, offset = memory[done:], offset + done


def _signature(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def unreadable(path: Path, error: OSError) -> CacheError:
    """Return the error for a shard that the system does not let us read."""
    return CacheError(
        f"{path} cannot be read ({error}). Check that the cache is whole and reachable; a missing "
        "shard is written again by the same precompute command with --resume."
    )


class OpenShards:
    """Open shards by key; the least recently used are closed first.

    Args:
        limit: How many stay open.
    """

    def __init__(self, limit: int = MAX_OPEN_SHARDS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[ShardKey, OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(
        self, keys: Sequence[ShardKey], open_shard: Callable[[ShardKey], OpenShard]
    ) -> list[OpenShard]:
        """Return the shards of `keys`, opening those that are closed or were replaced on disk.

        They stay open for as long as the caller holds them.

        Args:
            keys: Distinct, at most `limit`.
            open_shard: Opens the shard of a key; called from several threads at once.
        """
        with self._lock:
            known = {key: self._open[key] for key in keys if key in self._open}
        shards = {key: shard for key, shard in known.items() if shard.is_current()}
        del known  # replaced ones are closed below, before others are opened
        missing = [key for key in keys if key not in shards]
        with self._lock:
            for key in keys:
                self._open.pop(key, None)
            while self._open and len(self._open) + len(keys) > self._limit:
                self._open.popitem(last=False)

        def add(key: ShardKey) -> None:
            shards[key] = open_shard(key)

        run_reads([partial(add, key) for key in missing])
        with self._lock:
            self._open.update(shards)
        return [shards[key] for key in keys]

    def restart(self) -> None:
        """Close everything: for a forked child, in which nobody reads."""
        self._lock = threading.Lock()
        self._open.clear()


OPEN_SHARDS = OpenShards()
_threads: ThreadPoolExecutor | None = None


def run_reads(tasks: Iterable[Task], *, at_once: int = READS_IN_FLIGHT) -> None:
    """Run tasks, `at_once` of them at a time, and return when none is running any more.

    Raises:
        BaseException: The first one that a task raised; tasks not begun by then are dropped.
    """
    remaining = list(tasks)[::-1]
    helpers = min(at_once, len(remaining)) - 1  # beside this thread
    futures = [_thread_pool().submit(_drain, remaining) for _ in range(helpers)]
    try:
        _drain(remaining)
    finally:  # whatever happens here, nobody may still write into memory that is given back
        remaining.clear()
        wait(futures)
    for future in futures:
        future.result()


def _drain(tasks: list[Task]) -> None:
    try:
        while True:
            try:
                task = tasks.pop()
            except IndexError:
                return
            task()
    except BaseException:
        tasks.clear()
        raise


def _thread_pool() -> ThreadPoolExecutor:
    global _threads
    if _threads is None:
        _threads = ThreadPoolExecutor(READS_IN_FLIGHT, thread_name_prefix="dspark-read")
    return _threads


def _after_fork() -> None:
    global _threads
    _threads = None
    OPEN_SHARDS.restart()


os.register_at_fork(after_in_child=_after_fork)
