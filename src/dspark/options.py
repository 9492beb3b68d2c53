"""The command line of `dspark.precompute`: flags, defaults, and what can be refused at once.

Nothing here needs torch, so that ``--help`` and a typing mistake answer immediately.
"""

import argparse
import os
from collections.abc import Callable

DTYPES = ("bf16", "fp16", "fp32")
COMPUTE_DTYPES = ("auto", *DTYPES)
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m dspark.precompute``."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark.precompute",
        description="Run a frozen causal language model once over a chat dataset and write its "
        "hidden states as a cache from which a DSpark draft is trained without the target.",
    )
    _add_target(parser.add_argument_group("target"))
    _add_data(parser.add_argument_group("data"))
    _add_cache(parser.add_argument_group("cache"))
    run = parser.add_argument_group("run")
    _add_run(run)
    _add_processes(run)
    # What `main` knows and a caller of `_run` may not.
    parser.set_defaults(command="", command_to_continue="the same command with --resume")
    return parser


def validate_args(args: argparse.Namespace) -> None:
    """Reject values that argparse lets through.

    Raises:
        ValueError: Naming the flag: a batch size below 1; a shard size below 1 or no multiple of
            it; draft layers below 1; an unknown dtype.
    """
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.shard_size < 1 or args.shard_size % args.batch_size:
        raise ValueError(
            f"--shard-size must be a multiple of --batch-size {args.batch_size} and at least 1, "
            f"got {args.shard_size}"
        )
    if args.draft_num_hidden_layers < 1:
        raise ValueError(
            f"--draft-num-hidden-layers must be at least 1, got {args.draft_num_hidden_layers}"
        )
    if args.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}")


