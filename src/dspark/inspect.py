r"""Look at what a draft would be trained on.

    python -m dspark.inspect --target-model M --input-data F [--row K] [--json]

shows one conversation with its supervised tokens marked (colour on a terminal, double brackets
elsewhere) and totals over the whole input. No model is loaded.

    python -m dspark.inspect CACHE [--html FILE] [--json]
    python -m dspark.inspect CACHE --row K

summarises a cache, as tables, as JSON and as a page that needs nothing else, or shows one of its
rows.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspark.errors import DataError
from dspark.options import add_chat_options, add_model_options, at_least
from dspark.reports.terminal import format_table, printable, run_printing

if TYPE_CHECKING:
    from dspark.data.encoding import BadRow
    from dspark.reports.chat_report import RowReport, Totals

_UNCUT = 1 << 62


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments, without the program's name; None for those of the process.

    Returns:
        0 if everything could be shown, 1 if not; argparse exits with 2 on bad usage.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    _refuse_misuse(parser, args)
    try:
        if args.cache is None:
            _inspect_chats(args)
        else:
            print(_inspect_cache(args))
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        print(f"dspark.inspect: error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m dspark.inspect``."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark.inspect",
        description="Show a conversation with its supervised tokens marked, and totals over the "
        "input; or summarise a cache.",
    )
    parser.add_argument(
        "cache", nargs="?", metavar="CACHE", help="a cache's directory, in place of --input-data"
    )
    parser.add_argument(
        "--row",
        type=at_least(0),
        metavar="K",
        help="the row to show: of the input, counted from 0 before any row is left out (default: "
        "0), or of CACHE (default: none, the summary)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--seq-length",
        type=at_least(1),
        default=2048,
        metavar="N",
        help="longest row in tokens (default: 2048)",
    )
    group = parser.add_argument_group("summary of a cache")
    group.add_argument("--html", metavar="FILE", help="also write the summary as a page with plots")
    group.add_argument(
        "--sample-rows",
        type=at_least(0),
        default=64,
        metavar="N",
        help="rows, spread over CACHE, whose states are looked at (default: 64)",
    )
    add_model_options(parser.add_argument_group("target"), required=False)
    add_chat_options(parser.add_argument_group("data"), required=False)
    return parser


def _refuse_misuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the process with status 2 if the arguments do not go together."""
    if args.cache is None and not (args.target_model and args.input_data):
        parser.error("give a CACHE, or --target-model and --input-data")
    if args.cache is not None and args.input_data:
        parser.error(f"CACHE {args.cache} and --input-data exclude each other")
    if args.html and (args.cache is None or args.row is not None):
        parser.error(f"--html {args.html} is a summary of a CACHE and goes without --row")


def _inspect_cache(args: argparse.Namespace) -> str:
    from tqdm import tqdm

    from dspark.chat import load_tokenizer
    from dspark.checks.cache_rows import CacheRows
    from dspark.reports.cache_inspection import fits_cache, local_tokenizer, show_row, show_summary
    from dspark.reports.cache_summary import summarise_cache

    def tokenizer_of(manifest: dict[str, Any]) -> Any | None:
        if not args.target_model:
            return local_tokenizer(manifest)
        tokenizer = load_tokenizer(
            args.target_model,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
        )
        if not fits_cache(tokenizer, manifest):
            raise DataError(f"{args.cache} was not made with the tokenizer of {args.target_model}")
        return tokenizer

    if args.row is not None:
        cache = CacheRows(args.cache)
        tokenizer, colour = tokenizer_of(cache.manifest), sys.stdout.isatty()
        return show_row(cache, args.row, as_json=args.json, tokenizer=tokenizer, colour=colour)
    with tqdm(desc="reading", unit="row", disable=None, leave=False) as bar:
        summary = summarise_cache(
            args.cache, sample_rows=args.sample_rows, on_begin=bar.reset, on_row=bar.update
        )
    tokenizer = tokenizer_of(summary.manifest) if args.html else None
    return show_summary(summary, as_json=args.json, html=args.html, tokenizer=tokenizer)


def _inspect_chats(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from dspark.chat import ChatEncoder, load_tokenizer
    from dspark.data.encoding import encode_rows
    from dspark.data.rows import open_rows
    from dspark.reports.chat_report import count_totals, report_row

    source = open_rows(
        args.input_data,
        split=args.split,
        dataset_config=args.dataset_config,
        shuffle_seed=None if args.no_shuffle else args.shuffle_seed,
    )
    tokenizer = load_tokenizer(
        args.target_model,
        chat_template=args.chat_template,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )

    def encoder(seq_length: int) -> ChatEncoder:
        return ChatEncoder(
            tokenizer,
            seq_length=seq_length,
            mask_reasoning_content=args.mask_reasoning_content,
            mask_generation_prompt=args.mask_generation_prompt,
            template_date=args.template_date,
        )

    row = report_row(source, encoder(args.seq_length), tokenizer, args.row or 0)
    encoded = encode_rows(source, encoder(_UNCUT), os.cpu_count() or 1)
    # disable=None: a bar on a terminal, nothing elsewhere
    totals = count_totals(tqdm(encoded, unit="row", disable=None), args.seq_length)
    if args.json:
        print(json.dumps({"row": _row_as_json(row), "totals": totals.as_json()}))
    else:
        _print_row(row)
        _print_totals(totals)


def _row_as_json(row: "RowReport | BadRow") -> dict[str, Any]:
    from dspark.data.encoding import BadRow

    if isinstance(row, BadRow):
        return {"row": row.number, "where": row.where, "error": row.message}
    return row.as_json()


def _print_row(row: "RowReport | BadRow") -> None:
    from dspark.data.encoding import BadRow
    from dspark.reports.marked_text import mark

    if isinstance(row, BadRow):
        print(f"row {row.number}, {printable(row.where)}: left out: {printable(row.message)}\n")
        return
    tokens = len(row.conversation.loss_mask)
    supervised = int(row.conversation.loss_mask.sum())
    cut = ", cut" if row.conversation.truncated else ""
    print(
        f"row {row.number}, {printable(row.where)}: {tokens} tokens, {supervised} supervised{cut}\n"
    )
    print(mark(row.segments, colour=sys.stdout.isatty()))


def _print_totals(totals: "Totals") -> None:
    lengths = ", ".join(f"{name} {value}" for name, value in totals.percentiles.items())
    table = [
        ("rows", f"{totals.rows:,}"),
        ("tokens", f"{totals.tokens:,}"),
        ("supervised", f"{totals.supervised_tokens:,} ({totals.supervised_share:.1%})"),
        ("lengths", lengths or "none"),
        (f"rows cut at {totals.seq_length}", f"{totals.cut_rows:,}"),
        ("rows left out", f"{sum(totals.skipped.values()):,}"),
        *((f"  {reason}", f"{count:,}") for reason, count in totals.skipped.most_common()),
    ]
    print(format_table(table))
    for warning in totals.warnings:
        print(f"warning: {printable(warning)}")


if __name__ == "__main__":
    sys.exit(run_printing(main))
