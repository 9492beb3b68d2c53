"""Files that appear under their name only when they are whole.

    with StagedFile(path) as file:      .NAME.OWNER.<32 hex digits>.tmp, beside NAME
        os.write(file.fd, ...)
                                        fsync, rename onto NAME, fsync of the directory

Readers and restarted runs therefore never see half a file, whatever kills the writer. What a dead
writer leaves behind carries the name of its owner, so that one of several writers in a directory
removes only what is its own.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from uuid import uuid4

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<owner>[A-Za-z0-9_-]+)\.[0-9a-f]{32}\.tmp")
_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


class StagedFile:
    """A new file under a temporary name, moved onto `path` by `publish`.

    Leaving a ``with`` block publishes; an exception in it discards. The mode is what the caller's
    umask asks for.

    Args:
        path: The file's final name. An existing file is replaced in one step.
        owner: Who writes, in ``[A-Za-z0-9_-]``: the part of the temporary name that
            `remove_leftovers` can select by.

    Raises:
        OSError: If the file cannot be created, flushed or renamed.
    """

    def __init__(self, path: Path, *, owner: str = "run") -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{owner}.{uuid4().hex}.tmp")
        self._fd: int | None = os.open(
            self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )

    @property
    def fd(self) -> int:
        """The open descriptor, readable and writable, until the file is published or discarded."""
        assert self._fd is not None, f"{self.path} is closed"
        return self._fd

    def resize(self, size: int) -> None:
        """Make the file `size` bytes long; what is not written reads as zeros.

        Raises:
            OSError: If the disk refuses; it names the file.
        """
        with _naming(self.path):
            os.ftruncate(self.fd, size)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` (bytes, one dimension) at byte `offset`.

        Raises:
            OSError: If the disk refuses; it names the file.
        """
        while data:
            with _naming(self.path):
                written = os.pwrite(self.fd, data, offset)
            data = data[written:]
            offset += written

    def publish(self) -> None:
        """Flush the file to disk and move it onto its final name."""
        with _naming(self.path):
            os.fsync(self.fd)
        os.replace(self.temporary, self.path)
        self._close()  # only now: `discard` removes what is still open
        fsync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file; do nothing if it is published or discarded already."""
        if self._fd is not None:
            self._close()
            self.temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self._fd = self.fd, None
        os.close(fd)

    def __enter__(self) -> "StagedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let the errors of calls that only see a descriptor name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def publish_bytes(path: Path, data: bytes, *, owner: str = "run") -> None:
    """Write `data` to `path` in one step.

    Raises:
        OSError: If it cannot be written; `path` is then what it was before.
    """
    with StagedFile(path, owner=owner) as file:
        file.write(memoryview(data), 0)


def fsync_directory(directory: Path) -> None:
    """Make renames in `directory` durable, where the file system can."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # network file systems may not offer it; the rename itself is done
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(fd)


def remove_leftovers(directory: Path, *, owner: str | None = None) -> list[Path]:
    """Remove temporary files that dead writers left in `directory`.

    Only call it while no other writer of the same owner lives.

    Args:
        directory: Where to look, not below.
        owner: Whose files to remove; None for everybody's.

    Returns:
        The removed paths, sorted.
    """
    removed = []
    for path in sorted(directory.glob(".*.tmp")):
        match = _LEFTOVER.fullmatch(path.name)
        if match and owner in (None, match["owner"]):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed
