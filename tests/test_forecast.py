"""What a cache will take: said before the run, and true after it."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.chat import Conversation
from dspark.data.tokens import RowRules, Tokens, write_tokens
from dspark.disk.shard_file import TensorSpec
from dspark.disk.shard_writer import ShardWriter
from dspark.errors import CacheError
from dspark.job import forecast
from dspark.job.forecast import Forecast, keeps_holes, make_forecast
from dspark.job.forward import ShardSettings, shard_record

LENGTHS = [700, 30, 1024, 5, 250, 90, 400]
SEQ_LENGTH, SHARD_SIZE, WIDTH = 1024, 3, 64
WEIGHT_BYTES = 1000


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    def encoded() -> Iterator[Any]:
        for row, length in enumerate(LENGTHS):
            mask = np.arange(length) % 2
            yield row, Conversation(np.ones(length, np.int32), mask.astype(np.uint8), False)

    return write_tokens(tmp_path_factory.mktemp("tokens"), encoded(), RowRules(), key={})


@pytest.fixture
def settings() -> ShardSettings:
    return ShardSettings(
        row_specs={
            "input_ids": TensorSpec(torch.int64, (SEQ_LENGTH,)),
            "loss_mask": TensorSpec(torch.int64, (SEQ_LENGTH,)),
            "target_hidden_states": TensorSpec(torch.bfloat16, (SEQ_LENGTH, 2 * WIDTH)),
            "target_last_hidden_states": TensorSpec(torch.bfloat16, (SEQ_LENGTH, WIDTH)),
        },
        identity="ab" * 32,
        shard_size=SHARD_SIZE,
        batch_size=1,
        pad_token_id=0,
        layer_ids=[0, 1],
    )


def predict(directory: Path, tokens: Tokens, settings: ShardSettings, **changes: Any) -> Forecast:
    options = {"num_shards": 3, "missing": [0, 1, 2], "weights_missing": True}
    return make_forecast(
        directory, tokens, settings, weight_bytes=WEIGHT_BYTES, **(options | changes)
    )


def write_all(directory: Path, tokens: Tokens, settings: ShardSettings) -> list[os.stat_result]:
    """Write the shards as a run does, and return what the file system says of them."""
    found = []
    for index in range(3):
        record = shard_record(index, tokens, settings)
        path = directory / f"shard-{index}"
        writer = ShardWriter(path, settings.row_specs, metadata=record)
        for row, length in enumerate(record.lengths):
            for name, spec in settings.row_specs.items():
                real = SEQ_LENGTH if name == "input_ids" else length
                writer.write(name, row, torch.ones(real, *spec.shape[1:], dtype=spec.dtype))
        writer.publish()
        found.append(path.stat())
    return found


def test_rows_tokens_and_shards_are_those_of_the_input(tmp_path, tokens, settings):
    found = predict(tmp_path, tokens, settings)
    assert (found.rows, found.tokens) == (len(LENGTHS), sum(LENGTHS))
    assert found.supervised_tokens == sum(length // 2 for length in LENGTHS)
    assert (found.shards, found.shards_to_write) == (3, 3)


def test_the_apparent_size_is_exact(tmp_path, tokens, settings):
    found = predict(tmp_path, tokens, settings)
    written = sum(stat.st_size for stat in write_all(tmp_path, tokens, settings))
    assert found.apparent_bytes == written + WEIGHT_BYTES


def test_the_size_on_disk_is_within_2_percent(tmp_path, tokens, settings):
    found = predict(tmp_path, tokens, settings)
    written = sum(stat.st_blocks * 512 for stat in write_all(tmp_path, tokens, settings))
    assert abs(found.real_bytes - WEIGHT_BYTES - written) <= 0.02 * written


def test_without_holes_padding_counts_in_full(tmp_path, tokens, settings, monkeypatch):
    monkeypatch.setattr(forecast, "keeps_holes", lambda directory: False)
    found = predict(tmp_path, tokens, settings)
    assert found.real_bytes == found.bytes_to_write == found.apparent_bytes
    assert "keeps no holes: short rows cost as much as full ones" in found.line()


def test_only_what_is_missing_is_to_be_written(tmp_path, tokens, settings, monkeypatch):
    monkeypatch.setattr(forecast, "keeps_holes", lambda directory: False)
    whole = predict(tmp_path, tokens, settings)
    nothing = predict(tmp_path, tokens, settings, missing=[], weights_missing=False)
    assert (nothing.shards_to_write, nothing.bytes_to_write) == (0, 0)
    assert nothing.apparent_bytes == whole.apparent_bytes
    parts = [
        predict(tmp_path, tokens, settings, missing=[index], weights_missing=False).bytes_to_write
        for index in range(3)
    ]
    assert sum(parts) + WEIGHT_BYTES == whole.bytes_to_write


def test_trying_for_holes_leaves_nothing_behind(tmp_path):
    assert keeps_holes(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def some() -> Forecast:
    return Forecast(
        rows=1200,
        tokens=456_789,
        supervised_tokens=123_456,
        shards=5,
        shards_to_write=2,
        apparent_bytes=9_000_000_000,
        real_bytes=3_000_000_000,
        bytes_to_write=1_250_000_000,
        free_bytes=2_000_000_000,
        keeps_holes=True,
    )


def test_the_line_says_it_all(some):
    assert some.line() == (
        "1,200 rows, 456,789 tokens, 123,456 supervised; 5 shards and the weights: 9.00 GB "
        "apparent size, 3.00 GB on disk (padding takes no disk); 1.25 GB, 2 shards among it, "
        "to write now; 2.00 GB free"
    )


def test_the_table_has_a_line_for_each_figure(some):
    lines = some.table().splitlines()
    assert len(lines) == 10
    assert "456,789" in lines[1]
    assert lines[5].endswith("9.00 GB")


def test_what_fits_is_not_refused(some):
    some.refuse_if_too_large("cache")
    replace(some, free_bytes=some.bytes_to_write).refuse_if_too_large("cache")


def test_what_does_not_fit_is_refused_with_both_figures(some):
    full = replace(some, free_bytes=1_000_000_000)
    with pytest.raises(CacheError, match=r"needs 1.25 GB more.*cache has 1.00 GB free") as caught:
        full.refuse_if_too_large("cache")
    assert "--ignore-free-space" in str(caught.value)
