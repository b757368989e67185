"""The residuals of a VJP as plain arrays, so that a loop written by hand can store them and another can use them.

    out, vjp = jax.vjp(block, weights, h, side)      # in one loop
    kept = keep(vjp)                                 # activations only: weights and side are at hand later
    ...
    template = jax.eval_shape(lambda *a: jax.vjp(block, *a)[1], weights, h, side)
    dweights, dh, _ = rebuild(template, weights, side, kept)(dout)

`jax.vjp` returns a pytree whose fields `args_res` (what it needs of each argument) and `opaque_residuals` (the rest) are there
in JAX 0.10 to 0.12. Leaves are put back by position, never by shape: a square weight can have an activation's shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

WEIGHTS, HIDDEN, SIDE = range(3)


def keep(vjp: Any) -> Any:
    """What must be stored of a VJP of block(weights, h, side): its residuals but for weights and side."""
    if not hasattr(vjp, "opaque_residuals") or not hasattr(vjp, "args_res"):
        raise RuntimeError(f"jaxllm knows the VJPs of JAX 0.10 to 0.12, not those of {jax.__version__}: install one of these.")
    return vjp.args_res[HIDDEN], vjp.opaque_residuals


def rebuild(template: Any, weights: Any, side: Any, kept: Any) -> Any:
    """The VJP again: `template` says what it looked like, `kept` is keep()'s answer."""
    hidden, opaque = kept
    arguments = list(template.args_res)
    arguments[WEIGHTS] = _hang(arguments[WEIGHTS], weights)
    arguments[HIDDEN] = hidden
    arguments[SIDE] = _hang(arguments[SIDE], side)
    return dataclasses.replace(template, args_res=arguments, opaque_residuals=opaque)


def _hang(place: Any, argument: Any) -> Any:
    """An argument's leaves in the order the VJP keeps them; those it marked as not needed stay so."""
    leaves, structure = jax.tree.flatten(place, is_leaf=_is_not_needed)
    values = jax.tree.leaves(argument)
    assert len(leaves) == len(values), (len(leaves), len(values))
    return structure.unflatten([old if _is_not_needed(old) else new for old, new in zip(leaves, values, strict=True)])


def _is_not_needed(x: Any) -> bool:
    return type(x).__name__ == "NotNeeded"
