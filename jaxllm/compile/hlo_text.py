"""Parses one line of XLA's HLO text: an instruction, its shapes, its FLOPs and its device groups. hlo.py reads modules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxllm.config.attention import SHORTER_DOCUMENTS
from jaxllm.cost_model.flops import causal_pairs

_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|\w+_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})")
BUFFER = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
"""bf16[8,128], pred[], f8e4m3fn[1024]."""
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
OPERAND = re.compile(r"%([\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{([\d,]*)\}|ensions":\s*\[([^\]]*)\])')
_SCORES = re.compile(r'intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')
_WINDOW = re.compile(r'sliding_window_length":\s*"?([1-9]\d*)')
_CAUSAL = re.compile(r'mask_type":\s*"[A-Z_]*CAUSAL')


@dataclass(frozen=True)
class Instruction:
    name: str
    op: str
    result: str
    """Type of the result, as written."""
    text: str

    @property
    def called(self) -> list[str]:
        names = [name for one, several in _CALLED.findall(self.text) for name in (one or several).split(",")]
        return [name.strip().lstrip("%") for name in names]


def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, by HLO's name of its dtype; an element of less than a byte takes a full byte, a token nothing."""
    if dtype in ("token", "opaque"):
        return 0
    width = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
    return math.prod(shape) * max(1, width // 8)


def trip_count(instruction: Instruction) -> int:
    """Trip count of a loop; 1 for any other instruction, and if XLA does not know it."""
    match = TRIPS.search(instruction.text) if instruction.op == "while" else None
    return int(match[1]) if match else 1


MATMULS = re.compile(r"gemm|cublas|blockScaledDot")
"""In the names of library calls that multiply matrices."""


def matmul_flops(instruction: Instruction, types: Mapping[str, str]) -> int:
    """2 x elements of the result x elements that each sums over. The first result of a library call is the product; the others
    are workspace."""
    left = BUFFER.search(types.get(_first_operand(instruction), ""))
    result, match = BUFFER.search(instruction.result), _CONTRACTED.search(instruction.text)
    if left and result and "blockScaledDot" in instruction.text:
        return 2 * math.prod(shape_of(result[2])) * shape_of(left[2])[-1]
    if not (left and result and match):
        return 0
    contracted = shape_of(re.sub(r'[" ]', "", match[1] or match[2] or ""))
    return 2 * math.prod(shape_of(result[2])) * math.prod(shape_of(left[2])[dim] for dim in contracted)


def attention_flops(instruction: Instruction, target: str, types: Mapping[str, str]) -> int:
    """FLOPs of cuDNN's attention: 4 x scores x head size forward and 10 x backward, which recomputes the scores; half of that
    under a causal mask, and less in a window. Packed documents count as one a sequence, the most that they can take: then only
    the first of the calls has work."""
    if SHORTER_DOCUMENTS in instruction.text:
        return 0
    scores, query = _SCORES.search(instruction.text), BUFFER.search(types.get(_first_operand(instruction), ""))
    if not (scores and query):
        return 0
    *batch, S, T = (int(size) for size in scores[1].replace('"', "").split(","))
    window = _WINDOW.search(instruction.text)
    pairs = causal_pairs(S, int(window[1]) if window else None) * T / S if _CAUSAL.search(instruction.text) else S * T
    return round((10 if "Backward" in target else 4) * math.prod(batch) * pairs * shape_of(query[2])[-1])


def operands(instruction: Instruction) -> list[str]:
    """Names of the operands, in order."""
    rest = instruction.text.split(f" {instruction.op}(", 1)[1]
    return OPERAND.findall(rest[: _closing("(" + rest)])


def _first_operand(instruction: Instruction) -> str:
    return next(iter(operands(instruction)), "")


def parsed(line: str) -> Instruction:
    name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    op = re.match(r"\s*([\w\-]+)\(", rest[end:])
    return Instruction(name.lstrip("%"), op[1] if op else "", rest[:end], line)


def _closing(text: str) -> int:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    raise ValueError(f"unbalanced parentheses in {text[:80]}")


def reads(instruction: Instruction, name: str, op: str) -> bool:
    return instruction.op == op and re.search(rf"%{re.escape(name)}\b(?![.\-\w])", instruction.text) is not None


def shape_of(dims: str) -> tuple[int, ...]:
    return tuple(int(size) for size in dims.split(",") if size)


def device_groups(text: str, devices: int) -> list[list[int]]:
    """Device ids of each group. XLA writes groups in three formats, and permutes as pairs."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return [list(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", pairs[1])]
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text):
        return [list(shape_of(group)) for group in re.findall(r"\{([\d,]*)\}", listed[1])] or [list(range(devices))]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(iota[2], iota[3]).reshape(-1, shape_of(iota[1])[-1]).tolist()
    if mesh := _MESH_GROUPS.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        # The device order, if it is not sequential: an iota of other dims, transposed.
        order = _iota(mesh[2], mesh[3]) if mesh[3] else np.arange(math.prod(axes.values()))
        inside = re.findall(r"'([^']+)'", mesh[4])
        across, within = ([i for i, name in enumerate(axes) if (name in inside) == wanted] for wanted in (False, True))
        dealt = order.reshape(tuple(axes.values())).transpose(across + within)
        return dealt.reshape(math.prod(dealt.shape[: len(across)]), -1).tolist()
    raise ValueError(f"no replica groups in {text[:200]}")


def _iota(dims: str, order: str | None) -> np.ndarray:
    """iota over `dims`, transposed to `order`."""
    shape = shape_of(dims)
    return np.arange(math.prod(shape)).reshape(shape).transpose(shape_of(order) if order else range(len(shape)))
