"""Counts the FLOPs of traced programs (jaxprs): those of their matmuls, and those of cuDNN's attention.

    program = jax.make_jaxpr(function)(*arguments)
    matmul_flops(program), kernel_flops(program)

XLA's own cost analysis counts a loop's body once and does not cover GPUs; this module multiplies loops out. It counts the
program as written, before XLA merges or drops anything.

Inside a shard_map, a shape is that of one rank along the manual axes, and the global shape along all others. An equation
therefore counts as often as each rank runs it, times the ranks that do (the product of the axes that are manual there). In
this library's train step (pipe, data, context) are manual, and `tensor` in nested regions: a matmul of the outer region counts
once for each of its ranks, with its full size over tensor; attention counts for each tensor rank too, with that rank's heads.
Both ways the sum is that of all devices.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm.config.attention import SHORTER_DOCUMENTS
from jaxllm.cost_model.flops import causal_pairs

Axes = frozenset[str]
GROUPED = ("rows_times_matrices", "rows_times_rows")
"""Names of the functions with a kernel for the matmuls of experts (model/grouped_matmul.py)."""


def matmul_flops(jaxpr: Any, branch_shares: Sequence[float] = (), manual: Axes = frozenset()) -> int:
    """FLOPs of all matmuls (dot_general, scaled_matmul, those of experts' rows; a multiply and an add are two) in one run, over
    all ranks. Kernels of other libraries, such as cuDNN's attention, are not counted.

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
        elif equation.primitive.name == "ragged_dot_general" or equation.params.get("name") in GROUPED:
            # Rows [R, K], and a result with N columns.
            total += 2 * math.prod(equation.invars[0].aval.shape) * equation.outvars[0].aval.shape[-1]
            continue
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


def kernel_flops(jaxpr: Any, branch_shares: Sequence[float] = (), manual: Axes = frozenset(), share: float = 1) -> int:
    """FLOPs of cuDNN's attention in one step of all devices, by its shapes (q [B, S, N, H], k [B, T, K, H]): 4 B S T N H
    forward and 10 backward, which recomputes the scores; half of that under a causal mask, and less in a window. Documents by
    halves divide it into rectangles, which count in full; packed ones count as one a sequence, as in hlo.attention_flops.
    branch_shares, manual: as matmul_flops has them, but of another `cond` all branches count, and a `while` counts as one
    iteration. share: of the runs, in which this program is called.
    """
    total = 0
    for equation in _open(jaxpr).eqns:
        match = re.match(r"dot_product_attention_(fwd|bwd)", equation.primitive.name)
        if match and SHORTER_DOCUMENTS not in str(equation.source_info.name_stack):
            (B, S, N, H), (_, T, *_) = (x.aval.shape for x in equation.invars[:2])
            is_causal = "CAUSAL" in str(equation.params.get("mask_type", "")).upper()
            pairs = causal_pairs(S, equation.params["sliding_window_length"]) * T / S if is_causal else S * T
            total += round((4 if match[1] == "fwd" else 10) * B * N * H * pairs * share)
        split, programs = _newly_manual(equation, manual), list(_programs(equation))
        known = equation.primitive.name == "cond" and len(programs) == len(branch_shares)
        for program, of_branch in zip(programs, branch_shares if known else [1] * len(programs), strict=True):
            once = kernel_flops(program, branch_shares, manual | split.keys(), share * of_branch)
            total += once * (_trip_count(equation) or 1) * math.prod(split.values())
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
