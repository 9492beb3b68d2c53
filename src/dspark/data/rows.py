"""Input files, folders and Hub datasets as one ordered stream of rows.

    --input-data a.jsonl b.parquet org/name
         each input by itself:  order (file order, or shuffled)  ->  slice of --split
         then joined in the order given

JSON and JSONL keep file order. Parquet, ``save_to_disk`` folders and Hub datasets are ordered as
``datasets.Dataset.shuffle(seed=...)`` orders them, unless the seed is None. Rows are not decoded
here: a worker process calls :meth:`SourceRow.value`. Row numbers count from 0, lines from 1.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from dspark.data.columns import open_hub, open_parquet, open_saved
from dspark.data.row_files import (
    SUFFIXES,
    data_suffix,
    file_fingerprint,
    holds_json_lines,
    iter_lines,
    list_data_files,
    read_json,
)
from dspark.data.split_slice import SplitSlice, parse_split
from dspark.errors import DataError, RowError

Raw = bytes | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of the input, not decoded yet.

    Attributes:
        number: Place in the ordered, sliced and joined input, from 0, before any row is skipped.
        where: Where a person finds it: "in/chats.jsonl line 12", "in/data.parquet row 7".
        raw: A line of JSON, or the row itself.
    """

    number: int
    where: str
    raw: Raw

    def value(self) -> Mapping[str, Any]:
        """Return the decoded row.

        Raises:
            RowError: If the line is not valid JSON, or the row is not an object.
        """
        value = self.raw
        if isinstance(value, bytes):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise RowError("invalid JSON", str(error)) from error
        if not isinstance(value, Mapping):
            raise RowError("row is not an object", f"got {type(value).__name__}")
        return value


class _Input(Protocol):
    """One value of ``--input-data``, ordered but not sliced."""

    @property
    def description(self) -> dict[str, Any]:
        """What is read, and in which order, as JSON for provenance."""

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """What changes when the input does: files with size and time, or a revision."""

    def count(self) -> int:
        """Return the number of rows."""

    def rows(self, selected: range | None) -> Iterable[tuple[str, Raw]]:
        """Yield (where, raw) of the `selected` rows, or of all."""


class RowSource(Iterable[SourceRow]):
    """The ordered, sliced and joined input. Iterating again starts from the beginning."""

    def __init__(self, inputs: Sequence[_Input], split: SplitSlice) -> None:
        self._inputs = inputs
        self._split = split

    def __iter__(self) -> Iterator[SourceRow]:
        number = 0
        for source in self._inputs:
            for where, raw in source.rows(self._selection(source)):
                yield SourceRow(number, where, raw)
                number += 1

    def _selection(self, source: _Input) -> range | None:
        if self._split.is_whole:
            return None
        if self._split.needs_count:
            return self._split.resolve(source.count())
        return self._split.resolve(sys.maxsize)  # plain numbers: no need to count a large file

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """Per file its path, size and time of change in ns; per Hub dataset its revision."""
        return [item for source in self._inputs for item in source.fingerprint]

    @property
    def description(self) -> list[dict[str, Any]]:
        """Per input what was applied to it: format, order and slice, as JSON."""
        applied = None if self._split.is_whole else str(self._split)
        return [{**source.description, "slice": applied} for source in self._inputs]


def open_rows(
    inputs: Sequence[str],
    *,
    split: str | None = None,
    dataset_config: str | None = None,
    shuffle_seed: int | None = 42,
) -> RowSource:
    """Open one or more inputs as one stream of rows.

    Args:
        inputs: Files (.jsonl, .ndjson, .json, .parquet, also .gz or .zst), folders of them,
            ``save_to_disk`` folders or Hub dataset ids.
        split: Split name with an optional slice, applied to each input by itself. A file or a
            folder of files is the split ``train``.
        dataset_config: Configuration of Hub datasets.
        shuffle_seed: Orders parquet, ``save_to_disk`` and Hub data; None keeps their own order.

    Raises:
        DataError: If an input cannot be read, or the split does not exist.
        FileNotFoundError: If an input looks like a local path and is not there.
    """
    if isinstance(inputs, str) or not inputs:
        raise DataError(f"expected at least one input in a list, got {inputs!r}")
    spec = parse_split(split)
    return RowSource(
        [_open(name, spec.name, dataset_config, shuffle_seed) for name in inputs], spec
    )


def _open(name: str, split: str | None, config: str | None, seed: int | None) -> _Input:
    if not name.strip():
        raise DataError("an input has no name: --input-data got an empty text")
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(path, split, seed)
    if path.exists():
        if not path.is_file():
            raise DataError(f"{name} is no regular file: it is read more than once, write it down")
        return _open_files([path], path, split, seed)
    if _looks_local(name):
        raise FileNotFoundError(f"input data not found: {name}")
    return open_hub(name, split=split, config=config, seed=seed)


def _looks_local(name: str) -> bool:
    """Whether a missing `name` was meant as a path: a Hub id is ``name`` or ``org/name``."""
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or name.count("/") > 1
        or name.endswith("/")
        or data_suffix(Path(name)) in SUFFIXES
        or ("/" in name and Path(name).parent.exists())
    )


def _open_folder(folder: Path, split: str | None, seed: int | None) -> _Input:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return open_saved(folder, split=split, seed=seed)
    return _open_files(list_data_files(folder), folder, split, seed)


def _open_files(files: list[Path], named: Path, split: str | None, seed: int | None) -> _Input:
    if split not in (None, "train"):
        raise DataError(f"{named} has no split {split!r}; plain files have one split: 'train'")
    suffixes = {data_suffix(path) for path in files}
    if suffixes == {".parquet"}:
        return open_parquet(files, named=named, seed=seed)
    if not suffixes <= set(SUFFIXES):
        raise DataError(
            f"{named} has an unknown format: expected {', '.join(SUFFIXES)}, also with .gz or .zst"
        )
    return _JsonFiles(files, named)


class _JsonFiles:
    """JSON and JSONL files, one after the other, in file order."""

    def __init__(self, files: list[Path], named: Path) -> None:
        self._files = files
        self._named = named

    @property
    def description(self) -> dict[str, Any]:
        return {"path": str(self._named), "format": "json", "order": "file"}

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        return [file_fingerprint(path) for path in self._files]

    def count(self) -> int:
        return sum(1 for _ in self.rows(None))

    def rows(self, selected: range | None) -> Iterable[tuple[str, Raw]]:
        if selected is None:
            return self._all()
        return islice(self._all(), selected.start, selected.stop)

    def _all(self) -> Iterator[tuple[str, Raw]]:
        for path in self._files:
            if holds_json_lines(path):
                for line, raw in iter_lines(path):
                    yield f"{path} line {line}", raw
            else:
                for row, value in enumerate(read_json(path)):
                    yield f"{path} row {row}", value
