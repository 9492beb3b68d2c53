"""What decides a cache's content may not change between its runs; what does not, may."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dspark.job.run
from chat_fixtures import TEMPLATES, chat, tiny_tokenizer
from dspark.disk.manifest import identity_fields
from dspark.precompute import main
from tiny_target import command_line, some_chats, write_chats, write_target

ROWS = 11  # in three shards of four


class Work:
    """A cache of which two of three shards are done, and what it is made from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target, self.chats, self.cache = root / "target", root / "chats.jsonl", root / "cache"

    def main(self, *options: str) -> int:
        return main([*command_line(self.target, self.chats, self.cache), *options])

    def resume(self, *options: str) -> int:
        return self.main("--resume", *options)

    def files(self) -> dict[str, tuple[bytes, int]]:
        """Return content and time of every file of the cache, .dspark included."""
        paths = sorted(path for path in self.cache.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    @property
    def manifest(self) -> dict:
        return json.loads((self.cache / "manifest.json").read_bytes())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they save at this size, and far more where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was interrupted: its third shard and the end are missing."""
    work = Work(tmp_path_factory.mktemp("begun"))
    write_target(work.target)
    write_chats(work.chats, ROWS)
    assert work.main() == 0
    (work.cache / "shard-000002.safetensors").unlink()
    manifest = work.manifest | {"complete": False}
    (work.cache / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=2) + "\n")
    return work.root


@pytest.fixture
def work(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """The interrupted cache; afterwards everything is as it was before."""
    kept = shutil.copytree(begun, tmp_path / "kept")
    yield Work(begun)
    shutil.rmtree(begun)
    shutil.copytree(kept, begun)


Change = Callable[[Work], list[str]]  # changes something, and returns the options to resume with


def options(*options: str) -> Change:
    return lambda work: list(options)


def other_model(**changes: object) -> Change:
    def change(work: Work) -> list[str]:
        shutil.rmtree(work.target)
        write_target(work.target, **changes)
        return []

    return change


def moved_target(work: Work) -> list[str]:
    shutil.copytree(work.target, work.root / "copy")
    return ["--target-model", str(work.root / "copy")]


def moved_data(work: Work) -> list[str]:
    # A second --input-data would be read as well: this one is a file of the same rows, renamed.
    work.chats.rename(work.root / "renamed.jsonl")
    work.chats = work.root / "renamed.jsonl"
    return []


def other_type(work: Work) -> list[str]:
    from tiny_models import tiny_llama

    tiny_llama(vocab_size=512).save_pretrained(work.target)
    return []


def one_weight(work: Work) -> list[str]:
    path = work.target / "model.safetensors"
    weights = load_file(path)
    next(iter(weights.values())).view(-1)[0] += 1
    stat = path.stat()
    save_file(weights, path, metadata={"format": "pt"})
    assert path.stat().st_size == stat.st_size
    return []


def config_alone(work: Work) -> list[str]:
    path = work.target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"rms_norm_eps": 1e-3}))
    return []


def rewrite(change: Callable[[list], list]) -> Change:
    def apply(work: Work) -> list[str]:
        write_chats(work.chats, change(some_chats(ROWS)))
        return []

    return apply


def other_tokenizer(**settings: object) -> Change:
    def change(work: Work) -> list[str]:
        tokenizer = tiny_tokenizer(TEMPLATES["chatml"], **settings)
        tokenizer.save_pretrained(work.target)
        return []

    return change


def more_vocabulary(work: Work) -> list[str]:
    tokenizer = tiny_tokenizer(TEMPLATES["chatml"])
    tokenizer.add_tokens(["zyzzyva"])
    tokenizer.save_pretrained(work.target)
    return []


P = "provenance.identity."
CASES: dict[str, tuple[Change, dict[str, tuple[object, object]]]] = {
    "target": (moved_target, {"target_model": (..., ...)}),
    "kind of model": (other_type, {"target_model_type": ("qwen3", "llama")}),
    "vocabulary": (other_model(vocab_size=520), {"target_vocab_size": (512, 520)}),
    "hidden size": (
        other_model(hidden_size=48),
        {
            "hidden_size": (32, 48),
            "target_hidden_dim": (64, 96),
            "target_last_hidden_dim": (32, 48),
        },
    ),
    "depth": (other_model(num_hidden_layers=5), {"num_hidden_layers": (4, 5)}),
    "--seq-length": (options("--seq-length", "48"), {"seq_length": (64, 48)}),
    "--dtype": (options("--dtype", "fp16"), {"dtype": ("bf16", "fp16")}),
    "--max-samples": (options("--max-samples", "5"), {"num_samples": (11, 5)}),
    "--shard-size": (options("--shard-size", "2"), {"shard_size": (4, 2)}),
    "--target-layer-ids": (
        options("--target-layer-ids", "0", "3"),
        {"target_layer_ids": ([1, 3], [0, 3])},
    ),
    "--draft-num-hidden-layers": (
        options("--draft-num-hidden-layers", "1"),
        {"target_layer_ids": ([1, 3], [3]), "target_hidden_dim": (64, 32)},
    ),
    "path of the data": (moved_data, {"train_data_path": (..., ...)}),
    "--split": (options("--split", "train"), {"train_split": (None, "train")}),
    "--shuffle-seed": (options("--shuffle-seed", "7"), {"shuffle_seed": (42, 7)}),
    "--mask-reasoning-content": (
        options("--mask-reasoning-content"),
        {"mask_reasoning_content": (False, True)},
    ),
    "--mask-generation-prompt": (
        options("--mask-generation-prompt"),
        {"mask_generation_prompt": (False, True)},
    ),
    "--chat-template": (
        options("--chat-template", TEMPLATES["default-system"]),
        {"chat_template_sha256": (..., ...)},
    ),
    "content of a row": (
        rewrite(lambda rows: [*rows[:-1], chat("Another question?", "Another answer.")]),
        {P + "rows_sha256": (..., ...)},
    ),
    "order of the rows": (rewrite(lambda rows: rows[::-1]), {P + "rows_sha256": (..., ...)}),
    "a row more": (rewrite(lambda rows: [*rows, rows[0]]), {"num_samples": (11, 12)}),
    "tokenizer": (more_vocabulary, {P + "tokenizer_sha256": (..., ...)}),
    "pad token": (other_tokenizer(pad_token="<bos>"), {P + "pad_token_id": (0, 3)}),
    "a weight in place": (one_weight, {P + "target_weights": (..., ...)}),
    "all weights in place": (other_model(seed=1), {P + "target_weights": (..., ...)}),
    "config in place": (config_alone, {P + "target_weights": (..., ...)}),
    "--compute-dtype": (
        options("--compute-dtype", "bf16"),
        {P + "compute_dtype": ("float32", "bfloat16")},
    ),
    "--target-attn-implementation": (
        options("--target-attn-implementation", "eager"),
        {P + "attn_implementation": ("default", "eager")},
    ),
    "--min-loss-tokens": (options("--min-loss-tokens", "1"), {P + "min_loss_tokens": (0, 1)}),
    "several at once": (
        options("--seq-length", "48", "--compute-dtype", "bf16", "--min-loss-tokens", "1"),
        {
            "seq_length": (64, 48),
            P + "compute_dtype": ("float32", "bfloat16"),
            P + "min_loss_tokens": (0, 1),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_another_identity_is_refused_by_name_and_touches_nothing(work, case, capsys, monkeypatch):
    change, fields = CASES[case]
    arguments = change(work)
    before = work.files()
    monkeypatch.setattr(
        dspark.job.run, "load_target", lambda *_, **__: pytest.fail("it was loaded")
    )
    assert work.resume(*arguments) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "does not match this run: " in line
    for field, (recorded, wanted) in fields.items():
        assert f"{field}: cache " in line
        if recorded is not ...:
            assert f"{field}: cache {_shown(recorded)}, this run {_shown(wanted)}" in line
    assert work.files() == before


def _shown(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)


def test_every_field_that_is_identity_has_a_case(begun):
    covered = {field for _, fields in CASES.values() for field in fields}
    assert covered == set(identity_fields(Work(begun).manifest))


def test_the_day_that_a_template_reads_is_identity(tmp_path, capsys):
    work = Work(tmp_path)
    write_target(work.target, template="date")
    write_chats(work.chats, ROWS)
    assert work.main("--template-date", "2025-01-31") == 0
    (work.cache / "shard-000001.safetensors").unlink()
    before = work.files()
    assert work.resume("--template-date", "2025-02-01") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert 'provenance.identity.template_date: cache "2025-01-31", this run "2025-02-01"' in line
    assert work.files() == before
    assert work.resume() == 0, "by default it is the day on which the cache was begun"


def test_the_day_does_not_matter_to_a_template_that_reads_no_clock(work):
    assert work.resume("--template-date", "2025-02-01") == 0


def test_the_cache_of_another_tool_is_not_resumed(work, capsys):
    manifest = work.manifest
    del manifest["provenance"]
    (work.cache / "manifest.json").write_text(json.dumps(manifest))
    before = work.files()
    assert work.resume() == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert 'provenance.identity.compute_dtype: cache nothing, this run "float32"' in line
    assert work.files() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size", "4"],
        ["--num-workers", "3"],
        ["--on-bad-state", "mask"],
        ["--no-target-check"],
        ["--ignore-free-space"],
        ["--device", "auto"],
        ["--on-bad-row", "skip"],
        ["--log-level", "debug"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_is_not_identity_may_change(work, arguments):
    before = work.files()
    assert work.resume(*arguments) == 0
    after = work.files()
    assert work.manifest["complete"] is True
    for index in (0, 1):
        path = str(work.cache / f"shard-00000{index}.safetensors")
        assert after[path] == before[path]
