"""CACHE/.dspark: what a run keeps for itself and the next one, and who may write.

    writer.lock              held by a run that writes the whole cache
    part-3-of-8.lock         held by one part of a run that several processes share
    start.lock               held by a part for as long as it reads the input, or finishes
    tokens-<hash>/           the tokenized input
    weights.json             hashes of weight files
    runs.jsonl               every run that wrote, and how it ended; runs-part-3.jsonl for a part
    logs/                    what ranks other than the first have to say

Nothing in it is part of the cache.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark.disk.publish import remove_leftovers
from dspark.errors import CacheError
from dspark.job.identity import FileHashes
from dspark.job.log_setup import log_to
from dspark.processes.group import Group
from dspark.processes.lock import STALE_SECONDS, WriterLock, lock_lives, read_lock

logger = logging.getLogger(__name__)

_WRITER_LOCK, _START_LOCK = "writer.lock", "start.lock"
_PART_LOCK = re.compile(r"part-(?P<part>\d+)-of-(?P<num_parts>\d+)\.lock")


class Workplace:
    """CACHE/.dspark, as one run uses it.

    What a run puts here is kept only once it is accepted: a refused run leaves the directory as it
    was, tokens of another input included.

    Args:
        path: The directory.
        lock: What makes this run the one that writes its share; None on ranks other than the first.
        owner: Whose temporary files this process writes; see `StagedFile`.
        shared: Whether other processes may read the input of the same cache at this moment.

    Attributes:
        hashes: Hashes of weight files, remembered from run to run.
    """

    def __init__(self, path: Path, lock: WriterLock | None, *, owner: str, shared: bool) -> None:
        self.path = path
        self.owner = owner
        self.hashes = FileHashes(path / "weights.json")
        self._lock = lock
        self._shared = shared
        self._rejected: set[Path] = set()  # until `accept`, what this run makes itself

    @property
    def run_log(self) -> Path:
        """Where this run notes that it was."""
        return self.path / (f"runs-{self.owner}.jsonl" if self._shared else "runs.jsonl")

    def check_lock(self) -> None:
        """Make sure that this run is still the one that writes.

        Raises:
            CacheError: If another run took its place.
        """
        if self._lock is not None:
            self._lock.check()

    def other_parts_live(self) -> bool:
        """Whether any other part of the run lives at this moment."""
        own = None if self._lock is None else self._lock.path
        locks = [path for path in self.path.glob("part-*.lock") if path != own]
        return any(lock_lives(path, read_lock(path)) for path in locks)

    def tokens(self, key: Mapping[str, Any]) -> Path:
        """Return where the tokens decided by `key` lie."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        directory = self.path / f"tokens-{digest[:16]}"
        if not directory.exists():
            self._rejected.add(directory)
        return directory

    def accept(self, tokens: Path) -> None:
        """Keep what this run found out and `tokens` alone; remove what runs that died left."""
        self._rejected = set(self.path.glob("tokens-*")) - {tokens}
        if self._lock is None:
            return
        self.hashes.save()
        owner = self.owner if self._shared and self.other_parts_live() else None
        leftovers = remove_leftovers(self.path.parent, owner=owner)
        leftovers += remove_leftovers(self.path, owner=owner)
        leftovers += remove_leftovers(tokens)  # nobody else is at them now: see `alone`
        for leftover in leftovers:
            logger.info("removed %s, left by a run that died", leftover.name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the other parts of the run out of input and manifest for as long as it takes."""
        if not self._shared:
            yield
            return
        with WriterLock(self.path / _START_LOCK, wait=math.inf):
            yield

    def remove_rejected(self) -> None:
        """Remove the tokens that are not those of the run accepted last."""
        for directory in self._rejected if self._lock is not None else ():
            # Another rank may still be writing into it; what stays behind is never looked at.
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def open_workplace(args: argparse.Namespace, group: Group) -> Iterator[Workplace]:
    """Create the cache's directory if needed and become its writer, or one of its parts.

    Raises:
        CacheError: If a run that would be in the way lives in it.
        OSError: If it cannot be written.
    """
    path = Path(args.output_dir) / ".dspark"
    is_part = args.num_parts is not None
    owner = f"part-{args.part}" if is_part else "run"
    with contextlib.ExitStack() as stack:
        if not group.is_first:
            group.from_first("workplace", lambda: True)
            (path / "logs").mkdir(exist_ok=True)
            log_to(path / "logs" / f"{owner}-rank-{group.rank}.log")
            yield Workplace(path, None, owner=owner, shared=False)
            return
        path.mkdir(parents=True, exist_ok=True)
        name = f"part-{args.part}-of-{args.num_parts}.lock" if is_part else _WRITER_LOCK
        # The lock of a rank 0 that was killed on another machine lives on for a while.
        patience = 1.5 * STALE_SECONDS if group.is_restarted else 0.0
        lock = stack.enter_context(WriterLock(path / name, wait=patience))
        _refuse_other_writers(path, name, args.num_parts)
        workplace = Workplace(path, lock, owner=owner, shared=is_part)
        stack.callback(workplace.remove_rejected)
        group.from_first("workplace", lambda: True)
        yield workplace


def _refuse_other_writers(path: Path, own_name: str, num_parts: int | None) -> None:
    """Refuse to run beside a run of another kind, after this one has shown its own lock."""
    for lock in sorted(path.glob("*.lock")):
        match = _PART_LOCK.fullmatch(lock.name)
        is_sibling = match is not None and match["num_parts"] == str(num_parts)
        is_ours = lock.name == own_name or (num_parts is not None and lock.name == _START_LOCK)
        if is_ours or is_sibling:
            continue
        record = read_lock(lock)
        if lock_lives(lock, record):
            raise CacheError(
                f"{path.parent} is being written by {lock.stem}: process {record.get('pid')} on "
                f"{record.get('host')} since {record.get('since')}. All parts of a run need the "
                "same --num-parts; wait for them, or stop them."
            )
        with WriterLock(lock):
            pass  # of a run that is gone: taken over and given back
