"""Contents of a compiled step's program: its collectives, its largest results, and the FLOPs of cuDNN's attention."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.compile.hlo import Collective, Module, byte_size
from jaxllm.compile.jaxpr_flops import walk
from jaxllm.compile.overlap import sent_bytes
from jaxllm.config.attention import SHORTER_DOCUMENTS
from jaxllm.cost_model.flops import causal_pairs

LARGEST = 8
"""Number of results listed."""


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one step with the same properties, on one device."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes that they run over; none for a group of one."""
    dtype: str
    asynchronous: bool
    in_loops: bool
    behind_matmuls: bool
    """Whether there is a matmul or fused attention between start and done."""
    instructions: int
    count: int
    """Executions in one step."""
    bytes: int
    """Bytes of their results, in one step."""
    sent_bytes: int
    """Bytes that a device sends for them on a ring of n: (n-1)/n of a gathered or exchanged result, twice that of an
    all-reduced one, n-1 times a reduce-scattered one, once a permuted one."""


@dataclass(frozen=True)
class LargeResult:
    """The largest results of instructions, grouped by shape and origin."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    origin: str
    """The argument it comes from, else the operation as traced."""
    instructions: int
    in_loops: bool


def grouped(collectives: Iterable[Collective], sizes: dict[str, int]) -> tuple[CollectiveRow, ...]:
    """Groups collectives by kind, axes, dtype, and how they run; those that send most first."""
    groups: dict[tuple, list[Collective]] = {}
    for c in collectives:
        dtype = " ".join(sorted({dtype for dtype, _ in c.buffers}))
        groups.setdefault((c.kind, c.axes, dtype, c.asynchronous, bool(c.loops), c.spans_matmul), []).append(c)
    rows = []
    for key, members in groups.items():
        size = sum(c.executed * sum(byte_size(*buffer) for buffer in c.buffers) for c in members)
        n = math.prod(sizes[axis] for axis in key[1])
        sent = round(sent_bytes(key[0], size, n))
        rows.append(CollectiveRow(*key, len(members), sum(c.executed for c in members), size, sent))  # type: ignore[call-arg]
    return tuple(sorted(rows, key=lambda row: -row.sent_bytes))


def largest_results(module: Module) -> tuple[LargeResult, ...]:
    """The largest results of instructions. XLA's public interface has no buffer assignment for GPUs; some of these results
    share memory at different times.
    """
    groups: dict[tuple, list[bool]] = {}
    for result in module.results():
        key = (result.size_bytes, result.dtype, result.shape, origin(result.argument, result.op_name))
        groups.setdefault(key, []).append(result.in_loop)
    largest = sorted(groups, key=lambda key: -key[0])[:LARGEST]
    return tuple(LargeResult(*key, len(groups[key]), all(groups[key])) for key in largest)  # type: ignore[call-arg]


def origin(argument: str, op_name: str) -> str:
    """'layers.mlp.up' for state.params['layers']['mlp']['up'], else the last informative words of an operation's path."""
    if argument:
        path = argument.removeprefix("state.").removeprefix("params")
        return ".".join(re.findall(r"\w+", path)) or argument
    dull = r"jit\(\w+\)|shard_map|while|body|closed_call|checkpoint|cond|branch_\d+_fun|custom_vjp_call|remat2?"
    words = [word for word in op_name.split("/") if word and not re.fullmatch(dull, word)]
    backward = "backward: " if any("transpose(" in word for word in words) else ""
    informative = [word for word in words if not re.fullmatch(r"(transpose|jvp|rematted_computation)\b.*", word)]
    return backward + "/".join(informative[-2:] or words[-1:]) if words else op_name.rsplit("/", 1)[-1]


def kernel_flops(jaxpr: Any, branch_shares: Sequence[float] = ()) -> int:
    """FLOPs of cuDNN's attention in one step of all devices, by its shapes (q [B, S, N, H], k [B, T, K, H]): 4 B S T N H
    forward and 10 backward, which recomputes the scores; half of that under a causal mask, and less in a window. Documents by
    halves divide it into rectangles, which count in full; packed ones count as one a sequence, as in hlo_text.attention_flops.

    Args:
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
