"""What a chat file becomes under a tokenizer: one conversation in full, and totals."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from dspark.chat import ChatEncoder, Conversation
from dspark.data.encoding import BadRow, Encoded
from dspark.data.rows import RowSource
from dspark.errors import DataError, RowError
from dspark.reports.marked_text import Segment, split_by_mask

_PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class RowReport:
    """One row as it would be trained on.

    Attributes:
        number: Its place in the input, from 0.
        where: Where a person finds it.
        conversation: Its ids and mask, cut.
        segments: Its text, by mask.
    """

    number: int
    where: str
    conversation: Conversation
    segments: list[Segment]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        mask = self.conversation.loss_mask
        return {
            "row": self.number,
            "where": self.where,
            "tokens": len(mask),
            "supervised_tokens": int(mask.sum()),
            "truncated": self.conversation.truncated,
            "segments": [
                {"text": s.text, "tokens": s.tokens, "supervised": s.supervised}
                for s in self.segments
            ],
            "input_ids": self.conversation.input_ids.tolist(),
            "loss_mask": mask.tolist(),
        }


@dataclass
class Totals:
    """Counts over a whole input.

    Attributes:
        seq_length: Where rows are cut.
        rows: Rows that become training rows.
        tokens: Their tokens, after the cut.
        supervised_tokens: Those whose mask is 1.
        cut_rows: Rows longer than `seq_length`.
        skipped: Rows that cannot be labelled, by reason.
        warnings: What the rows showed about the template, once each.
        lengths: Tokens of each row before the cut.
    """

    seq_length: int
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    cut_rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, item: Encoded) -> None:
        """Count one row."""
        if isinstance(item, BadRow):
            self.skipped[item.reason] += 1
            return
        conversation = item[1]
        length = len(conversation.input_ids)
        self.rows += 1
        self.tokens += min(length, self.seq_length)
        self.supervised_tokens += int(conversation.loss_mask[: self.seq_length].sum())
        self.cut_rows += length > self.seq_length
        self.lengths.append(length)
        self.warnings += [w for w in conversation.warnings if w not in self.warnings]

    @property
    def supervised_share(self) -> float:
        """Supervised tokens per token, 0 where there is no token."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    @property
    def percentiles(self) -> dict[str, int]:
        """Lengths before the cut that some percentages of rows do not exceed, and the longest."""
        if not self.lengths:
            return {}
        lengths = np.array(self.lengths)
        values = np.percentile(lengths, _PERCENTILES, method="inverted_cdf")
        named = {f"p{p}": int(value) for p, value in zip(_PERCENTILES, values, strict=True)}
        return {**named, "max": int(lengths.max())}

    def as_json(self) -> dict[str, Any]:
        """Return the totals as a JSON object."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "supervised_share": round(self.supervised_share, 4),
            "seq_length": self.seq_length,
            "cut_rows": self.cut_rows,
            "length_percentiles": self.percentiles,
            "skipped_rows": sum(self.skipped.values()),
            "skipped_by_reason": dict(self.skipped.most_common()),
            "warnings": self.warnings,
        }


def report_row(
    source: RowSource, encoder: ChatEncoder, tokenizer: Any, number: int
) -> RowReport | BadRow:
    """Encode one row of the input, or say why it cannot be.

    Raises:
        DataError: If there is no such row.
    """
    row = next(islice(source, number, None), None)
    if row is None:
        count = sum(1 for _ in source)
        if not count:
            raise DataError("the input is empty. Check --input-data and --split.")
        raise DataError(f"there is no row {number}: the input has rows 0 to {count - 1}")
    try:
        conversation = encoder.encode(row.value())
    except RowError as error:
        return BadRow(number, row.where, error.reason, str(error))
    segments = split_by_mask(tokenizer, conversation.input_ids, conversation.loss_mask)
    return RowReport(number, row.where, conversation, segments)


def count_totals(items: Iterable[Encoded], seq_length: int) -> Totals:
    """Count what `items`, encoded without a cut, become when cut to `seq_length` tokens."""
    totals = Totals(seq_length)
    for item in items:
        totals.add(item)
    return totals
