"""The residuals of a VJP as plain arrays, so that one hand-written loop can store them and another can use them.

    out, vjp = jax.vjp(block, weights, h, block_context)      # in one loop
    kept = extract(vjp)                                       # activations only
    ...
    template = jax.eval_shape(lambda *a: jax.vjp(block, *a)[1], weights, h, block_context)
    dweights, dh, _ = restore(template, weights, block_context, kept)(dout)

Weights and block_context are not stored: the second loop has them, and `restore` puts them back into the VJP.

`jax.vjp` returns a pytree. In JAX 0.10 to 0.12 it has the fields `args_res` (what it needs of each argument) and
`opaque_residuals` (the rest). Leaves are put back by position, never by shape: a square weight can have an activation's shape.
Nor does a shape tell which tensor a residual is: `kept_names` follows each through the traced program to where it got its name.
"""

import dataclasses
from typing import Any

import jax
from jax.extend.core import Literal

from jaxllm.config import ATTENTION_RESULTS, BLOCK_INPUT
from jaxllm.config.remat_policy import Policy

WEIGHTS, HIDDEN, BLOCK_CONTEXT = range(3)


def extract(vjp: Any) -> Any:
    """The residuals to store of a VJP of block(weights, h, block_context): all but weights and block_context."""
    if not hasattr(vjp, "opaque_residuals") or not hasattr(vjp, "args_res"):
        raise RuntimeError(f"jaxllm knows the VJPs of JAX 0.10 to 0.12, not those of {jax.__version__}: install one of these.")
    return vjp.args_res[HIDDEN], vjp.opaque_residuals


def restore(template: Any, weights: Any, block_context: Any, kept: Any) -> Any:
    """The VJP from `kept`, which extract() returned. `template` has its structure."""
    hidden, opaque = kept
    arguments = list(template.args_res)
    arguments[WEIGHTS] = _substitute(arguments[WEIGHTS], weights)
    arguments[HIDDEN] = hidden
    arguments[BLOCK_CONTEXT] = _substitute(arguments[BLOCK_CONTEXT], block_context)
    return dataclasses.replace(template, args_res=arguments, opaque_residuals=opaque)


def _substitute(stored: Any, argument: Any) -> Any:
    """`stored` with its leaves replaced by the argument's. Leaves that the VJP marked as not needed stay."""
    leaves, structure = jax.tree.flatten(stored, is_leaf=_is_not_needed)
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
"""Primitives that pass the names of their inputs on to their outputs, in order."""
CALLS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "eval_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "shard_map",
}
"""Primitives that run a program with the same inputs and outputs, in order."""


def kept_names(block: Any, weights: Any, h: Any, block_context: Any, policy: Policy) -> Any:
    """The name of each residual of block(weights, h, block_context), in a tree like extract()'s: BLOCK_INPUT for h, None for a
    residual without a name. `block` has its remat applied. The arguments may be tracers or shapes.

    Args:
      policy: the one applied, to check that what it offloads is among the residuals.

    Raises:
      RuntimeError: a tensor to be offloaded has no residual. The results of attention may lack one: they have residuals only if
        attention is computed in blocks.
    """

    def residuals(weights, h, block_context):
        return extract(jax.vjp(block, weights, h, block_context)[1])

    traced, shapes = jax.make_jaxpr(residuals, return_shape=True)(weights, h, block_context)
    first, count = len(jax.tree.leaves(weights)), len(jax.tree.leaves(h))
    names = []
    for variable in traced.jaxpr.outvars:
        origin = _origin(traced.jaxpr, variable)
        if isinstance(origin, int):
            origin = BLOCK_INPUT if first <= origin < first + count else None
        names.append(origin)
    tree = jax.tree.structure(shapes).unflatten(names)
    if lost := [name for name in policy.offload if name not in (*names, *ATTENTION_RESULTS)]:
        raise RuntimeError(f"No residual of a block is its {', '.join(lost)}, so it cannot wait in the host's memory.")
    return tree


def waits_on_host(names: Any, policy: Policy) -> tuple[bool, ...]:
    """Whether `policy` offloads each residual, in the order of the leaves of extract(vjp). `names` come from kept_names()."""
    return tuple(name in policy.offload for name in jax.tree.leaves(names, is_leaf=lambda x: x is None))


def _origin(program: Any, variable: Any) -> str | int | None:
    """The origin of a value of a jaxpr: a name, the number of an input, or None if anything but a move or cast made it."""
    while True:
        if isinstance(variable, Literal):
            return None
        if variable in (inputs := list(program.invars)):
            return inputs.index(variable)
        # A value that no equation makes is a constant.
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
    """The jaxpr that a call runs; None if it has other inputs and outputs than the call."""
    for parameter in equation.params.values():
        inner = getattr(parameter, "jaxpr", parameter)
        if hasattr(inner, "eqns") and hasattr(inner, "outvars"):
            is_same = len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars)
            return inner if is_same else None
    return None
