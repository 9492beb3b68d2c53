"""Any number of ranks writes the very same cache, and they end together."""

import random
import time

import pytest

from ranks import Fault, Launch, errors, only, stamps

CAPTURE = "dspark.model.capture.Target.capture"
RENAME = "os.replace"


@pytest.mark.parametrize(
    "world_size",
    # The last is more than there are shards.
    [2, *(pytest.param(ranks, marks=pytest.mark.parallel) for ranks in (3, 5, 9))],
)
def test_ranks_write_the_cache_that_one_process_writes(bench, tmp_path, world_size):
    cache = tmp_path / "cache"
    ended = Launch(bench, cache, world_size=world_size).wait()
    assert [one.code for one in ended] == [0] * world_size, ended
    bench.check_finished(cache)


def test_one_rank_shows_what_all_have_done_and_the_others_log(bench, tmp_path):
    cache = tmp_path / "cache"
    ended = Launch(bench, cache, world_size=3).wait()
    assert "wrote 26 rows, 7 shards" in ended[0].stderr
    assert "cache is finished: 7 shards" in ended[0].last_line
    assert [(one.stdout, one.stderr) for one in ended[1:]] == [("", "")] * 2
    logs = {path.name: path.read_text() for path in (cache / ".dspark" / "logs").iterdir()}
    assert sorted(logs) == ["run-rank-1.log", "run-rank-2.log"]
    assert all("capturing layers" in log and "wrote" in log for log in logs.values())


def test_a_resume_with_another_number_of_ranks_computes_what_is_missing_only(bench, tmp_path):
    cache = tmp_path / "cache"
    killed = Launch(
        bench, cache, world_size=3, faults={1: [Fault(RENAME, "kill", 2, path="shard-")]}
    ).wait()
    assert [bool(one.code) for one in killed] == [True] * 3
    bench.check_published(cache)
    before = stamps(cache)
    assert before
    ended = Launch(bench, cache, "--resume", world_size=2).wait()
    assert [one.code for one in ended] == [0, 0], ended
    bench.check_finished(cache)
    after = stamps(cache)
    assert {name: after[name] for name in before} == before, "a finished shard was written again"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_target_fails_ends_all_with_one_message(bench, tmp_path, rank):
    cache = tmp_path / "cache"
    faults = {rank: [Fault(CAPTURE, "raise", 3)]}
    ended = Launch(bench, cache, world_size=3, faults=faults).wait()
    assert all(one.code for one in ended)
    message = only(errors(ended))
    assert f"rank {rank} on " in message
    assert "the target failed on rows" in message
    assert "go on with: python -m dspark.precompute" in message


def test_what_all_ranks_would_refuse_is_refused_once_and_leaves_nothing(bench, tmp_path):
    cache = tmp_path / "cache"
    ended = Launch(bench, cache, "--target-layer-ids", "7", world_size=3).wait()
    assert all(one.code for one in ended)
    message = only(errors(ended))
    assert "layer ids [7] do not fit" in message
    assert not cache.exists()


def test_a_misspelt_flag_is_named_once(bench, tmp_path):
    ended = Launch(bench, tmp_path / "cache", "--resmue", world_size=3).wait()
    assert all(one.code for one in ended)
    assert ended[0].code == 2
    message = only(errors(ended))
    assert "unrecognized arguments: --resmue" in message


def test_a_group_that_was_started_anew_goes_on_by_itself(bench, tmp_path):
    cache = tmp_path / "cache"
    first = Launch(bench, cache, world_size=2, faults={1: [Fault(CAPTURE, "kill", 8)]})
    first.wait()
    before = stamps(cache)
    # The launcher of one machine counts, that of a machine which has just joined does not.
    again = Launch(bench, cache, world_size=2, restarts={1: 1}, store=first.store)
    assert [one.code for one in again.wait()] == [0, 0]
    bench.check_finished(cache)
    assert stamps(cache).items() >= before.items()


@pytest.mark.parallel
@pytest.mark.parametrize("rank", [0, 1])
def test_where_no_launcher_does_a_dead_rank_ends_the_others(bench, tmp_path, rank):
    quick = [Fault("dspark.processes.heartbeat._SILENCE_SECONDS", "= 4")]
    faults = {0: list(quick), 1: list(quick)}
    faults[rank].append(Fault(CAPTURE, "kill", 5))
    cache = tmp_path / "cache"
    ended = Launch(bench, cache, world_size=2, faults=faults, kills=False).wait()
    assert ended[rank].code == -9
    assert ended[1 - rank].code == 1
    message = only(errors(ended))
    assert f"rank {rank} has not been heard of for 4 s" in message
    bench.check_published(cache)


def test_ranks_that_a_launcher_ends_finish_a_shard_that_takes_seconds(bench, tmp_path):
    cache = tmp_path / "cache"
    faults = {1: [Fault(CAPTURE, "SIGTERM", 4)]}
    ended = Launch(bench, cache, world_size=2, faults=faults, kills=False).wait()
    assert all(one.code for one in ended)
    message = only(errors(ended))
    assert "rank 1 on " in message
    assert "stopped by SIGTERM" in message
    assert bench.check_published(cache)
    assert not [path for path in cache.iterdir() if path.name.endswith(".tmp")]


KILLS = [
    Fault(CAPTURE, "kill", 2),
    Fault(CAPTURE, "kill", 6),
    Fault(RENAME, "kill", path="shard-"),
    Fault(RENAME, "kill", path="shard-", moment="after"),
    Fault("os.pwrite", "kill", 3, path="shard-", moment="halfway"),
    Fault("os.fsync", "kill", 2, path="shard-"),
    Fault("dspark.job.read_input.write_part", "kill"),
    Fault("dspark.job.read_input.write_part", "kill", moment="after"),
    Fault("dspark.job.survey.Survey.damaged", "kill"),
    Fault("dspark.target.load_config", "kill"),
    Fault("dspark.processes.group.Group.collect", "kill", 4),
    Fault("dspark.processes.group.Group.collect", "kill", 5, moment="after"),
]


@pytest.mark.parallel
@pytest.mark.parametrize("seed", range(4))
def test_ranks_killed_again_and_again_get_there_with_ever_other_numbers(bench, tmp_path, seed):
    draw = random.Random(seed)
    cache = tmp_path / "cache"
    kept: dict[str, tuple[int, int]] = {}
    for fault in draw.sample(KILLS, len(KILLS)):
        world_size = draw.choice((2, 3, 4, 5))
        rank = draw.randrange(world_size)
        launch = Launch(bench, cache, "--resume", world_size=world_size, faults={rank: [fault]})
        begun = time.monotonic()
        ended = launch.wait()
        assert time.monotonic() - begun < 60, fault
        if ended[rank].code == -9:  # else what was left had no such call
            assert all(one.code for one in ended), fault
        bench.check_published(cache)
        found = stamps(cache)
        assert found.items() >= kept.items(), f"{fault}: a finished file was written again"
        kept = found
    ended = Launch(bench, cache, "--resume", world_size=draw.choice((1, 2, 3))).wait()
    assert not any(one.code for one in ended), ended
    bench.check_finished(cache)
    assert stamps(cache).items() >= kept.items()
