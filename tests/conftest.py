"""What every test may ask for."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _log_levels_are_those_of_a_fresh_process() -> Iterator[None]:
    """Undo what a command that ran in this process decided about logging."""
    loggers = [logging.getLogger(name) for name in ("dspark", "__main__")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct; `make test` builds it before it runs the tests."""
    directory = ROOT / "models" / "smollm2-135m-instruct"
    if not (directory / "config.json").is_file():
        pytest.skip(f"{directory} is not there: build it with python examples/build_smollm2.py")
    return directory
