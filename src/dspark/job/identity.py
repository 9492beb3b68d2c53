"""What decides a cache's content without being a field of its manifest.

Two runs whose identities are equal write the same bytes. Weights are identified by content, not by
name or time: a checkpoint that was replaced in place is another target.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from dspark.disk.publish import publish_bytes

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "config.json", "*.py")
_READ_BYTES = 16 * 2**20
_UNUSED_RULES = ("version", "truncation", "padding", "post_processor", "decoder")


class FileHashes:
    """xxh3_128 of files' contents, remembered by size and time so that it is not made twice.

    Args:
        memory: The JSON file that remembers.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known = _read_memory(memory)
        self._used: dict[str, dict[str, Any]] = {}

    def of(self, path: Path) -> str:
        """Return the hash of a file's content as 32 hex digits."""
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        entry = self._known.get(str(path.resolve()), {})
        digest = entry.get("xxh3_128") if entry.get("stamp") == stamp else None
        digest = digest or _hash_file(path)
        self._used[str(path.resolve())] = {"stamp": stamp, "xxh3_128": digest}
        return str(digest)

    def save(self) -> None:
        """Remember the files that were asked for, and no others."""
        if self._used != self._known:
            publish_bytes(self._memory, json.dumps(self._used, sort_keys=True, indent=1).encode())


def target_identity(target_model: str, *, commit: str | None, hashes: FileHashes) -> str:
    """Return what names the target's weights for good.

    Args:
        target_model: Hub id or directory.
        commit: The resolved commit of a Hub model.
        hashes: Hashes the files of a directory.

    Returns:
        ``commit:<hash>`` for a Hub model, ``xxh3_128:<hash>`` over the weight files, configuration
        and code of a directory.
    """
    directory = Path(target_model)
    if not directory.is_dir():
        return f"commit:{commit}"
    files = sorted({p for pattern in _WEIGHT_PATTERNS for p in directory.glob(pattern)})
    lines = "".join(f"{path.name} {hashes.of(path)}\n" for path in files)
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(lines.encode())}"


def tokenizer_identity(tokenizer: Any) -> str:
    """Return the SHA-256 of what decides how a text is cut: vocabulary, merges, rules, additions.

    Its settings for padding and truncation do not count: nothing here uses them.
    """
    content = {
        "vocab": tokenizer.get_vocab(),
        "special": sorted(tokenizer.all_special_tokens),
        "rules": _tokenizer_rules(tokenizer),
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _tokenizer_rules(tokenizer: Any) -> dict[str, Any]:
    """Everything that a fast tokenizer serialises, or the digests of a slow one's own files."""
    if tokenizer.is_fast:
        rules: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        return {part: value for part, value in rules.items() if part not in _UNUSED_RULES}
    named = {key: tokenizer.init_kwargs.get(key) for key in tokenizer.vocab_files_names}
    files = {key: Path(path) for key, path in named.items() if isinstance(path, str)}
    return {key: _hash_file(path) for key, path in files.items() if path.is_file()}


def _read_memory(memory: Path) -> Mapping[str, Any]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}  # never written, or not whole: the files are hashed again
    entries = known.items() if isinstance(known, dict) else ()
    return {path: entry for path, entry in entries if isinstance(entry, dict)}


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
