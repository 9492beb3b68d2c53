"""Precompute and stream the target's hidden states for training DSpark drafts.

The package imports nothing by itself, so that ``import dspark.cache`` needs neither transformers
nor datasets and ``python -m dspark.precompute --help`` does not wait for torch.
"""

__version__ = "0.1.0"
