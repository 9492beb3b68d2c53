"""A cache summarised for people, in text.

`dspark.inspect` prints what these functions return; `html_report` makes a page of it.
"""

from collections.abc import Sequence
from typing import Any

from dspark.checks.cache_content import masked_rows
from dspark.reports.cache_summary import CacheSummary
from dspark.reports.terminal import format_bytes, format_table

_BAR = 40  # characters of the longest bar of a histogram


def format_summary(summary: CacheSummary) -> str:
    """Return the summary of a cache as tables."""
    parts = [format_table(facts(summary))]
    if summary.lengths:
        parts.append(_length_table(summary))
    if summary.norms:
        parts.append(_norm_table(summary))
    parts.extend(f"note: {note}" for note in summary.notes)
    return "\n\n".join(parts)


def facts(summary: CacheSummary) -> list[tuple[str, str]]:
    """Return what a cache is, as pairs of name and text."""
    manifest, counts = summary.manifest, summary.counts
    state = "finished" if manifest.get("complete", True) is True else "unfinished"
    pairs = [
        (
            "cache",
            f"{summary.cache_dir} ({state}, {summary.shards:,} of {summary.num_shards:,} shards)",
        ),
        (
            "target",
            f"{manifest['target_model']} ({manifest['target_model_type']}, "
            f"{manifest['num_hidden_layers']} layers, hidden size "
            f"{manifest['hidden_size']:,}, vocabulary {manifest['target_vocab_size']:,})",
        ),
        ("layers", ", ".join(map(str, manifest["target_layer_ids"]))),
        (
            "states",
            f"{manifest['dtype']}, rows of {manifest['seq_length']:,} tokens, shards of "
            f"{manifest['shard_size']:,} rows",
        ),
        ("data", _data(manifest)),
        ("options", _options(manifest)),
        ("rows", f"{manifest['num_samples']:,}"),
        ("tokens", _tokens(summary)),
        ("supervised", _supervised(summary)),
    ]
    if counts:
        pairs.append(
            ("cut", f"{counts.get('cut_rows', 0)} rows were longer than a row of the cache")
        )
        pairs.append(("left out", _left_out(counts.get("skipped"))))
    if masked := masked_rows(manifest):
        pairs.append(("masked", f"{len(masked)} rows were kept without states or supervision"))
    apparent, disk = format_bytes(summary.apparent_bytes), format_bytes(summary.disk_bytes)
    pairs.append(("size", f"{apparent} apparent, {disk} on disk"))
    return pairs


def _data(manifest: dict[str, Any]) -> str:
    split = manifest.get("train_split")
    text = str(manifest.get("train_data_path", "unknown"))
    return text if split is None else f"{text} [{split}]"


def _options(manifest: dict[str, Any]) -> str:
    names = ("mask_reasoning_content", "mask_generation_prompt")
    chosen = [f"--{name.replace('_', '-')}" for name in names if manifest.get(name)]
    chosen += [f"--shuffle-seed {manifest['shuffle_seed']}"] if "shuffle_seed" in manifest else []
    return " ".join(chosen) or "unknown"


def _tokens(summary: CacheSummary) -> str:
    if summary.tokens is None:
        return "unknown"
    room = summary.manifest["num_samples"] * summary.manifest["seq_length"]
    return f"{summary.tokens:,} ({summary.tokens / room:.1%} of the padded length)"


def _supervised(summary: CacheSummary) -> str:
    if summary.supervised_share is None:
        return "unknown"
    return f"{summary.supervised_tokens:,} tokens ({summary.supervised_share:.1%})"


def _left_out(skipped: Any) -> str:
    if not isinstance(skipped, dict) or not skipped:
        return "no rows"
    return ", ".join(f"{rows} rows ({reason})" for reason, rows in skipped.items())


def _length_table(summary: CacheSummary) -> str:
    lengths = summary.lengths
    assert lengths is not None
    rows: list[Sequence[str]] = [("length", "rows", "")]
    most = max(*lengths.rows, 1)
    for i, count in enumerate(lengths.rows):
        bar = "█" * round(_BAR * count / most) or "▏" * bool(count)
        rows.append((f"{lengths.edges[i]}-{lengths.edges[i + 1] - 1}", f"{count:,}", bar))
    least, lower, median, upper, high, top = lengths.percentiles
    text = (
        f"shortest {least}, 25 % {lower}, median {median}, 75 % {upper}, 95 % {high}, longest {top}"
    )
    return f"{format_table(rows, right=(0, 1))}\n{text}"


def _norm_table(summary: CacheSummary) -> str:
    return format_table(norm_rows(summary), right=range(1, 9))


def norm_rows(summary: CacheSummary) -> list[list[str]]:
    """Return the norms as a table of texts, its header first."""
    names = ("mean", "std", "min", "5 %", "median", "95 %", "max", "largest value")
    rows = [[f"norms over {summary.sampled_rows} rows", *names]]
    for norm in summary.norms:
        least, low, _, median, _, high, most = norm.percentiles
        values = (norm.mean, norm.std, least, low, median, high, most, norm.largest_value)
        rows.append([norm.name, *(f"{value:.4g}" for value in values)])
    return rows
