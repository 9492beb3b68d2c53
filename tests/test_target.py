"""Reading a target's configuration, choosing its layers, refusing what cannot be a target."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
)

import dspark.target
from dspark.errors import TargetError
from dspark.target import (
    check_layer_ids,
    check_seq_length,
    default_layer_ids,
    load_config,
    load_target,
    read_model_type,
)
from tiny_models import tiny_gpt2, tiny_llama, tiny_qwen3


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(directory)
    return directory


def load(directory: Path, layer_ids=(0,), **changes):
    options = {"device": "cpu", "compute_dtype": torch.float32, "layer_ids": layer_ids}
    return load_target(str(directory), **{**options, **changes})


def edit_config(directory: Path, source: Path, **changes) -> Path:
    directory.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def forbid_weights(monkeypatch) -> None:
    def load_weights(*_args, **_kwargs):
        pytest.fail("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_weights)


@pytest.mark.parametrize(
    ("num_layers", "num_captured", "ids"),
    [
        (36, 5, [1, 10, 18, 26, 35]),
        (30, 5, [1, 8, 15, 22, 29]),
        (36, 1, [35]),
        (2, 5, [1]),
        (3, 5, [1, 2]),
        (4, 5, [1, 2, 3]),
        (5, 5, [1, 2, 3, 4]),
        (1, 5, [0]),
    ],
)
def test_default_layers_spread_from_layer_1_to_the_post_norm_state(num_layers, num_captured, ids):
    assert default_layer_ids(num_layers=num_layers, num_captured=num_captured) == ids


def test_default_layers_are_always_valid():
    for num_layers in range(1, 80):
        for num_captured in range(1, 20):
            ids = default_layer_ids(num_layers=num_layers, num_captured=num_captured)
            assert check_layer_ids(ids, num_layers=num_layers) == ids
            assert len(ids) == max(1, min(num_captured, num_layers - 1))


def test_no_layers_cannot_be_spread():
    with pytest.raises(TargetError, match="0 of 4 layers"):
        default_layer_ids(num_layers=4, num_captured=0)


@pytest.mark.parametrize("ids", [[-2], [0, 4], [1, 1], [2, 1], []])
def test_ids_that_do_not_fit_are_refused_before_the_weights_load(monkeypatch, llama_dir, ids):
    forbid_weights(monkeypatch)
    with pytest.raises(TargetError, match="layer ids"):
        load(llama_dir, ids)


def test_the_model_type_is_read_without_any_configuration_class(monkeypatch, tmp_path, llama_dir):
    monkeypatch.setattr(dspark.target, "AutoConfig", None)
    directory = edit_config(tmp_path / "m", llama_dir, model_type="a_type_of_tomorrow")
    assert read_model_type(str(directory)) == "a_type_of_tomorrow"


def test_a_configuration_without_a_model_type_is_refused(tmp_path, llama_dir):
    directory = edit_config(tmp_path / "m", llama_dir, model_type=None)
    with pytest.raises(TargetError, match="model_type=None"):
        read_model_type(str(directory))


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(TargetError, match="cannot read the config"):
        read_model_type(str(tmp_path))


def test_an_unknown_model_type_is_refused(tmp_path, llama_dir):
    directory = edit_config(tmp_path / "m", llama_dir, model_type="a_type_of_tomorrow")
    with pytest.raises(TargetError, match="a_type_of_tomorrow"):
        load_config(str(directory))


def test_a_model_with_its_own_code_is_refused_and_the_code_not_run(tmp_path, llama_dir):
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    directory = edit_config(tmp_path / "m", llama_dir, auto_map=own)
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(TargetError, match="--trust-remote-code"):
        load_config(str(directory))
    with pytest.raises(TargetError, match="--trust-remote-code"):
        load(directory)
    assert not (tmp_path / "ran").exists()


def test_trusted_code_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "c")])
    directory = tmp_path / "m"
    tiny_llama().save_pretrained(directory)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(directory, directory, auto_map=own, model_type="own_llama")
    (directory / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    target = load(directory, trust_remote_code=True)
    assert type(target.model).__name__ == "OwnModel"
    dspark.target.check_target(target)


def test_an_encoder_decoder_is_refused(tmp_path):
    BartConfig(d_model=16).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="encoder-decoder"):
        load_config(str(tmp_path))


def test_a_model_type_without_a_causal_model_is_refused(tmp_path):
    from transformers import ViTConfig

    ViTConfig(hidden_size=16).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="model_type='vit'"):
        load(tmp_path)


def test_a_directory_without_weights_is_an_error_that_names_it(tmp_path, llama_dir):
    with pytest.raises(TargetError, match=r"cannot load .*without"):
        load(edit_config(tmp_path / "without", llama_dir))


def test_weights_load_in_the_compute_dtype(llama_dir):
    target = load(llama_dir, compute_dtype=torch.bfloat16)
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    ids = torch.tensor([[3, 4, 5]])
    assert target.capture(ids, torch.ones_like(ids)).last.dtype == torch.bfloat16


def test_the_attention_kind_asked_for_is_used(llama_dir):
    target = load(llama_dir, attn_implementation="eager")
    assert target.model.config._attn_implementation == "eager"


def test_the_sizes_are_those_of_the_text_configuration(llama_dir):
    target = load(llama_dir)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 128)
    assert target.embed_tokens.weight.shape == target.lm_head.weight.shape == (128, 32)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_positions=1024),
        LlamaConfig(max_position_embeddings=1024),
        LlamaConfig(
            max_position_embeddings=256,
            rope_scaling={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
    ],
    ids=["learned", "rotary", "stretched"],
)
def test_rows_longer_than_the_positions_are_refused(config):
    check_seq_length(config, seq_length=1024)
    with pytest.raises(TargetError, match="1025 is beyond the 1024 positions"):
        check_seq_length(config, seq_length=1025)


def test_a_model_without_positions_takes_any_length():
    check_seq_length(MambaConfig(), seq_length=10**6)


def test_a_model_that_sees_the_future_fails_its_check(tmp_path):
    config = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="not a causal decoder"):
        dspark.target.check_target(load(tmp_path))


@pytest.mark.parametrize("build", [tiny_qwen3, tiny_gpt2])
def test_a_loaded_target_gives_the_states_of_the_model_that_was_saved(tmp_path, build):
    model = build()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    captured = load(tmp_path, [-1, 1, 3]).capture(ids, torch.ones_like(ids))
    states = model(ids, output_hidden_states=True).hidden_states
    for mine, theirs in zip(captured.layers, (states[0], states[2], states[4]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
