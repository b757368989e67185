"""Reads traced programs (jaxprs): which equations run, how often, and how many FLOPs their matmuls are.

    program = jax.make_jaxpr(function)(*arguments)
    matmul_flops(program)
    sum(visit.executed for visit in walk(program) if visit.equation.primitive.name == "dot_general")

XLA's own cost analysis counts a loop's body once and does not cover GPUs; this module multiplies loops out. It counts the
program as written, before XLA merges or drops anything.

Inside a shard_map, a shape is that of one rank along the manual axes, and the global shape along all others. A visit therefore
says how often each rank runs its equation and how many ranks do (the product of the axes that are manual there). FLOPs are
summed over all ranks. In this library's train step (pipe, data, context) are manual, and `tensor` in nested regions: a matmul
of the outer region counts once for each of its ranks, with its full size over tensor; attention counts for each tensor rank
too, with that rank's heads. Both ways the sum is that of all devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.config.attention import SHORTER_DOCUMENTS
from jaxllm.cost_model.flops import causal_pairs

Axes = frozenset[str]


@dataclass(frozen=True)
class Visit:
    """One equation of a program, with how often it runs."""

    equation: Any
    """jax.extend.core.JaxprEqn."""
    executed: int
    """How often each rank runs it, with scans multiplied out. A `while`, whose iteration count is unknown, counts as one
    iteration; each branch of a `cond` counts as if it were taken (`branches`)."""
    loops: tuple[int | None, ...]
    """Iterations of the enclosing loops, outermost first; None for a `while`."""
    ranks: int
    """How many ranks run it: the product of the manual mesh axes."""
    branches: tuple[tuple[int, int], ...] = ()
    """(number, how many there are) of the branches that it is in, outermost first."""


def walk(jaxpr: Any, at: Visit = Visit(None, 1, (), 1), manual: Axes = frozenset()) -> Iterator[Visit]:
    """Yields all equations of a Jaxpr or ClosedJaxpr and of the programs they call, in order; a call comes before its body.

    Args:
      at: where the program is, of which the mesh axes `manual` are manual already. Default: a program of its own.
    """
    for equation in _open(jaxpr).eqns:
        yield replace(at, equation=equation)
        trips, split, programs = _trip_count(equation), _newly_manual(equation, manual), list(_programs(equation))
        loops = at.loops if trips == 1 else (*at.loops, trips)
        for number, program in enumerate(programs):
            branches = (*at.branches, (number, len(programs))) if equation.primitive.name == "cond" else at.branches
            inside = Visit(None, at.executed * (trips or 1), loops, at.ranks * math.prod(split.values()), branches)
            yield from walk(program, inside, manual | split.keys())


def matmul_flops(jaxpr: Any, branch_shares: Sequence[float] = (), manual: Axes = frozenset()) -> int:
    """FLOPs of all matmuls (dot_general, scaled_matmul; a multiply and an add are two) in one run, over all ranks. Kernels of
    other libraries, such as cuDNN's attention, are not counted.

    Args:
      branch_shares: share of its runs in which a `cond` of so many branches takes each. Another counts as its most expensive
        branch.
      manual: mesh axes that are manual around the program already.

    Raises:
      ValueError: a matmul is in a `while`, whose iteration count is unknown.
    """
    total = 0
    for equation in _open(jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            total += dot_flops(equation)
        elif equation.primitive.name.startswith("scaled_matmul"):
            # [B, M, K] with [B, N, K].
            total += 2 * math.prod(equation.outvars[0].aval.shape) * equation.invars[0].aval.shape[-1]
        split = _newly_manual(equation, manual)
        inner = [matmul_flops(program, branch_shares, manual | split.keys()) for program in _programs(equation)]
        once = sum(inner)
        if equation.primitive.name == "cond":
            shares = branch_shares if len(inner) == len(branch_shares) else None
            once = round(sum(map(math.prod, zip(shares, inner, strict=True)))) if shares else max(inner)
        trips = _trip_count(equation)
        if trips is None and once:
            raise ValueError("A matmul runs in a `while` loop, whose iteration count is unknown: use a scan.")
        total += once * (trips or 1) * math.prod(split.values())
    return total


def dot_flops(equation: Any) -> int:
    """FLOPs of one dot_general on one rank: 2 x elements of the result x elements summed for each."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)


def kernel_flops(jaxpr: Any, branch_shares: Sequence[float] = ()) -> int:
    """FLOPs of cuDNN's attention in one step of all devices, by its shapes (q [B, S, N, H], k [B, T, K, H]): 4 B S T N H
    forward and 10 backward, which recomputes the scores; half of that under a causal mask, and less in a window. Documents by
    halves divide it into rectangles, which count in full; packed ones count as one a sequence, as in hlo.attention_flops.
    branch_shares: as matmul_flops has them; of another conditional all branches count.
    """
    total = 0
    for visit in walk(jaxpr):
        match = re.match(r"dot_product_attention_(fwd|bwd)", visit.equation.primitive.name)
        if match and SHORTER_DOCUMENTS not in str(visit.equation.source_info.name_stack):
            (B, S, N, H), (_, T, *_) = (x.aval.shape for x in visit.equation.invars[:2])
            parameters = visit.equation.params
            is_causal = "CAUSAL" in str(parameters.get("mask_type", "")).upper()
            pairs = causal_pairs(S, parameters["sliding_window_length"]) * T / S if is_causal else S * T
            share = math.prod(branch_shares[b] if count == len(branch_shares) else 1 for b, count in visit.branches)
            total += round((4 if match[1] == "fwd" else 10) * B * N * H * pairs * share) * visit.executed * visit.ranks
    return total


def _trip_count(equation: Any) -> int | None:
    """How often an equation runs its programs; None if unknown, 1 if it is not a loop."""
    if equation.primitive.name == "while":
        return None
    return equation.params["length"] if equation.primitive.name == "scan" else 1


def _newly_manual(equation: Any, manual: Axes) -> dict[str, int]:
    """Sizes of the mesh axes that this shard_map makes manual and that no enclosing one has made manual."""
    if equation.primitive.name != "shard_map":
        return {}
    params = equation.params
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    return {axis: params["mesh"].shape[axis] for axis in axes if axis not in manual}


def _programs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs: all those among its parameters."""
    for parameter in equation.params.values():
        for value in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            program = _open(value)
            if hasattr(program, "eqns") and hasattr(program, "outvars"):
                yield program


def _open(jaxpr: Any) -> Any:
    """The Jaxpr of a ClosedJaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)
