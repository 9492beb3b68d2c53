"""Whatever single thing goes wrong with a cache, it is found, and no wrong row is ever returned."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark.cache import CachedDSparkDataset
from dspark.checks.cache_check import check_cache
from dspark.disk.shard_file import read_header
from dspark.errors import CacheError
from tiny_cache import LENGTHS, write_tiny_cache

Corruption = Callable[[Path, random.Random, Path], str]
_SHARDS = [f"shard-{index:06d}.safetensors" for index in range(3)]
_WEIGHTS, _MANIFEST = "target_weights.safetensors", "manifest.json"


def _flip(path: Path, begin: int, end: int, draw: random.Random) -> str:
    """Change one bit of the bytes `begin` to `end`."""
    position, bit = draw.randrange(begin, end), draw.randrange(8)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {position} of {path.name}"


def _places(path: Path, *, real: bool) -> list[tuple[int, int]]:
    """Return the byte ranges of the real tokens of a shard, or of its padding."""
    header, shard = read_header(path), _SHARDS.index(path.name)
    ranges = []
    for place in header.tensors.values():
        row_bytes = (place.end - place.begin) // place.spec.shape[0]
        token_bytes = row_bytes // place.spec.shape[1]
        for row in range(place.spec.shape[0]):
            begin = header.data_start + place.begin + row * row_bytes
            middle = begin + LENGTHS[shard * 4 + row] * token_bytes
            ranges.append((begin, middle) if real else (middle, begin + row_bytes))
    return [(begin, end) for begin, end in ranges if end > begin]


def flip_in_data(cache: Path, draw: random.Random, other: Path) -> str:
    path = cache / draw.choice(_SHARDS)
    return _flip(path, *draw.choice(_places(path, real=True)), draw)


def flip_in_padding(cache: Path, draw: random.Random, other: Path) -> str:
    path = cache / draw.choice(_SHARDS)
    return _flip(path, *draw.choice(_places(path, real=False)), draw)


def flip_in_header(cache: Path, draw: random.Random, other: Path) -> str:
    path = cache / draw.choice([*_SHARDS, _WEIGHTS])
    return _flip(path, 0, read_header(path).data_start, draw)


def flip_in_weights(cache: Path, draw: random.Random, other: Path) -> str:
    path = cache / _WEIGHTS
    return _flip(path, read_header(path).data_start, path.stat().st_size, draw)


def flip_in_manifest(cache: Path, draw: random.Random, other: Path) -> str:
    path = cache / _MANIFEST
    return _flip(path, 0, path.stat().st_size, draw)


def truncation(cache: Path, draw: random.Random, other: Path) -> str:
    path = cache / draw.choice([*_SHARDS, _WEIGHTS, _MANIFEST])
    size = draw.choice([0, 7, draw.randrange(path.stat().st_size), path.stat().st_size - 1])
    with path.open("r+b") as file:
        file.truncate(size)
    return f"{path.name} cut to {size} bytes"


def swapped_shards(cache: Path, draw: random.Random, other: Path) -> str:
    one, two = draw.sample(_SHARDS, 2)
    (cache / one).rename(cache / "aside")
    (cache / two).rename(cache / one)
    (cache / "aside").rename(cache / two)
    return f"{one} and {two} swapped"


def shard_of_another_run(cache: Path, draw: random.Random, other: Path) -> str:
    name = draw.choice([*_SHARDS, _WEIGHTS])
    shutil.copy(other / name, cache / name)
    return f"{name} of another run"


def deleted_file(cache: Path, draw: random.Random, other: Path) -> str:
    name = draw.choice([*_SHARDS, _WEIGHTS, _MANIFEST])
    (cache / name).unlink()
    return f"{name} deleted"


def extra_shard(cache: Path, draw: random.Random, other: Path) -> str:
    name = draw.choice(["shard-000003", "shard-0000001", "shard-000009", "shard-1", "more"])
    shutil.copy(cache / draw.choice(_SHARDS), cache / f"{name}.safetensors")
    return f"extra {name}"


def zeroed_block(cache: Path, draw: random.Random, other: Path) -> str:
    path = cache / draw.choice([*_SHARDS, _WEIGHTS])
    begin = draw.choice([0, 8, read_header(path).data_start])
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(64))
    return f"64 bytes of zeros at {begin} of {path.name}"


CORRUPTIONS: list[Corruption] = [
    flip_in_data,
    flip_in_padding,
    flip_in_header,
    flip_in_weights,
    flip_in_manifest,
    truncation,
    swapped_shards,
    shard_of_another_run,
    deleted_file,
    extra_shard,
    zeroed_block,
]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the same shape."""
    root = tmp_path_factory.mktemp("caches")
    write_tiny_cache(root / "run", seed=0)
    write_tiny_cache(root / "other", seed=1)
    return root / "run", root / "other"


def _corrupted(caches: tuple[Path, Path], target: Path, number: int) -> str:
    """Copy the first cache and damage the copy in the way that `number` draws."""
    shutil.copytree(caches[0], target)
    draw = random.Random(number)
    return CORRUPTIONS[number % len(CORRUPTIONS)](target, draw, caches[1])


def _stored_rows(cache: Path) -> list[dict[str, torch.Tensor]]:
    """Return the rows as the safetensors library reads them."""
    shards = [load_file(cache / name) for name in _SHARDS]
    return [
        {name: tensor[row] for name, tensor in shard.items()}
        for shard in shards
        for row in range(len(shard["input_ids"]))
    ]


@pytest.mark.parametrize("tens", range(20))
def test_verify_finds_every_single_corruption(
    caches: tuple[Path, Path], tmp_path: Path, tens: int
) -> None:
    for number in range(10 * tens, 10 * tens + 10):
        what = _corrupted(caches, tmp_path / str(number), number)
        report = check_cache(str(tmp_path / str(number)), num_workers=1)
        assert report.problems, what


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("fifties", range(4))
def test_the_reader_returns_right_rows_or_an_error(
    caches: tuple[Path, Path], tmp_path: Path, fifties: int, mmap: bool
) -> None:
    right = _stored_rows(caches[0])
    for number in range(50 * fifties, 50 * fifties + 50):
        what = _corrupted(caches, tmp_path / str(number), number)
        try:
            dataset = CachedDSparkDataset(str(tmp_path / str(number)), check="checksums", mmap=mmap)
        except (CacheError, FileNotFoundError):
            continue
        assert len(dataset) == len(right), what
        for row in range(len(right)):
            try:
                sample = dataset[row]
            except CacheError:
                continue
            assert all(torch.equal(sample[key], right[row][key]) for key in right[row]), what


def test_an_untouched_cache_is_right(caches: tuple[Path, Path]) -> None:
    for cache in caches:
        report = check_cache(str(cache), num_workers=2)
        assert (report.problems, report.unchecked, report.notes) == ([], [], [])
        assert report.tokens == sum(LENGTHS)


def test_no_part_of_the_manifest_is_unguarded(caches: tuple[Path, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(caches[0], cache)
    text = (cache / _MANIFEST).read_bytes()
    for position in range(0, len(text), 7):
        changed = bytearray(text)
        changed[position] ^= 1 << position % 8
        (cache / _MANIFEST).write_bytes(changed)
        assert check_cache(str(cache), num_workers=1).problems, f"byte {position}"
