"""What a plan says of its winner: how sure it is, and what stands beside it. Without rich, as the browser's page needs it."""

from __future__ import annotations

from collections.abc import Iterator

from jaxllm.cost_model.error_range import range_lines
from jaxllm.plan.plan_result import Candidate, Plan


def certainty_lines(plan: Plan) -> Iterator[str]:
    """How sure the winner's speed and its place are."""
    if not plan.candidates:
        return
    best, *more = range_lines(plan.candidates[0].tokens_per_s_per_gpu, plan.speed_range)
    yield f"Number 1: {best}"
    yield from (f"{line[0].upper()}{line[1:]}" for line in more)
    if plan.undecided:
        meshes = len({one.choice.mesh for one in plan.undecided})
        yield (
            f"{len(plan.undecided):,} others, of {meshes} mesh{'es' if meshes > 1 else ''}, are within the error between two "
            f"layouts ({plan.speed_range.layout_error:.0%} for number 1's kind): their order is not certain"
        )


def beside_lines(plan: Plan) -> Iterator[str]:
    """The best candidate without the host beside a winner that uses it, and the best with FP8."""
    if plan.candidates and plan.candidates[0].uses_host:
        if (other := plan.without_host) is None:
            yield "Without the host's memory: nothing fits"
        else:
            yield f"Without the host's memory: {_beside(plan, other)}"
        yield (
            "Copies to and from the host are predicted: shared by the GPUs of a host, hidden behind compute; by how much they "
            "slow that compute is not measured"
        )
    if plan.with_fp8 is not None:
        yield f"With FP8 (model.matmul_dtype=fp8): {_beside(plan, plan.with_fp8)}"


def _beside(plan: Plan, other: Candidate) -> str:
    """'8,791 tokens/s/GPU, 1.6% less than the best: pipe 1 x ...'"""
    gain = other.tokens_per_s_per_gpu / plan.candidates[0].tokens_per_s_per_gpu - 1
    confirmed = "" if other.compiled_bytes is None else ", confirmed"
    return (
        f"{other.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {abs(gain):.1%} {'more' if gain > 0 else 'less'} than the "
        f"best{confirmed}: {other.choice}"
    )
