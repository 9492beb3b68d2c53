"""The command, run in this process on a tiny target: what it writes and says."""

import argparse
import json
import logging

import torch
import transformers
from observed import ROWS, snapshot

from chat_fixtures import TEMPLATES, tiny_tokenizer
from dspark import precompute
from dspark.cache import (
    CachedDSparkDataset,
    read_manifest,
    read_target_weight_modules,
)
from dspark.precompute import (
    _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES,
    _build_parser,
    _run,
    _validate_args,
    main,
)
from tiny_target import (
    SEQ_LENGTH,
    cache_files,
    command_line,
    some_chats,
    write_chats,
)


def test_the_names_of_the_page_are_there():
    assert _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES == (
        "deepseek_v4",
        "glm_moe_dsa",
        "minimax_m3_vl",
    )
    assert precompute.logger.name == "dspark.precompute"
    assert isinstance(_build_parser(), argparse.ArgumentParser)
    assert callable(_validate_args)
    assert callable(_run)


def test_a_run_writes_manifest_weights_and_every_shard(finished):
    assert sorted(cache_files(finished)) == [
        "manifest.json",
        "shard-000000.safetensors",
        "shard-000001.safetensors",
        "shard-000002.safetensors",
        "target_weights.safetensors",
    ]


def test_the_manifest_says_what_was_run(finished, target, chats):
    manifest = read_manifest(str(finished))
    identity = manifest["provenance"]["identity"]
    assert manifest["complete"] is True
    assert manifest["target_model"] == str(target)
    assert manifest["target_model_type"] == "qwen3"
    assert manifest["target_vocab_size"] == 512
    assert manifest["hidden_size"] == 32
    assert manifest["num_hidden_layers"] == 4
    assert manifest["seq_length"] == SEQ_LENGTH
    assert manifest["dtype"] == "bf16"
    assert manifest["num_samples"] == ROWS
    assert manifest["shard_size"] == 4
    assert manifest["target_layer_ids"] == [1, 3]
    assert manifest["train_data_path"] == str(chats)
    assert manifest["train_split"] is None
    assert manifest["shuffle_seed"] == 42
    assert manifest["mask_reasoning_content"] is manifest["mask_generation_prompt"] is False
    assert identity["compute_dtype"] == "float32"
    assert identity["pad_token_id"] == tiny_tokenizer().pad_token_id


def test_the_manifest_counts_what_was_kept(finished):
    counts = read_manifest(str(finished))["provenance"]["counts"]
    dataset = CachedDSparkDataset(str(finished))
    assert counts["rows"] == counts["source_rows"] == len(dataset) == ROWS
    assert counts["supervised_tokens"] == sum(int(row["loss_mask"].sum()) for row in dataset)
    assert counts["skipped"] == {}
    assert counts["cut_rows"] > 0


def test_the_last_states_through_the_stored_head_are_the_targets_logits(finished, target):
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    _, lm_head = read_target_weight_modules(str(finished))
    dataset = CachedDSparkDataset(str(finished))
    for item in dataset:
        length = int((item["target_last_hidden_states"] != 0).any(dim=-1).sum())
        with torch.no_grad():
            logits = model(input_ids=item["input_ids"][None, :length]).logits[0]
        found = item["target_last_hidden_states"][:length].float() @ lm_head.weight.float().T
        assert (found - logits).abs().max() <= 0.05 * logits.abs().max()


def test_two_runs_write_the_same_bytes(finished, target, chats, tmp_path):
    assert main(command_line(target, chats, tmp_path / "again")) == 0
    assert cache_files(tmp_path / "again") == cache_files(finished)


def test_a_nested_output_directory_is_created(target, chats, tmp_path):
    cache = tmp_path / "a" / "b" / "c"
    assert main([*command_line(target, chats, cache), "--max-samples", "1"]) == 0
    assert len(CachedDSparkDataset(str(cache))) == 1


def test_the_batch_size_does_not_change_what_a_row_holds(finished, target, chats, tmp_path):
    command = [*command_line(target, chats, tmp_path), "--dtype", "fp32", "--shard-size", "4"]
    assert main([*command, "--batch-size", "4"]) == 0
    for found, expected in zip(
        CachedDSparkDataset(str(tmp_path)), CachedDSparkDataset(str(finished)), strict=True
    ):
        assert torch.equal(found["input_ids"], expected["input_ids"])
        assert torch.allclose(
            found["target_last_hidden_states"],
            expected["target_last_hidden_states"].float(),
            rtol=2**-7,
            atol=1e-2,
        )


