"""Loading: whole or not at all, the class of the checkpoint, memory, and several devices."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.errors import TargetError
from dspark.target import check_target, load_target
from tiny_models import tiny_mllama, tiny_qwen3

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def load(directory: Path, **changes):
    options = {"layer_ids": [-1, 0, 1, 2, 3], "device": "cpu", "compute_dtype": torch.float32}
    return load_target(str(directory), **{**options, **changes})


def test_a_checkpoint_with_a_tensor_missing_is_refused(tmp_path):
    tiny_qwen3().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"no weights for 1 parameters .*layers\.2\.mlp\.up_proj"):
        load(tmp_path)


def test_a_multimodal_checkpoint_loads_as_the_class_that_saved_it(tmp_path):
    model = tiny_mllama()
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    assert type(target.model) is type(model)
    check_target(target)


def test_weights_spread_over_memory_and_disk_give_the_same_states(tmp_path):
    pytest.importorskip("accelerate")
    tiny_qwen3().save_pretrained(tmp_path)
    whole = load(tmp_path)
    places = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    spread = load(tmp_path, device_map=places | {"lm_head": "disk"})
    assert spread.model.lm_head.weight.is_meta
    assert spread.device == torch.device("cpu")
    check_target(spread)
    mine, theirs = (t.capture(IDS, torch.ones_like(IDS)) for t in (spread, whole))
    assert torch.equal(mine.hidden_states, theirs.hidden_states)
    torch.testing.assert_close(spread.lm_head.weight, whole.lm_head.weight, rtol=0, atol=1e-6)
    assert torch.equal(spread.embed_tokens.weight, whole.embed_tokens.weight)


MEASURE = """
import re, sys, threading, torch
from transformers.models.llama import modeling_llama
from dspark.target import load_config, load_target

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

directory, dtype = sys.argv[1], getattr(torch, sys.argv[2])
load_config(directory)
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
target = load_target(directory, layer_ids=[0], device="cpu", compute_dtype=dtype)
done.set()
watcher.join()
size = sum(p.numel() * p.element_size() for p in target.model.parameters())
print((max(peak, anonymous()) - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_little_more_memory_than_the_model(tmp_path):
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), "float32"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.3
