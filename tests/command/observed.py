"""What a run leaves behind, as a test sees it."""

from pathlib import Path

import pytest

ROWS, SHARDS = 10, 3  # of four, four and two rows


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return inode, time and content of every file of a cache, its workplace left out."""
    files = [path for path in directory.iterdir() if path.is_file()]
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [line for line in captured.err.splitlines() if "error:" in line]
