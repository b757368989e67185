"""Reads traced programs (jaxprs): which equations run, how often, and how many FLOPs their matmuls are.

    program = jax.make_jaxpr(function)(*arguments)
    matmul_flops(program)
    sum(visit.executed for visit in walk(program) if visit.equation.primitive.name == "dot_general")

XLA's own cost analysis counts a loop's body once and says nothing of GPUs; here loops are multiplied out. What is counted is
what was written, before XLA merges or drops anything.

A shape in a shard_map is that of one rank of the axes it makes manual, and whole over all others. So a visit says how often
each rank runs its equation and how many ranks do (the product of the axes that are manual there), and FLOPs are of all ranks
together. In this library's train step (pipe, data, context) are manual, and `tensor` in nested regions: a matmul of the region
counts once for each of its ranks, whole over tensor; attention's for each tensor rank too, with its heads. Both ways the sum
is that of all devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Axes = frozenset[str]


@dataclass(frozen=True)
class Visit:
    """An equation at one place of a program."""

    equation: Any
    """jax.extend.core.JaxprEqn."""
    executed: int
    """Times that each rank runs it, scans multiplied out. A `while`, whose turns are not known, counts as one turn, and each
    branch of a `cond` as if it were taken."""
    loops: tuple[int | None, ...]
    """Turns of the loops round it, outermost first; None for a `while`."""
    ranks: int
    """How many ranks run it: the product of the mesh axes that are manual here."""


def walk(jaxpr: Any) -> Iterator[Visit]:
    """All equations of a Jaxpr or ClosedJaxpr, and of the programs they call, in order; a call comes before what it runs."""
    yield from _walk(_open(jaxpr), 1, (), 1, frozenset())


def matmul_flops(jaxpr: Any) -> int:
    """FLOPs of all matmuls (dot_general; a multiply and an add are two) in one run, over all ranks. Of a `cond` the branch with
    most. Kernels of other libraries, as cuDNN's attention, are not seen.

    Raises:
      ValueError: a matmul in a `while`: nobody knows how often it runs.
    """
    return _flops(_open(jaxpr), frozenset())


def dot_flops(equation: Any) -> int:
    """FLOPs of one dot_general on one rank: 2 x elements of the result x elements that each sums over."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)


def _walk(jaxpr: Any, executed: int, loops: tuple[int | None, ...], ranks: int, manual: Axes) -> Iterator[Visit]:
    for equation in jaxpr.eqns:
        yield Visit(equation, executed, loops, ranks)
        turns, split = _turns(equation), _newly_manual(equation, manual)
        inside = loops if turns == 1 else (*loops, turns)
        for program in _programs(equation):
            more = math.prod(split.values())
            yield from _walk(program, executed * (turns or 1), inside, ranks * more, manual | split.keys())


def _flops(jaxpr: Any, manual: Axes) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += dot_flops(equation)
        split = _newly_manual(equation, manual)
        inner = [_flops(program, manual | split.keys()) for program in _programs(equation)]
        once = max(inner) if equation.primitive.name == "cond" else sum(inner)
        turns = _turns(equation)
        if turns is None and once:
            raise ValueError("A matmul runs in a `while` loop, whose turns are not known: use a scan.")
        total += once * (turns or 1) * math.prod(split.values())
    return total


def _turns(equation: Any) -> int | None:
    """How often an equation runs its programs; None: not known. A loop of one turn is none."""
    if equation.primitive.name == "while":
        return None
    return equation.params["length"] if equation.primitive.name == "scan" else 1


def _newly_manual(equation: Any, manual: Axes) -> dict[str, int]:
    """Sizes of the mesh axes over which a shard_map, and nothing round it, runs its program by rank."""
    if equation.primitive.name != "shard_map":
        return {}
    params = equation.params
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    return {axis: params["mesh"].shape[axis] for axis in axes if axis not in manual}


def _programs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs: every one among its parameters."""
    for parameter in equation.params.values():
        for value in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            program = _open(value)
            if hasattr(program, "eqns") and hasattr(program, "outvars"):
                yield program


def _open(jaxpr: Any) -> Any:
    """The Jaxpr of a ClosedJaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)
