"""What one process keeps open to read shards: a few files and a few threads.

Both are shared by all readers of the process, and start afresh in a forked child, in which the
parent's threads do not run.
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from dspark.errors import CacheError
from dspark.shard_file import damaged

MAX_OPEN_SHARDS = 64
READS_IN_FLIGHT = 8

Task = Callable[[], None]
ShardKey = tuple[int, int]  # number of the reader, number of the shard


class OpenShard:
    """One shard file, open for reading at any place by any number of threads.

    Args:
        path: The file.

    Attributes:
        fd: The descriptor, until `map` or `close`.
        signature: What tells this file from one that replaces it: device, inode, size and time
            of change.

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
        stat = os.fstat(self.fd)
        self.signature = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def map(self) -> None:
        """Read through a mapping from now on.

        A file that is truncated while it is mapped kills the process that touches the lost part.
        """
        self._mapped = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        os.close(self.fd)
        self.fd = -1

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

    def close(self) -> None:
        """Give the descriptor or the mapping back."""
        if self._mapped is not None:
            self._mapped.close()
        elif self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def unreadable(path: Path, error: OSError) -> CacheError:
    """Return the error for a shard that the system does not let us read."""
    return CacheError(
        f"{path} cannot be read ({error}). Check that the cache is whole and reachable; a missing "
        "shard is written again by the same precompute command with --resume."
    )


class OpenShards:
    """Open shards by key; the least recently used are closed first.

    A shard that is being read is never closed: while more than `limit` are read at once, all of
    those stay open.

    Args:
        limit: How many stay open.
    """

    def __init__(self, limit: int = MAX_OPEN_SHARDS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[ShardKey, OpenShard] = OrderedDict()
        self._users: dict[ShardKey, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def borrow(
        self, keys: Sequence[ShardKey], open_shard: Callable[[ShardKey], OpenShard]
    ) -> Iterator[list[OpenShard]]:
        """Lend the shards of `keys`, opening those that are closed.

        Args:
            keys: Distinct, at most `limit`.
            open_shard: Opens the shard of a key; may be called from several threads at once.
        """
        with self._lock:
            for key in keys:
                self._users[key] = self._users.get(key, 0) + 1
            self._make_room(sum(key not in self._open for key in keys))
        try:
            missing = [key for key in keys if key not in self._open]
            run_reads([partial(self._add, key, open_shard) for key in missing])
            yield [self._open[key] for key in keys]
        finally:
            with self._lock:
                self._release(keys)

    def restart(self) -> None:
        """Close everything, whoever uses it: for a forked child, which has none of the users."""
        self._lock = threading.Lock()
        self._users.clear()
        while self._open:
            with suppress(BufferError):  # a thread of the parent was copying out of the mapping
                self._open.popitem()[1].close()

    def _add(self, key: ShardKey, open_shard: Callable[[ShardKey], OpenShard]) -> None:
        shard = open_shard(key)
        with self._lock:
            if key in self._open:  # another thread was faster
                shard.close()
            else:
                self._open[key] = shard

    def _make_room(self, needed: int) -> None:
        idle = [key for key in self._open if key not in self._users]
        for key in idle[: max(0, len(self._open) + needed - self._limit)]:
            self._open.pop(key).close()

    def _release(self, keys: Sequence[ShardKey]) -> None:
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
            if key in self._open:
                self._open.move_to_end(key)
        self._make_room(0)


OPEN_SHARDS = OpenShards()
_threads: ThreadPoolExecutor | None = None


def run_reads(tasks: Iterable[Task]) -> None:
    """Run tasks, several at once, and return when none is running any more.

    Raises:
        BaseException: The first one that a task raised; tasks not begun by then are dropped.
    """
    remaining = list(tasks)
    if len(remaining) < 2:
        for task in remaining:
            task()
        return
    remaining.reverse()
    helpers = min(READS_IN_FLIGHT, len(remaining)) - 1
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
