"""The equations of a traced program, each with how often it runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.compile.jaxpr_flops import Axes, _newly_manual, _open, _programs, _trip_count


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
