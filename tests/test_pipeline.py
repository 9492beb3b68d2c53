"""From tokens to shards: every cached row is the target's, whatever runs beside it."""

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from containers import dspark_record
from dspark.cache import compute_batch_cache, shard_path, write_manifest, write_shard
from dspark.chat import Conversation
from dspark.data.encoding import BadRow
from dspark.data.tokens import RowRules, Tokens, write_tokens
from dspark.disk.manifest import identity_digest
from dspark.disk.shard_check import check_shard
from dspark.errors import TargetError
from dspark.job.bad_states import masked_rows
from dspark.job.forward import ShardSettings, forwards, shard_batches, shard_record
from dspark.job.pipeline import follow_shards, write_shards
from dspark.model.capture import Captured, Target
from dspark.schema.cache_manifest import row_specs
from dspark_caches import a_manifest
from tiny_models import tiny_qwen3

SEQ_LENGTH, SHARD_SIZE, PAD = 24, 4, 5
LENGTHS = [24, 23, 11, 24, 1, 8, 7, 19, 2, 23, 6]
SHARDS = range(3)
LAYERS = [-1, 0, 2, 3]
WIDTH = 32


def make_tokens(directory: Path, *, skipped: Sequence[int] = ()) -> Tokens:
    """Write rows of random ids; their first id is their number, by which stubs know them."""
    random = np.random.default_rng(0)

    def encoded() -> Iterator[Any]:
        for row, length in enumerate(LENGTHS):
            ids = random.integers(0, 128, length, dtype=np.int32)
            ids[0] = row
            mask = (np.arange(length) % 3 == 2).astype(np.uint8)
            if row in skipped:
                yield BadRow(row, "somewhere", "no user", "no user")
            else:
                yield row, Conversation(ids, mask, False)

    return write_tokens(directory, encoded(), RowRules(skip_bad_rows=True), key={})


def make_manifest(dtype: str = "fp32") -> dict[str, Any]:
    return a_manifest(
        target_text_config=SimpleNamespace(vocab_size=128, hidden_size=WIDTH, num_hidden_layers=4),
        seq_length=SEQ_LENGTH,
        dtype=dtype,
        num_samples=len(LENGTHS),
        shard_size=SHARD_SIZE,
        target_layer_ids=LAYERS,
    )


def make_settings(dtype: str = "fp32", **changes: Any) -> ShardSettings:
    manifest = make_manifest(dtype)
    fields = {
        "row_specs": row_specs(manifest),
        "identity": identity_digest(manifest),
        "shard_size": SHARD_SIZE,
        "batch_size": 2,
        "pad_token_id": PAD,
        "layer_ids": LAYERS,
    }
    return ShardSettings(**(fields | changes))


class StubTarget:
    """States that are a function of the ids alone; `spoil` may change them, or raise."""

    device = torch.device("cpu")

    def __init__(self, spoil: Any = lambda ids, states: None) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # ids and mask by first id
        self._spoil = spoil

    def capture(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Captured:
        self.shapes.append(tuple(input_ids.shape))
        for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
            self.rows[ids[0]] = (ids, mask)
        base = input_ids.unsqueeze(-1) + torch.arange(WIDTH) / WIDTH
        states = [base * (place + 1) for place in range(len(LAYERS))]
        states = [
            state * attention_mask.unsqueeze(-1) + 7 * (1 - attention_mask.unsqueeze(-1))
            for state in states
        ]
        self._spoil(input_ids, states)
        return Captured(tuple(states), states[-1].clone())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3()


def run(
    cache: Path, target: Any, tokens: Tokens, settings: ShardSettings, **options: Any
) -> dict[int, bytes]:
    """Write all shards and return their bytes by number."""
    cache.mkdir(exist_ok=True)
    write_shards(str(cache), SHARDS, target, tokens, settings, **options)
    return {index: Path(shard_path(str(cache), index)).read_bytes() for index in SHARDS}


def rows_of(cache: Path) -> list[dict[str, torch.Tensor]]:
    """Return every row on disk, in order, as another library reads it."""
    shards = [load_file(shard_path(str(cache), index)) for index in SHARDS]
    return [
        {name: tensor[row] for name, tensor in shard.items()}
        for shard in shards
        for row in range(len(shard["input_ids"]))
    ]


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


def test_a_rank_that_follows_runs_the_same_forwards_and_writes_nothing(tmp_path, tokens):
    writer, follower = StubTarget(), StubTarget()
    settings = make_settings()
    run(tmp_path, writer, tokens, settings)
    before = sorted(tmp_path.iterdir())
    follow_shards(SHARDS, follower, tokens, settings, lambda seconds_left: None)
    assert follower.shapes == writer.shapes
    assert sorted(tmp_path.iterdir()) == before
