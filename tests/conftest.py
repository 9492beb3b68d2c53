"""What every test may ask for."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct; `make test` builds it before it runs the tests."""
    directory = ROOT / "models" / "smollm2-135m-instruct"
    if not (directory / "config.json").is_file():
        pytest.skip(f"{directory} is not there: build it with python examples/build_smollm2.py")
    return directory
