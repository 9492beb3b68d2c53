"""What decides a cache beside its manifest: the target's weights by content, and the tokenizer."""

import json
import os
from pathlib import Path

import pytest
import tokenizers
import xxhash

from chat_fixtures import TEMPLATES, tiny_tokenizer
from dspark.job import identity
from dspark.job.identity import FileHashes, target_identity, tokenizer_identity


@pytest.fixture
def target(tmp_path):
    """A directory that looks like a model's."""
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def identify(target: Path, *, memory: Path | None = None) -> str:
    hashes = FileHashes(memory or target.parent / "memory.json")
    found = target_identity(str(target), commit=None, hashes=hashes)
    hashes.save()
    return found


def replace(path: Path, content: bytes) -> None:
    """Give a file another content, in place, and let a second pass."""
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


def test_a_directory_is_named_by_the_content_of_its_files(target):
    files = {name: (target / name).read_bytes() for name in ("config.json", "model.safetensors")}
    lines = [f"{name} {xxhash.xxh3_128_hexdigest(raw)}\n" for name, raw in files.items()]
    expected = xxhash.xxh3_128_hexdigest("".join(lines).encode())
    assert identify(target) == f"xxh3_128:{expected}"


def test_weights_replaced_in_place_are_another_target(target):
    before = identify(target)
    replace(target / "model.safetensors", b"WEIGHTS")
    assert identify(target) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_every_file_of_the_model_counts(target, name):
    before = identify(target)
    replace(target / name, b"other")
    assert identify(target) != before


@pytest.mark.parametrize(
    "name", ["model-00002.safetensors", "pytorch_model.bin", "model.gguf", "modeling.py"]
)
def test_a_file_more_is_another_target(target, name):
    before = identify(target)
    (target / name).write_bytes(b"more")
    assert identify(target) != before


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", ".model.lock", "runs.csv"])
def test_files_that_are_no_part_of_the_model_do_not_count(target, name):
    before = identify(target)
    (target / name).write_bytes(b"more")
    assert identify(target) == before


def test_a_copy_elsewhere_is_the_same_target(target, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in target.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert identify(copy) == identify(target)


def test_times_alone_do_not_make_another_target(target):
    before = identify(target)
    replace(target / "model.safetensors", b"weights")
    assert identify(target) == before


def test_files_that_swap_their_contents_are_another_target(target):
    (target / "other.safetensors").write_bytes(b"other")
    before = identify(target)
    replace(target / "model.safetensors", b"other")
    replace(target / "other.safetensors", b"weights")
    assert identify(target) != before


def test_a_model_of_the_hub_is_named_by_its_commit(tmp_path):
    hashes = FileHashes(tmp_path / "memory.json")
    assert target_identity("org/no-such-model", commit="abc123", hashes=hashes) == "commit:abc123"


def test_files_that_did_not_change_are_not_hashed_again(target, monkeypatch):
    before = identify(target)
    monkeypatch.setattr(identity, "_hash_file", lambda path: pytest.fail(f"hashed {path} again"))
    assert identify(target) == before


def test_only_the_file_that_changed_is_hashed_again(target, monkeypatch):
    identify(target)
    hash_file, hashed = identity._hash_file, []
    monkeypatch.setattr(
        identity, "_hash_file", lambda path: [hashed.append(path.name), hash_file(path)][1]
    )
    replace(target / "model.safetensors", b"WEIGHTS")
    identify(target)
    assert hashed == ["model.safetensors"]


def test_nothing_is_remembered_before_it_is_saved(target, tmp_path):
    memory = tmp_path / "memory.json"
    target_identity(str(target), commit=None, hashes=FileHashes(memory))
    assert not memory.exists()


def test_what_did_not_change_is_not_written_again(target, tmp_path):
    memory = tmp_path / "memory.json"
    identify(target, memory=memory)
    before = memory.stat()
    identify(target, memory=memory)
    assert (memory.stat().st_ino, memory.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_files_that_are_gone_are_forgotten(target, tmp_path):
    memory = tmp_path / "memory.json"
    (target / "more.safetensors").write_bytes(b"more")
    identify(target, memory=memory)
    (target / "more.safetensors").unlink()
    identify(target, memory=memory)
    assert sorted(Path(path).name for path in json.loads(memory.read_text())) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', "\udcff"])
def test_a_damaged_memory_only_costs_time(target, tmp_path, text):
    before = identify(target)
    memory = tmp_path / "damaged.json"
    memory.write_text(text, errors="surrogateescape")
    assert identify(target, memory=memory) == before


@pytest.mark.parametrize("entry", [None, 3, "text", [], {}, {"stamp": None}, {"xxh3_128": "ab"}])
def test_a_damaged_entry_of_the_memory_only_costs_time(target, tmp_path, entry):
    before = identify(target)
    memory = tmp_path / "damaged.json"
    path = (target / "model.safetensors").resolve()
    memory.write_text(json.dumps({str(path): entry}))
    assert identify(target, memory=memory) == before


def test_the_same_tokenizer_built_twice_has_one_identity():
    assert tokenizer_identity(tiny_tokenizer()) == tokenizer_identity(tiny_tokenizer())


def test_a_tokenizer_saved_and_loaded_keeps_its_identity(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_identity(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_identity(
        tokenizer
    )


def test_a_token_more_is_another_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["newtoken"])
    assert tokenizer_identity(tokenizer) != tokenizer_identity(tiny_tokenizer())


def test_other_special_tokens_are_another_tokenizer():
    assert tokenizer_identity(tiny_tokenizer(eos_token="<eos>", bos_token=None)) != (
        tokenizer_identity(tiny_tokenizer(eos_token="<eos>", bos_token="<bos>"))
    )


def test_other_merges_of_the_same_tokens_are_another_tokenizer():
    tokenizer = tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["merges"] = backend["model"]["merges"][:-1]
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(backend))
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert tokenizer_identity(tokenizer) != tokenizer_identity(tiny_tokenizer())


def test_settings_of_padding_and_truncation_are_no_part_of_the_tokenizers_identity():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.backend_tokenizer.enable_padding(direction="left")
    assert tokenizer_identity(tokenizer) == tokenizer_identity(tiny_tokenizer())


def test_the_template_is_no_part_of_the_tokenizers_identity():
    # The manifest has a field of its own for it.
    first, second = (tiny_tokenizer(TEMPLATES["chatml"]), tiny_tokenizer("{{ 1 }}"))
    assert tokenizer_identity(first) == tokenizer_identity(second)
