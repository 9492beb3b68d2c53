"""One writer per cache: a file that says who, refreshed while it lives.

    CACHE/.dspark/NAME.lock    {"boot", "host", "pid", "since", "started", "token"}

A lock of the same boot of the same host is dead when its process is; any other is dead when its
time is older than `STALE_SECONDS`. Only who holds the claim on a dead lock, NAME.lock.<its digest>,
may remove it: of several runs that find it dead, none removes what another has put in its place.
Only ``O_EXCL`` is relied on, so that shared file systems without hard links or advisory locks will
do; where there are hard links, a lock appears with its content.
"""

import contextlib
import hashlib
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

from dspark.disk.publish import StagedFile
from dspark.errors import CacheError

logger = logging.getLogger(__name__)

STALE_SECONDS = 60.0
_REFRESH_SECONDS = 10.0
_ATTEMPTS = 50  # at a lock that others are taking over at the same moment
_WAIT_SECONDS = 0.05


class WriterLock:
    """Holds `path` as long as the ``with`` block runs.

    Args:
        path: The lock file; its directory must exist.
        wait: Seconds to wait for another writer to end.

    Raises:
        CacheError: On entering, if another writer lives: naming host, process and since when.
        OSError: If the file cannot be written.
    """

    def __init__(self, path: Path, *, wait: float = 0.0) -> None:
        self.path = path
        self._wait = wait
        self._token = uuid4().hex
        self._released = threading.Event()
        self._lost = False

    def check(self) -> None:
        """Make sure that the lock is still this writer's.

        Raises:
            CacheError: If another writer took it over, because this one stood still for too long.
        """
        record = read_lock(self.path)
        if self._lost or (record and record.get("token") != self._token):
            raise CacheError(
                f"{self.path} was taken over by another run, since this one did not refresh it for "
                f"{STALE_SECONDS:.0f} s. It stops here, so that there is one writer."
            )
        if not record:
            raise CacheError(
                f"{self.path} is gone: the directory was removed, or its file system with it. "
                "Make it available again."
            )

    def __enter__(self) -> "WriterLock":
        attempts = 0
        deadline = time.monotonic() + self._wait
        while attempts < _ATTEMPTS:
            if self._create():
                threading.Thread(target=self._refresh, name="dspark-lock", daemon=True).start()
                return self
            if time.monotonic() < deadline and lock_lives(self.path, read_lock(self.path)):
                time.sleep(_WAIT_SECONDS)
                continue
            self._remove_if_dead()
            attempts += 1
        raise CacheError(
            f"{self.path} cannot be taken: other runs are starting at this moment, or one was "
            f"killed while it started. Try again in {STALE_SECONDS:.0f} s."
        )

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
        # The second look is for network file systems, which may repeat a request that succeeded.
        return _create(self.path, self._token) or read_lock(self.path).get("token") == self._token

    def _remove_if_dead(self) -> None:
        """Move a dead writer's lock out of the way, or raise for a living one."""
        record = read_lock(self.path)
        if lock_lives(self.path, record):
            if not record:  # it is being written at this moment
                time.sleep(_WAIT_SECONDS)
                return
            raise CacheError(
                f"{self.path.parent.parent} is being written by another run: process "
                f"{record.get('pid')} on {record.get('host')} since {record.get('since')}. "
                "Wait for it, or stop it and give --resume."
            )
        if self._remove_dead(self.path, record):
            logger.warning(
                "taking over from process %s on %s, which began at %s and is gone",
                record.get("pid"),
                record.get("host"),
                record.get("since"),
            )

    def _remove_dead(self, path: Path, record: Mapping[str, Any]) -> bool:
        """Remove `path` if it still is the dead `record` and nobody else is at it."""
        claim = claim_path(self.path, record)
        if not _create(claim, uuid4().hex):
            claimed = read_lock(claim)
            if lock_lives(claim, claimed):
                time.sleep(_WAIT_SECONDS)
            else:
                self._remove_dead(claim, claimed)
            return False
        try:
            if read_lock(path) != record or lock_lives(path, record):
                return False
            path.unlink()
            return True
        except FileNotFoundError:
            return False
        finally:
            claim.unlink(missing_ok=True)

    def _refresh(self) -> None:
        while not self._released.wait(_REFRESH_SECONDS):
            record = read_lock(self.path)
            if record and record.get("token") != self._token:
                self._lost = True
                return
            with contextlib.suppress(OSError):  # the next turn, or `check`, will tell
                os.utime(self.path)


def _create(path: Path, token: str) -> bool:
    """Write a lock of this process, unless there is one."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    record = {**_this_process(), "since": since, "token": token}
    data = json.dumps(record, sort_keys=True).encode()
    staged = StagedFile(path, owner="lock")
    try:
        staged.write(memoryview(data), 0)
        return _link(staged.temporary, path)
    finally:
        staged.discard()


def _link(whole: Path, path: Path) -> bool:
    """Give `path` the content of `whole`, unless it exists."""
    try:
        os.link(whole, path)
    except (FileExistsError, FileNotFoundError):  # the second: another run has cleaned up
        return False
    except OSError:  # no hard links here: for a moment the lock is empty
        with contextlib.suppress(FileExistsError), path.open("xb") as file:
            file.write(whole.read_bytes())
            return True
        return False
    return True


def claim_path(path: Path, record: Mapping[str, Any]) -> Path:
    """Return the file whose holder alone may remove `record`, a dead one, from `path`."""
    content = json.dumps(record, sort_keys=True).encode()
    return path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:32]}")


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
    is_here = all(record.get(key) == mine[key] for key in ("boot", "host"))
    if is_here and mine["boot"] and isinstance(record.get("pid"), int):
        return _started(record["pid"]) == record.get("started")
    try:
        return _age(path) < STALE_SECONDS
    except FileNotFoundError:
        return False


def _age(path: Path) -> float:
    """Seconds since `path` was refreshed, by the clock of its file system."""
    probe = path.with_name(f".clock.lock.{uuid4().hex}.tmp")
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
