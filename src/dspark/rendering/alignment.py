"""Text to token ids, and which of the tokens a stretch of the text became.

The whole text is tokenized once, without special tokens, cutting or padding. A private copy of
the tokenizer's backend does it, so the settings of the tokenizer that was passed in neither
matter nor change.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, Protocol

import numpy as np


class TokenizedText(Protocol):
    """The tokens of one text."""

    @property
    def ids(self) -> list[int]:
        """The token ids."""

    def cover(self, start: int, stop: int) -> tuple[int, int]:
        """Return [first, last) of the tokens that overlap the characters [start, stop)."""


def build_tokenize(tokenizer: Any) -> Callable[[str], TokenizedText]:
    """Return a function from text to tokens that leaves `tokenizer` as it is."""
    if not tokenizer.is_fast:
        return lambda text: _DecodedText(tokenizer, text)
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    # Without special tokens to add, all that is left of it is cutting white space off the offsets.
    backend.post_processor = None
    return lambda text: _OffsetText(backend.encode(text, add_special_tokens=False))


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items `left` and `right` share at their beginning."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def common_suffix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items `left` and `right` share at their end."""
    return common_prefix(left[::-1], right[::-1])


class _OffsetText:
    """Tokens whose places in the text the tokenizer itself knows."""

    def __init__(self, encoding: Any) -> None:
        self.ids: list[int] = encoding.ids
        self._encoding = encoding

    @cached_property
    def _offsets(self) -> np.ndarray:
        """[2, n] int64: where each token starts and stops, in characters."""
        flat = chain.from_iterable(self._encoding.offsets)
        return np.fromiter(flat, dtype=np.int64, count=2 * len(self.ids)).reshape(-1, 2).T

    def cover(self, start: int, stop: int) -> tuple[int, int]:
        starts, stops = self._offsets
        first = int(np.searchsorted(stops, start, side="right"))
        return first, max(first, int(np.searchsorted(starts, stop, side="left")))


class _DecodedText:
    """Tokens of a tokenizer without offsets: their places are found by decoding prefixes.

    Where decoding does not give the text back, the text before (after) a place is tokenized by
    itself, and the tokens it shares with the whole are the ones before (after) it.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self.ids: list[int] = self._encode(text)

    def cover(self, start: int, stop: int) -> tuple[int, int]:
        if not self._is_decodable:
            first = common_prefix(self.ids, self._encode(self._text[:start]))
            after = common_suffix(self.ids, self._encode(self._text[stop:]))
            return first, max(first, len(self.ids) - after)
        first = self._reaching(start)
        if first > 0 and self._reach(first) > start:  # the token before straddles the place
            first = self._reaching(self._reach(first - 1))
        return first, max(first, self._reaching(stop))

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(
            text, add_special_tokens=False, truncation=False, padding=False, verbose=False
        )
        return list(encoded["input_ids"])

    @cached_property
    def _is_decodable(self) -> bool:
        return self._decode(len(self.ids)) == self._text

    def _decode(self, count: int) -> str:
        text: str = self._tokenizer.decode(
            self.ids[:count],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text

    def _reach(self, count: int) -> int:
        """Return how many characters of the text the first `count` tokens spell."""
        return common_prefix(self._decode(count), self._text)

    def _reaching(self, place: int) -> int:
        """Return the least number of tokens that spell at least `place` characters."""
        return bisect_left(range(len(self.ids)), place, key=self._reach)
