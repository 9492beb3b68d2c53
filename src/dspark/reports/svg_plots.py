"""Small plots as inline SVG, without anything from outside.

Colours come from the classes ``mark``, ``soft``, ``axis`` and ``series-0`` … of the page's style
sheet; texts use its font.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _LEFT, _RIGHT, _BOTTOM = 640, 84, 28, 36
_PLOT = _WIDTH - _LEFT - _RIGHT
_BAR_HEIGHT = 180
_ROW = 26
_CURVE_HEIGHT = 240
_MOST_POINTS = 256  # of a curve; more cannot be told apart
NUM_SERIES = 8


class LogScale:
    """Maps positive values to pixels; what is not positive or not finite goes to the lower end.

    Args:
        values: What has to fit.
        begin: Pixel of the smallest value.
        end: Pixel of the largest.
    """

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        usable = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
        self._low, high = math.floor(min(usable)), math.ceil(max(usable))
        self._high = max(high, self._low + 1)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        log = math.log10(value) if 0 < value < math.inf else self._low
        share = (log - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    @property
    def ticks(self) -> list[float]:
        """The powers of ten in range."""
        return [10.0**power for power in range(self._low, self._high + 1)]


def bars(labels: Sequence[str], counts: Sequence[int], *, caption: str) -> str:
    """Return a bar chart of whole numbers; each bar says its label and count when pointed at."""
    most = max(*counts, 1)
    step = _PLOT / len(counts)
    parts = []
    for i, (label, count) in enumerate(zip(labels, counts, strict=True)):
        height = _BAR_HEIGHT * count / most
        x, y = _LEFT + i * step, 12 + _BAR_HEIGHT - height
        parts.append(
            f'<rect class="mark" x="{x + 1:.1f}" y="{y:.1f}" width="{step - 2:.1f}" '
            f'height="{height:.1f}"><title>{escape(label)}: {count:,}</title></rect>'
        )
        if i % max(1, len(counts) // 8) == 0:
            parts.append(_text(x, _BAR_HEIGHT + 30, label.split("-")[0]))
    parts.append(_line(_LEFT, 12 + _BAR_HEIGHT, _WIDTH - _RIGHT, 12 + _BAR_HEIGHT))
    parts.append(_text(_LEFT - 8, 20, f"{most:,}", anchor="end"))
    parts.append(_text(_LEFT - 8, 12 + _BAR_HEIGHT, "0", anchor="end"))
    return _svg(parts, height=_BAR_HEIGHT + _BOTTOM + 4, caption=caption)


def spreads(rows: Mapping[str, Sequence[float]], *, caption: str) -> str:
    """Return one line per row from its smallest to its largest value, on a logarithmic axis.

    Args:
        rows: Per name the values at 0, 5, 25, 50, 75, 95 and 100 %.
        caption: What the plot shows.
    """
    scale = LogScale([v for values in rows.values() for v in values], _LEFT, _WIDTH - _RIGHT)
    height = _ROW * len(rows) + _BOTTOM
    parts = [_tick_line(scale(tick), height - 26, tick) for tick in scale.ticks]
    for i, (name, values) in enumerate(rows.items()):
        y = 8 + _ROW * i + _ROW / 2
        least, low, lower, median, upper, high, most = map(scale, values)
        title = ", ".join(f"{value:.4g}" for value in values)
        parts += [
            f"<g><title>{escape(name)}: {title}</title>",
            f'<rect class="soft" x="{least:.1f}" y="{y - 1}" width="{most - least:.1f}" '
            'height="2"/>',
            f'<rect class="soft" x="{low:.1f}" y="{y - 4}" width="{high - low:.1f}" height="8"/>',
            f'<rect class="mark" x="{lower:.1f}" y="{y - 6}" width="{upper - lower:.1f}" '
            'height="12"/>',
            f'<circle class="dot" cx="{median:.1f}" cy="{y}" r="3"/></g>',
            _text(_LEFT - 8, y + 4, name, anchor="end"),
        ]
    return _svg(parts, height=height, caption=caption)


def curves(series: Mapping[str, Sequence[float]], *, caption: str) -> str:
    """Return lines over positions from 0 on, with a logarithmic axis and a legend."""
    bottom = 12 + _CURVE_HEIGHT
    scale = LogScale([v for values in series.values() for v in values], bottom, 12)
    longest = max(map(len, series.values()))
    parts = [
        part
        for tick in scale.ticks
        for part in (
            _line(_LEFT, scale(tick), _WIDTH - _RIGHT, scale(tick)),
            _text(_LEFT - 8, scale(tick) + 4, f"{tick:g}", anchor="end"),
        )
    ]
    for i, (name, values) in enumerate(series.items()):
        stride = -(-len(values) // _MOST_POINTS)
        points = " ".join(
            f"{_LEFT + _PLOT * position / max(longest - 1, 1):.1f},{scale(values[position]):.1f}"
            for position in range(0, len(values), stride)
        )
        style = f"series-{i % NUM_SERIES}"
        parts.append(f'<polyline class="curve {style}" points="{points}"/>')
        x, y = _LEFT + 90 * (i % 6), bottom + 44 + 18 * (i // 6)
        parts.append(f'<rect class="key {style}" x="{x}" y="{y - 9}" width="10" height="10"/>')
        parts.append(_text(x + 15, y, name))
    parts.append(_text(_LEFT, bottom + 18, "0"))
    parts.append(_text(_WIDTH - _RIGHT, bottom + 18, f"{longest - 1:,}", anchor="end"))
    return _svg(parts, height=bottom + 56 + 18 * ((len(series) - 1) // 6), caption=caption)


def _svg(parts: Sequence[str], *, height: float, caption: str) -> str:
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><svg viewBox="0 0 {_WIDTH} '
        f'{height:.0f}" role="img" aria-label="{escape(caption)}">{"".join(parts)}</svg></figure>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="axis" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _tick_line(x: float, bottom: float, value: float) -> str:
    return _line(x, 4, x, bottom) + _text(x, bottom + 18, f"{value:g}", anchor="middle")


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
