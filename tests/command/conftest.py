"""A tiny target, chats, and the cache that one uninterrupted run makes of them."""

import shutil
from pathlib import Path

import pytest
from observed import ROWS

from dspark.precompute import main
from tiny_target import command_line, write_chats, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", ROWS)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, target, chats):
    """A cache as one uninterrupted run writes it; not to be changed."""
    cache = tmp_path_factory.mktemp("finished") / "cache"
    assert main(command_line(target, chats, cache)) == 0
    return cache


@pytest.fixture
def cache(tmp_path, finished):
    """A copy of the finished cache, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "cache"))


@pytest.fixture
def no_weights(monkeypatch):
    """Fail the test if weights are loaded."""
    monkeypatch.setattr(
        "dspark.job.run.load_target", lambda *_, **__: pytest.fail("weights loaded")
    )
