"""Remat policies: what a block stores for its backward pass.

A block reads one tensor, block_input, and names the outputs of its matmuls and of its attention. A policy decides for each
name: keep it on the device, offload it to host memory, or recompute it from block_input and the stored tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from jaxllm.config.model_spec import Shape
from jaxllm.config.types import BLOCK_INPUT, Remat, block_tensors

SHORT = {
    "block_input": "input",
    "query": "q",
    "key": "k",
    "value": "v",
    "attention_output": "attn",
    "attention_out": "out",
    "mlp_gate": "gate",
    "mlp_up": "up",
    "mlp_down": "down",
}
"""Names of a block's tensors in a table. attention_lse goes with attention_output."""


@dataclass(frozen=True)
class Policy:
    """Names of a network's block_tensors, in their order."""

    name: str
    """The policy's name in the config; `mapping` for one that names tensors."""
    keep: tuple[str, ...]
    """Kept on the device."""
    offload: tuple[str, ...]
    """Offloaded to pinned host memory."""
    recompute: tuple[str, ...]
    """All others."""
    everything: bool
    """No rematerialisation: autodiff keeps all that it needs, much of it without a name."""


def policy_of(remat: Remat, model: Shape) -> Policy:
    """The policy that a value of parallel.remat stands for, in this network.

    `selective` keeps every name; the tensors between them are cheap to recompute. Plain XLA attention on one context rank has
    no ATTENTION_RESULTS, and runs once more.
    """
    return _policy_of(remat if isinstance(remat, str) else tuple(remat.items()), block_tensors(model))


@lru_cache(maxsize=4096)
def _policy_of(remat: str | tuple[tuple[str, str], ...], names: tuple[str, ...]) -> Policy:
    if isinstance(remat, str):
        action = {"full": "recompute", "offload": "offload"}.get(remat, "keep")
        actions = dict.fromkeys(names, action) | ({BLOCK_INPUT: "keep"} if remat == "full" else {})
    else:
        actions = {BLOCK_INPUT: "keep", **dict(remat)}
    keep, offload, recompute = (
        tuple(name for name in names if actions.get(name, "recompute") == action) for action in ("keep", "offload", "recompute")
    )
    return Policy(remat if isinstance(remat, str) else "mapping", keep, offload, recompute, everything=remat == "none")


def remat_words(remat: Remat) -> str:
    """parallel.remat in words: its name, or the action for each tensor."""
    return remat if isinstance(remat, str) else ", ".join(f"{name} {action}" for name, action in remat.items())


def offloads(remat: Remat) -> bool:
    """Whether activations wait in the host's memory."""
    return remat == "offload" or (isinstance(remat, Mapping) and "offload" in remat.values())


def remat_text(remat: Remat) -> str:
    """A policy's name. Of a mapping what it keeps or what it recomputes, whichever is shorter, in SHORT names, and what goes to
    the host: 'keep q k v', 'recompute gate; host up'."""
    if isinstance(remat, str):
        return remat
    actions = {BLOCK_INPUT: "keep", **remat}
    kept, again, host = (
        " ".join(short for name, short in SHORT.items() if actions.get(name, "recompute") == action)
        for action in ("keep", "recompute", "offload")
    )
    kept = kept.removeprefix("input").strip()
    if "mlp_down" not in remat:
        again = again.removesuffix("down").strip()
    if kept and (not again or len(kept) < len(again)):
        device = f"keep {kept}"
    elif again:
        device = f"recompute {again if kept else 'the rest' if host else 'all'}"
    else:
        return f"host {host}"
    return f"{device}; host {host}" if host else device
