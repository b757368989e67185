"""Remat policies as functions on the block: which of its named tensors the backward pass finds, and which it computes again."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxllm.config import BLOCK_INPUT
from jaxllm.cost_model.activations import Policy


def remat(policy: Policy, block: Callable, in_loop: bool) -> Callable:
    """The block with a policy applied. What is to be offloaded is kept by name, and moved by the loop that stores it.

    A plain JAX block keeps about 67 bytes per token and unit of width (norms, SiLU and casts keep theirs); the named tensors
    are a third of that.

    Args:
      in_loop: the block runs in a loop of several turns. There XLA cannot merge the recomputation with the forward pass;
        unrolled it would, and keep everything after all.
    """
    if policy.everything:
        return block
    # An input needs no policy: it is there.
    names = [name for name in policy.keep + policy.offload if name != BLOCK_INPUT]
    return jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(*names), prevent_cse=not in_loop)
