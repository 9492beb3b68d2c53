"""`--split`: the name of a split and, in brackets, a slice of its rows.

    train   train[100:200]   train[-50:]   train[:10%]

Numbers and percentages mean what they mean to ``datasets.load_dataset``: negative ones count from
the end, what lies outside is cut off, a percentage is rounded to the nearest row.
"""

import re
from dataclasses import dataclass

from dspark.errors import DataError

_SPLIT = re.compile(
    r"(?P<name>\w[\w.-]*)(?:\[(?P<start>-?\d+%?)?(?P<colon>:)(?P<stop>-?\d+%?)?\])?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class SplitSlice:
    """A parsed ``--split``.

    Attributes:
        name: The split, such as ``train``; None where none was asked for.
        start: First row as written ("100", "-50", "10%"), None for the beginning.
        stop: Row after the last as written, None for the end.
    """

    name: str | None = None
    start: str | None = None
    stop: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every row of the split is asked for."""
        return self.start is None and self.stop is None

    @property
    def needs_count(self) -> bool:
        """Whether the slice can only be resolved once the number of rows is known."""
        return any(bound is not None and not bound.isdigit() for bound in (self.start, self.stop))

    def resolve(self, num_rows: int) -> range:
        """Return the rows asked for out of `num_rows`, as a range with step 1."""
        start = 0 if self.start is None else _absolute(self.start, num_rows)
        stop = num_rows if self.stop is None else _absolute(self.stop, num_rows)
        return range(start, max(start, stop))

    def __str__(self) -> str:
        bounds = "" if self.is_whole else f"[{self.start or ''}:{self.stop or ''}]"
        return f"{self.name or ''}{bounds}"


def parse_split(text: str | None) -> SplitSlice:
    """Parse the value of ``--split``.

    Raises:
        DataError: If `text` is not a split name with an optional slice.
    """
    if text is None:
        return SplitSlice()
    match = _SPLIT.fullmatch(text.strip())
    if match is None:
        raise DataError(
            f"cannot read split {text!r}: expected a name and an optional slice, such as 'train', "
            "'train[100:200]', 'train[-50:]' or 'train[:10%]'"
        )
    return SplitSlice(match["name"], match["start"], match["stop"])


def _absolute(bound: str, num_rows: int) -> int:
    """Turn a written bound into a row number between 0 and `num_rows`."""
    percent = bound.endswith("%")
    row = round(int(bound[:-1]) * num_rows / 100) if percent else int(bound)
    return min(max(row + num_rows if row < 0 else row, 0), num_rows)
