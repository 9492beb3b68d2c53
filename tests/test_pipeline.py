"""From tokens to shards: every cached row is the target's, whatever runs beside it."""

import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from containers import dspark_record
from dspark.cache import compute_batch_cache, shard_path, write_manifest, write_shard
from dspark.chat import Conversation
from dspark.data.tokens import RowRules, Tokens, write_tokens
from dspark.disk.shard_check import check_shard
from dspark.job.forward import ShardSettings, forwards, shard_batches, shard_record
from dspark.job.pipeline import follow_shards, write_shards
from dspark.model.capture import Target
from stub_target import (
    LAYERS,
    LENGTHS,
    PAD,
    SEQ_LENGTH,
    SHARDS,
    WIDTH,
    StubTarget,
    make_manifest,
    make_settings,
    make_tokens,
    rows_of,
    run,
)
from tiny_models import tiny_qwen3


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3()


def assert_close_per_token(found: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    largest = expected.abs().amax(dim=-1, keepdim=True)
    assert ((found - expected).abs() <= scale * largest).all()


@torch.no_grad()
def test_every_state_is_that_of_its_row_run_alone(tmp_path, tokens, model):
    run(tmp_path, Target(model, LAYERS), tokens, make_settings())
    for row, found in enumerate(rows_of(tmp_path)):
        length = LENGTHS[row]
        ids = found["input_ids"][:length]
        states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
        for place, layer in enumerate(LAYERS):
            part = found["target_hidden_states"][:length, place * WIDTH : (place + 1) * WIDTH]
            assert_close_per_token(part, states[layer + 1][0], 1e-5)
        assert_close_per_token(found["target_last_hidden_states"][:length], states[-1][0], 1e-5)


@torch.no_grad()
def test_a_bf16_cache_has_one_rounding_more(tmp_path, tokens, model):
    run(tmp_path, Target(model, LAYERS), tokens, make_settings(dtype="bf16"))
    for row, found in enumerate(rows_of(tmp_path)):
        length = LENGTHS[row]
        states = model(input_ids=found["input_ids"][None, :length], output_hidden_states=True)
        last = found["target_last_hidden_states"]
        assert last.dtype == torch.bfloat16
        expected = states.hidden_states[-1][0]
        allowed = 1e-5 * expected.abs().amax(dim=-1, keepdim=True) + 2**-8 * expected.abs()
        assert ((last[:length].float() - expected).abs() <= allowed).all()


def test_ids_and_masks_are_those_of_the_input_and_padding_is_as_the_format_says(tmp_path, tokens):
    run(tmp_path, StubTarget(), tokens, make_settings())
    rows = rows_of(tmp_path)
    assert len(rows) == len(LENGTHS)
    for row, found in enumerate(rows):
        ids, mask = tokens.row(row)
        length = len(ids)
        assert found["input_ids"].tolist() == [*ids, *[PAD] * (SEQ_LENGTH - length)]
        assert found["loss_mask"].tolist() == [*mask, *[0] * (SEQ_LENGTH - length)]
        assert found["target_hidden_states"][:length].any()
        for key in ("target_hidden_states", "target_last_hidden_states"):
            assert not found[key][length:].any()


def test_layers_lie_side_by_side_in_the_order_of_their_ids(tmp_path, tokens):
    run(tmp_path, StubTarget(), tokens, make_settings())
    for row, found in enumerate(rows_of(tmp_path)):
        ids = torch.tensor(tokens.row(row)[0])
        base = ids.unsqueeze(-1) + torch.arange(WIDTH) / WIDTH
        expected = torch.cat([base * (place + 1) for place in range(len(LAYERS))], dim=-1)
        assert torch.equal(found["target_hidden_states"][: len(ids)], expected)
        assert torch.equal(found["target_last_hidden_states"][: len(ids)], base * len(LAYERS))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("skipped", [(), (1, 6)], ids=["all rows", "rows left out"])
def test_the_bytes_are_those_of_write_shard(tmp_path, model, dtype, skipped):
    tokens = make_tokens(tmp_path / "tokens", skipped=skipped)
    settings, target = make_settings(dtype=dtype), Target(model, LAYERS)
    written = run(tmp_path / "streamed", target, tokens, settings)
    whole = tmp_path / "whole"
    whole.mkdir()
    write_manifest(str(whole), make_manifest(dtype))
    for index in SHARDS:
        batch = padded_batch(index, target, tokens, settings)
        samples = compute_batch_cache(batch, settings.dtype)
        if skipped:
            samples["rows"] = torch.tensor(shard_record(index, tokens, settings).rows)
        path = Path(write_shard(str(whole), index, samples))
        assert path.read_bytes() == written[index]


def padded_batch(
    index: int, target: Any, tokens: Tokens, settings: ShardSettings
) -> SimpleNamespace:
    """Return one whole shard as the batch of a plain implementation would be."""
    record = shard_record(index, tokens, settings)
    count, first = len(record.lengths), index * settings.shard_size
    batch = SimpleNamespace(
        input_ids=torch.full((count, SEQ_LENGTH), PAD),
        loss_mask=torch.zeros(count, SEQ_LENGTH, dtype=torch.bool),
        target_hidden_states=torch.full((count, SEQ_LENGTH, WIDTH * len(LAYERS)), 9.0),
        target_last_hidden_states=torch.full((count, SEQ_LENGTH, WIDTH), 9.0),
        lengths=record.lengths,
    )
    for row in range(count):
        ids, mask = tokens.row(first + row)
        batch.input_ids[row, : len(ids)] = torch.tensor(ids)
        batch.loss_mask[row, : len(ids)] = torch.tensor(mask).bool()
    batches = shard_batches(index, tokens, settings)
    for rows, captured in forwards(target, batches, tokens, settings):
        width = captured.last.shape[1]
        for position, row in enumerate(rows):
            batch.target_hidden_states[row - first, :width] = captured.hidden_states[position]
            batch.target_last_hidden_states[row - first, :width] = captured.last[position]
    return batch


@pytest.mark.parametrize(("threads", "queue_size"), [(1, 1), (1, 5), (2, 2), (4, 9)])
def test_threads_and_queue_do_not_show_in_the_bytes(tmp_path, tokens, model, threads, queue_size):
    settings, target = make_settings(), Target(model, LAYERS)
    plain = run(tmp_path / "plain", target, tokens, settings)
    options = {"threads": threads, "queue_size": queue_size}
    assert run(tmp_path / "other", target, tokens, settings, **options) == plain


def test_a_shard_does_not_depend_on_the_shards_before_it(tmp_path, tokens, model):
    settings, target = make_settings(), Target(model, LAYERS)
    written = run(tmp_path / "all", target, tokens, settings)
    alone = tmp_path / "alone"
    alone.mkdir()
    write_shards(str(alone), [2, 1], target, tokens, settings)
    assert sorted(path.name for path in alone.iterdir()) == [
        "shard-000001.safetensors",
        "shard-000002.safetensors",
    ]
    for index in (1, 2):
        assert Path(shard_path(str(alone), index)).read_bytes() == written[index]


def test_every_shard_passes_the_check_of_a_resumed_run(tmp_path, tokens):
    settings = make_settings()
    run(tmp_path, StubTarget(), tokens, settings)
    for index in SHARDS:
        check_shard(
            Path(shard_path(str(tmp_path), index)),
            settings.row_specs,
            shard_record(index, tokens, settings),
            padding={"input_ids": PAD, "loss_mask": 0, "target_last_hidden_states": 0},
        )


def test_source_rows_are_named_where_some_were_left_out(tmp_path):
    tokens = make_tokens(tmp_path / "tokens", skipped=[0, 2])
    run(tmp_path / "cache", StubTarget(), tokens, make_settings())
    record = dspark_record(Path(shard_path(str(tmp_path / "cache"), 0)))
    assert record["rows"] == [1, 3, 4, 5]


def test_a_forward_holds_the_budget_and_is_as_wide_as_its_longest_row(tmp_path, tokens):
    target = StubTarget()
    run(tmp_path, target, tokens, make_settings())
    assert sum(rows for rows, _ in target.shapes) == len(LENGTHS)
    assert all(rows * width <= 2 * SEQ_LENGTH for rows, width in target.shapes)
    assert {width for _, width in target.shapes} <= set(LENGTHS)


@pytest.mark.parametrize("pad", [0, PAD])
def test_attention_goes_by_the_true_length_whatever_the_pad_id(tmp_path, pad):
    def encoded() -> Iterator[Any]:
        for row, length in enumerate((20, 19, 20)):
            ids = np.full(length, pad, dtype=np.int32)  # real tokens with the id that pads
            ids[0] = row
            yield row, Conversation(ids, np.ones(length, np.uint8), False)

    tokens = write_tokens(tmp_path / "tokens", encoded(), RowRules(), key={})
    target = StubTarget()
    (tmp_path / "cache").mkdir()
    settings = make_settings(batch_size=4, pad_token_id=pad)
    write_shards(str(tmp_path / "cache"), [0], target, tokens, settings)
    assert target.shapes == [(3, 20)]
    assert {row: sum(mask) for row, (_, mask) in target.rows.items()} == {0: 20, 1: 19, 2: 20}
    assert target.rows[1] == ([1, *[pad] * 19], [*[1] * 19, 0])


def test_rows_tokens_and_shards_are_reported(tmp_path, tokens):
    rows, shards = [], []
    options = {"on_rows": lambda *counts: rows.append(counts), "on_shard": shards.append}
    run(tmp_path, StubTarget(), tokens, make_settings(), **options)
    assert [sum(column) for column in zip(*rows, strict=True)] == [len(LENGTHS), sum(LENGTHS)]
    assert shards == list(SHARDS)


@pytest.mark.parametrize("queue_size", [1, 3])
def test_only_a_few_micro_batches_are_in_memory(tmp_path, tokens, queue_size):
    living: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []

    def watch(ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        living.add(states[0])
        most.append(len(living))

    options = {"queue_size": queue_size, "on_rows": lambda *_: time.sleep(0.01)}
    run(tmp_path, StubTarget(watch), tokens, make_settings(batch_size=1), **options)
    assert len(most) > queue_size + 2
    assert max(most) <= queue_size + 2  # waiting or being written, waiting for room, new


def test_states_that_were_written_are_gone_before_the_next_forward_ends(tmp_path, tokens):
    living: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    left_over = []

    def watch(ids: torch.Tensor, states: list[torch.Tensor]) -> None:
        patience = time.monotonic() + 5
        while living and time.monotonic() < patience:
            time.sleep(0.001)  # the writer may still be at the micro-batch before
        left_over.append(len(living))
        living.add(states[0])

    run(tmp_path, StubTarget(watch), tokens, make_settings())
    assert set(left_over) == {0}


def test_a_rank_that_follows_runs_the_same_forwards_and_writes_nothing(tmp_path, tokens):
    writer, follower = StubTarget(), StubTarget()
    settings = make_settings()
    run(tmp_path, writer, tokens, settings)
    before = sorted(tmp_path.iterdir())
    follow_shards(SHARDS, follower, tokens, settings, lambda seconds_left: None)
    assert follower.shapes == writer.shapes
    assert sorted(tmp_path.iterdir()) == before
