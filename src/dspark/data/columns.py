"""Columnar inputs: parquet files, ``save_to_disk`` folders and Hub datasets, in shuffled order.

A columnar file gives every row every column, and every struct every field, so what a row never
had arrives as null. Such nulls are dropped here: they count as absent.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.data.row_files import decompressed_copy, file_fingerprint
from dspark.errors import DataError

if TYPE_CHECKING:
    import datasets

_ROWS_AT_ONCE = 256


class ColumnarInput:
    """A ``datasets.Dataset`` read in the order its own shuffle would give.

    Args:
        dataset: The unsliced, unshuffled split.
        label: Names the dataset in a row's ``where``.
        description: What is read, as JSON.
        fingerprint: What changes when the data does.
        seed: Seed of the shuffle; None keeps the dataset's order.
    """

    def __init__(
        self,
        dataset: "datasets.Dataset",
        *,
        label: str,
        description: dict[str, Any],
        fingerprint: list[dict[str, Any]],
        seed: int | None,
    ) -> None:
        self._dataset = dataset
        self._label = label
        self._seed = seed
        order = "file" if seed is None else f"datasets.Dataset.shuffle(seed={seed})"
        self.description = {**description, "order": order}
        self.fingerprint = fingerprint

    def count(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def rows(self, selected: range | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (where, row) of the `selected` places in the order, or of all.

        The row number in ``where`` is the one in the dataset's own order.
        """
        order = _shuffled(len(self._dataset), self._seed)
        if selected is not None:
            order = order[selected.start : selected.stop]
        for begin in range(0, len(order), _ROWS_AT_ONCE):
            numbers = order[begin : begin + _ROWS_AT_ONCE].tolist()
            columns = self._dataset[numbers]
            for i, number in enumerate(numbers):
                row = {name: values[i] for name, values in columns.items()}
                yield f"{self._label} row {number}", without_nulls(row)


def _shuffled(num_rows: int, seed: int | None) -> np.ndarray:
    """Return row numbers, int64 [num_rows], in the order of ``Dataset.shuffle(seed=seed)``."""
    if seed is None:
        return np.arange(num_rows)
    import datasets

    # The library shuffles a column of row numbers, so the order stays its own by construction.
    numbers = datasets.Dataset.from_dict({"row": np.arange(num_rows)}).shuffle(seed=seed)
    return np.asarray(numbers.with_format("numpy")["row"][:], dtype=np.int64)


def without_nulls(value: Any) -> Any:
    """Return `value` without the null fields of its objects, at any depth; list items stay."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep the library's progress bars out of logs, where each step would be a line."""
    import datasets

    was_on = datasets.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()


def open_parquet(files: Sequence[Path], *, named: Path, seed: int | None) -> ColumnarInput:
    """Open parquet files as one dataset.

    Raises:
        DataError: If the files are not parquet, or differ in their columns.
    """
    import datasets
    from pyarrow import parquet

    try:
        with TemporaryDirectory() as folder, _bars_on_terminals_only():
            plain = [decompressed_copy(path.resolve(), Path(folder)) for path in files]
            plain = [path for path in plain if parquet.read_metadata(path).num_rows]
            if not plain:
                raise DataError(f"{named} has no rows")
            # Read into the library's own cache, so the copies are not needed afterwards.
            dataset = datasets.load_dataset(
                "parquet", data_files=list(map(str, plain)), split="train"
            )
    except DataError:
        raise
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        raise DataError(f"{named} cannot be read as parquet: {cause}") from error
    return ColumnarInput(
        dataset,
        label=str(named),
        description={"path": str(named), "format": "parquet"},
        fingerprint=[file_fingerprint(path) for path in files],
        seed=seed,
    )


def open_saved(folder: Path, *, split: str | None, seed: int | None) -> ColumnarInput:
    """Open a folder that ``save_to_disk`` wrote.

    Raises:
        DataError: If `split` is not in it, or several are and none was named.
    """
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        name = _pick_split(str(folder), split, list(loaded))
        dataset, label = loaded[name], f"{folder.name}[{name}]"
    else:
        _pick_split(str(folder), split, ["train"])
        dataset, label = loaded, folder.name
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return ColumnarInput(
        dataset,
        label=label,
        description={"path": str(folder), "format": "save_to_disk"},
        fingerprint=[file_fingerprint(path) for path in files],
        seed=seed,
    )


def open_hub(
    name: str, *, split: str | None, config: str | None, seed: int | None
) -> ColumnarInput:
    """Open a dataset of the Hugging Face Hub. Code in the dataset's repository is never run.

    Raises:
        DataError: If there is no such dataset, configuration or split.
    """
    import datasets

    try:
        with _bars_on_terminals_only():
            builder = datasets.load_dataset_builder(name, config)
            builder.download_and_prepare()
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"cannot load {name!r} from the Hugging Face Hub ({error}); "
            "a local file needs a path that exists"
        ) from error
    chosen = _pick_split(name, split, list(builder.info.splits or {}))
    return ColumnarInput(
        builder.as_dataset(split=chosen),
        label=f"{name}[{chosen}]",
        description={"path": name, "format": "hub", "config": builder.config.name},
        fingerprint=[{"hub": name, "config": builder.config.name, "revision": builder.hash}],
        seed=seed,
    )


def _pick_split(name: str, split: str | None, existing: list[str]) -> str:
    if split is None and len(existing) == 1:
        return existing[0]
    listed = ", ".join(repr(item) for item in existing)
    if split is None:
        raise DataError(f"{name} has several splits ({listed}); choose one with --split")
    if split not in existing:
        raise DataError(f"{name} has no split {split!r}; it has {listed}")
    return split
