"""Text for people: tables, sizes, strings of unknown origin made harmless, readers that go away."""

import os
import signal
import sys
from collections.abc import Callable, Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def printable(text: str) -> str:
    """Return `text` with everything that could steer a terminal written as an escape."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def format_bytes(count: int) -> str:
    """Return a number of bytes with three digits or more and a decimal unit."""
    value = float(count)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def format_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return rows of cells as lines with aligned columns.

    Args:
        rows: As many cells in each.
        right: The columns that are aligned on the right: numbers.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def run_printing(command: Callable[[], int]) -> int:
    """Run a command that prints, and end it quietly where nobody reads on, as in ``… | head``.

    Returns:
        The command's exit status, or that of a process which was ended by SIGPIPE.
    """
    try:
        status = command()
        if sys.stdout is not None:  # closed from the start: there is nothing to flush
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered goes nowhere, so that the flush at exit has nothing to complain of.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status
