"""Files appear under their name only when whole, and dead writers' leftovers can be removed."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dspark.disk import publish
from dspark.disk.publish import (
    StagedFile,
    fsync_directory,
    publish_bytes,
    remove_leftovers,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_published_file_has_its_content_and_nothing_lies_beside_it(tmp_path):
    publish_bytes(tmp_path / "a.json", b"whole")
    assert (tmp_path / "a.json").read_bytes() == b"whole"
    assert names(tmp_path) == ["a.json"]


def test_a_file_has_no_final_name_before_it_is_published(tmp_path):
    with StagedFile(tmp_path / "a") as file:
        os.write(file.fd, b"half")
        assert names(tmp_path) == [file.temporary.name]
        assert file.temporary.name.startswith(".a.run.")
        assert file.temporary.name.endswith(".tmp")
    assert names(tmp_path) == ["a"]


def test_an_exception_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="in the middle"), StagedFile(tmp_path / "a") as file:
        os.write(file.fd, b"half")
        raise RuntimeError("in the middle")
    assert names(tmp_path) == []


def test_an_exception_leaves_the_old_file_as_it_was(tmp_path):
    publish_bytes(tmp_path / "a", b"old")
    with pytest.raises(KeyboardInterrupt), StagedFile(tmp_path / "a") as file:
        os.write(file.fd, b"new")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_file_is_replaced_in_one_step(tmp_path):
    publish_bytes(tmp_path / "a", b"old")
    with (tmp_path / "a").open("rb") as reader:
        publish_bytes(tmp_path / "a", b"newer")
        assert reader.read() == b"old"  # who had it open still has a whole file
    assert (tmp_path / "a").read_bytes() == b"newer"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_is_what_the_umask_asks_for(tmp_path, mask, mode):
    with umask(mask):
        publish_bytes(tmp_path / "a", b"x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_the_data_are_flushed_before_the_rename_and_the_directory_after_it(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(fd: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        steps.append(f"fsync {kind}")
        fsync(fd)

    def watch_replace(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(publish.os, "fsync", watch_fsync)
    monkeypatch.setattr(publish.os, "replace", watch_replace)
    publish_bytes(tmp_path / "a", b"x")
    assert steps == ["fsync file", "rename", "fsync directory"]


def test_a_failed_flush_leaves_no_file(tmp_path, monkeypatch):
    def disk_full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish.os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        publish_bytes(tmp_path / "a", b"x")
    assert names(tmp_path) == []


def test_a_failed_rename_leaves_no_file(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        publish_bytes(tmp_path / "a", b"x")
    assert names(tmp_path) == ["a"]


def test_a_missing_directory_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        publish_bytes(tmp_path / "nowhere" / "a", b"x")


def test_publishing_twice_at_once_keeps_both_writers_apart(tmp_path):
    with StagedFile(tmp_path / "a") as first, StagedFile(tmp_path / "a") as second:
        assert first.temporary != second.temporary
        os.write(first.fd, b"first")
        os.write(second.fd, b"second")
    assert (tmp_path / "a").read_bytes() == b"first"  # the one that left last
    assert names(tmp_path) == ["a"]


def test_discarding_after_publishing_does_nothing(tmp_path):
    file = StagedFile(tmp_path / "a")
    file.publish()
    file.discard()
    assert names(tmp_path) == ["a"]


def test_a_directory_that_cannot_be_flushed_is_no_error(tmp_path, monkeypatch):
    def unsupported(fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(publish.os, "fsync", unsupported)
    fsync_directory(tmp_path)


def test_a_directory_that_fails_to_flush_is_an_error(tmp_path, monkeypatch):
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(publish.os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        fsync_directory(tmp_path)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(publish.os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    with StagedFile(tmp_path / "a") as file:
        file.write(memoryview(b"0123456789"), 2)
    assert (tmp_path / "a").read_bytes() == b"\0\x000123456789"


def test_a_write_that_the_disk_refuses_names_the_final_file(tmp_path, monkeypatch):
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish.os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a.json'"):
        publish_bytes(tmp_path / "a.json", b"x")
    assert names(tmp_path) == []


def test_leftovers_are_removed_and_named(tmp_path):
    abandoned = StagedFile(tmp_path / "shard-000001.safetensors")
    other = StagedFile(tmp_path / "manifest.json")
    expected = sorted([abandoned.temporary, other.temporary])
    assert remove_leftovers(tmp_path) == expected
    assert names(tmp_path) == []
    assert remove_leftovers(tmp_path) == []
    for file in (abandoned, other):
        file.discard()


def test_leftovers_of_other_owners_are_kept(tmp_path):
    mine = StagedFile(tmp_path / "a", owner="part-1")
    theirs = StagedFile(tmp_path / "a", owner="part-11")
    assert remove_leftovers(tmp_path, owner="part-1") == [mine.temporary]
    assert names(tmp_path) == [theirs.temporary.name]
    for file in (mine, theirs):
        file.discard()


@pytest.mark.parametrize(
    "name",
    [
        "shard-000000.safetensors",
        "notes.tmp",
        ".hidden.tmp",
        ".a.run.0123.tmp",
        f".a.run.{'g' * 32}.tmp",
        f".a.{'0' * 32}.tmp",
        f"a.run.{'0' * 32}.tmp",
        f".a.run.{'0' * 32}.tmp.bak",
    ],
)
def test_files_of_the_user_are_never_leftovers(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    assert remove_leftovers(tmp_path) == []
    assert names(tmp_path) == [name]


def test_leftovers_below_the_directory_are_kept(tmp_path):
    (tmp_path / "below").mkdir()
    file = StagedFile(tmp_path / "below" / "a")
    assert remove_leftovers(tmp_path) == []
    assert file.temporary.exists()
    file.discard()
