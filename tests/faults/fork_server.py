"""A process that has imported everything and run the command once, and forks a child per run.

    python fork_server.py SOCKET ARGUMENTS…      the arguments of the first, undisturbed run

Importing torch and transformers takes seconds; a run of the command on a tiny target does not. Per
connection it reads a line of JSON, {"argv", "faults", "output", "environment"}, and answers with a
line for the process number of the run and one for its exit code, negative for a signal.
"""

import json
import os
import signal
import socketserver
import sys
import traceback
from pathlib import Path

import torch

from dspark import precompute
from injection import from_json, inject


class Handler(socketserver.StreamRequestHandler):
    """Runs the command once, in a child of a process of its own."""

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        pid = os.fork()
        if pid == 0:
            run(request)
        self._answer(pid)
        self._answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _answer(self, value: int) -> None:
        self.wfile.write(f"{value}\n".encode())
        self.wfile.flush()


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """A process per connection; ends with the process that started it."""

    starter = os.getppid()

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.starter:
            os._exit(1)


def run(request: dict) -> None:
    """Become a run of the command, as a process of its own would be."""
    code = 1
    try:
        output = Path(request["output"])
        for name, fd in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(request.get("environment", {}))
        inject(from_json(request["faults"]))
        code = precompute.main(request["argv"])
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a child must not find threads that it has not inherited
    assert precompute.main(sys.argv[2:]) == 0
    with Server(sys.argv[1], Handler) as server:
        server.serve_forever()
