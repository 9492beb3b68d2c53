"""The examples do what they say."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chat_fixtures import encoder, supervised
from dspark.cache import write_target_weights
from learnable_cache import next_token_cache

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHATS = [json.loads(line) for line in (EXAMPLES / "chats.jsonl").read_text().splitlines()]


def test_the_example_conversations_are_many_and_of_every_kind():
    assert len(CHATS) >= 48
    assert len({chat["id"] for chat in CHATS}) == len(CHATS)
    roles = [[message["role"] for message in chat["messages"]] for chat in CHATS]
    assert sum(turns.count("assistant") > 1 for turns in roles) >= 15
    assert sum("system" in turns for turns in roles) >= 8
    assert sum("tool" in turns for turns in roles) >= 5
    messages = [message for chat in CHATS for message in chat["messages"]]
    assert sum("reasoning_content" in message for message in messages) >= 8


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat["id"])
def test_every_example_conversation_is_supervised_in_all_its_answers(chat):
    conversation = encoder((EXAMPLES / "chatml.jinja").read_text()).encode(chat)
    runs = supervised(conversation)
    answers = [message for message in chat["messages"] if message["role"] == "assistant"]
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        assert answer["content"] in run
        assert answer.get("reasoning_content", "") in run
        for call in answer.get("tool_calls", []):
            assert f'{{"name": "{call["function"]["name"]}", "arguments": {{' in run


def test_the_training_example_learns_from_a_cache(tmp_path, monkeypatch, capsys):
    assert (EXAMPLES / "train_from_cache.py").read_text().count("\n") <= 80
    cache = next_token_cache(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_from_cache.py", cache, "--epochs", "4"])
    runpy.run_path(str(EXAMPLES / "train_from_cache.py"), run_name="__main__")
    first, *epochs = capsys.readouterr().out.splitlines()
    assert first.endswith("next token right 912 of 912 times")
    losses = [float(line.split()[4].rstrip(",")) for line in epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def test_the_training_example_refuses_states_that_do_not_predict_the_next_token(
    tmp_path, monkeypatch
):
    cache = next_token_cache(tmp_path)
    shuffled = SimpleNamespace(weight=20 * torch.eye(16).roll(1, 0))
    write_target_weights(cache, shuffled, shuffled, torch.bfloat16)
    monkeypatch.setattr(sys, "argv", ["train_from_cache.py", cache])
    with pytest.raises(AssertionError, match="do not belong"):
        runpy.run_path(str(EXAMPLES / "train_from_cache.py"), run_name="__main__")


def test_building_the_real_model_again_does_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["build_smollm2.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / "build_smollm2.py"), run_name="__main__")
    assert "already there" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_real_model_is_not_built_into_a_directory_of_other_things(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "thesis.tex").touch()
    monkeypatch.setattr(sys, "argv", ["build_smollm2.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "build_smollm2.py"), run_name="__main__")
    assert "holds no model" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.real_model
def test_the_real_model_knows_the_capital_of_france(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example = runpy.run_path(str(EXAMPLES / "build_smollm2.py"))
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    example["check_answer"](model, AutoTokenizer.from_pretrained(smollm2))
