"""Rows of a cache computed again by the target, and compared.

Each row runs by itself, so sums are taken in another order than in the batch it was written from:
states agree within a share of each token's largest magnitude, not bit for bit. Ids are the input
and cannot be wrong here; what is compared are states and the target's weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from dspark.checks.cache_rows import CacheRow, CacheRows, spread_rows
from dspark.errors import CacheError
from dspark.model.capture import Target
from dspark.schema.target_weights import _TARGET_WEIGHTS_NAME, read_target_weight_modules
from dspark.target import load_target

# Largest difference between two runs of the same row, as a share of each token's largest magnitude
# in a layer. In half precision every layer rounds, and the differences of all layers add up.
_SAME_ROW = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.05}
_ATTENTION = (
    "default",
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
)
# One rounding to the dtype of the cache, as a share of the value that is rounded.
_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a cache is not what the target computes, and by how much."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class _RecordedRun:
    """How a cache says that it was computed."""

    compute_dtype: str
    attn_implementation: str | None
    tolerance: float


@dataclass
class Comparison:
    """What came of computing rows again.

    Attributes:
        model: The target, as given.
        rows: How many were computed.
        worst: The largest difference, as a share of what is tolerated.
        differences: Rows and layers that differ by more, and weights that differ at all.
    """

    model: str
    rows: int = 0
    worst: float = 0.0
    differences: list[Difference] = field(default_factory=list)


def compare_with_target(
    cache_dir: str,
    model: str,
    *,
    num_rows: int,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    on_begin: Callable[[int], object] = lambda rows: None,
    on_row: Callable[[], object] = lambda: None,
) -> Comparison:
    """Run the target over rows spread evenly over a cache.

    Args:
        cache_dir: A whole and finished cache.
        model: Hub id or directory of the target.
        num_rows: How many rows, less those among them that are kept without states; all of them
            if there are fewer.
        device: ``auto`` is CUDA where it is there.
        revision: The hub revision.
        trust_remote_code: Whether code shipped with the model may be run.
        on_begin: Called with the number of rows.
        on_row: Called after each.

    Raises:
        TargetError: If the model cannot be loaded or its layers are not those of the cache.
        CacheError: If the cache cannot be read.
    """
    cache = CacheRows(cache_dir)
    run = _recorded_run(cache.manifest)
    target = load_target(
        model,
        layer_ids=cache.manifest["target_layer_ids"],
        device=_choose_device(device),
        compute_dtype=getattr(torch, run.compute_dtype),
        attn_implementation=run.attn_implementation,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    comparison = Comparison(model)
    _compare_weights(cache_dir, target, comparison)
    masked = _masked_rows(cache.manifest)
    rows = [row for row in spread_rows(len(cache), num_rows) if row not in masked]
    on_begin(len(rows))
    for row in rows:
        _compare_row(cache.read(row), target, run.tolerance, comparison)
        on_row()
    return comparison


def _recorded_run(manifest: Mapping[str, Any]) -> _RecordedRun:
    """Read how the cache was computed, believing nothing.

    Raises:
        CacheError: If it names a dtype or a kind of attention that is not known. The latter could
            name code on a hub, which a manifest must not be able to run.
    """
    provenance = manifest.get("provenance")
    if not isinstance(provenance, dict):  # another tool's: computed in half precision at worst
        return _RecordedRun("float32", None, _SAME_ROW["bfloat16"])
    identity = provenance.get("identity", {})
    dtype, attention = identity.get("compute_dtype"), identity.get("attn_implementation")
    if dtype not in _SAME_ROW or attention not in _ATTENTION:
        raise CacheError(
            f"the manifest names compute_dtype {dtype!r} and attn_implementation {attention!r}; "
            f"known are {', '.join(_SAME_ROW)} and {', '.join(_ATTENTION)}. Run the precompute "
            "command with --resume instead: it uses the flags that it is given."
        )
    kind = None if attention == "default" else attention
    return _RecordedRun(dtype, kind, _SAME_ROW[dtype])


def _masked_rows(manifest: Mapping[str, Any]) -> set[int]:
    """Rows that are kept without states, because those of the target were not finite."""
    provenance = manifest.get("provenance")
    rows = provenance.get("masked_rows", []) if isinstance(provenance, dict) else []
    return {row for row in rows if isinstance(row, int)} if isinstance(rows, list) else set()


def _choose_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _compare_weights(cache_dir: str, target: Target, comparison: Comparison) -> None:
    stored = read_target_weight_modules(cache_dir)
    for name, mine, module in zip(
        ("embed_tokens", "lm_head"), stored, (target.embed_tokens, target.lm_head), strict=True
    ):
        theirs = cast(Tensor, module.weight).detach().to("cpu", mine.weight.dtype)
        if not torch.equal(mine.weight.view(torch.uint8), theirs.view(torch.uint8)):  # NaN too
            comparison.differences.append(
                Difference(_TARGET_WEIGHTS_NAME, f"{name}.weight is not that of {comparison.model}")
            )


def _compare_row(row: CacheRow, target: Target, tolerance: float, comparison: Comparison) -> None:
    ids_BS = row.input_ids[None]
    captured = target.capture(ids_BS, torch.ones_like(ids_BS))
    names = [f"layer {layer_id}" for layer_id in target.layer_ids]
    for name, stored_SH, state_BSH in zip(
        [*names, "the last state"],
        [*row.layers, row.last],
        [*captured.layers, captured.last],
        strict=True,
    ):
        share = _share_of_tolerance(stored_SH, state_BSH[0].cpu(), tolerance)
        comparison.worst = max(comparison.worst, share)
        if not share <= 1:
            comparison.differences.append(
                Difference(
                    f"row {row.number}", f"{name} differs by {share:.3g} times what is tolerated"
                )
            )
    comparison.rows += 1


def _share_of_tolerance(stored_SH: Tensor, state_SH: Tensor, tolerance: float) -> float:
    """Return the largest difference as a share of what is allowed at its place."""
    stored, state = stored_SH.double(), state_SH.double()
    largest = state.abs().amax(dim=-1, keepdim=True)
    allowed = tolerance * largest + _ROUNDING[stored_SH.dtype] * state.abs()
    return float(((stored - state).abs() / allowed.clamp_min(1e-300)).max())
