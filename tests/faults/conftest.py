"""The bench that every test here works at."""

from collections.abc import Iterator

import pytest

from bench import Bench, warm_bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with warm_bench(tmp_path_factory.mktemp("faults")) as bench:
        yield bench
