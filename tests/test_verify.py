"""The verify command: what it finds, what it says, and how it exits."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from dspark.cache import (
    build_cache_manifest,
    read_manifest,
    shard_path,
    write_manifest,
    write_shard,
    write_target_weights,
)
from dspark.checks.cache_check import CacheReport, check_cache
from dspark.checks.cache_rows import spread_rows
from dspark.checks.manifest_check import finished_manifest
from dspark.checks.recompute import compare_with_target
from dspark.disk.shard_check import TensorRules, check_shard
from dspark.disk.shard_file import ShardMetadata, read_header, shard_metadata
from dspark.errors import CacheError
from dspark.target import load_target
from dspark.verify import main
from tiny_cache import LENGTHS, PAD, SEQ, write_tiny_cache


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write_tiny_cache(tmp_path / "cache")
    return tmp_path / "cache"


def _check(cache: Path) -> CacheReport:
    return check_cache(str(cache), num_workers=2)


def _faults(cache: Path) -> list[str]:
    return [f"{problem.file}: {problem.what}" for problem in _check(cache).problems]


def _rewrite(cache: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it a checksum that fits."""
    manifest = read_manifest(str(cache), allow_incomplete=True)
    change(manifest)
    write_manifest(str(cache), finished_manifest(str(cache), manifest))


def _strip(cache: Path) -> None:
    """Leave what another tool would have written: no metadata, no provenance, no holes."""
    for path in cache.glob("*.safetensors"):
        save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path)
    manifest = read_manifest(str(cache))
    manifest.pop("provenance", None)
    write_manifest(str(cache), manifest)


# The command


def test_a_right_cache_exits_with_0_and_a_table(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(cache)]) == 0
    out = capsys.readouterr().out
    assert "11 in 3 shards" in out
    assert out.endswith("all is right\n")


def test_a_damaged_cache_exits_with_1_and_names_file_tensor_and_row(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cache / "shard-000001.safetensors"
    header = read_header(path)
    place = header.tensors["target_hidden_states"]
    row_bytes = (place.end - place.begin) // 4
    _write(path, header.data_start + place.begin + 2 * row_bytes, b"\x01")
    assert main([str(cache)]) == 1
    out = capsys.readouterr().out
    assert (
        "WRONG shard-000001.safetensors: the data of target_hidden_states in row 2 do not match"
        in out
    )


def test_json_has_the_same_facts(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(cache), "--json", "--num-workers", "1"]) == 0
    right = json.loads(capsys.readouterr().out)
    assert right["right"] is True
    assert (right["rows"], right["shards"], right["tokens"]) == (11, 3, sum(LENGTHS))
    (cache / "shard-000002.safetensors").unlink()
    assert main([str(cache), "--json"]) == 1
    wrong = json.loads(capsys.readouterr().out)
    assert wrong["right"] is False
    assert {"file": "shards", "what": "1 of 3 are missing: 2"} in wrong["problems"]


