"""What `dspark.inspect` tells of a cache."""

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.cache import CachedDSparkDataset, read_manifest, write_manifest
from dspark.checks.cache_rows import CacheRows
from dspark.inspect import main
from dspark.reports.cache_summary import CacheSummary, histogram, summarise_cache
from dspark.reports.html_report import html_page
from dspark.reports.svg_plots import LogScale, bars, curves
from tiny_cache import LENGTHS, SEQ, write_tiny_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole cache; tests that change it make a copy."""
    path = tmp_path_factory.mktemp("caches") / "cache"
    write_tiny_cache(path)
    return path


def _foreign(cache: Path, copy: Path) -> Path:
    """Copy a cache without everything that only dspark writes."""
    shutil.copytree(cache, copy)
    for path in copy.glob("shard-*"):
        save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path)
    manifest = read_manifest(str(copy))
    del manifest["provenance"]
    write_manifest(str(copy), manifest)
    return copy


class _Page(HTMLParser):
    """Collects what a page refers to, and checks that its elements are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.references: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag != "meta":
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# Numbers


def test_norms_are_those_of_the_real_tokens(cache: Path) -> None:
    summary = summarise_cache(str(cache), sample_rows=100)
    dataset = CachedDSparkDataset(str(cache))
    real = [dataset[row]["target_hidden_states"][:n, 8:16] for row, n in enumerate(LENGTHS)]
    norms = torch.cat(real).float().norm(dim=-1)
    layer = summary.norms[1]
    assert layer.name == "layer 2"
    assert layer.mean == pytest.approx(float(norms.mean()))
    assert layer.std == pytest.approx(float(norms.std(correction=0)))
    assert layer.percentiles[0] == pytest.approx(float(norms.min()))
    assert layer.percentiles[3] == pytest.approx(float(norms.median()), rel=0.05)
    assert layer.percentiles[6] == pytest.approx(float(norms.max()))
    assert layer.largest_value == float(torch.cat(real).abs().max())
    first = summary.norms_by_position["layer 2"][0]
    assert first == pytest.approx(np.mean([float(row[0].float().norm()) for row in real]))
    assert len(summary.norms_by_position["last"]) == max(LENGTHS)


