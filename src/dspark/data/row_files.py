r"""JSON and JSONL files, compressed or not: bytes on disk to undecoded rows.

A JSONL file is streamed and split on ``\n`` alone: the other line separators of Unicode may stand
inside a JSON string. A byte order mark, CRLF, blank lines and a missing final newline are fine.
"""

import gzip
import io
import json
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import zstandard

from dspark.errors import DataError

_COMPRESSED = (".gz", ".zst", ".zstd")
_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 20
_PACKED_AT_ONCE = 1 << 16  # what it unpacks to is held in memory

LINE_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*LINE_SUFFIXES, ".json", ".parquet")


def data_suffix(path: Path) -> str:
    """Return the suffix that names the format, below any compression: ``.jsonl`` of a.jsonl.gz."""
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return Path(name).suffix


def list_data_files(folder: Path) -> list[Path]:
    """Return the data files in `folder` and below, sorted by path; dot-files are ignored.

    Raises:
        DataError: If there is none, or JSON and parquet files are mixed.
    """
    files = sorted(
        path
        for path in folder.rglob("*")
        if data_suffix(path) in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
    if not files:
        raise DataError(
            f"{folder} holds no data file: expected {', '.join(SUFFIXES)} (also .gz or .zst) "
            "or a folder written by datasets' save_to_disk"
        )
    if len({data_suffix(path) == ".parquet" for path in files}) > 1:
        raise DataError(
            f"{folder} mixes parquet and JSON files ({len(files)} files); their orders differ, "
            "so give each kind its own --input-data"
        )
    return files


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Return the path, size and time of change (ns) by which a file counts as unchanged."""
    status = path.stat()
    return {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open `path`, and turn what the decompressors raise into an error that names the file."""
    try:
        with _open_bytes(path) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise DataError(
            f"{path} is damaged or cut short ({error}); copy or compress it again"
        ) from error


def _open_bytes(path: Path) -> IO[bytes]:
    """Open `path` for reading, decompressing gzip and zstd by content, whatever its name."""
    packing = _packing(path)
    if packing == "gzip":
        return io.BufferedReader(gzip.open(path), _BUFFER)
    file = path.open("rb", buffering=_BUFFER)
    return io.BufferedReader(_ZstdReader(file), _BUFFER) if packing == "zstd" else file


def _packing(path: Path) -> str | None:
    with path.open("rb") as file:
        magic = file.read(4)
    kinds = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
    return next((kind for begin, kind in kinds.items() if magic.startswith(begin)), None)


class _ZstdReader(io.RawIOBase):
    """Decompresses every frame of a file; zstandard's own stream ends a cut file in silence."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._engine = zstandard.ZstdDecompressor().decompressobj()
        self._packed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            within = self._packed or self._file.read(_PACKED_AT_ONCE)
            if not within:
                return self._end()
            if self._engine.eof:
                self._engine = zstandard.ZstdDecompressor().decompressobj()
            self._plain = memoryview(self._engine.decompress(within))
            self._packed = self._engine.unused_data
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _end(self) -> int:
        if not self._engine.eof:
            raise zstandard.ZstdError("the last frame is not finished")
        return 0

    def close(self) -> None:
        self._file.close()
        super().close()


def decompressed_copy(path: Path, folder: Path) -> Path:
    """Return `path`, or a plain copy of it in `folder` if it is compressed.

    Raises:
        DataError: If the compressed data is damaged.
    """
    if _packing(path) is None:
        return path
    copy = folder / f"{len(list(folder.iterdir()))}{data_suffix(path)}"
    with _reading(path) as packed, copy.open("wb") as plain:
        shutil.copyfileobj(packed, plain, _BUFFER)
    return copy


def iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its end) for every line that is not blank.

    Raises:
        DataError: If the compressed data is damaged.
    """
    with _reading(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            line = line.strip()
            if line:
                yield number, line


def holds_json_lines(path: Path) -> bool:
    """Whether a file is JSONL: by its name, or a ``.json`` file whose first line is one object."""
    if data_suffix(path) in LINE_SUFFIXES:
        return True
    _, first = next(iter_lines(path), (0, b""))
    if not first.startswith(b"{"):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False  # an object printed over several lines
    return True


def read_json(path: Path) -> list[Any]:
    """Read a whole ``.json`` file: a list of rows, or one row.

    Raises:
        DataError: If it is not JSON.
    """
    with _reading(path) as file:
        data = file.read()
    try:
        value = json.loads(data.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}); if it has one object a line, name it .jsonl"
        ) from error
    return value if isinstance(value, list) else [value]
