r"""Faults put into a run of the command from outside: the code under test is not touched.

    python injection.py '[{"function": "os.replace", "call": 3, "action": "kill"}]' --target-model …

runs ``python -m dspark.precompute --target-model …`` and kills it before its third rename.
"""

import errno
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What happens at one call of one function.

    Attributes:
        function: Dotted, a method included: "os.pwrite", "dspark.model.capture.Target.capture".
        action: "kill", a signal's name, an error number's name, "raise" (a RuntimeError),
            "out of device memory", "pause" (until the file `gate` is there; GATE.reached tells
            that it waits), or "= 3", which is no call: the module's constant becomes a number.
        call: The n-th call, from 1; 0 for every call.
        moment: "before" the call, "after" it, or "halfway" through its data (os.pwrite).
        path: Only calls on files whose path contains this count.
        gate: See "pause".
    """

    function: str
    action: str
    call: int = 1
    moment: str = "before"
    path: str = ""
    gate: str = ""

    def __str__(self) -> str:
        which = f"{self.path} " if self.path else ""
        return f"{self.action} {self.moment} {which}{self.function} {self.call}".replace("/", "_")


def inject(faults: list[Fault]) -> None:
    """Put faults into this process."""
    for fault in faults:
        owner, name = _find(fault.function)
        if fault.action.startswith("= "):
            setattr(owner, name, float(fault.action[2:]))
        else:
            setattr(owner, name, _faulty(getattr(owner, name), fault))


def _find(dotted: str) -> tuple[Any, str]:
    """Return the module or class that a name belongs to, and the name in it."""
    *path, name = dotted.split(".")
    classes = []
    while not _is_module(".".join(path)):
        classes.insert(0, path.pop())
    owner: Any = importlib.import_module(".".join(path))
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _faulty(real: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    lock = threading.Lock()
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if fault.path and not any(fault.path in _path(arg) for arg in args[:2]):
            return real(*args, **kwargs)
        with lock:
            calls += 1
            hit = fault.call in (0, calls)
        if not hit:
            return real(*args, **kwargs)
        if fault.moment == "halfway":
            fd, data, offset = args
            real(fd, data[: len(data) // 2], offset)
        if fault.moment == "after":
            result = real(*args, **kwargs)
            _act(fault, args)
            return result
        _act(fault, args)
        return real(*args, **kwargs)

    return call


def _path(argument: Any) -> str:
    if isinstance(argument, int):
        try:
            return os.readlink(f"/proc/self/fd/{argument}")
        except OSError:
            return ""
    return str(argument) if isinstance(argument, str | Path) else ""


def _act(fault: Fault, args: tuple[Any, ...]) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # another thread may be the one that is stopped first
    elif fault.action.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault.action])
    elif fault.action == "raise":
        raise RuntimeError("the sky is falling")
    elif fault.action == "out of device memory":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    elif fault.action == "pause":
        Path(f"{fault.gate}.reached").touch()
        while not Path(fault.gate).exists():
            time.sleep(0.01)
    else:
        number = getattr(errno, fault.action)
        # As the system does: calls that take a path name it, those that take a descriptor do not.
        raise OSError(number, os.strerror(number), *(a for a in args[:1] if not isinstance(a, int)))


def to_json(faults: list[Fault]) -> str:
    return json.dumps([asdict(fault) for fault in faults])


def from_json(text: str) -> list[Fault]:
    return [Fault(**fields) for fields in json.loads(text)]


if __name__ == "__main__":
    inject(from_json(sys.argv[1]))
    sys.argv[:2] = ["precompute"]
    runpy.run_module("dspark.precompute", run_name="__main__", alter_sys=True)
