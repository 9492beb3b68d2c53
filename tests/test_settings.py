"""What a run decides before it reads a row: device, dtype, layers, and what pads."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from chat_fixtures import tiny_tokenizer
from dspark.errors import TargetError
from dspark.job.settings import RunSettings, choose_device, choose_layers

CPU = torch.device("cpu")


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda_a_run_is_on_the_cpu_in_fp32_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="dspark"):
        assert choose_device("auto", "auto") == (CPU, torch.float32)
    assert "running on the CPU" in caplog.text


@pytest.mark.usefixtures("no_cuda")
def test_a_cpu_that_was_asked_for_needs_no_word(caplog):
    with caplog.at_level(logging.INFO, logger="dspark"):
        assert choose_device("cpu", "auto") == (CPU, torch.float32)
    assert caplog.text == ""


@pytest.mark.usefixtures("cuda")
def test_where_cuda_is_a_run_is_on_it_in_bf16():
    assert choose_device("auto", "auto") == (torch.device("cuda"), torch.bfloat16)
    assert choose_device("cpu", "auto") == (CPU, torch.float32)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_of_a_launcher_has_a_gpu_of_its_own(monkeypatch, device):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device(device, "auto")[0] == torch.device("cuda:3")
    assert choose_device("cuda:1", "auto")[0] == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_a_compute_dtype_that_was_asked_for_is_taken(name, dtype):
    assert choose_device("cpu", name) == (CPU, dtype)


@pytest.mark.usefixtures("no_cuda")
def test_cuda_that_is_not_there_is_refused():
    with pytest.raises(TargetError, match=r"--device cuda:0.*use --device cpu"):
        choose_device("cuda:0", "auto")


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(TargetError, match="--device abacus"):
        choose_device("abacus", "auto")


def test_layers_are_spread_by_default(caplog):
    with caplog.at_level(logging.INFO, logger="dspark"):
        found = choose_layers(None, num_layers=36, num_captured=5)
    assert found == [1, 10, 18, 26, 35]
    assert "layer 35 is the post-norm state; SGLang cannot capture it" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_fewer_layers_than_asked_for_are_a_warning_with_both_numbers(caplog):
    with caplog.at_level(logging.WARNING, logger="dspark"):
        assert len(choose_layers(None, num_layers=4, num_captured=5)) == 3
    assert "--draft-num-hidden-layers 5: the target has 4 layers, so 3 are captured" in caplog.text


def test_the_input_of_layer_0_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="dspark"):
        assert choose_layers([-1, 2], num_layers=4, num_captured=5) == [-1, 2]
    assert "layer -1" in caplog.text


def test_layers_in_the_middle_need_no_word(caplog):
    with caplog.at_level(logging.WARNING, logger="dspark"):
        choose_layers([0, 2], num_layers=4, num_captured=5)
    assert caplog.text == ""


@pytest.mark.parametrize("wanted", [[4], [-2], [2, 1], [1, 1], []])
def test_layers_that_do_not_fit_are_refused(wanted):
    with pytest.raises(TargetError):
        choose_layers(wanted, num_layers=4, num_captured=5)


def pad_id(*, embedded: int = 512, **special_tokens: str | None) -> int:
    config = LlamaConfig(vocab_size=embedded)
    tokenizer = tiny_tokenizer(**special_tokens)
    return RunSettings(SimpleNamespace(), config, tokenizer, [0], CPU, torch.float32).pad_token_id


def test_rows_are_padded_with_the_pad_token_even_if_its_id_is_0():
    assert tiny_tokenizer().convert_tokens_to_ids("<|endoftext|>") == 0
    assert pad_id(pad_token="<|endoftext|>", eos_token="<|im_end|>") == 0


def test_without_a_pad_token_rows_are_padded_with_the_end_token():
    expected = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert expected > 0
    assert pad_id(pad_token=None, eos_token="<|im_end|>") == expected


def test_a_pad_token_without_an_embedding_is_passed_over():
    ids = tiny_tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokens = {"pad_token": "<|im_end|>", "eos_token": "<|im_start|>"}
    assert pad_id(**tokens, embedded=ids[1] + 1) == ids[1] > ids[0]
    assert pad_id(**tokens, embedded=ids[1]) == ids[0]


def test_without_any_such_token_rows_are_padded_with_0():
    assert pad_id(pad_token=None, eos_token=None) == 0
