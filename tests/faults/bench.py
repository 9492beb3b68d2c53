"""The command, run over and over: in forked children of one warm process, or as it is."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from injection import Fault, to_json
from tiny_target import cache_files, command_line, write_chats, write_target

HERE = Path(__file__).parent
ROWS = 26  # in seven shards of four
SECONDS = 300  # nothing here takes longer, on the slowest machine


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit code, negative for a signal, and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return self.stderr.rstrip("\n").rpartition("\n")[2]


class Forked:
    """A run in a child of the fork server."""

    def __init__(self, server: Path, argv: Sequence[str], faults: list[Fault], output: Path):
        self._output = output
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SECONDS)
        self._socket.connect(str(server))
        self._answers: IO[bytes] = self._socket.makefile("rwb")
        request = {"argv": list(argv), "faults": to_json(faults), "output": str(output)}
        self._answers.write(json.dumps(request).encode() + b"\n")
        self._answers.flush()
        self.pid = int(self._answers.readline())

    def wait(self) -> Ended:
        code = int(self._answers.readline())
        self.close()
        return Ended(code, *((self._output / name).read_text() for name in ("stdout", "stderr")))

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


@dataclass(frozen=True)
class Bench:
    """A target, its chats, the cache of an undisturbed run, and how to run the command again."""

    target: Path
    chats: Path
    reference: Path
    server: Path
    output: Path
    started: list[Forked] = field(default_factory=list)

    def argv(self, cache: Path, *options: str) -> list[str]:
        return [*command_line(self.target, self.chats, cache), *options]

    def start(self, cache: Path, *options: str, faults: Sequence[Fault] = ()) -> Forked:
        output = self.output / f"run-{len(self.started)}"
        output.mkdir()
        run = Forked(self.server, self.argv(cache, *options), list(faults), output)
        self.started.append(run)
        return run

    def run(self, cache: Path, *options: str, faults: Sequence[Fault] = ()) -> Ended:
        return self.start(cache, *options, faults=faults).wait()

    def process(
        self,
        cache: Path,
        *options: str,
        faults: Sequence[Fault] = (),
        new_group: bool = False,
    ) -> subprocess.Popen[str]:
        """Start the command as a user would, or with faults put in."""
        begin = ["-m", "dspark.precompute"]
        if faults:
            begin = [str(HERE / "injection.py"), to_json(list(faults))]
        return subprocess.Popen(
            [sys.executable, *begin, *self.argv(cache, *options)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=new_group,
            text=True,
        )

    def check_published(self, cache: Path) -> set[str]:
        """Make sure that every shard under a final name is right, and return their names."""
        right = cache_files(self.reference)
        found = cache_files(cache)
        manifest = found.pop("manifest.json", None)
        for name, data in found.items():
            assert data == right[name], f"{name} was published and is not right"
        if manifest is not None and json.loads(manifest)["complete"]:
            assert found.keys() | {"manifest.json"} == right.keys()
        return set(found)

    def check_finished(self, cache: Path) -> None:
        """Make sure that the cache is, byte for byte, the undisturbed one, and nothing is left."""
        assert cache_files(cache) == cache_files(self.reference)
        assert {path.name for path in cache.iterdir()} == {
            path.name for path in self.reference.iterdir()
        }
        left = [path for path in cache.rglob(".*") if path != cache / ".dspark"]
        left += [path for path in (cache / ".dspark").iterdir() if "lock" in path.name]
        assert not left, f"left behind: {left}"

    def check_stopped(self, cache: Path, ended: Ended, cause: str, code: int) -> set[str]:
        """Make sure that one line says why a run stopped and how to go on; return its shards."""
        errors = [line for line in ended.stderr.splitlines() if "error:" in line]
        assert ended.code == code, ended.stderr
        assert errors == [ended.last_line]
        assert cause in ended.last_line
        command = ["python", "-m", "dspark.precompute", *self.argv(cache), "--resume"]
        assert ended.last_line.endswith(f"go on with: {shlex.join(command)}")
        assert "Traceback" not in ended.stderr
        assert not list(cache.rglob("*.tmp"))
        manifest = cache / "manifest.json"
        assert not manifest.exists() or json.loads(manifest.read_bytes())["complete"] is False
        return {name for name in self.check_published(cache) if name.startswith("shard")}

    def check_resumes(self, cache: Path) -> None:
        """Make sure that the next run finishes the cache."""
        ended = self.run(cache, "--resume")
        assert ended.code == 0, ended.stderr
        self.check_finished(cache)


@contextlib.contextmanager
def warm_bench(root: Path) -> Iterator[Bench]:
    """Make target, chats and reference below `root`, and keep a warm process to fork runs from."""
    bench = Bench(
        write_target(root / "target"),
        write_chats(root / "chats.jsonl", ROWS),
        root / "reference",
        root / "server",
        root / "output",
    )
    bench.output.mkdir()
    arguments = [str(bench.server), *bench.argv(bench.reference)]
    with (root / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py"), *arguments], stdout=log, stderr=log
        )
    while not bench.server.exists():
        assert server.poll() is None, (root / "server.log").read_text()
        time.sleep(0.05)
    yield bench
    for run in bench.started:
        run.close()
    server.terminate()
    server.wait(SECONDS)


def stamps(cache: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of every published shard."""
    paths = sorted(cache.glob("*.safetensors"))
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def everything(cache: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return content, inode and time of every file below a directory."""
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    return {
        str(path): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in files
    }


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.005)