def validate_processes(args: argparse.Namespace) -> None:
    """Reject flags that do not describe one way of sharing the work among processes.

    Raises:
        ValueError: Naming the flags: a device map shared by several ranks; a part that is not one
            of the parts.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.device_map is not None and max(ranks_here, args.tensor_parallel) > 1:
        raise ValueError(
            f"--device-map {args.device_map} has one rank spread the target over its machine's "
            f"devices, but {ranks_here} ranks run here, --tensor-parallel {args.tensor_parallel}. "
            "Give one of the two flags, and one rank per machine with --device-map."
        )
    if (args.num_parts is None) != (args.part is None):
        raise ValueError(
            f"--num-parts and --part go together, got {args.num_parts} and {args.part}"
        )
    if args.part is not None and args.part >= args.num_parts:
        raise ValueError(
            f"--part must be from 0 to {args.num_parts - 1} with --num-parts {args.num_parts}, "
            f"got {args.part}"
        )


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    parse.__name__ = "int"  # argparse names it in "invalid int value"
    return parse


def add_model_options(group: argparse._ArgumentGroup, *, required: bool) -> None:
    """Add the flags that name the target, which other commands share."""
    group.add_argument(
        "--target-model",
        required=required,
        metavar="NAME",
        help="Hub id or directory of the target",
    )
    group.add_argument("--revision", metavar="REV", help="Hub branch, tag or commit of the target")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def _add_target(group: argparse._ArgumentGroup) -> None:
    add_model_options(group, required=True)
    group.add_argument(
        "--target-attn-implementation",
        metavar="KIND",
        help="eager, sdpa, flash_attention_2, …; default: what transformers chooses",
    )
    group.add_argument(
        "--target-force-hf",
        action="store_true",
        help="accepted for compatibility: the target is always loaded by transformers",
    )
    group.add_argument(
        "--target-layer-ids",
        nargs="+",
        type=int,
        metavar="ID",
        help="layers to capture, increasing; -1 is the input of layer 0, the last id the "
        "post-norm state; default: spread by --draft-num-hidden-layers",
    )
    group.add_argument(
        "--draft-num-hidden-layers",
        type=int,
        default=5,
        metavar="K",
        help="number of layers to capture where --target-layer-ids is not given (default: 5)",
    )


def add_chat_options(group: argparse._ArgumentGroup, *, required: bool) -> None:
    """Add the flags that say which conversations and what of them is supervised."""
    group.add_argument(
        "--input-data",
        required=required,
        nargs="+",
        action="extend",
        metavar="PATH",
        help="JSONL, JSON or parquet file, directory of them, or Hub dataset id",
    )
    group.add_argument("--split", help="split or slice of the data, such as train[:1000]")
    group.add_argument("--dataset-config", metavar="NAME", help="configuration of a Hub dataset")
    group.add_argument(
        "--shuffle-seed",
        type=at_least(0),
        default=42,
        metavar="N",
        help="order of Hub, parquet and saved datasets; JSON keeps file order (default: 42)",
    )
    group.add_argument("--no-shuffle", action="store_true", help="keep file order everywhere")
    group.add_argument(
        "--chat-template",
        metavar="TEMPLATE",
        help="inline Jinja, a file, or a JSON file with a chat_template key",
    )
    group.add_argument(
        "--template-date",
        metavar="YYYY-MM-DD",
        help="the day that a template which reads the clock sees (default: the day the cache was "
        "begun)",
    )
    group.add_argument(
        "--mask-reasoning-content",
        action="store_true",
        help="leave reasoning out of the loss mask",
    )
    group.add_argument(
        "--mask-generation-prompt",
        action="store_true",
        help="leave the generation prompt at the head of each answer out of the loss mask",
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    add_chat_options(group, required=True)
    group.add_argument(
        "--max-samples",
        type=at_least(1),
        metavar="N",
        help="stop after this many rows kept",
    )
    group.add_argument(
        "--on-bad-row",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a row that cannot be labelled; skipped rows are counted by reason "
        "(default: stop)",
    )
    group.add_argument(
        "--min-loss-tokens",
        type=at_least(0),
        default=0,
        metavar="N",
        help="leave out rows with fewer supervised tokens (default: 0)",
    )


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-dir", required=True, metavar="DIR", help="the cache's directory")
    group.add_argument(
        "--seq-length",
        type=at_least(1),
        default=2048,
        metavar="N",
        help="tokens of a row; longer conversations are cut (default: 2048)",
    )
    group.add_argument(
        "--shard-size",
        type=int,
        default=256,
        metavar="N",
        help="rows per shard, a multiple of --batch-size (default: 256)",
    )
    group.add_argument(
        "--dtype",
        default="bf16",
        choices=DTYPES,
        help="dtype of the states on disk (default: bf16)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on where an interrupted run stopped; starts afresh in an empty directory",
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size",
        type=int,
        default=4,
        metavar="N",
        help="full rows per forward; shorter rows share their token budget (default: 4)",
    )
    group.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default: auto)"
    )
    group.add_argument(
        "--compute-dtype",
        default="auto",
        choices=COMPUTE_DTYPES,
        help="dtype of weights and forward; auto is bf16 on CUDA, fp32 on CPU (default: auto)",
    )
    group.add_argument(
        "--device-map",
        metavar="MAP",
        help="auto spreads a target over this machine's GPUs and memory (needs accelerate)",
    )
    group.add_argument(
        "--tensor-parallel",
        type=at_least(1),
        default=1,
        metavar="N",
        help="ranks that hold one copy of the target together, under torchrun (default: 1)",
    )
    group.add_argument(
        "--no-target-check",
        action="store_true",
        help="do not compare captured states with the model's own before the first row",
    )
    group.add_argument(
        "--on-bad-state",
        choices=("stop", "mask"),
        default="stop",
        help="what to do with a row whose states are not finite: stop, or keep it with zero states "
        "and a zero loss mask (default: stop)",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="read the input, print what the cache will take as a table and as JSON, and stop",
    )
    group.add_argument(
        "--ignore-free-space",
        action="store_true",
        help="go on although the cache does not seem to fit",
    )


def _add_processes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-workers",
        type=at_least(0),
        default=0,
        metavar="N",
        help="processes that tokenize; 0 is one per core (default: 0)",
    )
    group.add_argument(
        "--num-parts",
        type=at_least(1),
        metavar="N",
        help="share the shards among N processes without a launcher; each gets another --part",
    )
    group.add_argument(
        "--part", type=at_least(0), metavar="K", help="which part this is, from 0 to N - 1"
    )
    group.add_argument(
        "--finish",
        action="store_true",
        help="compute nothing: check all shards of a run in parts and mark the cache complete",
    )
    group.add_argument(
        "--log-level",
        type=str.upper,
        default="INFO",
        choices=LOG_LEVELS,
        help="DEBUG also shows tracebacks (default: INFO)",
    )
