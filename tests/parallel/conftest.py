"""The bench of the fault tests, with more rows than ranks and a short last shard."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ranks import FAULTS, Bench
from tiny_target import write_chats, write_target

ROWS = 26  # in seven shards of four


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("parallel")
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
            [sys.executable, str(FAULTS / "fork_server.py"), *arguments], stdout=log, stderr=log
        )
    while not bench.server.exists():
        assert server.poll() is None, (root / "server.log").read_text()
        time.sleep(0.05)
    yield bench
    server.terminate()
    server.wait(60)
