"""The command on targets of several kinds: what it writes is what the model says of each row."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import tiny_models
from chat_fixtures import TEMPLATES, tiny_tokenizer
from dspark.cache import (
    CachedDSparkDataset,
    read_manifest,
    read_target_weight_modules,
    target_logits,
)
from dspark.precompute import main
from dspark.verify import main as verify
from tiny_target import command_line, write_chats

VOCAB = 512
BUILDERS = {
    "gpt2": tiny_models.tiny_gpt2,
    "gemma2": tiny_models.tiny_gemma2,
    "gemma3": tiny_models.tiny_gemma3,
    "phi": tiny_models.tiny_phi,
    "qwen3moe": tiny_models.tiny_qwen3moe,
    "tied": tiny_models.tiny_tied,
}


@pytest.fixture(scope="module", params=BUILDERS)
def made(request, tmp_path_factory):
    """A model and the cache that the command wrote of seven conversations."""
    root = tmp_path_factory.mktemp(request.param)
    model = BUILDERS[request.param](vocab_size=VOCAB)
    model.save_pretrained(root / "target")
    tiny_tokenizer(TEMPLATES["chatml"]).save_pretrained(root / "target")
    chats = write_chats(root / "chats.jsonl", 7)
    command = command_line(root / "target", chats, root / "cache")
    assert main([*command, "--dtype", "fp32", "--target-layer-ids", "-1", "1", "3"]) == 0
    shutil.rmtree(root / "target")
    return model, root / "cache"


def rows_of(cache: Path):
    """Yield each row's real ids and states."""
    for row in CachedDSparkDataset(str(cache)):
        length = int(row["target_last_hidden_states"].any(dim=-1).sum())
        yield {key: tensor[:length] for key, tensor in row.items()}


def test_every_cached_row_is_a_single_row_forward_of_its_own_ids(made):
    model, cache = made
    head = read_target_weight_modules(str(cache))[1]
    for row in rows_of(cache):
        with torch.no_grad():
            alone = model(input_ids=row["input_ids"][None], output_hidden_states=True)
        expected = [alone.hidden_states[i + 1][0] for i in (-1, 1, 3)]
        for mine, theirs in zip(
            row["target_hidden_states"].split(32, dim=-1), expected, strict=True
        ):
            largest = theirs.abs().amax(-1, keepdim=True)
            assert ((mine - theirs).abs() <= 1e-5 * largest).all()
        logits = target_logits(head, row["target_last_hidden_states"])
        torch.testing.assert_close(logits, alone.logits[0], rtol=1e-4, atol=1e-4)


def test_the_manifest_has_the_sizes_of_the_text_decoder(made):
    manifest = read_manifest(str(made[1]))
    sizes = ("hidden_size", "num_hidden_layers", "target_vocab_size", "target_hidden_dim")
    assert [manifest[size] for size in sizes] == [32, 4, VOCAB, 96]


def test_both_weights_are_there_each_with_its_own_storage(made):
    model, cache = made
    with safe_open(cache / "target_weights.safetensors", "pt") as file:
        embed, head = file.get_tensor("embed_tokens.weight"), file.get_tensor("lm_head.weight")
    assert torch.equal(embed, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)


def test_what_the_head_adds_is_in_provenance(made):
    model, cache = made
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    expected = {"final_logit_softcapping": cap} if cap else None
    assert read_manifest(str(cache))["provenance"].get("logits") == expected


def test_the_cache_passes_its_proof(made, capsys):
    assert verify([str(made[1])]) == 0


def test_rows_beyond_learned_positions_are_refused_up_front(tmp_path, capsys):
    model = tiny_models.tiny_gpt2(vocab_size=VOCAB, n_positions=63)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(TEMPLATES["chatml"]).save_pretrained(tmp_path / "target")
    chats = write_chats(tmp_path / "chats.jsonl", 1)
    assert main(command_line(tmp_path / "target", chats, tmp_path / "cache")) == 1
    assert "--seq-length 64 is beyond the 63 positions of gpt2" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_with_the_check_off_the_head_is_never_called(tmp_path, monkeypatch):
    model = tiny_models.tiny_qwen3(vocab_size=VOCAB)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(TEMPLATES["chatml"]).save_pretrained(tmp_path / "target")
    chats = write_chats(tmp_path / "chats.jsonl", 4)
    command = command_line(tmp_path / "target", chats, tmp_path / "checked")
    assert main(command) == 0
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("head called"))
    command = command_line(tmp_path / "target", chats, tmp_path / "unchecked")
    assert main([*command, "--no-target-check"]) == 0
    for name in ("shard-000000.safetensors", "target_weights.safetensors"):
        assert (tmp_path / "checked" / name).read_bytes() == (
            tmp_path / "unchecked" / name
        ).read_bytes()
