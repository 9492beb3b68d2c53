"""A cache summarised as one page that needs nothing else: no script, no font, no other file.

Everything that comes from the cache is escaped: a page made of a hostile cache shows text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dspark.reports.cache_report import facts, norm_rows
from dspark.reports.cache_summary import CacheSummary
from dspark.reports.marked_text import Segment
from dspark.reports.svg_plots import bars, curves, spreads

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #9db7d5;
  --mark: #2f6db3; --line: #d5d9de; --label: #59636e; --supervised: #d2f4d9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #16181c; --soft: #3d5878;
  --mark: #6aa7ee; --line: #33383f; --label: #9aa4af; --supervised: #1d4d2b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .15rem .8rem .15rem 0; text-align: left;
  vertical-align: top; } th { color: var(--label); font-weight: normal; }
table.numbers td, table.numbers th { text-align: right; font-variant-numeric: tabular-nums; }
table.numbers td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
figure { margin: 1rem 0; } figcaption { color: var(--label); }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--label); }
.mark { fill: var(--mark); } .soft { fill: var(--soft); } .dot { fill: var(--ink); }
.axis { stroke: var(--line); } .curve { fill: none; stroke: currentColor; stroke-width: 1.5; }
.key { fill: currentColor; }
.series-0 { color: #2f6db3; } .series-1 { color: #c2571a; } .series-2 { color: #2c8c57; }
.series-3 { color: #9a4fb0; } .series-4 { color: #b8860b; } .series-5 { color: #c03a5b; }
.series-6 { color: #3f8f9c; } .series-7 { color: #7a7f87; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: 1rem; } mark { background: var(--supervised); color: inherit; }
"""


@dataclass(frozen=True)
class ShownRow:
    """A cached conversation to be shown.

    Attributes:
        number: Its place in the cache.
        tokens: Its real tokens.
        supervised_tokens: Those whose loss mask is 1.
        segments: Its text, or its ids, by mask.
    """

    number: int
    tokens: int
    supervised_tokens: int
    segments: Sequence[Segment]


def html_page(summary: CacheSummary, rows: Sequence[ShownRow]) -> str:
    """Return the page.

    Args:
        summary: The cache in numbers.
        rows: Conversations to show.
    """
    parts = [
        f"<h1>{escape(summary.cache_dir)}</h1>",
        _table([[f"<th>{escape(k)}</th>", _cell(v)] for k, v in facts(summary)]),
        *(f"<p>{escape(note)}</p>" for note in summary.notes),
        *_length_section(summary),
        *_norm_section(summary),
        *_row_section(rows),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(summary.cache_dir)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _length_section(summary: CacheSummary) -> list[str]:
    lengths = summary.lengths
    if lengths is None:
        return []
    labels = [f"{a}-{b - 1}" for a, b in zip(lengths.edges, lengths.edges[1:], strict=False)]
    caption = (
        f"Rows by real tokens: median {lengths.percentiles[2]:,}, longest "
        f"{lengths.percentiles[5]:,}, room for {summary.manifest['seq_length']:,}"
    )
    return ["<h2>Lengths</h2>", bars(labels, lengths.rows, caption=caption)]


def _norm_section(summary: CacheSummary) -> list[str]:
    if not summary.norms:
        return []
    header, *rows = norm_rows(summary)
    table = [
        "".join(f"<th>{escape(cell)}</th>" for cell in header),
        *("".join(map(_cell, row)) for row in rows),
    ]
    spread = {norm.name: norm.percentiles for norm in summary.norms}
    return [
        "<h2>Norms of the states</h2>",
        f'<div class="scroll">{_table([[row] for row in table], css="numbers")}</div>',
        spreads(spread, caption="All tokens, the middle 90 %, the middle half, the median"),
        curves(summary.norms_by_position, caption="Mean norm by position in the row"),
    ]


def _row_section(rows: Sequence[ShownRow]) -> list[str]:
    if not rows:
        return []
    parts = ["<h2>Conversations</h2><p>Supervised tokens have a <mark>green ground</mark>.</p>"]
    for row in rows:
        text = "".join(
            f"<mark>{escape(s.text)}</mark>" if s.supervised else escape(s.text)
            for s in row.segments
        )
        parts.append(
            f"<h3>Row {row.number:,}: {row.tokens:,} tokens, {row.supervised_tokens:,} supervised"
            f"</h3><pre>{text}</pre>"
        )
    return parts


def _table(rows: Sequence[Sequence[str]], *, css: str = "") -> str:
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<table class="{css}">{lines}</table>'


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"
