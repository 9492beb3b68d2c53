"""The ranks of a run, each in a forked child of one warm process, and the launcher between them."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore

FAULTS = Path(__file__).parents[1] / "faults"
sys.path.append(str(FAULTS))

from bench import SECONDS, Bench, Ended, warm_bench  # noqa: E402
from injection import Fault, to_json  # noqa: E402

__all__ = ["Bench", "Ended", "Fault", "Launch", "Rank", "stamps", "warm_bench"]


class Rank:
    """One process of a run."""

    def __init__(self, bench: Bench, argv: Sequence[str], faults: Sequence[Fault], **environment):
        self.output = bench.output / f"rank-{len(list(bench.output.iterdir()))}"
        self.output.mkdir()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SECONDS)
        self._socket.connect(str(bench.server))
        self._answers = self._socket.makefile("rwb")
        request = {
            "argv": list(argv),
            "faults": to_json(list(faults)),
            "output": str(self.output),
            "environment": environment,
        }
        self._answers.write(json.dumps(request).encode() + b"\n")
        self._answers.flush()
        self.pid = int(self._answers.readline())
        self.ended: Ended | None = None

    def poll(self) -> bool:
        """Whether the process is still there."""
        if self.ended is None:
            state = Path(f"/proc/{self.pid}/stat")
            try:
                return state.read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                return False
        return False

    def wait(self) -> Ended:
        if self.ended is None:
            code = int(self._answers.readline())
            self._answers.close()
            self._socket.close()
            texts = ((self.output / name).read_text() for name in ("stdout", "stderr"))
            self.ended = Ended(code, *texts)
        return self.ended

    def signal(self, signum: int) -> None:
        if self.poll():
            os.kill(self.pid, signum)


class Launch:
    """What ``torchrun`` does on one machine: a store, and a process per rank.

    Args:
        bench: The command and its target.
        cache: Where to.
        options: More arguments.
        world_size: How many ranks.
        faults: Put into a rank.
        restarts: How often each rank's launcher says that it has started it anew.
        store: That of an earlier launch.
        kills: Whether the others get SIGTERM once a rank has failed, as on one machine.
    """

    def __init__(
        self,
        bench: Bench,
        cache: Path,
        *options: str,
        world_size: int,
        faults: Mapping[int, Sequence[Fault]] | None = None,
        restarts: Mapping[int, int] | None = None,
        store: TCPStore | None = None,
        kills: bool = True,
    ) -> None:
        self.store = store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._kills = kills
        self.ranks = [
            Rank(
                bench,
                bench.argv(cache, *options),
                (faults or {}).get(rank, ()),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT=str((restarts or {}).get(rank, 0)),
            )
            for rank in range(world_size)
        ]

    def wait(self) -> list[Ended]:
        """Wait for all ranks to end; where one fails and this is one machine, end the others."""
        while any(rank.poll() for rank in self.ranks):
            gone = [rank for rank in self.ranks if not rank.poll()]
            if self._kills and any(rank.wait().code for rank in gone):
                for rank in self.ranks:
                    rank.signal(signal.SIGTERM)
                break
            time.sleep(0.02)
        return [rank.wait() for rank in self.ranks]


def errors(ended: Sequence[Ended]) -> list[str]:
    """Return every line of an error that any rank has shown."""
    lines = [line for one in ended for line in one.stderr.splitlines()]
    return [
        line for line in lines if any(sign in line for sign in ("error: ", " ERROR ", "Traceback"))
    ]


def only(lines: list[str]) -> str:
    """Return the one line that there should be."""
    assert len(lines) == 1, "\n".join(lines)
    return lines[0]


def stamps(cache: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of every published shard."""
    paths = sorted(cache.glob("*.safetensors"))
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}
