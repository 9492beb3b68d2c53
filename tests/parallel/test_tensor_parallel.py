"""A target that several ranks hold together has the states of one that a single process holds."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chat_fixtures import TEMPLATES, tiny_tokenizer
from ranks import Bench, Fault, Launch, Rank, errors, only, stamps
from tiny_models import tiny_gpt2, tiny_llama, tiny_qwen3, tiny_tied

MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "tied": tiny_tied, "gpt2": tiny_gpt2}
OPTIONS = ("--dtype", "fp32")


@pytest.fixture(scope="session")
def targets(bench, tmp_path_factory) -> dict[str, Bench]:
    """The bench with another target each."""
    root = tmp_path_factory.mktemp("targets")
    for name, build in MODELS.items():
        build(vocab_size=512).save_pretrained(root / name)
        tiny_tokenizer(TEMPLATES["chatml"]).save_pretrained(root / name)
    return {name: dataclasses.replace(bench, target=root / name) for name in MODELS}


def largest_difference(cache: Path, other: Path) -> float:
    """Return how far states are apart, as a share of each token's largest magnitude per layer."""
    size = json.loads((cache / "manifest.json").read_bytes())["hidden_size"]
    worst = 0.0
    for path in sorted(cache.glob("shard-*")):
        mine, theirs = load_file(path), load_file(other / path.name)
        for key, states in mine.items():
            if not states.is_floating_point():
                assert torch.equal(states, theirs[key])
                continue
            for ours, yours in zip(
                states.split(size, -1), theirs[key].split(size, -1), strict=True
            ):
                largest = yours.double().abs().amax(-1)
                apart = (ours.double() - yours.double()).abs().amax(-1)
                assert not apart[largest == 0].any()
                worst = max(worst, float((apart / largest.clamp_min(1e-30)).max()))
    return worst


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", pytest.param("tied", marks=pytest.mark.parallel)]
)
def test_two_ranks_that_hold_one_target_write_the_states_of_one_process(targets, tmp_path, name):
    bench = targets[name]
    assert Rank(bench, bench.argv(tmp_path / "one", *OPTIONS), []).wait().code == 0
    ended = Launch(bench, tmp_path / "two", *OPTIONS, "--tensor-parallel", "2", world_size=2).wait()
    assert [one.code for one in ended] == [0, 0], ended
    assert ended[1].stderr == ended[1].stdout == ""
    assert 0 < largest_difference(tmp_path / "two", tmp_path / "one") < 1e-5
    weights = [tmp_path / name / "target_weights.safetensors" for name in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parallel
def test_two_copies_of_a_target_over_two_ranks_each_share_the_shards(targets, tmp_path):
    bench, options = targets["qwen3"], (*OPTIONS, "--tensor-parallel", "2")
    assert [one.code for one in Launch(bench, tmp_path / "two", *options, world_size=2).wait()] == [
        0,
        0,
    ]
    ended = Launch(bench, tmp_path / "four", *options, world_size=4).wait()
    assert [one.code for one in ended] == [0] * 4, ended
    assert "wrote 26 rows, 7 shards" in ended[0].stderr
    assert largest_difference(tmp_path / "four", tmp_path / "two") == 0


@pytest.mark.parallel
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_within_a_forward_ends_the_one_that_waits_for_it(
    targets, tmp_path, rank
):
    bench, options = targets["qwen3"], (*OPTIONS, "--tensor-parallel", "2")
    cache = tmp_path / "cache"
    faults = {rank: [Fault("torch.nn.Linear.forward", "kill", 80)]}
    ended = Launch(bench, cache, *options, world_size=2, faults=faults).wait()
    assert ended[rank].code == -9
    assert ended[1 - rank].code not in (0, None)
    before = stamps(cache)
    again = Launch(bench, cache, *options, "--resume", world_size=2).wait()
    assert [one.code for one in again] == [0, 0], again
    assert stamps(cache).items() >= before.items()


@pytest.mark.parametrize(
    ("name", "world_size", "options", "reason"),
    [
        ("gpt2", 2, ("--tensor-parallel", "2"), "no tensor-parallel plan for model_type='gpt2'"),
        ("llama", 3, ("--tensor-parallel", "2"), "does not divide the 3 ranks"),
        ("llama", 1, ("--tensor-parallel", "2"), "does not divide the 1 ranks"),
        ("llama", 4, ("--tensor-parallel", "4"), "does not divide the target's num_key_value"),
        ("llama", 2, ("--tensor-parallel", "2", "--device-map", "auto"), "one of the two flags"),
        ("llama", 2, ("--device-map", "auto"), "one of the two flags"),
    ],
)
def test_what_cannot_be_held_together_is_refused_with_a_reason(
    targets, tmp_path, name, world_size, options, reason
):
    cache = tmp_path / "cache"
    ended = Launch(targets[name], cache, *options, world_size=world_size).wait()
    assert all(one.code for one in ended)
    assert reason in only(errors(ended))
    assert not cache.exists()
