"""A conversation as text with its supervised tokens marked, for people and for machines."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from dspark.reports.terminal import printable

_COLOUR, _PLAIN = "\x1b[30;42m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that are all supervised, or all not."""

    text: str
    tokens: int
    supervised: bool


def split_by_mask(tokenizer: Any, input_ids: np.ndarray, loss_mask: np.ndarray) -> list[Segment]:
    """Decode runs of tokens with the same mask.

    Args:
        tokenizer: Decodes ids.
        input_ids: int [n].
        loss_mask: 0/1 [n].
    """
    pairs = zip(input_ids.tolist(), loss_mask.tolist(), strict=True)
    segments = []
    for bit, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        segments.append(Segment(text, len(ids), bool(bit)))
    return segments


def mark(segments: list[Segment], *, colour: bool) -> str:
    """Return the text with supervised segments on a coloured ground, or in double brackets."""
    shown = []
    for segment in segments:
        lines = [printable(line) for line in segment.text.split("\n")]
        if segment.supervised and colour:
            # Line by line: a terminal would colour the rest of the line behind a line's end.
            lines = [f"{_COLOUR}{line}{_PLAIN}" if line else line for line in lines]
        text = "\n".join(lines)
        shown.append(f"[[{text}]]" if segment.supervised and not colour else text)
    return "".join(shown)
