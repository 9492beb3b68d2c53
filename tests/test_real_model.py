"""The whole job on SmolLM2-135M-Instruct: every cached state is the model's own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark.cache import (
    DTYPE_MAP,
    CachedDSparkDataset,
    existing_shard_indices,
    read_manifest,
    read_target_weight_modules,
)
from dspark.precompute import main

CHATS = Path(__file__).parent / "data" / "chats_12.jsonl"
LAYERS = [1, 8, 15, 22, 29]
WIDTH = 576
BF16_ROUNDING = 2**-8

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def cache(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    directory = tmp_path_factory.mktemp(request.param)
    command = [
        *("--target-model", str(smollm2), "--input-data", str(CHATS)),
        *("--output-dir", str(directory), "--dtype", request.param, "--device", "cpu"),
        *("--seq-length", "256", "--batch-size", "4", "--shard-size", "4"),
    ]
    assert main(command) == 0
    return str(directory)


@dataclass(frozen=True)
class Alone:
    """What the model makes of one row's real tokens, run alone: [n, H] per layer, and [n, V]."""

    states: tuple[torch.Tensor, ...]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def run_alone(smollm2: Path) -> Callable[[torch.Tensor], Alone]:
    """Return what runs a row's ids alone; the same ids are run once."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()

    @lru_cache
    def run(ids: tuple[int, ...]) -> Alone:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return Alone(tuple(state[0] for state in out.hidden_states), out.logits[0])

    return lambda ids: run(tuple(ids.tolist()))


def real_rows(cache: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the rows of a cache, cut to their real tokens."""
    for row in CachedDSparkDataset(cache):
        length = int(row["target_last_hidden_states"].any(dim=-1).sum())
        yield {key: tensor[:length] for key, tensor in row.items()}


def test_the_manifest_is_complete_and_has_the_default_layers(cache):
    manifest = read_manifest(cache)
    assert manifest["complete"] is True
    assert manifest["num_samples"] == 12
    assert manifest["target_layer_ids"] == LAYERS
    assert existing_shard_indices(cache) == {0, 1, 2}


def test_every_state_is_that_of_its_row_run_alone(cache, run_alone):
    rounding = BF16_ROUNDING if read_manifest(cache)["dtype"] == "bf16" else 0.0
    for row in real_rows(cache):
        states = run_alone(row["input_ids"]).states
        cached = [*row["target_hidden_states"].split(WIDTH, dim=-1)]
        cached.append(row["target_last_hidden_states"])
        for found, layer in zip(cached, [*LAYERS, 29], strict=True):
            expected = states[layer + 1]
            largest = expected.abs().amax(dim=-1, keepdim=True)
            allowed = 1e-5 * largest + rounding * expected.abs()
            assert ((found.float() - expected).abs() <= allowed).all()


def test_the_stored_head_predicts_what_the_model_predicts(cache, run_alone):
    exact = read_manifest(cache)["dtype"] == "fp32"
    embed_tokens, lm_head = read_target_weight_modules(cache)
    assert lm_head.weight.dtype == DTYPE_MAP[read_manifest(cache)["dtype"]]
    assert torch.equal(embed_tokens.weight, lm_head.weight)  # tied in this model
    same = total = 0
    for row in real_rows(cache):
        found = row["target_last_hidden_states"].float() @ lm_head.weight.float().T
        expected = run_alone(row["input_ids"]).logits
        same += int((found.argmax(dim=-1) == expected.argmax(dim=-1)).sum())
        total += len(expected)
    assert same == total if exact else same >= 0.99 * total
