"""The bench of the fault tests, where the ranks of these find more shards than there are ranks."""

from collections.abc import Iterator

import pytest

from ranks import Bench, warm_bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with warm_bench(tmp_path_factory.mktemp("parallel")) as bench:
        yield bench
