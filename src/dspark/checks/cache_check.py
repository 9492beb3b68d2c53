"""Everything that can be proved about a cache without its target.

    manifest    its own checksum, its fields among themselves      dspark.checks.manifest_check
    directory   the files of the cache, all of them and no others  dspark.checks.directory_check
    weights     shape, dtype, checksums, identity, header
    shards      several at once                                    dspark.disk.shard_check
    the whole   counts, source rows and content hash against the manifest

Caches by other writers have no checksums, lengths or identity: what they do have is checked, and
the report says what could not be.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from dspark.checks.cache_content import content_problems, masked_rows
from dspark.checks.directory_check import list_cache
from dspark.checks.manifest_check import manifest_problems
from dspark.disk.manifest import MANIFEST_NAME, identity_digest, manifest_path, shard_path
from dspark.disk.shard_check import ExpectedShard, ShardCheck, TensorRules
from dspark.disk.shard_file import METADATA_KEY, Header, decode_json, read_header
from dspark.errors import CacheError
from dspark.plan import count_shards, shard_rows
from dspark.schema.cache_manifest import (
    DTYPE_MAP,
    padding_values,
    read_manifest,
    row_specs,
    value_limits,
)
from dspark.schema.target_weights import (
    _TARGET_WEIGHTS_NAME,
    _WEIGHT_KEYS,
    _target_weights_path,
    check_target_weights,
)

_MOST_PROBLEMS = 5  # of one shard; the rest is rarely news
_SHARDS_AT_ONCE = 1024  # submitted to the threads together


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the name of a file in the cache, and what is wrong with it."""

    file: str
    what: str


@dataclass
class CacheReport:
    """What a check found.

    Attributes:
        cache_dir: The cache.
        rows: Rows that the manifest speaks of.
        shards: Shards that were read.
        tokens: Real tokens in them.
        supervised_tokens: Tokens whose loss mask is 1.
        bytes_read: Bytes of tensors that were read.
        bytes_skipped: Bytes of padding proved zero by being holes.
        seconds: Time it took.
        problems: Everything that is wrong.
        unchecked: What could not be checked, and why.
        notes: What is odd and harmless.
    """

    cache_dir: str
    rows: int = 0
    shards: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    bytes_read: int = 0
    bytes_skipped: int = 0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def blame(self, file: str, *faults: str) -> None:
        """Add problems of one file."""
        self.problems.extend(Problem(file, fault) for fault in faults)


@dataclass(frozen=True)
class _ShardOutcome:
    """What is kept of one checked shard; its header's digest is None if it could not be read."""

    name: str
    faults: Sequence[str]
    header_digest: str | None
    has_record: bool
    tokens: int
    supervised_tokens: int
    source_rows: Sequence[int] | None
    bytes_read: int
    bytes_skipped: int


def check_cache(
    cache_dir: str,
    *,
    num_workers: int,
    on_begin: Callable[[int], object] = lambda shards: None,
    on_shard: Callable[[], object] = lambda: None,
) -> CacheReport:
    """Check a cache against its manifest and its own checksums.

    Args:
        cache_dir: The cache.
        num_workers: Threads; reading, hashing and comparing run outside of the interpreter's lock.
        on_begin: Called with the number of shards to read.
        on_shard: Called after each.

    Returns:
        What was found; a damaged cache is no exception.
    """
    begun = time.monotonic()
    report = CacheReport(cache_dir)
    manifest = _read_manifest(report)
    if manifest is not None:
        _CacheCheck(report, manifest).run(num_workers, on_begin, on_shard)
    report.seconds = time.monotonic() - begun
    return report


def _read_manifest(report: CacheReport) -> dict[str, Any] | None:
    try:
        manifest = read_manifest(report.cache_dir, allow_incomplete=True)
        text = Path(manifest_path(report.cache_dir)).read_bytes()
    except (OSError, CacheError) as error:
        report.blame(MANIFEST_NAME, str(error))
        report.unchecked.append("everything else: only a manifest says what it should be")
        return None
    report.blame(MANIFEST_NAME, *manifest_problems(text, manifest))
    if "provenance" not in manifest:
        report.unchecked.append(
            "the manifest's own checksum, and those of the files' headers: it has no provenance "
            "(dspark.precompute did not write it)"
        )
    return manifest


