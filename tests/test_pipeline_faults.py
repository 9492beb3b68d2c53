"""What goes wrong between tokens and shards: named, contained, and no damaged file."""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dspark.chat import Conversation
from dspark.data.tokens import RowRules, write_tokens
from dspark.errors import TargetError
from dspark.job.bad_states import masked_rows
from dspark.job.pipeline import write_shards
from dspark.model.capture import Captured
from stub_target import (
    LAYERS,
    LENGTHS,
    StubTarget,
    make_settings,
    make_tokens,
    rows_of,
    run,
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("tokens"))


BAD_ROW, BAD_TOKEN = 7, 4


def spoil(layer: int, value: float) -> Any:
    def change(ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        for position in (ids[:, 0] == BAD_ROW).nonzero().flatten():
            states[layer][position, BAD_TOKEN, 3] = value

    return change


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(len(LAYERS)))
def test_a_state_that_is_not_finite_stops_the_run_by_name(tmp_path, tokens, place, value):
    target = StubTarget(spoil(place, value))
    with pytest.raises(TargetError) as caught:
        run(tmp_path, target, tokens, make_settings())
    message = str(caught.value)
    assert f"row {BAD_ROW} of the cache (row {BAD_ROW} of the source)" in message
    assert f"token {BAD_TOKEN} at layer {LAYERS[place]} is {value}" in message
    assert "--on-bad-state mask" in message
    assert [path.name for path in tmp_path.iterdir()] in ([], ["shard-000000.safetensors"])


def test_a_state_that_overflows_the_dtype_of_the_cache_stops_the_run(tmp_path, tokens):
    target = StubTarget(spoil(0, 70_000.0))
    with pytest.raises(TargetError, match=r"layer -1 is inf in torch.float16"):
        run(tmp_path, target, tokens, make_settings(dtype="fp16"))
    run(tmp_path, target, tokens, make_settings(dtype="bf16"))


def test_large_finite_states_are_no_bad_states(tmp_path, tokens):
    target = StubTarget(lambda ids, states: states[0].fill_(3e38))
    run(tmp_path, target, tokens, make_settings())


