"""What `dspark.inspect` shows of a cache: the summary, a page of it, or one row.

A tokenizer is needed to show text. The manifest's ``target_model`` is used where it is a directory
or lies in the local cache of the hub; a name in a manifest is never looked up in a network, and
code that comes with it is never run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.checks.cache_rows import CacheRow, CacheRows, spread_rows
from dspark.disk.publish import publish_bytes
from dspark.errors import DataError
from dspark.job.identity import tokenizer_identity
from dspark.reports.cache_report import format_summary
from dspark.reports.cache_summary import CacheSummary
from dspark.reports.html_report import ShownRow, html_page
from dspark.reports.marked_text import Segment, mark, split_by_mask

_SHOWN_ROWS = 3


def show_summary(
    summary: CacheSummary, *, as_json: bool, html: str | None, tokenizer: Any | None
) -> str:
    """Return a summary as text, and write a page of it where one is asked for.

    Args:
        summary: The cache in numbers.
        as_json: Return one JSON object instead of tables.
        html: Where the page goes, or None.
        tokenizer: Decodes the conversations on the page; without one they are ids.

    Raises:
        CacheError: If a row to show is damaged.
        OSError: If the page cannot be written.
    """
    if html is not None:
        rows: list[ShownRow] = []
        if summary.sampled_rows:
            cache = CacheRows(summary.cache_dir)
            numbers = spread_rows(len(cache), _SHOWN_ROWS)
            rows = [_shown(cache.read(number), tokenizer) for number in numbers]
        publish_bytes(Path(html), html_page(summary, rows).encode(errors="replace"))
    if as_json:
        return json.dumps(summary.to_json(), sort_keys=True, indent=2)
    return format_summary(summary)


def show_row(
    cache: CacheRows, number: int, *, as_json: bool, tokenizer: Any | None, colour: bool
) -> str:
    """Return one row of a cache: its text, or its ids, with what is supervised marked.

    Args:
        cache: The cache.
        number: The row.
        as_json: Return one JSON object instead of text.
        tokenizer: Decodes the ids, or None.
        colour: Mark by colour instead of brackets.

    Raises:
        DataError: If there is no such row.
        CacheError: If it is damaged.
    """
    if not 0 <= number < len(cache):
        raise DataError(f"there is no row {number}: the cache has rows 0 to {len(cache) - 1}")
    row = cache.read(number)
    shown = _shown(row, tokenizer)
    facts: dict[str, Any] = {
        "row": row.number,
        "source_row": row.source,
        "tokens": shown.tokens,
        "supervised_tokens": shown.supervised_tokens,
    }
    if as_json:
        segments = [
            {"text": s.text, "tokens": s.tokens, "supervised": s.supervised} for s in shown.segments
        ]
        arrays = {"input_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}
        return json.dumps({**facts, "segments": segments, **arrays})
    source = "" if row.source is None else f", row {row.source} of the input"
    return (
        f"row {row.number}{source}: {shown.tokens} tokens, {shown.supervised_tokens} supervised\n\n"
        f"{mark(list(shown.segments), colour=colour)}"
    )


def local_tokenizer(manifest: Mapping[str, Any]) -> Any | None:
    """Return the tokenizer that a cache was made with if it is on this machine, else None."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            manifest["target_model"], local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError):
        return None
    return tokenizer if fits_cache(tokenizer, manifest) else None


def fits_cache(tokenizer: Any, manifest: Mapping[str, Any]) -> bool:
    """Return whether a cache was made with this tokenizer, as far as its manifest tells."""
    provenance = manifest.get("provenance")
    identity = provenance.get("identity") if isinstance(provenance, dict) else None
    recorded = identity.get("tokenizer_sha256") if isinstance(identity, dict) else None
    return recorded is None or bool(recorded == tokenizer_identity(tokenizer))


def _shown(row: CacheRow, tokenizer: Any | None) -> ShownRow:
    ids, mask = row.input_ids.numpy(), row.loss_mask.numpy()
    segments: Sequence[Segment] = split_by_mask(tokenizer or _PlainIds(), ids, mask)
    return ShownRow(row.number, len(ids), int(mask.sum()), segments)


class _PlainIds:
    """Shows ids where there is no tokenizer."""

    def decode(self, ids: Sequence[int], **_options: bool) -> str:
        """Return ids in decimal, each followed by a space."""
        return "".join(f"{token} " for token in ids)
