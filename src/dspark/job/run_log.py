"""CACHE/.dspark/runs.jsonl: when, where and how the cache was written, one line of JSON per run.

    {"begun", "ended", "outcome", "command", "host", "pid", "ranks", "versions",
     "batch_size", "device", "tensor_parallel", "threads"}

Manifest and shards say nothing of this: they are the same whoever writes them. ``ended`` and
``outcome`` are null while a run lives; where it was killed, the next run notes that.
"""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dspark.disk.publish import publish_bytes

logger = logging.getLogger(__name__)

_VERSIONS_OF = ("dspark", "torch", "transformers", "tokenizers", "safetensors", "datasets")
_CHANGES_LAST_BITS = ("batch_size", "device", "tensor_parallel", "threads", "versions")


def library_versions() -> dict[str, str]:
    """Return the versions of what has a hand in a cache's content."""
    return {package: version(package) for package in _VERSIONS_OF}


def describe_run(
    *, command: str, batch_size: int, device: torch.device, ranks: int, tensor_parallel: int
) -> dict[str, Any]:
    """Return what the log says of this run at its beginning.

    Args:
        command: Its command line.
        batch_size: Full rows per forward.
        device: Where the target runs.
        ranks: Processes that share the work.
        tensor_parallel: How many of them run one copy of the target.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "batch_size": batch_size,
        "command": command,
        "device": name,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ranks": ranks,
        "tensor_parallel": tensor_parallel,
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }


@contextlib.contextmanager
def noted_run(path: Path, run: Mapping[str, Any]) -> Iterator[None]:
    """Note in the log `path` that a run begins, and at the end of the ``with`` block how it ended.

    Where something is not as it was in the run before, which may change the last bits of states,
    a warning says so. Only one run may use `path` at a time.

    Raises:
        OSError: If the beginning cannot be noted. That the end cannot is no error of its own.
    """
    earlier = _read(path)
    if earlier and earlier[-1].get("ended", "") is None:
        earlier[-1] |= {"outcome": "killed"}
    if earlier:
        _warn_of_changes(earlier[-1], run)
    line = {**run, "begun": _now(), "ended": None, "outcome": None}
    _write(path, [*earlier, line])
    outcome = "finished"
    try:
        yield
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}".rstrip(": ")
        raise
    finally:
        with contextlib.suppress(OSError):  # such as the full disk that ended the run
            _write(path, [*earlier, {**line, "ended": _now(), "outcome": outcome}])


def _warn_of_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changes = [
        f"{name} is {now[name]}, not {before[name]}"
        for name in _CHANGES_LAST_BITS
        if name in before and before[name] != now[name]
    ]
    if changes:
        logger.warning(
            "unlike in the run before, %s: the last bits of states may differ between the shards "
            "of the two",
            " and ".join(changes),
        )


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the lines that can be read: nothing depends on them."""
    lines = []
    with contextlib.suppress(OSError):
        for text in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    publish_bytes(path, text.encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
