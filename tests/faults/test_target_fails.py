"""A target that fails: in the middle of a run, or for want of device memory."""

import re

from injection import Fault
from tiny_target import cache_files

CAPTURE = "dspark.model.capture.Target.capture"


def test_a_model_that_raises_ends_the_run_and_names_the_rows(bench, tmp_path):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[Fault(CAPTURE, "raise", 9)])
    kept = bench.check_stopped(cache, ended, "RuntimeError: the sky is falling", 1)
    assert kept
    rows = re.search(r"the target failed on rows \[([\d, ]+)\] of the cache", ended.last_line)
    shard = {int(row) // 4 for row in rows[1].split(", ")}
    assert shard == {len(kept)}, "the rows are not those of the shard in hand"
    bench.check_resumes(cache)


def test_a_micro_batch_that_is_too_large_for_the_device_is_halved(bench, tmp_path):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[Fault(CAPTURE, "out of device memory", 3)])
    assert ended.code == 0, ended.stderr
    assert "out of device memory with 2 rows" in ended.stderr
    bench.check_finished(cache)


def test_a_row_that_is_too_large_for_the_device_ends_the_run(bench, tmp_path):
    cache = tmp_path / "cache"
    # The check of the target has two calls, the two rows of the first micro-batch the third.
    faults = [Fault(CAPTURE, "out of device memory", call) for call in (3, 4)]
    ended = bench.run(cache, faults=faults)
    bench.check_stopped(cache, ended, "OutOfMemoryError: CUDA out of memory", 1)
    assert re.search(r"the target failed on rows \[\d+\] of the cache", ended.last_line)
    assert cache_files(cache).keys() == {"manifest.json", "target_weights.safetensors"}
    bench.check_resumes(cache)


def test_a_target_that_fails_on_its_check_ends_the_run_in_one_line(bench, tmp_path):
    cache = tmp_path / "cache"
    ended = bench.run(cache, faults=[Fault(CAPTURE, "out of device memory", 1)])
    bench.check_stopped(cache, ended, "fails on the short rows of its check", 1)
    bench.check_resumes(cache)
