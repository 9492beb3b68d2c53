"""The command line of `dspark.precompute`: defaults, what is refused, and in which order."""

import argparse

import pytest

from dspark.cache import DTYPE_MAP
from dspark.options import COMPUTE_DTYPES, DTYPES, at_least, validate_processes
from dspark.precompute import _build_parser, _validate_args

REQUIRED = ["--target-model", "model", "--input-data", "chats.jsonl", "--output-dir", "cache"]


def parse(*flags: str) -> argparse.Namespace:
    return _build_parser().parse_args([*REQUIRED, *flags])


def misuse(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what is said about flags that are refused with exit status 2."""
    with pytest.raises(SystemExit) as caught:
        parse(*flags)
    assert caught.value.code == 2
    return capsys.readouterr().err


DEFAULTS = {
    "seq_length": 2048,
    "batch_size": 4,
    "shard_size": 256,
    "dtype": "bf16",
    "device": "auto",
    "compute_dtype": "auto",
    "num_workers": 0,
    "split": None,
    "dataset_config": None,
    "shuffle_seed": 42,
    "no_shuffle": False,
    "draft_num_hidden_layers": 5,
    "target_layer_ids": None,
    "chat_template": None,
    "mask_reasoning_content": False,
    "mask_generation_prompt": False,
    "on_bad_row": "stop",
    "min_loss_tokens": 0,
    "target_attn_implementation": None,
    "target_force_hf": False,
    "revision": None,
    "trust_remote_code": False,
    "resume": False,
    "max_samples": None,
    "log_level": "INFO",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_flag_that_is_not_given_has_its_default(name):
    assert getattr(parse(), name) == DEFAULTS[name]


@pytest.mark.parametrize("missing", ["--target-model", "--input-data", "--output-dir"])
def test_three_flags_are_required(capsys, missing):
    place = REQUIRED.index(missing)
    with pytest.raises(SystemExit) as caught:
        _build_parser().parse_args([*REQUIRED[:place], *REQUIRED[place + 2 :]])
    assert caught.value.code == 2
    assert missing in capsys.readouterr().err


def test_several_inputs_may_follow_one_flag_or_several():
    assert parse("--input-data", "b", "c").input_data == ["chats.jsonl", "b", "c"]


def test_layer_ids_are_integers_apart_by_spaces():
    assert parse("--target-layer-ids", "-1", "0", "3").target_layer_ids == [-1, 0, 3]


def test_a_level_of_logging_may_be_spelled_in_small_letters():
    assert parse("--log-level", "debug").log_level == "DEBUG"


def test_the_dtypes_of_the_parser_are_those_of_the_cache():
    assert list(DTYPES) == list(DTYPE_MAP)
    assert list(COMPUTE_DTYPES) == ["auto", *DTYPE_MAP]


@pytest.mark.parametrize("dtype", DTYPE_MAP)
def test_every_dtype_is_accepted(dtype):
    args = parse("--dtype", dtype, "--compute-dtype", dtype)
    assert (args.dtype, args.compute_dtype) == (dtype, dtype)
    _validate_args(args)


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "int8"],
        ["--compute-dtype", "fp8"],
        ["--log-level", "loud"],
        ["--on-bad-row", "guess"],
        ["--seq-length", "0"],
        ["--max-samples", "0"],
        ["--min-loss-tokens", "-1"],
        ["--num-workers", "-1"],
        ["--seq-length", "many"],
        ["--shuffle-seed", "0.5"],
        ["--target-layer-ids", "1,2"],
        ["--target-layer-ids"],
        ["--no-such-flag"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_refused_by_name(capsys, flags):
    assert flags[0] in misuse(capsys, *flags)


def test_a_number_below_the_least_is_told_from_text():
    assert at_least(1)("7") == 7
    with pytest.raises(argparse.ArgumentTypeError, match="must be at least 1, got 0"):
        at_least(1)("0")
    with pytest.raises(ValueError, match="invalid literal"):
        at_least(1)("many")


def namespace(**changes: object) -> argparse.Namespace:
    """Return only what the validation looks at first: nothing else may be needed."""
    fields = {"batch_size": 4, "shard_size": 8, "draft_num_hidden_layers": 5, "dtype": "bf16"}
    return argparse.Namespace(**(fields | changes))


def test_good_values_pass():
    _validate_args(namespace())
    _validate_args(parse())


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"batch_size": 0}, "--batch-size"),
        ({"batch_size": -4}, "--batch-size"),
        ({"shard_size": 0}, "--shard-size"),
        ({"shard_size": -8}, "--shard-size"),
        ({"shard_size": 6}, "--shard-size"),
        ({"shard_size": 3}, "--shard-size"),
        ({"draft_num_hidden_layers": 0}, "--draft-num-hidden-layers"),
        ({"draft_num_hidden_layers": -1}, "--draft-num-hidden-layers"),
        ({"dtype": "int8"}, "--dtype"),
    ],
)
def test_a_bad_value_is_refused_with_its_flag_and_itself(changes, flag):
    with pytest.raises(ValueError, match=flag) as caught:
        _validate_args(namespace(**changes))
    assert all(str(value) in str(caught.value) for value in changes.values())


WRONG_IN_ORDER = [
    ({"batch_size": 0}, "--batch-size"),
    ({"shard_size": 6}, "--shard-size"),
    ({"draft_num_hidden_layers": 0}, "--draft-num-hidden-layers"),
    ({"dtype": "int8"}, "--dtype"),
]


@pytest.mark.parametrize("first", range(4))
def test_values_are_looked_at_in_a_fixed_order(first):
    changes: dict[str, object] = {}
    for change, _ in WRONG_IN_ORDER[first:]:
        changes |= change
    with pytest.raises(ValueError, match=rf"^{WRONG_IN_ORDER[first][1]} "):
        _validate_args(namespace(**changes))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--num-parts", "3"], ["--num-parts", "3"]),
        (["--part", "0"], ["--part", "0"]),
        (["--num-parts", "3", "--part", "3"], ["--part", "from 0 to 2", "3"]),
        (["--device-map", "auto", "--tensor-parallel", "2"], ["--device-map auto", "2"]),
    ],
)
def test_flags_that_share_the_work_in_two_ways_are_refused(flags, named):
    with pytest.raises(ValueError, match=named[0]) as caught:
        validate_processes(parse(*flags))
    assert all(text in str(caught.value) for text in named)