@pytest.mark.parametrize(
    "arguments", [[], ["CACHE", "--rows", "3"], ["CACHE", "--num-workers", "-1"], ["nowhere"]]
)
def test_misuse_exits_with_2(
    cache: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([str(cache) if word == "CACHE" else word for word in arguments])
    assert exit_.value.code == 2


def test_names_of_files_cannot_steer_the_terminal(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "\x1b[31mred.txt").touch()
    main([str(cache)])
    assert "\x1b" not in capsys.readouterr().out


# Manifest


def test_an_unfinished_cache_is_wrong_and_checked_all_the_same(cache: Path) -> None:
    manifest = read_manifest(str(cache))
    write_manifest(str(cache), manifest | {"complete": False})
    report = _check(cache)
    assert any("has not finished" in problem.what for problem in report.problems)
    assert report.shards == 3


def test_without_a_manifest_nothing_else_can_be_checked(cache: Path) -> None:
    (cache / "manifest.json").unlink()
    report = _check(cache)
    assert [problem.file for problem in report.problems] == ["manifest.json"]
    assert "everything else" in report.unchecked[0]


def test_a_manifest_that_was_edited_is_told_from_one_that_was_written(cache: Path) -> None:
    path = cache / "manifest.json"
    path.write_text(path.read_text().replace('"torch": "2.13.0"', '"torch": "2.12.0"'))
    assert _faults(cache) == [
        "manifest.json: its content does not match provenance.manifest_xxh3_64"
    ]
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert any("byte for byte" in fault for fault in _faults(cache))


def test_a_finished_manifest_of_dspark_must_have_its_checksums(cache: Path) -> None:
    manifest = read_manifest(str(cache))
    for key in ("files", "manifest_xxh3_64"):
        provenance = {k: v for k, v in manifest["provenance"].items() if k != key}
        write_manifest(str(cache), manifest | {"provenance": provenance})
        assert any(f"provenance.{key}" in fault for fault in _faults(cache))


@pytest.mark.parametrize("layer_ids", [[2, 0], [0, 0], [0, 3], [-2, 1]])
def test_layers_that_the_target_does_not_have_are_wrong(cache: Path, layer_ids: list[int]) -> None:
    _rewrite(cache, lambda manifest: manifest.update(target_layer_ids=layer_ids))
    assert any("do not increase" in fault for fault in _faults(cache))


def test_counts_must_be_those_of_the_shards(cache: Path) -> None:
    _rewrite(cache, lambda manifest: manifest["provenance"]["counts"].update(tokens=1))
    assert _faults(cache) == [
        f"manifest.json: provenance.counts.tokens is 1, the shards have {sum(LENGTHS)}"
    ]


def test_the_rows_must_be_those_of_the_identity(tmp_path: Path) -> None:
    """A consistent cache whose manifest claims another input."""
    write_tiny_cache(tmp_path / "cache", rows_sha256="0" * 64)
    faults = _faults(tmp_path / "cache")
    assert len(faults) == 1
    assert "provenance speaks of rows with hash 000" in faults[0]


def test_rows_kept_without_states_are_not_held_against_the_input(tmp_path: Path) -> None:
    """What ``--on-bad-state mask`` leaves: no supervision and no states in one row."""
    write_tiny_cache(tmp_path / "cache", masked_row=5)
    report = _check(tmp_path / "cache")
    assert report.problems == []
    assert report.unchecked == ["the hash of the input: 1 rows were kept without supervision"]
    _rewrite(tmp_path / "cache", lambda m: m["provenance"].update(masked_rows=[4, 5]))
    assert _faults(tmp_path / "cache") == [
        "manifest.json: provenance.masked_rows names row 4, which has states or supervision"
    ]


# Files


def test_other_files_are_noted_and_harmless(cache: Path) -> None:
    (cache / "README.md").touch()
    (cache / ".dspark").mkdir()
    (cache / ".shard-000000.safetensors.run.0123.tmp").touch()
    report = _check(cache)
    assert report.is_right
    assert len(report.notes) == 2


def test_a_link_that_leads_nowhere_is_no_shard(cache: Path) -> None:
    path = cache / "shard-000000.safetensors"
    path.unlink()
    path.symlink_to("nowhere")
    assert "shard-000000.safetensors: it is not a file" in _faults(cache)


def test_links_to_right_files_are_followed(cache: Path, tmp_path: Path) -> None:
    """A download cache keeps files under other names and links to them."""
    for path in list(cache.glob("*.safetensors")):
        moved = tmp_path / f"blob-{path.stem}"
        path.rename(moved)
        path.symlink_to(moved)
    assert _faults(cache) == []


def test_a_shard_written_again_is_told_from_the_one_that_the_run_wrote(cache: Path) -> None:
    path = cache / "shard-000002.safetensors"
    samples = {name: tensor.clone() for name, tensor in load_file(path).items()}
    samples["target_last_hidden_states"][0, 0] += 1
    write_shard(str(cache), 2, samples | {"lengths": torch.tensor(LENGTHS[8:])})
    faults = _faults(cache)
    assert len(faults) == 1
    assert faults[0].startswith("shard-000002.safetensors: its header's checksum is ")


def test_a_copy_without_holes_is_as_right(cache: Path) -> None:
    whole = _check(cache)
    for path in cache.glob("shard-*"):
        data = path.read_bytes()
        path.write_bytes(data)
    filled = _check(cache)
    assert whole.is_right
    assert filled.is_right
    assert filled.bytes_skipped <= whole.bytes_skipped


def test_padding_is_proved_in_every_tensor(cache: Path) -> None:
    path = cache / "shard-000000.safetensors"
    header = read_header(path)
    for name, place in header.tensors.items():
        data = path.read_bytes()
        end_of_row_1 = header.data_start + place.begin + (place.end - place.begin) // 4 * 2
        _write(path, end_of_row_1 - 8, b"\x02")
        value = PAD if name == "input_ids" else 0
        fault = f"shard-000000.safetensors: the padding of {name} in row 1 is not {value}"
        assert _faults(cache) == [fault]
        path.write_bytes(data)


def test_every_problem_of_a_shard_is_counted_but_few_are_listed(cache: Path) -> None:
    path = cache / "shard-000000.safetensors"
    start = read_header(path).data_start
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:start] + bytes(byte ^ 255 for byte in data[start:]))
    faults = _faults(cache)
    assert faults[-1] == "shard-000000.safetensors: and there is more"
    assert len(faults) == 6


