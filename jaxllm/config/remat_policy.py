"""Remat policies: what a block stores for its backward pass.

A block reads one tensor, block_input, and names the outputs of its matmuls and of its attention. A policy decides for each
name: keep it on the device, offload it to host memory, or recompute it from block_input and the stored tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config.types import BLOCK_INPUT, BLOCK_TENSORS, Remat


@dataclass(frozen=True)
class Policy:
    """Names in the order of BLOCK_TENSORS. Those in neither `keep` nor `offload` are recomputed."""

    name: str
    """The policy's name in the config; `mapping` for one that names tensors."""
    keep: tuple[str, ...]
    """Kept on the device."""
    offload: tuple[str, ...]
    """Offloaded to pinned host memory."""
    everything: bool
    """No rematerialisation: autodiff keeps all that it needs, much of it without a name."""

    @property
    def recompute(self) -> tuple[str, ...]:
        return tuple(name for name in BLOCK_TENSORS if name not in self.keep + self.offload)


def policy_of(remat: Remat) -> Policy:
    """The policy that a value of parallel.remat stands for.

    `selective` keeps every name; the tensors between them are cheap to recompute. Plain XLA attention on one context rank has
    no ATTENTION_RESULTS, and runs once more.
    """
    if isinstance(remat, str):
        keep = {"none": BLOCK_TENSORS, "selective": BLOCK_TENSORS, "full": (BLOCK_INPUT,), "offload": ()}[remat]
        return Policy(remat, keep, BLOCK_TENSORS if remat == "offload" else (), everything=remat == "none")
    actions = {BLOCK_INPUT: "keep", **remat}
    keep, offload = (tuple(name for name in BLOCK_TENSORS if actions.get(name) == action) for action in ("keep", "offload"))
    return Policy("mapping", keep, offload, everything=False)


def remat_words(remat: Remat) -> str:
    """parallel.remat in words: its name, or the action for each tensor."""
    return remat if isinstance(remat, str) else ", ".join(f"{name} {action}" for name, action in remat.items())