class _CacheCheck:
    """The check of one cache whose manifest can be read."""

    def __init__(self, report: CacheReport, manifest: Mapping[str, Any]) -> None:
        self.report = report
        self.manifest = manifest
        self.foreign = "provenance" not in manifest
        provenance = manifest.get("provenance")
        self.provenance = provenance if isinstance(provenance, dict) else {}
        self.identity = identity_digest(manifest)
        self.rules = TensorRules(
            row_specs(manifest), padding_values(manifest), value_limits(manifest)
        )
        self.header_digests: dict[str, str] = {}
        self.without_record: list[str] = []
        self.last_source_row = -1

    def run(
        self,
        num_workers: int,
        on_begin: Callable[[int], object],
        on_shard: Callable[[], object],
    ) -> None:
        report, manifest = self.report, self.manifest
        report.rows = manifest["num_samples"]
        num_shards = count_shards(num_rows=report.rows, shard_size=manifest["shard_size"])
        listing = list_cache(report.cache_dir, num_shards)
        for name, fault in listing.problems:
            report.blame(name, fault)
        report.notes += [f"{name} is no file of the cache" for name in listing.others]
        on_begin(len(listing.shards))
        with ThreadPoolExecutor(num_workers) as pool:
            weights = pool.submit(self._check_weights)
            for start in range(0, len(listing.shards), _SHARDS_AT_ONCE):
                window = listing.shards[start : start + _SHARDS_AT_ONCE]
                for outcome in pool.map(self._check_shard, window):
                    self._add(outcome)
                    on_shard()
            faults, bytes_read = weights.result()
            report.blame(_TARGET_WEIGHTS_NAME, *faults)
            report.bytes_read += bytes_read
        self._compare_records(len(listing.shards))
        self._compare_headers()
        if report.is_right and not self.without_record:
            report.blame(MANIFEST_NAME, *self._count_faults())
        if report.is_right and not self.foreign:
            report.blame(MANIFEST_NAME, *content_problems(report.cache_dir, manifest))
            if masked := masked_rows(manifest):
                report.unchecked.append(
                    f"the hash of the input: {len(masked)} rows were kept without supervision"
                )

    def _check_shard(self, index: int) -> _ShardOutcome:
        path = Path(shard_path(self.report.cache_dir, index))
        rows = shard_rows(index, num_rows=self.report.rows, shard_size=self.manifest["shard_size"])
        check = ShardCheck(path, self.rules)
        expected = ExpectedShard(index, len(rows), self.identity, foreign=self.foreign)
        faults: list[str] = []
        try:
            with closing(check.problems(expected)) as problems:
                faults += islice(problems, _MOST_PROBLEMS)
                if next(problems, None) is not None:
                    faults.append("and there is more")
        except (OSError, CacheError) as error:
            faults.append(str(error))
        record = check.metadata
        return _ShardOutcome(
            path.name,
            faults,
            header_digest=check.header.digest if check.header else None,
            has_record=record is not None,
            tokens=sum(record.lengths) if record else 0,
            supervised_tokens=check.sums["loss_mask"],
            source_rows=record.rows if record else None,
            bytes_read=check.bytes_read,
            bytes_skipped=check.bytes_skipped,
        )

    def _add(self, outcome: _ShardOutcome) -> None:
        report = self.report
        report.shards += 1
        report.blame(outcome.name, *outcome.faults)
        report.bytes_read += outcome.bytes_read
        report.bytes_skipped += outcome.bytes_skipped
        report.tokens += outcome.tokens
        report.supervised_tokens += outcome.supervised_tokens
        if outcome.header_digest is None:
            return
        self.header_digests[outcome.name] = outcome.header_digest
        if outcome.has_record:
            self._check_source_rows(outcome.name, outcome.source_rows)
        else:
            self.without_record.append(outcome.name)

    def _check_source_rows(self, name: str, rows: Sequence[int] | None) -> None:
        """Source rows are kept in order; they are recorded exactly where some were left out."""
        counts = self.provenance.get("counts")
        if isinstance(counts, dict) and bool(counts.get("skipped")) != (rows is not None):
            self.report.blame(name, "its source rows are not those that provenance.counts tells of")
        for row in rows or ():
            if row <= self.last_source_row:
                self.report.blame(name, f"source row {row} follows {self.last_source_row}")
            self.last_source_row = row

    def _check_weights(self) -> tuple[list[str], int]:
        """Return what is wrong with the weights, and how many bytes were read to know."""
        path = Path(_target_weights_path(self.report.cache_dir))
        try:
            header = read_header(path)
            self.header_digests[path.name] = header.digest
            faults = _weights_faults(header, self.manifest)
            if METADATA_KEY not in header.metadata and self.foreign:
                self.report.unchecked.append(f"the data of {path.name}: it has no checksums")
                return faults, 0
            record = decode_json(header.metadata.get(METADATA_KEY, "{}"), path)
            nameless = self.foreign and record.get("identity") is None
            check_target_weights(
                self.report.cache_dir, identity=None if nameless else self.identity
            )
        except (OSError, CacheError) as error:
            return [str(error)], 0
        return faults, sum(place.spec.nbytes for place in header.tensors.values())

    def _compare_records(self, num_shards: int) -> None:
        """Say what shards without a record leave open; a mixture of both kinds is no cache."""
        if not self.without_record or not self.foreign:
            return
        if len(self.without_record) < num_shards:
            for name in self.without_record:
                self.report.blame(name, "it carries no dspark metadata, but other shards do")
            return
        self.report.unchecked.append(
            "checksums, lengths, padding and origin of the shards: they carry no dspark metadata "
            "(another tool wrote them); whole rows were read and their values looked at instead"
        )

    def _compare_headers(self) -> None:
        recorded = self.provenance.get("files")
        if not isinstance(recorded, dict):
            return
        for name, digest in sorted(self.header_digests.items()):
            if recorded.get(name) != digest:
                self.report.blame(
                    name,
                    f"its header's checksum is {digest}, the manifest has {recorded.get(name)!r}",
                )

    def _count_faults(self) -> Iterator[str]:
        counts = self.provenance.get("counts")
        if not isinstance(counts, dict):
            return
        report = self.report
        found = {"rows": report.rows, "tokens": report.tokens}
        for key, value in found.items():
            if counts.get(key) != value:
                yield f"provenance.counts.{key} is {counts.get(key)!r}, the shards have {value}"


def _weights_faults(header: Header, manifest: Mapping[str, Any]) -> list[str]:
    """Say in which dtype and shape the weights are not those of the target."""
    dtype, hidden = DTYPE_MAP[manifest["dtype"]], manifest["hidden_size"]
    faults = []
    for name in _WEIGHT_KEYS:
        spec = header.tensors[name].spec if name in header.tensors else None
        if spec is None or spec.dtype != dtype or spec.shape[1:] != (hidden,):
            faults.append(f"{name} is {spec}, expected {dtype} [vocabulary, {hidden}]")
    return faults


def default_workers() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))
