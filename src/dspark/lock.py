"""One writer per cache: a file that says who, refreshed while it lives.

    CACHE/.dspark/NAME.lock    {"boot", "host", "pid", "started", "since", "token"}

A lock of the same boot of the same host is dead when its process is; any other is dead when its
time is older than `STALE_SECONDS`. Only ``O_EXCL`` and ``rename`` are relied on, so that shared
file systems without hard links or advisory locks will do.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from dspark.errors import CacheError

logger = logging.getLogger(__name__)

STALE_SECONDS = 60.0
_REFRESH_SECONDS = 10.0
_ATTEMPTS = 50  # at a lock that others are taking over at the same moment


class WriterLock:
    """Holds `path` as long as the ``with`` block runs.

    Args:
        path: The lock file; its directory must exist.

    Raises:
        CacheError: On entering, if another writer lives: naming host, process and since when.
        OSError: If the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = uuid4().hex
        self._released = threading.Event()
        self._lost = False

    def check(self) -> None:
        """Make sure that the lock is still this writer's.

        Raises:
            CacheError: If another writer took it over, because this one stood still for too long.
        """
        if self._lost or read_lock(self.path).get("token") != self._token:
            raise CacheError(
                f"{self.path} was taken over by another run, since this one did not refresh it for "
                f"{STALE_SECONDS:.0f} s. It stops here, so that there is one writer."
            )

    def __enter__(self) -> "WriterLock":
        for _ in range(_ATTEMPTS):
            if self._create():
                threading.Thread(target=self._refresh, name="dspark-lock", daemon=True).start()
                return self
            self._remove_if_dead()
        raise CacheError(f"{self.path} cannot be taken: several runs are starting at once. Wait.")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._released.set()
        if read_lock(self.path).get("token") == self._token:
            self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        record = {
            **_this_process(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "token": self._token,
        }
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(record, sort_keys=True).encode())
        return True

    def _remove_if_dead(self) -> None:
        """Move a dead writer's lock out of the way, or raise for a living one."""
        record = read_lock(self.path)
        if lock_lives(self.path, record):
            if not record:  # it is being written at this moment
                time.sleep(0.05)
                return
            raise CacheError(
                f"{self.path.parent.parent} is being written by another run: process "
                f"{record.get('pid')} on {record.get('host')} since {record.get('since')}. "
                "Wait for it, or stop it and give --resume."
            )
        grave = self.path.with_name(f"{self.path.name}.{uuid4().hex}")
        try:
            os.rename(self.path, grave)
        except FileNotFoundError:
            return  # somebody else was faster
        if read_lock(grave) != record:  # a third run had taken it over in between: give it back
            os.rename(grave, self.path)
            return
        grave.unlink()
        logger.warning(
            "taking over from process %s on %s, which began at %s and is gone",
            record.get("pid"),
            record.get("host"),
            record.get("since"),
        )

    def _refresh(self) -> None:
        while not self._released.wait(_REFRESH_SECONDS):
            if read_lock(self.path).get("token") != self._token:
                self._lost = True
                return
            with contextlib.suppress(OSError):  # the next turn, or `check`, will tell
                os.utime(self.path)


def read_lock(path: Path) -> dict[str, Any]:
    """Return what a lock file says; nothing if it is not there or not written yet."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def lock_lives(path: Path, record: Mapping[str, Any]) -> bool:
    """Whether the process that wrote `record` into the lock `path` still holds it."""
    mine = _this_process()
    if record and record.get("boot") == mine["boot"] and record.get("host") == mine["host"]:
        return _started(int(record.get("pid", 0))) == record.get("started")
    try:
        return _age(path) < STALE_SECONDS
    except FileNotFoundError:
        return False


def _age(path: Path) -> float:
    """Seconds since `path` was refreshed, by the clock of its file system."""
    probe = path.with_name(f".clock.{uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"boot": _boot(), "host": socket.gethostname(), "pid": pid, "started": _started(pid)}


def _boot() -> str:
    """Names this boot and this process namespace, in which process numbers mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When process `pid` started, in the kernel's ticks; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]
