r"""Prove that a cache on disk is whole and right.

    python -m dspark.verify CACHE
    python -m dspark.verify CACHE --against MODEL --rows 16

Every file is compared with the manifest, with its own checksums and with the others, several shards
at once, and padding is proved to be padding. ``--against`` runs the target again over some rows.
The exit status is 0 if all is right, 1 if anything is wrong, 2 on misuse.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspark.options import at_least
from dspark.reports.terminal import format_bytes, format_table, printable, run_printing

_REMEDY = (
    "The precompute command with --resume writes damaged and missing files of its cache again; "
    "what came from elsewhere is to be copied anew."
)
_MODEL_REMEDY = "The cache itself passed: it is MODEL that could not be compared. Check its name."
_AGAINST = "--against"

if TYPE_CHECKING:
    from dspark.checks.cache_check import CacheReport
    from dspark.checks.recompute import Comparison


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments, without the program's name; None for those of the process.

    Returns:
        0 if all is right, 1 if something is wrong; argparse exits with 2 on bad usage.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.rows is not None and not args.against:
        parser.error("--rows needs --against MODEL, which says what to run")
    if not os.path.isdir(args.cache):
        parser.error(f"{printable(args.cache)} is not a directory")
    report = _check(args)
    comparison = None
    if args.against and report.is_right:
        comparison = _compare(args, report)
    if args.json:
        print(json.dumps(_as_json(report, comparison), sort_keys=True, indent=2))
    else:
        _print_report(report, comparison)
    return 0 if report.is_right else 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m dspark.verify``."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark.verify",
        description="Prove that a cache on disk is whole and right: manifest, names, shapes, "
        "dtypes, lengths, checksums, padding, weights.",
    )
    parser.add_argument("cache", metavar="CACHE", help="the cache's directory")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    parser.add_argument(
        "--against", metavar="MODEL", help="run this target again over some rows and compare"
    )
    parser.add_argument(
        "--rows",
        type=at_least(1),
        metavar="N",
        help="rows to run again, spread over the cache (default: 8)",
    )
    parser.add_argument(
        "--device", default="auto", help="where --against runs: auto, cpu, cuda, … (default: auto)"
    )
    parser.add_argument("--revision", metavar="REV", help="Hub branch, tag or commit of MODEL")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with MODEL"
    )
    parser.add_argument(
        "--num-workers",
        type=at_least(0),
        default=0,
        metavar="N",
        help="threads that read and hash; 0 is one per core (default: 0)",
    )
    return parser


def _check(args: argparse.Namespace) -> "CacheReport":
    from tqdm import tqdm

    from dspark.checks.cache_check import check_cache, default_workers

    with tqdm(desc="verifying", unit="shard", disable=None, leave=False) as bar:
        return check_cache(
            args.cache,
            num_workers=args.num_workers or default_workers(),
            on_begin=bar.reset,
            on_shard=bar.update,
        )


def _compare(args: argparse.Namespace, report: "CacheReport") -> "Comparison | None":
    """Run the target over some rows; what differs becomes a problem of the report."""
    from tqdm import tqdm

    from dspark.checks.recompute import compare_with_target

    with tqdm(desc="recomputing", unit="row", disable=None, leave=False) as bar:
        try:
            comparison = compare_with_target(
                args.cache,
                args.against,
                num_rows=args.rows or 8,
                device=args.device,
                revision=args.revision,
                trust_remote_code=args.trust_remote_code,
                on_begin=bar.reset,
                on_row=bar.update,
            )
        except (OSError, ValueError) as error:
            report.blame(_AGAINST, str(error))
            return None
    for difference in comparison.differences:
        report.blame(difference.where, difference.what)
    return comparison


def _as_json(report: "CacheReport", comparison: "Comparison | None") -> dict[str, Any]:
    content: dict[str, Any] = {
        "cache": report.cache_dir,
        "right": report.is_right,
        "problems": [{"file": p.file, "what": p.what} for p in report.problems],
        "unchecked": report.unchecked,
        "notes": report.notes,
        "rows": report.rows,
        "shards": report.shards,
        "tokens": report.tokens,
        "supervised_tokens": report.supervised_tokens,
        "bytes_read": report.bytes_read,
        "bytes_skipped": report.bytes_skipped,
        "seconds": round(report.seconds, 3),
    }
    if comparison is not None:
        content["against"] = {
            "model": comparison.model,
            "rows": comparison.rows,
            "worst": comparison.worst,
        }
    return content


def _tokens(report: "CacheReport") -> str:
    supervised = f"{report.supervised_tokens:,} of them supervised"
    # Another tool's shards do not tell where padding begins.
    return f"{report.tokens:,}, {supervised}" if report.tokens else f"unknown, {supervised}"


def _print_report(report: "CacheReport", comparison: "Comparison | None") -> None:
    rate = report.bytes_read / max(report.seconds, 1e-9)
    rows: list[Sequence[str]] = [
        ("cache", report.cache_dir),
        ("rows", f"{report.rows:,} in {report.shards:,} shards"),
        ("tokens", _tokens(report)),
        ("read", f"{format_bytes(report.bytes_read)} at {format_bytes(int(rate))}/s"),
        ("holes", f"{format_bytes(report.bytes_skipped)} of padding"),
    ]
    if comparison is not None:
        rows.append(
            ("recomputed", f"{comparison.rows} rows, worst {comparison.worst:.2f} of the tolerance")
        )
    print(format_table(rows))
    for title, lines in (("not checked", report.unchecked), ("note", report.notes)):
        for line in lines:
            print(printable(f"{title}: {line}"))
    for problem in report.problems:
        print(printable(f"WRONG {problem.file}: {problem.what}"))
    if report.is_right:
        print("all is right")
    else:
        is_about_model = all(problem.file == _AGAINST for problem in report.problems)
        print(f"{len(report.problems)} wrong. {_MODEL_REMEDY if is_about_model else _REMEDY}")


if __name__ == "__main__":
    sys.exit(run_printing(main))
