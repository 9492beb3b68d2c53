"""Proof on the spot that a target's states are what they claim to be."""

from __future__ import annotations

from dspark.capture import Target


def check_target(target: Target) -> None:
    """Compare a dummy batch's states with transformers' own.

    Raises:
        TargetError: If a state or the logits differ; names the layer and by how much.
    """
