"""The tokenized input on disk: what is kept, counted, reused, and never made twice."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.chat import Conversation
from dspark.data import encoding
from dspark.data.encoding import BadRow, encode_rows, read_parts, write_part
from dspark.data.rows import SourceRow
from dspark.data.tokens import RowRules, Tokens, load_tokens, write_tokens
from dspark.errors import DataError, RowError

KEY = {"files": [{"path": "chats.jsonl", "size": 3}], "seq_length": 8}


class CountingEncoder:
    """Makes row {"tokens": n} into the ids 0 … n-1; cuts at 8, supervises every id but 0."""

    def encode(self, row: Mapping[str, Any]) -> Conversation:
        if "bad" in row:
            raise RowError(row["bad"], "as asked for")
        ids = np.arange(row["tokens"], dtype=np.int32)[:8]
        warnings = tuple(row.get("warnings", ()))
        return Conversation(ids, (ids > 0).astype(np.uint8), row["tokens"] > 8, warnings)


def source(*values: Any) -> list[SourceRow]:
    """Return rows of so many tokens; text makes a bad row, and a mapping is taken as it is."""
    rows = []
    for number, value in enumerate(values):
        row = {"tokens": value} if isinstance(value, int) else value
        row = {"bad": row} if isinstance(row, str) else row
        rows.append(SourceRow(number, f"chats.jsonl line {number + 1}", json.dumps(row).encode()))
    return rows


def write(directory: Path, *values: Any, workers: int = 1, **rules: Any) -> Tokens:
    encoded = encode_rows(source(*values), CountingEncoder(), workers)
    return write_tokens(directory, encoded, RowRules(**rules), key=KEY)


def lengths_of(tokens: Tokens) -> list[int]:
    return tokens.lengths.tolist()


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_rows_come_back_as_they_were_encoded(tmp_path):
    tokens = write(tmp_path, 3, 1, 8)
    for row, length in enumerate((3, 1, 8)):
        ids, mask = tokens.row(row)
        assert ids.dtype == np.int32
        assert mask.dtype == np.uint8
        assert ids.tolist() == list(range(length))
        assert mask.tolist() == [0] + [1] * (length - 1)
    assert tokens.largest_id == 7


def test_rows_tokens_supervision_and_cuts_are_counted(tmp_path):
    counts = write(tmp_path, 3, 20, 8, 9).counts
    assert (counts.rows, counts.source_rows) == (4, 4)
    assert counts.tokens == 3 + 8 + 8 + 8
    assert counts.supervised_tokens == 2 + 7 + 7 + 7
    assert counts.cut_rows == 2
    assert counts.skipped == {}


def test_the_files_are_plain_arrays(tmp_path):
    write(tmp_path, 3, "no user", 2, skip_bad_rows=True)
    assert sorted(files(tmp_path)) == [
        "input_ids.bin",
        "lengths.bin",
        "loss_mask.bin",
        "source_rows.bin",
        "tokens.json",
    ]
    assert np.fromfile(tmp_path / "input_ids.bin", np.int32).tolist() == [0, 1, 2, 0, 1]
    assert np.fromfile(tmp_path / "loss_mask.bin", np.uint8).tolist() == [0, 1, 1, 0, 1]
    assert np.fromfile(tmp_path / "lengths.bin", np.int64).tolist() == [3, 2]
    assert np.fromfile(tmp_path / "source_rows.bin", np.int64).tolist() == [0, 2]


def test_the_hash_covers_lengths_ids_and_masks_in_order(tmp_path):
    expected = hashlib.sha256()
    for length in (3, 1):
        ids = np.arange(length, dtype=np.int32)
        for part in (np.int64(length), ids, (ids > 0).astype(np.uint8)):
            expected.update(part.tobytes())
    assert write(tmp_path / "a", 3, 1).counts.sha256 == expected.hexdigest()
    assert write(tmp_path / "b", 1, 3).counts.sha256 != expected.hexdigest()


def test_the_hash_does_not_depend_on_rows_that_are_left_out(tmp_path):
    plain = write(tmp_path / "a", 3, 2).counts
    skipped = write(tmp_path / "b", 3, "no user", 2, skip_bad_rows=True).counts
    assert plain.sha256 == skipped.sha256


def test_a_bad_row_stops_and_says_where_and_how_to_go_on(tmp_path):
    with pytest.raises(DataError, match=r"chats.jsonl line 2: no user: as asked") as caught:
        write(tmp_path, 3, "no user", 2)
    assert "--on-bad-row skip" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_no_json_is_a_bad_row(tmp_path):
    rows = [SourceRow(0, "chats.jsonl line 1", b"{"), *source(2)]
    encoded = encode_rows(rows, CountingEncoder(), 1)
    with pytest.raises(DataError, match=r"chats.jsonl line 1: invalid JSON"):
        write_tokens(tmp_path, encoded, RowRules(), key=KEY)


def test_bad_rows_are_left_out_and_counted_by_reason_on_request(tmp_path):
    tokens = write(tmp_path, "no user", 3, "empty", 2, "no user", skip_bad_rows=True)
    assert lengths_of(tokens) == [3, 2]
    assert tokens.source_rows.tolist() == [1, 3]
    assert tokens.any_skipped
    assert tokens.counts.skipped == {"empty": 1, "no user": 2}
    assert (tokens.counts.rows, tokens.counts.source_rows) == (2, 5)


def test_rows_with_little_supervision_are_left_out_and_counted(tmp_path):
    tokens = write(tmp_path, 3, 4, 1, 5, min_loss_tokens=3)
    assert lengths_of(tokens) == [4, 5]
    assert tokens.counts.skipped == {"fewer than 3 supervised tokens": 2}
    assert tokens.source_rows.tolist() == [1, 3]


def test_by_default_a_row_without_supervision_is_kept(tmp_path):
    tokens = write(tmp_path, 1, 3)
    assert lengths_of(tokens) == [1, 3]
    assert not tokens.any_skipped


def test_max_samples_counts_rows_that_are_kept(tmp_path):
    tokens = write(tmp_path, "no user", 3, 1, 4, 5, 6, skip_bad_rows=True, min_loss_tokens=1)
    assert lengths_of(tokens) == [3, 4, 5, 6]
    some = write(
        tmp_path / "some",
        *("no user", 3, 1, 4, 5, 6),
        skip_bad_rows=True,
        min_loss_tokens=1,
        max_samples=2,
    )
    assert lengths_of(some) == [3, 4]
    assert some.counts.source_rows == 4


def test_a_bad_row_beyond_max_samples_is_never_looked_at(tmp_path):
    assert lengths_of(write(tmp_path, 3, 2, "no user", max_samples=2)) == [3, 2]


def test_fewer_rows_than_max_samples_are_all_kept(tmp_path):
    assert lengths_of(write(tmp_path, 3, 2, max_samples=9)) == [3, 2]


def test_an_empty_input_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no row is left.*input is empty.*--input-data"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_input_of_bad_rows_alone_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no row is left.*all 2 rows were left out: 2 no user"):
        write(tmp_path, "no user", "no user", skip_bad_rows=True)


def test_every_row_is_reported_as_progress(tmp_path):
    seen = []
    write_tokens(
        tmp_path,
        encode_rows(source(3, "no user", 2), CountingEncoder(), 1),
        RowRules(skip_bad_rows=True),
        key=KEY,
        on_row=lambda: seen.append(1),
    )
    assert len(seen) == 3


def test_what_rows_have_to_say_is_said_once(tmp_path):
    counts = write(
        tmp_path,
        {"tokens": 3, "warnings": ["no end token"]},
        {"tokens": 2, "warnings": ["no tools", "no end token"]},
    ).counts
    assert counts.warnings == ["no end token", "no tools"]


def test_tokens_of_the_same_key_are_loaded(tmp_path):
    written = write(tmp_path, 3, 1, 8)
    loaded = load_tokens(tmp_path, dict(reversed(KEY.items())))
    assert loaded is not None
    assert loaded.counts == written.counts
    assert lengths_of(loaded) == [3, 1, 8]
    assert loaded.row(2)[0].tolist() == list(range(8))


@pytest.mark.parametrize(
    "key",
    [
        KEY | {"seq_length": 9},
        KEY | {"files": [{"path": "chats.jsonl", "size": 4}]},
        KEY | {"more": None},
        {"seq_length": 8},
        {},
    ],
)
def test_tokens_of_another_key_are_not_loaded(tmp_path, key):
    write(tmp_path, 3, 1)
    assert load_tokens(tmp_path, key) is None


def test_no_tokens_are_loaded_where_none_were_written(tmp_path):
    assert load_tokens(tmp_path / "nowhere", KEY) is None


DAMAGES = {
    "no record": lambda d: (d / "tokens.json").unlink(),
    "empty record": lambda d: (d / "tokens.json").write_bytes(b""),
    "half a record": lambda d: (d / "tokens.json").write_bytes(b'{"key": '),
    "record of another kind": lambda d: (d / "tokens.json").write_bytes(b"[]"),
    "record of nothing": lambda d: (d / "tokens.json").write_bytes(b"null"),
    "record without counts": lambda d: (d / "tokens.json").write_text(json.dumps({"key": KEY})),
    "record with other counts": lambda d: (d / "tokens.json").write_text(
        json.dumps({"key": KEY, "counts": {"rows": 2, "unknown": 1}})
    ),
    "no ids": lambda d: (d / "input_ids.bin").unlink(),
    "ids cut short": lambda d: (d / "input_ids.bin").write_bytes(b"123"),
    "mask cut short": lambda d: (d / "loss_mask.bin").write_bytes(b"1"),
    "no lengths": lambda d: (d / "lengths.bin").unlink(),
    "ids of another value": lambda d: flip(d / "input_ids.bin"),
    "mask of another value": lambda d: flip(d / "loss_mask.bin"),
    "lengths of another value": lambda d: flip(d / "lengths.bin"),
}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_tokens_are_not_loaded(tmp_path, damage):
    write(tmp_path, 3, 1)
    damage(tmp_path)
    assert load_tokens(tmp_path, KEY) is None


def test_writing_replaces_what_was_there(tmp_path):
    write(tmp_path, 3, 1, 8)
    assert lengths_of(write(tmp_path, 2)) == [2]
    loaded = load_tokens(tmp_path, KEY)
    assert loaded is not None
    assert lengths_of(loaded) == [2]


def test_a_failed_pass_leaves_no_tokens_to_load(tmp_path):
    write(tmp_path, 3, 1)
    with pytest.raises(DataError):
        write(tmp_path, 3, "no user")
    assert load_tokens(tmp_path, KEY) is None


@pytest.fixture
def small_chunks(monkeypatch):
    """Let a handful of rows be enough for workers and for several chunks."""
    monkeypatch.setattr(encoding, "_ROWS_BEFORE_WORKERS", 5)
    monkeypatch.setattr(encoding, "_CHUNK_ROWS", 3)


ROWS = [1 + row % 11 for row in range(40)]


@pytest.mark.usefixtures("small_chunks")
def test_worker_processes_give_the_very_same_files(tmp_path):
    values = [*ROWS[:20], "no user", *ROWS[20:], {"tokens": 4, "warnings": ["late"]}]
    for workers in (1, 2):
        write(tmp_path / f"{workers}", *values, workers=workers, skip_bad_rows=True)
    assert files(tmp_path / "1") == files(tmp_path / "2")
    tokens = load_tokens(tmp_path / "2", KEY)
    assert tokens is not None
    assert tokens.counts.warnings == ["late"]
    assert tokens.counts.skipped == {"no user": 1}


@pytest.mark.usefixtures("small_chunks")
def test_a_bad_row_found_by_a_worker_stops_with_its_place(tmp_path):
    with pytest.raises(DataError, match=r"chats.jsonl line 31: no user"):
        write(tmp_path, *ROWS[:30], "no user", *ROWS[30:], workers=2)
    assert list(tmp_path.iterdir()) == []


def test_a_short_input_starts_no_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", lambda *_: pytest.fail("not needed"))
    assert lengths_of(write(tmp_path, 3, 1, workers=4)) == [3, 1]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rows", [1, 3, 20, 40])
def test_shares_read_together_are_the_rows_in_order(tmp_path, num_shares, num_rows):
    values = [*ROWS[: num_rows - 1], "no user"]
    rules = RowRules(skip_bad_rows=True)
    paths = [tmp_path / f"{share}" for share in range(num_shares)]
    for share, path in enumerate(paths):
        write_part(
            path,
            source(*values),
            CountingEncoder(),
            num_workers=1,
            share=share,
            num_shares=num_shares,
            is_last=rules.last_of_part(),
        )
    items = list(read_parts(paths))
    numbers = [item.number if isinstance(item, BadRow) else item[0] for item in items]
    assert numbers == list(range(num_rows))
    direct = list(encode_rows(source(*values), CountingEncoder(), 1))
    for found, expected in zip(items, direct, strict=True):
        if isinstance(expected, BadRow):
            assert found == expected
        else:
            assert found[1].input_ids.tolist() == expected[1].input_ids.tolist()
            assert found[1].loss_mask.tolist() == expected[1].loss_mask.tolist()
            assert found[1].truncated == expected[1].truncated


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("max_samples", [1, 4, 9, 100])
def test_shares_hold_enough_rows_for_max_samples(tmp_path, max_samples):
    rules = RowRules(min_loss_tokens=3, max_samples=max_samples)
    paths = [tmp_path / f"{share}" for share in range(3)]
    for share, path in enumerate(paths):
        write_part(
            path,
            source(*ROWS),
            CountingEncoder(),
            num_workers=1,
            share=share,
            num_shares=3,
            is_last=rules.last_of_part(),
        )
    shared = write_tokens(tmp_path / "shared", read_parts(paths), rules, key=KEY)
    write(tmp_path / "alone", *ROWS, min_loss_tokens=3, max_samples=max_samples)
    assert files(shared.directory) == files(tmp_path / "alone")
