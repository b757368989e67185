"""The residuals of a VJP as plain arrays, so that a loop written by hand can store them and another can use them.

    out, vjp = jax.vjp(block, weights, h, side)      # in one loop
    kept = keep(vjp)                                 # activations only: weights and side are at hand later
    ...
    template = jax.eval_shape(lambda *a: jax.vjp(block, *a)[1], weights, h, side)
    dweights, dh, _ = rebuild(template, weights, side, kept)(dout)

`jax.vjp` returns a pytree whose fields `args_res` (what it needs of each argument) and `opaque_residuals` (the rest) are there
in JAX 0.10 to 0.12. Leaves are put back by position, never by shape: a square weight can have an activation's shape. Nor do
shapes say which tensor a residual is: `kept_names` follows each through the traced program to where it got its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend.core import Literal

from jaxllm.config import ATTENTION_RESULTS, BLOCK_INPUT
from jaxllm.cost_model.activations import Policy

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


# --------------------------------------------------------------------------------------------------- which tensor is which

SAME_VALUE = {
    "convert_element_type",
    "copy",
    "optimization_barrier",
    "pvary",
    "reduce_precision",
    "sharding_constraint",
    "stop_gradient",
}
"""Primitives whose outputs are their inputs in order, as far as naming goes."""
CALLS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "shard_map",
}
"""Primitives that run a program of their own, whose inputs and outputs are theirs in order."""


def kept_names(block: Any, weights: Any, h: Any, side: Any, policy: Policy | None = None) -> Any:
    """The name of each residual of block(weights, h, side), in a tree like keep()'s: BLOCK_INPUT for the hidden argument, None
    for what has no name. The block comes with its remat applied; the arguments may be tracers or shapes.

    Args:
      policy: the one applied, to check that what it offloads is among the residuals.

    Raises:
      RuntimeError: something to be offloaded has no residual. Not so the results of attention, which is without unless it is
        computed in blocks (`absent` says which).
    """

    def residuals(weights, h, side):
        return keep(jax.vjp(block, weights, h, side)[1])

    traced, shapes = jax.make_jaxpr(residuals, return_shape=True)(weights, h, side)
    first, count = len(jax.tree.leaves(weights)), len(jax.tree.leaves(h))
    names = []
    for variable in traced.jaxpr.outvars:
        origin = _origin(traced.jaxpr, variable)
        if isinstance(origin, int):
            origin = BLOCK_INPUT if first <= origin < first + count else None
        names.append(origin)
    tree = jax.tree.structure(shapes).unflatten(names)
    if lost := [name for name in absent(tree, policy.offload if policy else ()) if name not in ATTENTION_RESULTS]:
        raise RuntimeError(f"No residual of a block is its {', '.join(lost)}, so it cannot wait in the host's memory.")
    return tree


def waits_on_host(names: Any, policy: Policy) -> tuple[bool, ...]:
    """For each residual, in the order of the leaves of keep(vjp), whether `policy` offloads it. `names` of kept_names()."""
    return tuple(name in policy.offload for name in jax.tree.leaves(names, is_leaf=lambda x: x is None))


def absent(names: Any, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the wanted names kept_names() did not find."""
    found = set(jax.tree.leaves(names))
    return tuple(name for name in wanted if name not in found)


def _origin(program: Any, variable: Any) -> str | int | None:
    """Where a value of a jaxpr comes from, if only moved since: a name, the number of an input, or None."""
    while True:
        if isinstance(variable, Literal):
            return None
        if variable in (inputs := list(program.invars)):
            return inputs.index(variable)
        # What is no output of an equation is a constant.
        equation = next((e for e in program.eqns if variable in e.outvars), None)
        if equation is None:
            return None
        primitive, place = equation.primitive.name, equation.outvars.index(variable)
        if primitive == "name":
            return equation.params["name"]
        if primitive in CALLS and (inner := _program_of(equation)) is not None:
            origin = _origin(inner, inner.outvars[place])
            if not isinstance(origin, int):
                return origin
            variable = equation.invars[origin]
        elif primitive in SAME_VALUE:
            variable = equation.invars[place]
        else:
            return None


def _program_of(equation: Any) -> Any:
    """The jaxpr that a call runs; None if its inputs and outputs are not the call's."""
    for parameter in equation.params.values():
        inner = getattr(parameter, "jaxpr", parameter)
        if hasattr(inner, "eqns") and hasattr(inner, "outvars"):
            is_whole = len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars)
            return inner if is_whole else None
    return None
