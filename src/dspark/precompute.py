r"""Precompute the hidden states that a DSpark draft learns from.

    python -m dspark.precompute \
        --target-model Qwen/Qwen3-0.6B \
        --input-data messages.jsonl \
        --output-dir cache \
        --seq-length 2048 --batch-size 4 --shard-size 256 --dtype bf16

The frozen target runs once over the conversations; training then streams the cache and never loads
the target. Everything that can be refused is refused before the model is loaded. An interrupted run
goes on with the same command and ``--resume``.
"""

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from dspark.disk.manifest import existing_shard_indices, manifest_path
from dspark.errors import CacheError, TargetError
from dspark.job.log_setup import set_up_logging
from dspark.options import build_parser as _build_parser
from dspark.options import validate_args as _validate_args
from dspark.options import validate_processes
from dspark.processes.group import Group
from dspark.processes.interrupts import PeerFailed, Stopped, stopping_at_once
from dspark.processes.rendezvous import join_group

if TYPE_CHECKING:
    from dspark.job.run import Run
    from dspark.job.settings import RunSettings
    from dspark.job.workplace import Workplace

logger = logging.getLogger(__name__)

_DEEPSEEK_V4_MODEL_TYPE = "deepseek_v4"
_GLM_5_2_MODEL_TYPE = "glm_moe_dsa"
_MINIMAX_M3_MODEL_TYPES = ("minimax_m3_vl",)
_UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES = (
    _DEEPSEEK_V4_MODEL_TYPE,
    _GLM_5_2_MODEL_TYPE,
    *_MINIMAX_M3_MODEL_TYPES,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments, without the program's name; None for those of the process.

    Returns:
        0 when the cache is finished, 1 when the run failed; argparse exits with 2 on bad usage.
    """
    argv = sys.argv[1:] if argv is None else argv
    # Rows are spread over processes: threads inside each would fight for the same cores, and a
    # tokenizer that is used before a fork would say so at length.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        group = join_group()
    except (OSError, ValueError) as error:
        _report(Group(), error)
        return 1
    try:
        with stopping_at_once(), group.watched(partial(_report, group)):
            args = group.first_then_all("arguments", partial(_parse, argv))
            set_up_logging(args.log_level, on_terminal=group.is_first)
            with _telling_how_to_go_on(args, _is_interruption):
                return _run(args, group)
    except (KeyboardInterrupt, Stopped) as error:
        return 128 + (error.signum if isinstance(error, Stopped) else signal.SIGINT)
    except PeerFailed as error:
        is_told_here = f" on {socket.gethostname()}: " in str(error)
        logger.log(logging.DEBUG if is_told_here else logging.ERROR, "ending: %s", error)
        return 1
    except Exception:
        return 1


def _parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments, with the command line and the one that continues this run."""
    args = _build_parser().parse_args(argv)
    resume = [] if args.resume else ["--resume"]
    args.command = shlex.join(["python", "-m", "dspark.precompute", *argv])
    args.command_to_continue = shlex.join(["python", "-m", "dspark.precompute", *argv, *resume])
    return args


def _report(group: Group, error: BaseException) -> None:
    """Tell the user in one line why the run ends; what is a fault of dspark, with its trace."""
    if isinstance(error, SystemExit):  # argparse has told
        return
    is_expected = isinstance(error, KeyboardInterrupt | Stopped | PeerFailed | OSError | ValueError)
    if not is_expected or logger.isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    notes = getattr(error, "__notes__", [])
    if notes and not message.endswith((".", "?")):
        message += "."
    text = "\n".join([f"{group.label}{message}", *notes])
    line = " ".join(line.strip() for line in text.splitlines())
    print(f"dspark.precompute: error: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _telling_how_to_go_on(
    args: argparse.Namespace, concerns: Callable[[BaseException], bool]
) -> Iterator[None]:
    """Add to the errors concerned the command that continues, unless they have it already."""
    try:
        yield
    except BaseException as error:
        if concerns(error) and not getattr(error, "__notes__", None):
            error.add_note(f"Finished shards are kept; go on with: {args.command_to_continue}")
        raise


def _is_interruption(error: BaseException) -> bool:
    """Whether what failed is the machine and not the request."""
    if isinstance(error, OSError):  # those that dspark raises for a wrong request have no number
        return error.errno is not None or isinstance(error, ChildProcessError)
    return isinstance(error, KeyboardInterrupt | Stopped)


def _run(args: argparse.Namespace, group: "Group | None" = None) -> int:
    """Load the target, scan the dataset once, and write the sharded cache."""
    group = Group() if group is None else group
    goes_on = args.resume or args.finish or args.num_parts is not None or group.is_restarted
    group.first_then_all("refusals", partial(_refuse_at_once, args, goes_on))
    group.split_target(args.tensor_parallel)
    # Only now: these import torch and transformers, and what is above answers at once.
    from dspark.job.settings import decide_settings
    from dspark.job.workplace import open_workplace

    settings = group.first_then_all("settings", partial(decide_settings, args))
    with open_workplace(args, group) as workplace:
        with workplace.alone():
            run, todo = _prepare(settings, workplace, group, goes_on=goes_on)
        return _carry_out(run, todo)


def _refuse_at_once(args: argparse.Namespace, goes_on: bool) -> None:
    """Refuse what needs no import."""
    _validate_args(args)
    validate_processes(args)
    if not args.output_dir:
        raise CacheError("--output-dir is empty; name a directory")
    existing = existing_shard_indices(args.output_dir)
    if existing and not goes_on and not args.dry_run:
        raise CacheError(
            f"{args.output_dir} already holds {len(existing)} shards. Give --resume to go on with "
            "them, or another --output-dir."
        )
    _refuse_unsupported_target(args)


def _prepare(
    settings: "RunSettings", workplace: "Workplace", group: Group, *, goes_on: bool
) -> tuple["Run", str]:
    """Read the input, refuse what does not fit, and decide what there is to do.

    Returns:
        The run, and "write", "finish" or "nothing".
    """
    from dspark.job.read_input import read_input

    cache_dir = settings.args.output_dir
    existing = existing_shard_indices(cache_dir)
    recorded = group.from_first("recorded", lambda: _recorded_manifest(cache_dir, goes_on))
    if recorded:  # first what needs no reading of the input: a mistyped flag answers at once
        _ensure_resume_compatible(cache_dir, _without_reading(settings, recorded), existing)
    run = read_input(settings, workplace, group, recorded)
    if goes_on:
        _ensure_resume_compatible(cache_dir, run.manifest, existing)
    if goes_on or not existing:  # a dry run beside somebody's shards leaves them their tokens
        workplace.accept(run.tokens.directory)
    run.look_at_files()
    return run, group.from_first("todo", partial(_decide, run, goes_on))


def _without_reading(settings: "RunSettings", recorded: dict[str, Any]) -> dict[str, Any]:
    """What the manifest will be if the input and the weights are those of the recorded one."""
    from dspark.job.read_input import identity_of_settings

    provenance = recorded.get("provenance", {})
    identity = provenance.get("identity", {}) | identity_of_settings(settings)
    return {
        **recorded,
        **settings.manifest(num_samples=recorded["num_samples"]),
        "provenance": {**provenance, "identity": identity},
    }


def _decide(run: "Run", goes_on: bool) -> str:
    args = run.settings.args
    if goes_on and run.is_finished:
        whose = f" of part {args.part}" if run.is_part else ""
        count = len(run.responsible)
        logger.info("%s is finished: all %d shards%s pass", args.output_dir, count, whose)
        return "nothing"
    forecast = run.forecast()
    if args.dry_run:
        print(forecast.table())
        print(json.dumps(asdict(forecast)))
        return "nothing"
    if args.finish:
        return "finish"
    logger.info("%s", forecast.line())
    if not args.ignore_free_space:
        forecast.refuse_if_too_large(args.output_dir)
    run.begin()
    return "write"


def _carry_out(run: "Run", todo: str) -> int:
    if todo == "finish" and run.group.is_first:
        run.finish()
    if todo == "write":
        with _telling_how_to_go_on(run.settings.args, lambda error: True):
            run.write()
    return 0


def _recorded_manifest(cache_dir: str, goes_on: bool) -> dict[str, Any] | None:
    """The manifest of the cache that this run goes on with, if there is one."""
    from dspark.cache import read_manifest

    if not goes_on or not os.path.exists(manifest_path(cache_dir)):
        return None
    recorded = read_manifest(cache_dir, allow_incomplete=True)
    provenance = recorded.get("provenance", {})
    if not isinstance(provenance, dict) or not isinstance(provenance.get("identity", {}), dict):
        raise CacheError(
            f"{manifest_path(cache_dir)} is damaged: its provenance, or the identity in it, is not "
            "an object. Use another --output-dir, or copy the manifest anew."
        )
    return recorded


def _refuse_unsupported_target(args: argparse.Namespace) -> None:
    from dspark.target import read_model_type

    model_type = read_model_type(
        args.target_model, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    if model_type in _UNSUPPORTED_OFFLINE_TARGET_MODEL_TYPES:
        raise TargetError(
            f"{args.target_model} has model_type={model_type!r}, which transformers' decoder does "
            "not run as it is served: its hidden states cannot be precomputed. Train its draft "
            "online, with the target in the loop."
        )


def _ensure_resume_compatible(
    cache_dir: str, manifest: dict[str, Any], existing_shards: set[int]
) -> None:
    """Refuse to resume into shards produced with a different configuration.

    Args:
        cache_dir: The cache.
        manifest: What this run would write.
        existing_shards: The shards that are there.

    Raises:
        CacheError: If there are shards and no manifest, or a manifest that "does not match", with
            every differing field and both values.
    """
    from dspark.cache import manifest_mismatch_fields, read_manifest

    if not os.path.exists(manifest_path(cache_dir)):
        if existing_shards:
            raise CacheError(
                f"{cache_dir} holds {len(existing_shards)} shards but no manifest, so nothing says "
                "what they are. Use another --output-dir, or remove them."
            )
        return
    recorded = read_manifest(cache_dir, allow_incomplete=True)
    fields = manifest_mismatch_fields(recorded, manifest)
    if fields:
        differences = (
            f"{name}: cache {_field(recorded, name)}, this run {_field(manifest, name)}"
            for name in fields
        )
        raise CacheError(
            f"the cache in {cache_dir} does not match this run: {'; '.join(differences)}. Give the "
            "settings it was begun with, or another --output-dir."
        )


def _field(manifest: dict[str, Any], name: str) -> str:
    value: Any = manifest
    for key in name.split(".", 2):
        value = value.get(key) if isinstance(value, dict) else None
    return "nothing" if value is None else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
