"""Nothing read from a cache runs code, leaves its directory or allocates without bound."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from containers import container
from dspark.cache import CachedDSparkDataset, read_manifest, read_target_weight_modules
from dspark.checks.cache_check import check_cache
from dspark.errors import CacheError
from tiny_cache import write_tiny_cache

_SHARD, _WEIGHTS = "shard-000000.safetensors", "target_weights.safetensors"
_LIMITED_BYTES = 3 * 2**30  # torch alone maps about one


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write_tiny_cache(tmp_path / "cache", provenance=False)
    return tmp_path / "cache"


def _change_manifest(cache: Path, **fields: Any) -> None:
    path = cache / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _sparse(path: Path, header: Any, data_bytes: int) -> None:
    """Write a safetensors file of any apparent size, which takes no disk."""
    path.write_bytes(container(header))
    os.truncate(path, path.stat().st_size + data_bytes)


def _entry(dtype: str, shape: list[int], begin: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + nbytes]}


def _run_with_little_memory(code: str, cache: Path) -> str:
    """Run code that must end in a CacheError, and return its text."""
    prelude = f"""
        import resource, sys
        from dspark.cache import CachedDSparkDataset, read_target_weight_modules
        from dspark.checks.cache_check import check_cache
        from dspark.errors import CacheError
        cache = {str(cache)!r}
        resource.setrlimit(resource.RLIMIT_AS, ({_LIMITED_BYTES}, {_LIMITED_BYTES}))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_manifest_that_claims_more_shards_than_memory_can_list(cache: Path) -> None:
    _change_manifest(cache, num_samples=2**47, shard_size=1)
    begun = time.monotonic()
    with pytest.raises(CacheError, match=r"missing \(3, 4, 5"):
        CachedDSparkDataset(str(cache))
    report = check_cache(str(cache), num_workers=1)
    assert any("are missing: 3, 4" in problem.what for problem in report.problems)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "fields",
    [
        {"num_samples": 2**47, "shard_size": 2**47},
        {"seq_length": 2**40},
        {"num_samples": 2**60},
        {"seq_length": True},
        {"num_samples": 11.0},
        {"shard_size": -4},
        {"dtype": ["bf16"]},
        {"target_layer_ids": {"0": 2}},
    ],
)
def test_a_size_that_no_cache_has_is_refused(cache: Path, fields: dict[str, Any]) -> None:
    _change_manifest(cache, **fields)
    with pytest.raises(CacheError, match=next(iter(fields)) + "|rows of a shard"):
        read_manifest(str(cache))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"format_version":1,"x":['])
@pytest.mark.parametrize("depth", [200, 900, 1_000_000])
def test_json_that_is_nested_to_exhaust_the_stack(cache: Path, opening: bytes, depth: int) -> None:
    closing = {b"[": b"]", b'{"a":': b"}", b'{"format_version":1,"x":[': b"]}"}[opening]
    (cache / "manifest.json").write_bytes(opening * depth + b"1" + closing * depth)
    with pytest.raises(CacheError, match="damaged"):
        read_manifest(str(cache))
    assert check_cache(str(cache), num_workers=1).problems


def test_a_manifest_larger_than_any_needs_is_not_read(cache: Path) -> None:
    os.truncate(cache / "manifest.json", 2**40)
    with pytest.raises(CacheError, match="more than any manifest needs"):
        read_manifest(str(cache))


def test_a_header_is_bounded_by_the_rows_that_a_shard_has(cache: Path) -> None:
    path = cache / _SHARD
    bomb = b"[" + b"{}," * 20_000_000 + b"{}]"
    path.write_bytes(len(bomb).to_bytes(8, "little") + bomb)
    report = check_cache(str(cache), num_workers=1)
    assert any("cannot hold a header" in problem.what for problem in report.problems)
    dataset = CachedDSparkDataset(str(cache), check="names")
    with pytest.raises(CacheError, match="cannot hold a header"):
        dataset[0]


def test_a_row_larger_than_the_machine_in_a_sparse_file(cache: Path) -> None:
    seq = 2**30
    sizes = {"input_ids": 8, "loss_mask": 8}
    states = {"target_hidden_states": 32, "target_last_hidden_states": 16}
    header: dict[str, Any] = {}
    begin = 0
    for name, token_bytes in (sizes | states).items():
        shape = [1, seq] if name in sizes else [1, seq, token_bytes // 2]
        dtype = "I64" if name in sizes else "BF16"
        header[name] = _entry(dtype, shape, begin, seq * token_bytes)
        begin += seq * token_bytes
    for name in ("shard-000001.safetensors", "shard-000002.safetensors"):
        (cache / name).unlink()
    _sparse(cache / _SHARD, header, begin)
    _change_manifest(cache, seq_length=seq, num_samples=1, shard_size=1)
    out = _run_with_little_memory(
        """
        try:
            print(CachedDSparkDataset(cache, check="names")[0])
        except (CacheError, MemoryError) as error:
            print(type(error).__name__)
        """,
        cache,
    )
    assert out.strip() in {"CacheError", "MemoryError"}


def test_verifying_a_huge_sparse_shard_takes_no_memory(cache: Path) -> None:
    _sparse(cache / _SHARD, {"x": _entry("U8", [2**42], 0, 2**42)}, 2**42)
    out = _run_with_little_memory(
        """
        for problem in check_cache(cache, num_workers=2).problems:
            print(problem.what)
        """,
        cache,
    )
    assert "'x' is" in out


def test_huge_weights_in_a_sparse_file_are_refused(cache: Path) -> None:
    nbytes = 2**42  # some file systems end at 2**44
    header = {
        "embed_tokens.weight": _entry("BF16", [2**20, 2**21], 0, nbytes),
        "lm_head.weight": _entry("BF16", [2**20, 2**21], nbytes, nbytes),
    }
    _sparse(cache / _WEIGHTS, header, 2 * nbytes)
    with pytest.raises(CacheError, match="of memory"):
        read_target_weight_modules(str(cache))


@pytest.mark.parametrize("name", [_SHARD, _WEIGHTS])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(cache: Path, name: str) -> None:
    (cache / name).unlink()
    os.mkfifo(cache / name)
    report = check_cache(str(cache), num_workers=1)
    assert next(p.what for p in report.problems if p.file == name) == "it is not a file"
    if name == _SHARD:
        with pytest.raises(CacheError, match="not a regular file"):
            CachedDSparkDataset(str(cache))
    else:
        with pytest.raises(FileNotFoundError):
            read_target_weight_modules(str(cache))


def test_names_in_a_manifest_are_compared_and_never_opened(tmp_path: Path) -> None:
    write_tiny_cache(tmp_path / "cache")
    outside = tmp_path / "outside.safetensors"
    os.mkfifo(outside)  # opening it would wait for ever
    path = tmp_path / "cache" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["provenance"]["files"] = {"../outside.safetensors": "0" * 16}
    path.write_text(json.dumps(manifest))
    assert not check_cache(str(tmp_path / "cache"), num_workers=1).is_right


def test_tensor_names_are_not_paths(cache: Path) -> None:
    header = {"../../escaped": _entry("U8", [1], 0, 1)}
    (cache / _SHARD).write_bytes(container(header, b"x"))
    with pytest.raises(CacheError, match="input_ids"):
        CachedDSparkDataset(str(cache), check="names")[0]
    assert not list(cache.parent.glob("escaped*"))


def test_pickles_are_never_loaded() -> None:
    source = Path(__file__).parent.parent / "src" / "dspark"
    for path in source.glob("*.py"):
        text = path.read_text()
        assert "torch.load(" not in text, path
        assert "import pickle" not in text, path
