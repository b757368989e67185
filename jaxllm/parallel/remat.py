"""Remat policies: which activations of a block are kept for the backward pass. Each is a function on the block."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxllm.model.layers import MATMUL_OUTPUTS
from jaxllm.model.llama import BlockFunction


def _none(block: BlockFunction) -> BlockFunction:
    return block


def _selective(block: BlockFunction) -> BlockFunction:
    # A plain JAX block keeps about 67 bytes per token and unit of width (norms, SiLU and casts keep theirs): the tagged
    # matmul outputs are a third of that, and what is between them is cheap to compute again.
    return jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(*MATMUL_OUTPUTS), prevent_cse=False)


def _full(block: BlockFunction) -> BlockFunction:
    return jax.checkpoint(block, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)


# prevent_cse=False: the block runs in a scan, whose forward and backward loops XLA cannot merge anyway.
POLICIES: dict[str, Callable[[BlockFunction], BlockFunction]] = {"none": _none, "selective": _selective, "full": _full}
