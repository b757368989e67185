"""Remat policies: which activations of a block are kept for the backward pass. Each is a function on the block."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxllm.model.attention_blocks import RESIDUALS
from jaxllm.model.layers import MATMUL_OUTPUTS
from jaxllm.model.llama import BlockFunction


def _keep(policy: Callable) -> Callable[[BlockFunction, bool], BlockFunction]:
    def remat(block: BlockFunction, in_loop: bool) -> BlockFunction:
        # In a loop XLA cannot merge the recomputation with the forward pass; unrolled it would, and keep everything after all.
        return jax.checkpoint(block, policy=policy, prevent_cse=not in_loop)

    return remat


POLICIES: dict[str, Callable[[BlockFunction, bool], BlockFunction]] = {
    "none": lambda block, in_loop: block,
    # A plain JAX block keeps about 67 bytes per token and unit of width (norms, SiLU and casts keep theirs): the tagged matmul
    # outputs are a third of that, and what is between them is cheap to compute again, but for the attention kernel itself: its
    # results are kept where they have names, since a ring would be travelled again.
    "selective": _keep(jax.checkpoint_policies.save_only_these_names(*MATMUL_OUTPUTS, *RESIDUALS)),
    "full": _keep(jax.checkpoint_policies.nothing_saveable),
}
"""name -> function (block, whether it runs in a loop of several turns) -> block."""
