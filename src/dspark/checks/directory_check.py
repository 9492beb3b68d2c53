"""Whether a cache's directory holds the files of the cache and no others in their place.

Nothing named in a manifest is ever opened: the names a cache has follow from its number of shards.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.disk.manifest import MANIFEST_NAME, existing_shard_indices, first_missing, shard_path
from dspark.schema.target_weights import _TARGET_WEIGHTS_NAME

WORKPLACE_NAME = ".dspark"


@dataclass(frozen=True)
class Listing:
    """What lies in a cache's directory.

    Attributes:
        shards: Numbers of the shards that can be opened, sorted.
        problems: File name and fault of what is missing, not a file, or poses as one of the cache.
        others: Names of what else is there and harms nothing.
    """

    shards: Sequence[int]
    problems: Sequence[tuple[str, str]]
    others: Sequence[str]


def list_cache(cache_dir: str, num_shards: int) -> Listing:
    """List a cache that should have shards 0 … `num_shards` - 1.

    Raises:
        OSError: If the directory cannot be read.
    """
    with os.scandir(cache_dir) as scan:
        is_file = {entry.name: _is_file(entry) for entry in scan}
    is_file.pop(WORKPLACE_NAME, None)
    numbers = existing_shard_indices(cache_dir)
    shard_names = {os.path.basename(shard_path(cache_dir, number)) for number in numbers}
    own = {MANIFEST_NAME, _TARGET_WEIGHTS_NAME, *shard_names}
    posing = {name for name in is_file.keys() - own if name.endswith(".safetensors")}
    problems = [
        *_number_problems(cache_dir, numbers, num_shards),
        *((name, "it is not a file") for name in sorted(own & is_file.keys()) if not is_file[name]),
        *((name, "no file of a cache has this name") for name in sorted(posing)),
    ]
    usable = [n for n in sorted(numbers) if n < num_shards and is_file[_name(cache_dir, n)]]
    return Listing(usable, problems, sorted(is_file.keys() - own - posing))


def _number_problems(cache_dir: str, numbers: set[int], num_shards: int) -> list[tuple[str, str]]:
    extra = sorted(number for number in numbers if number >= num_shards)
    problems = [
        (_name(cache_dir, number), f"the manifest speaks of {num_shards} shards only")
        for number in extra
    ]
    missing = num_shards - (len(numbers) - len(extra))
    if missing:
        some = first_missing(numbers, num_shards)
        problems.insert(0, ("shards", f"{missing} of {num_shards} are missing: {some}"))
    return problems


def _name(cache_dir: str, number: int) -> str:
    return os.path.basename(shard_path(cache_dir, number))


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:  # a link that leads nowhere
        return False