def test_a_bad_state_in_padding_does_not_matter(tmp_path, tokens):
    def change(ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        for row in range(len(ids)):
            states[0][row, LENGTHS[int(ids[row, 0])] :] = math.nan

    settings = make_settings()
    written = run(tmp_path / "a", StubTarget(change), tokens, settings)
    assert written == run(tmp_path / "b", StubTarget(), tokens, settings)


def test_a_row_with_a_bad_state_can_be_kept_without_states_and_supervision(
    tmp_path, tokens, caplog
):
    settings = make_settings(mask_bad_states=True)
    with caplog.at_level(logging.WARNING, logger="dspark"):
        run(tmp_path, StubTarget(spoil(2, math.nan)), tokens, settings)
    assert f"row {BAD_ROW} of the cache" in caplog.text
    run(tmp_path / "plain", StubTarget(), tokens, settings)
    for row, (found, plain) in enumerate(
        zip(rows_of(tmp_path), rows_of(tmp_path / "plain"), strict=True)
    ):
        assert torch.equal(found["input_ids"], plain["input_ids"])
        for key in ("loss_mask", "target_hidden_states", "target_last_hidden_states"):
            if row == BAD_ROW:
                assert not found[key].any()
            else:
                assert torch.equal(found[key], plain[key])
    assert list(masked_rows(str(tmp_path), tokens, settings)) == [BAD_ROW]
    assert list(masked_rows(str(tmp_path / "plain"), tokens, settings)) == []


def test_a_row_kept_without_states_is_told_even_if_it_never_had_supervision(tmp_path):
    def encoded() -> Iterator[Any]:
        for row in range(3):
            ids = np.array([BAD_ROW if row == 1 else row] * 6, dtype=np.int32)
            yield row, Conversation(ids, np.zeros(6, np.uint8), False)

    tokens = write_tokens(tmp_path / "tokens", encoded(), RowRules(), key={})
    settings = make_settings(mask_bad_states=True)
    cache = tmp_path / "cache"
    cache.mkdir()
    write_shards(str(cache), [0], StubTarget(spoil(2, math.nan)), tokens, settings)
    assert list(masked_rows(str(cache), tokens, settings)) == [1]


class ScarceMemory(StubTarget):
    """Runs out of memory whenever more than `rows` rows come at once."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def capture(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Captured:
        if len(input_ids) > self._rows:
            raise torch.OutOfMemoryError(f"{len(input_ids)} rows do not fit")
        return super().capture(input_ids, attention_mask)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_where_memory_runs_out_a_micro_batch_is_halved_and_the_bytes_stay(
    tmp_path, tokens, caplog, rows
):
    settings = make_settings(batch_size=8)
    plenty, scarce = StubTarget(), ScarceMemory(rows)
    expected = run(tmp_path / "plenty", plenty, tokens, settings)
    assert max(count for count, _ in plenty.shapes) > 1
    with caplog.at_level(logging.WARNING, logger="dspark"):
        found = run(tmp_path / "scarce", scarce, tokens, settings)
    assert found == expected
    assert all(count <= rows for count, _ in scarce.shapes)
    assert ("out of device memory" in caplog.text) == (len(scarce.shapes) > len(plenty.shapes))
    assert rows_by_width(scarce) == rows_by_width(plenty)


def rows_by_width(target: StubTarget) -> Counter[int]:
    return Counter(width for rows, width in target.shapes for _ in range(rows))


def test_a_single_row_that_does_not_fit_stops_the_run(tmp_path, tokens):
    with pytest.raises(TargetError, match=r"rows \[0\] of the cache.*1 rows do not fit"):
        run(tmp_path, ScarceMemory(0), tokens, make_settings())
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_run_the_same_forwards_do_not_halve(tmp_path, tokens):
    with pytest.raises(TargetError, match="rows do not fit"):
        run(tmp_path, ScarceMemory(1), tokens, make_settings(halve_batches=False))


def test_a_model_that_raises_is_an_error_that_names_the_rows_and_leaves_no_file(tmp_path):
    def fail(ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        if BAD_ROW in ids[:, 0]:
            raise RuntimeError("a bug in the model")

    tokens = make_tokens(tmp_path / "tokens", skipped=[0])
    cache = tmp_path / "cache"
    with pytest.raises(TargetError, match=r"RuntimeError: a bug in the model") as caught:
        run(cache, StubTarget(fail), tokens, make_settings())
    assert "[6]" in str(caught.value)  # of the cache
    assert "[7]" in str(caught.value)  # of the source
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [path.name for path in cache.iterdir()] in ([], ["shard-000000.safetensors"])


def test_an_interrupt_leaves_whole_shards_alone(tmp_path, tokens):
    def interrupt(ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        if 9 in ids[:, 0]:
            raise KeyboardInterrupt

    expected = run(tmp_path / "whole", StubTarget(), tokens, make_settings())
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        run(cache, StubTarget(interrupt), tokens, make_settings())
    for path in cache.iterdir():
        index = int(path.name.removeprefix("shard-").removesuffix(".safetensors"))
        assert path.read_bytes() == expected[index]


def test_a_full_disk_stops_the_run_and_leaves_no_file(tmp_path, tokens, monkeypatch):
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, StubTarget(), tokens, make_settings())
    assert list(tmp_path.iterdir()) == []


def test_what_the_caller_refuses_before_publishing_is_not_published(tmp_path, tokens):
    def refuse(index: int) -> None:
        raise RuntimeError(f"not shard {index}")

    with pytest.raises(RuntimeError, match="not shard 0"):
        run(tmp_path, StubTarget(), tokens, make_settings(), on_shard=refuse)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_between_micro_batches_keeps_finished_shards(tmp_path, tokens):
    class Stop(BaseException):
        pass

    seconds = []

    def check_stop(left: float) -> None:
        seconds.append(left)
        if seconds.count(math.inf) == 3:
            raise Stop

    with pytest.raises(Stop):
        run(tmp_path, StubTarget(), tokens, make_settings(), check_stop=check_stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "shard-000000.safetensors",
        "shard-000001.safetensors",
    ]
    assert all(left >= 0 for left in seconds)
    assert seconds.count(0) == 2  # after the last micro-batch of a shard nothing is left
