"""Safetensors files taken apart and put together by hand, without the code under test."""

import json
from pathlib import Path
from typing import Any


def container(header: Any, data: bytes = b"", *, size: int | None = None) -> bytes:
    """Return the bytes of a safetensors file.

    Args:
        header: What is to be written as JSON, or the header's bytes themselves.
        data: The data section.
        size: What the first 8 bytes claim; by default the truth.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def header_text(path: Path) -> str:
    """Return the header of a safetensors file as it is written."""
    raw = path.read_bytes()
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")].decode()


def dspark_record(path: Path) -> dict[str, Any]:
    """Return the JSON that dspark keeps in a file's safetensors metadata."""
    return json.loads(json.loads(header_text(path))["__metadata__"]["dspark"])


def data_start(path: Path) -> int:
    """Return the byte at which the data section of a safetensors file begins."""
    return 8 + len(header_text(path).encode())
