"""Who may write on the terminal: of several ranks the first, and of libraries none.

The other ranks keep what they have to say in memory until there is a file for it, so that a run
which is refused leaves no file behind.
"""

import logging
import os
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
_NEVER = logging.CRITICAL + 1


def set_up_logging(level: str, *, on_terminal: bool) -> None:
    """Log from `level` on to stderr, or keep it until `log_to` says where it goes.

    Progress bars of libraries are turned off where no terminal, or not this process, shows them.
    Call it before they are imported.
    """
    root = logging.getLogger()
    if on_terminal:
        handler: logging.Handler = logging.StreamHandler()
    else:
        handler = MemoryHandler(capacity=10_000, flushLevel=_NEVER, flushOnClose=False)
        root.handlers.clear()
    if not root.handlers:
        handler.setFormatter(_FORMAT)
        root.addHandler(handler)
    if on_terminal:
        logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    for name in ("dspark", "__main__"):
        logging.getLogger(name).setLevel(level)
    if not on_terminal or sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers obeys it too
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def log_to(path: Path) -> None:
    """Write what was kept, and all that follows, to `path`; what libraries say as well."""
    from transformers.utils import logging as transformers_logging

    root = logging.getLogger()
    file = logging.FileHandler(path, delay=True)
    file.setFormatter(_FORMAT)
    for handler in root.handlers:
        if isinstance(handler, MemoryHandler):
            handler.setTarget(file)
            handler.flush()
            handler.close()
    root.handlers[:] = [file]
    logging.captureWarnings(True)
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