def test_weights_of_another_shape_are_wrong(cache: Path) -> None:
    half = SimpleNamespace(weight=torch.randn(32, 4))
    write_target_weights(str(cache), half, half, torch.bfloat16)
    _rewrite(cache, lambda manifest: None)
    assert any("expected torch.bfloat16 [vocabulary, 8]" in fault for fault in _faults(cache))


# Caches by other writers


def test_a_cache_by_another_writer_is_right_as_far_as_it_goes(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _strip(cache)
    report = _check(cache)
    assert report.problems == []
    assert main([str(cache)]) == 0
    assert re.search(r"^tokens +unknown, \d+ of them supervised$", capsys.readouterr().out, re.M)
    assert [line.split(":")[0] for line in report.unchecked] == [
        "the manifest's own checksum, and those of the files' headers",
        "the data of target_weights.safetensors",
        "checksums, lengths, padding and origin of the shards",
    ]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("input_ids", 32, "are not all in 0 … 31"),
        ("loss_mask", 2, "are not all in 0 … 1"),
        ("target_hidden_states", float("nan"), "are not all finite"),
        ("target_last_hidden_states", float("inf"), "are not all finite"),
    ],
)
def test_values_of_a_cache_by_another_writer_are_looked_at(
    cache: Path, name: str, value: float, fault: str
) -> None:
    _strip(cache)
    path = cache / "shard-000001.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name][1, 3] = value
    save_file(tensors, path)
    assert _faults(cache) == [f"shard-000001.safetensors: the data of {name} in row 1 {fault}"]


