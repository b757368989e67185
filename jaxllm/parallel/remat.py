"""Remat policies, applied to a block: which of its named tensors are saved for the backward pass, and which are recomputed."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxllm.config import BLOCK_INPUT
from jaxllm.config.remat_policy import Policy


def remat(policy: Policy, block: Callable, in_loop: bool) -> Callable:
    """The block with a policy applied. Tensors to be offloaded are saved by name; the loop that stores them moves them.

    A plain JAX block saves about 67 bytes per token and unit of width, because norms, SiLU and casts save their inputs. The
    named tensors are a third of that.

    Args:
      in_loop: the block runs in a loop of several turns. XLA then cannot merge the recomputation with the forward pass. In an
        unrolled loop it would merge them, and keep everything after all.
    """
    if policy.everything:
        return block
    # The block's input is saved without a policy.
    names = [name for name in policy.keep + policy.offload if name != BLOCK_INPUT]
    return jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(*names), prevent_cse=not in_loop)