def test_layers_can_be_chosen(target, chats, tmp_path):
    command = [*command_line(target, chats, tmp_path), "--max-samples", "2", "--dtype", "fp32"]
    assert main([*command, "--target-layer-ids", "-1", "0", "3"]) == 0
    assert read_manifest(str(tmp_path))["target_layer_ids"] == [-1, 0, 3]
    row = CachedDSparkDataset(str(tmp_path))[0]
    assert torch.equal(row["target_hidden_states"][:, 64:], row["target_last_hidden_states"])
    embed_tokens, _ = read_target_weight_modules(str(tmp_path))
    length = int(row["target_hidden_states"].any(dim=-1).sum())
    expected = embed_tokens.weight[row["input_ids"][:length]]
    assert torch.equal(row["target_hidden_states"][:length, :32], expected)


def test_more_layers_than_the_target_has_are_captured_as_far_as_possible(
    target, chats, tmp_path, caplog
):
    command = [*command_line(target, chats, tmp_path), "--max-samples", "1"]
    with caplog.at_level(logging.WARNING, logger="dspark"):
        assert main([*command, "--draft-num-hidden-layers", "9"]) == 0
    assert read_manifest(str(tmp_path))["target_layer_ids"] == [1, 2, 3]
    assert "--draft-num-hidden-layers 9: the target has 4 layers, so 3 are captured" in caplog.text


def test_max_samples_counts_rows_kept_after_split_and_skipping(target, tmp_path):
    rows = some_chats(8)
    rows[2] = {"messages": [{"role": "user", "content": "no answer"}]}
    data = write_chats(tmp_path / "chats.jsonl", rows)
    flags = ["--split", "train[1:]", "--on-bad-row", "skip", "--max-samples", "3"]
    assert main([*command_line(target, data, tmp_path / "cache"), *flags]) == 0
    counts = read_manifest(str(tmp_path / "cache"))["provenance"]["counts"]
    assert (counts["rows"], counts["source_rows"]) == (3, 4)
    assert sum(counts["skipped"].values()) == 1
    assert len(CachedDSparkDataset(str(tmp_path / "cache"))) == 3


def test_several_inputs_are_joined_in_order(target, tmp_path):
    paths = [write_chats(tmp_path / f"{name}.jsonl", rows) for name, rows in (("b", 2), ("a", 1))]
    command = [*command_line(target, paths[0], tmp_path / "cache"), "--input-data", str(paths[1])]
    assert main(command) == 0
    manifest = read_manifest(str(tmp_path / "cache"))
    assert json.loads(manifest["train_data_path"]) == [str(path) for path in paths]
    ids = [row["input_ids"].tolist() for row in CachedDSparkDataset(str(tmp_path / "cache"))]
    assert ids[0] == ids[2] != ids[1]


def test_a_dry_run_prints_the_size_and_writes_no_cache(target, chats, finished, tmp_path, capsys):
    command = [*command_line(target, chats, tmp_path), "--dry-run", "--log-level", "error"]
    assert main(command) == 0
    *table, last = capsys.readouterr().out.splitlines()
    forecast = json.loads(last)
    assert forecast["rows"] == ROWS
    assert table
    assert cache_files(tmp_path) == {}
    written = sum(len(raw) for name, raw in cache_files(finished).items() if "manifest" not in name)
    apparent = forecast["apparent_bytes"]
    assert abs(apparent - written) <= 0.02 * written


def test_a_dry_run_says_the_same_beside_a_finished_cache_and_changes_nothing(
    target, chats, cache, capsys
):
    before = snapshot(cache)
    assert main([*command_line(target, chats, cache), "--dry-run", "--log-level", "error"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == ROWS
    assert snapshot(cache) == before


def test_a_dry_run_with_other_settings_leaves_a_cache_its_tokens(target, chats, cache, capsys):
    tokens = sorted((cache / ".dspark").glob("tokens-*/*"))
    shorter = [*command_line(target, chats, cache), "--seq-length", "12", "--dry-run"]
    assert main([*shorter, "--log-level", "error"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == ROWS
    assert sorted((cache / ".dspark").glob("tokens-*/*")) == tokens != []


def test_tokens_are_made_again_when_another_of_several_templates_changes(target, tmp_path):
    rows = [
        chat | {"tools": [{"type": "function", "function": {"name": "f"}}]}
        for chat in some_chats(2)
    ]
    chats, templates = write_chats(tmp_path / "chats.jsonl", rows), tmp_path / "templates.json"

    def run(cache: str, tool_use: str, *flags: str) -> dict[str, bytes]:
        named = {"default": TEMPLATES["chatml"], "tool_use": tool_use + TEMPLATES["chatml"]}
        templates.write_text(json.dumps({"chat_template": named}))
        command = [*command_line(target, chats, tmp_path / cache), *flags]
        assert main([*command, "--chat-template", str(templates)]) == 0
        return cache_files(tmp_path / cache)

    run("cache", "first ", "--dry-run")
    assert run("cache", "second ") == run("fresh", "second ") != run("other", "first ")