def test_one_shard_without_a_record_among_others_is_wrong(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_tiny_cache(cache, provenance=False)
    assert _faults(cache) == []
    path = cache / "shard-000001.safetensors"
    save_file({key: tensor.clone() for key, tensor in load_file(path).items()}, path)
    assert any("other shards do" in fault for fault in _faults(cache))


def test_shards_written_before_there_was_a_manifest_have_no_identity(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    manifest = write_tiny_cache(cache, provenance=False)
    (cache / "manifest.json").unlink()
    for index in range(3):
        write_shard(str(cache), index, load_file(shard_path(str(cache), index)))
    head = SimpleNamespace(weight=torch.randn(32, 8))
    write_target_weights(str(cache), head, head, torch.bfloat16)
    write_manifest(str(cache), manifest)
    assert _faults(cache) == []


# The check that a resumed run shares


def test_check_shard_names_the_first_fault(cache: Path) -> None:
    path = cache / "shard-000000.safetensors"
    record = shard_metadata(read_header(path), path)
    assert record is not None
    specs = _rules(cache).row_specs
    assert check_shard(path, specs, record, padding=_rules(cache).padding) == record
    wrong = ShardMetadata(record.index, record.identity, (16, 5, 9, 2))
    with pytest.raises(CacheError, match="its lengths are not those of this run"):
        check_shard(path, specs, wrong)
    with pytest.raises(CacheError, match="written as shard 0, not 1"):
        check_shard(path, specs, ShardMetadata(1, record.identity, record.lengths))
    with pytest.raises(CacheError, match="it is of another run"):
        check_shard(path, specs, ShardMetadata(0, "other", record.lengths))


def test_a_header_written_differently_is_wrong_though_it_says_the_same(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_tiny_cache(cache, provenance=False)
    path = cache / "shard-000000.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    text = json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode()
    path.write_bytes(raw[:8] + text.ljust(size) + raw[8 + size :])
    assert _faults(cache) == [
        "shard-000000.safetensors: its header is not, byte for byte, what dspark writes for its "
        "content"
    ]


def _rules(cache: Path) -> TensorRules:
    from dspark.schema.cache_manifest import padding_values, row_specs

    manifest = read_manifest(str(cache))
    return TensorRules(row_specs(manifest), padding_values(manifest))


# Against the target


@pytest.fixture(scope="module")
def target_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and a cache of its states over random rows."""
    root = tmp_path_factory.mktemp("target")
    model = tiny_models.tiny_qwen3()
    model.save_pretrained(root / "model")
    target = load_target(
        str(root / "model"), layer_ids=[0, 3], device="cpu", compute_dtype=torch.float32
    )
    manifest = build_cache_manifest(
        target_model="tiny",
        target_model_type="qwen3",
        target_text_config=target.text_config,
        seq_length=SEQ,
        dtype="bf16",
        num_samples=4,
        shard_size=4,
        target_layer_ids=[0, 3],
        train_data_path="chats.jsonl",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256="0" * 64,
    )
    cache = root / "cache"
    cache.mkdir()
    write_manifest(str(cache), manifest)
    write_target_weights(str(cache), target.embed_tokens, target.lm_head, torch.bfloat16)
    lengths = torch.tensor([16, 5, 9, 12])
    real = torch.arange(SEQ) < lengths[:, None]
    ids = torch.randint(3, 100, (4, SEQ), generator=torch.Generator().manual_seed(0)) * real
    captured = target.capture(ids, real.long())
    samples = {
        "input_ids": ids,
        "loss_mask": real.long(),
        "target_hidden_states": captured.hidden_states.bfloat16(),
        "target_last_hidden_states": captured.last.bfloat16(),
        "lengths": lengths,
    }
    write_shard(str(cache), 0, samples)
    write_manifest(str(cache), manifest | {"complete": True})
    return cache, root / "model"


def test_recomputed_rows_agree(
    target_cache: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache, model = target_cache
    assert main([str(cache), "--json", "--against", str(model), "--rows", "3"]) == 0
    against = json.loads(capsys.readouterr().out)["against"]
    assert against["rows"] == 3
    assert 0 < against["worst"] <= 1


def test_rows_kept_without_states_are_not_recomputed(
    target_cache: tuple[Path, Path], tmp_path: Path
) -> None:
    cache, model = target_cache
    copy = Path(shutil.copytree(cache, tmp_path / "copy"))
    tensors = load_file(copy / "shard-000000.safetensors")
    for name in ("loss_mask", "target_hidden_states", "target_last_hidden_states"):
        tensors[name][2] = 0
    write_shard(str(copy), 0, tensors | {"lengths": torch.tensor([16, 5, 9, 12])})
    compare = partial(compare_with_target, str(copy), str(model), num_rows=4)
    assert {difference.where for difference in compare().differences} == {"row 2"}
    found = {"compute_dtype": "float32", "attn_implementation": "default"}
    _rewrite(copy, lambda m: m.update(provenance={"masked_rows": [2], "identity": found}))
    write_shard(str(copy), 0, tensors | {"lengths": torch.tensor([16, 5, 9, 12])})
    comparison = compare()
    assert (comparison.differences, comparison.rows) == ([], 3)


def test_another_model_is_told_apart(
    target_cache: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.tiny_qwen3()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "model")
    assert main([str(target_cache[0]), "--against", str(tmp_path / "model")]) == 1
    out = capsys.readouterr().out
    assert "the last state differs by" in out
    assert "layer 0 differs" not in out
    assert "lm_head" not in out


def test_other_weights_are_told_apart(
    target_cache: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.tiny_qwen3()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "model")
    assert main([str(target_cache[0]), "--against", str(tmp_path / "model"), "--rows", "1"]) == 1
    assert "lm_head.weight is not that of" in capsys.readouterr().out


def test_a_model_that_cannot_be_loaded_is_one_line(
    target_cache: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(target_cache[0]), "--against", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "WRONG --against: " in out
    assert "The cache itself passed" in out
    assert "--resume" not in out


def test_a_manifest_cannot_choose_code_to_run(
    target_cache: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attention kind may name a kernel on a hub."""
    cache = tmp_path / "cache"
    write_tiny_cache(cache, attn_implementation="someone/kernel")
    assert main([str(cache), "--against", str(target_cache[1])]) == 1
    assert "attn_implementation 'someone/kernel'; known are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_rows", "count", "rows"),
    [(10, 4, [0, 3, 6, 9]), (3, 8, [0, 1, 2]), (9, 1, [4]), (5, 2, [0, 4])],
)
def test_rows_are_spread_from_the_first_to_the_last(
    num_rows: int, count: int, rows: list[int]
) -> None:
    assert spread_rows(num_rows, count) == rows


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