def test_lengths_tokens_and_sizes_are_counted(cache: Path) -> None:
    summary = summarise_cache(str(cache), sample_rows=0)
    assert summary.tokens == sum(LENGTHS)
    assert summary.supervised_tokens == sum(n - n // 2 for n in LENGTHS)
    assert summary.lengths is not None
    assert sum(summary.lengths.rows) == len(LENGTHS)
    assert summary.lengths.percentiles[-1] == 16
    assert summary.apparent_bytes == sum(path.stat().st_size for path in cache.iterdir())
    assert summary.disk_bytes == sum(path.stat().st_blocks * 512 for path in cache.iterdir())
    assert summary.norms == []


@pytest.mark.parametrize("longest", [1, 5, 16, 4096])
def test_every_length_falls_into_one_bin(longest: int) -> None:
    lengths = np.arange(longest + 1)
    counted = histogram(lengths, longest=longest)
    assert sum(counted.rows) == longest + 1
    assert (counted.edges[0], counted.edges[-1]) == (0, longest + 1)
    assert len(counted.rows) <= 16


def test_an_unfinished_cache_is_summarised_without_states(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    manifest = read_manifest(str(copy))
    write_manifest(str(copy), manifest | {"complete": False})
    (copy / "shard-000002.safetensors").unlink()
    (copy / "target_weights.safetensors").unlink()
    summary = summarise_cache(str(copy), sample_rows=4)
    assert (summary.shards, summary.num_shards) == (2, 3)
    assert summary.tokens == sum(LENGTHS[:8])
    assert summary.norms == []
    assert "unfinished" in summary.notes[0]


def test_rows_of_other_writers_end_with_their_last_supervised_token(
    cache: Path, tmp_path: Path
) -> None:
    foreign = _foreign(cache, tmp_path / "cache")
    rows, known = CacheRows(str(foreign)), CacheRows(str(cache))
    for number, length in enumerate(LENGTHS):
        row = rows.read(number)
        assert (len(row.input_ids), row.source) == (length, None)
        assert torch.equal(row.last, known.read(number).last)
    summary = summarise_cache(str(foreign), sample_rows=4)
    assert summary.tokens is None
    assert summary.lengths is None
    assert len(summary.norms) == 3
    assert "lengths and tokens are unknown" in summary.notes[0]


# The command


def test_the_summary_has_settings_counts_and_norms(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(cache)]) == 0
    out = capsys.readouterr().out
    for text in ("finished, 3 of 3 shards", "hidden size 8", "rows        11", "layer 0", "last"):
        assert text in out
    assert f"{sum(LENGTHS)} ({sum(LENGTHS) / 11 / SEQ:.1%} of the padded length)" in out


def test_rows_kept_without_states_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_cache(tmp_path / "cache", masked_row=5)
    assert main([str(tmp_path / "cache"), "--sample-rows", "11"]) == 0
    assert "1 rows were kept without states or supervision" in capsys.readouterr().out


def test_json_is_json_even_where_a_norm_is_not_finite(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = _foreign(cache, tmp_path / "cache")
    path = foreign / "shard-000000.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["target_last_hidden_states"][0, 0] = math.inf
    save_file(tensors, path)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert main([str(foreign), "--json", "--html", str(tmp_path / "page.html")]) == 0
    content = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert content["norms"][2]["percentiles"][6] is None
    assert content["norms"][1]["mean"] > 0


def test_a_cached_row_is_shown_with_its_mask(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(cache), "--row", "1"]) == 0
    title, ids = capsys.readouterr().out.split("\n\n")
    assert title == "row 1, row 1 of the input: 5 tokens, 3 supervised"
    wanted = CachedDSparkDataset(str(cache))[1]["input_ids"][:5].tolist()
    plain, supervised = ids.strip().removesuffix("]]").split("[[")
    assert list(map(int, plain.split())) == wanted[:2]
    assert list(map(int, supervised.split())) == wanted[2:]


def test_a_cached_row_as_json(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(cache), "--row", "3", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["row"], row["source_row"], row["tokens"]) == (3, 3, 1)
    assert row["loss_mask"] == [1]


@pytest.mark.parametrize(
    "arguments", [["--row", "11"], ["--row", "0", "--target-model", "nowhere/"]]
)
def test_what_cannot_be_shown_is_one_line(
    cache: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(cache), *arguments]) == 1
    assert capsys.readouterr().err.startswith("dspark.inspect: error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target-model", "m"],
        ["cache", "--input-data", "chats.jsonl"],
        ["cache", "--row", "0", "--html", "page.html"],
        ["--target-model", "m", "--input-data", "chats.jsonl", "--html", "page.html"],
        ["cache", "--sample-rows", "-1"],
    ],
)
def test_misuse_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


# The page


def test_the_page_needs_nothing_else(cache: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([str(cache), "--html", str(page)]) == 0
    text = page.read_text()
    parsed = _Page(text)
    assert parsed.open == []
    assert parsed.references == []
    assert "script" not in parsed.names
    assert not re.search(r"url\(|@import|https?:", text)
    assert text.count("<svg") == 3
    assert text.count("<h3>Row") == 3
    assert "<mark>" in text


def test_nothing_in_a_cache_becomes_markup(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    manifest = read_manifest(str(copy))
    hostile = "<script>alert(1)</script>\x1b[31m\ud800"
    manifest |= {"target_model": hostile, "train_data_path": hostile, "target_model_type": hostile}
    manifest["provenance"]["counts"]["skipped"] = {hostile: 3}
    summary = CacheSummary(str(copy), manifest, notes=[hostile])
    page = html_page(summary, [])
    assert "script" not in _Page(page).names
    assert "<script>" not in page


def test_plots_hold_for_extreme_values() -> None:
    assert "<svg" in bars(["0-1"], [0], caption="none")
    text = curves({"zero": [0.0, 0.0], "inf": [math.inf, 1e-30], "one": [1.0]}, caption="<b>")
    numbers = [float(n) for n in re.findall(r"[\d.]+,([-\d.]+)", text)]
    assert all(0 <= n <= 300 for n in numbers)
    assert "<b>" not in text
    scale = LogScale([1.0, 1000.0], 0, 300)
    assert [scale(value) for value in (1, 10, 1000, 0)] == [0, 100, 300, 0]
