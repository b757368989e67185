"""Reads XLA's optimised HLO text: which collectives run, how often and over which mesh axes; the instructions between the start
and the done of one; the arrays that instructions produce. Plain text processing, no JAX.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.config.attention import SHORTER_DOCUMENTS
from jaxllm.cost_model.flops import causal_pairs

# -------------------------------------------------------------------------------------------------------- one instruction

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


MATMULS = re.compile(r"gemm|cublas|blockScaledDot|mosaic_gpu")
"""In the names of library calls that multiply matrices."""


def matmul_flops(instruction: Instruction, types: Mapping[str, str]) -> int:
    """2 x elements of the result x elements that each sums over. The first result of a library call is the product; the others
    are workspace. Grouped matmuls (model/grouped_matmul.py) have rows [R, K] behind the bounds of the groups, and a result with
    N columns: 2 R K N."""
    if "mosaic_gpu" in instruction.text:
        of_rows, result = (BUFFER.search(x) for x in (types.get(operands(instruction)[1], ""), instruction.result))
        return 2 * math.prod(shape_of(of_rows[2])) * shape_of(result[2])[-1] if of_rows and result else 0
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


# ---------------------------------------------------------------------------------------------------------------- modules

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
ON_HOST = "S(5)"
"""XLA's mark for arrays in host memory."""
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
PASSING = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "constant", "opt-barrier")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
RUNNING = ("while", "call", "conditional", "async-start")
"""Operations that run other computations instruction by instruction."""


@dataclass(frozen=True)
class _Occurrence:
    """An instruction in its computation, with how often it runs."""

    among: list[Instruction]
    position: int
    executed: int
    loops: tuple[int, ...]
    computation: str = ""
    """Name of the enclosing computation."""

    @property
    def instruction(self) -> Instruction:
        return self.among[self.position]


@dataclass(frozen=True)
class Collective:
    """One collective instruction (the start of an asynchronous one)."""

    kind: str
    buffers: tuple[tuple[str, tuple[int, ...]], ...]
    """dtype and shape of each result, per device."""
    executed: int
    """Executions in one run of the program, loops multiplied out."""
    loops: tuple[int, ...]
    """Trip counts of the enclosing loops, outermost first."""
    axes: tuple[str, ...]
    """Mesh axes that it runs over, in whole or in part."""
    group: tuple[int, ...]
    """The devices of its first group."""
    asynchronous: bool
    spans_matmul: bool
    """Whether there is a matmul or fused attention, or a loop or call with one, between start and done."""
    spans_loop: bool
    """Whether there is a complete loop with one between them."""
    flops_behind: int = 0
    """FLOPs of the matmuls and attention between them, loops multiplied out, per execution."""
    name: str = ""
    computation: str = ""
    """Names of the instruction and of the enclosing computation."""

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.buffers)


class Module:
    """An HLO module.

    Args:
      text: `compiled.as_text()`.
      axes: mesh axis names and sizes, in device order.
      branch_shares: share of its runs in which a conditional with so many branches takes each; of another all branches count.
    """

    def __init__(self, text: str, axes: Mapping[str, int], branch_shares: Sequence[float] = ()):
        self.text, self.axes, self.branch_shares, current = text, axes, branch_shares, None
        self.computations: dict[str, list[Instruction]] = {}
        self.entry: str = ""
        self._flops: dict[str, int] = {}
        for line in text.splitlines():
            if (header := _HEADER.match(line)) and not line.startswith("HloModule"):
                current = self.computations.setdefault(header[1], [])
                if line.startswith("ENTRY"):
                    self.entry = header[1]
            elif current is not None and " = " in line:
                current.append(parsed(line))

    def collectives(self) -> list[Collective]:
        found = [(at.instruction.op.removesuffix("-start"), at) for at in self.walk()]
        return [self._collective(kind, at) for kind, at in found if kind in COLLECTIVES]

    def loops_without_trip_count(self) -> int:
        """Number of loops with collectives for which XLA gives no trip count; everything in them counts once. Our own loops
        have one. The loop that XLA's collective pipeliner makes of the loop over microbatches has none (JAX 0.10.2)."""
        loops = [at.instruction for at in self.walk() if at.instruction.op == "while"]
        unknown = [loop.called for loop in loops if not TRIPS.search(loop.text)]
        inside = [{at.instruction.op.removesuffix("-start") for name in names for at in self.walk(name)} for names in unknown]
        return sum(not ops.isdisjoint(COLLECTIVES) for ops in inside)

    def flops(self, computation: str) -> int:
        """FLOPs of the matmuls and fused attention in one run of a computation: 2 per product. A loop without a trip count
        counts as one iteration, a conditional by branch_shares, and an instruction without shapes as nothing."""
        if computation not in self._flops:
            among = self.computations.get(computation, [])
            types = {instruction.name: instruction.result for instruction in among}
            self._flops[computation] = sum(self.flops_of(instruction, types) for instruction in among)
        return self._flops[computation]

    def flops_of(self, instruction: Instruction, types: Mapping[str, str]) -> int:
        """FLOPs of one instruction and of the computations it calls. types: result types in its computation, by name."""
        target = match[1] if (match := TARGET.search(instruction.text)) else ""
        if instruction.op == "dot" or MATMULS.search(target):
            return matmul_flops(instruction, types)
        if "fmha" in target:
            return attention_flops(instruction, target, types)
        inside = sum(share * self.flops(name) for name, share in self._shares(instruction))
        return round(inside * trip_count(instruction))

    def _shares(self, instruction: Instruction) -> list[tuple[str, float]]:
        """(computation, share of the instruction's runs that run it)"""
        called = instruction.called
        known = instruction.op == "conditional" and len(called) == len(self.branch_shares)
        return list(zip(called, self.branch_shares if known else [1.0] * len(called), strict=True))

    def walk(self, computation: str | None = None, executed: int = 1, loops: tuple[int, ...] = ()) -> Iterator[_Occurrence]:
        """Every instruction that a computation runs, in order, with those of its loops and calls; default: of the entry."""
        computation = self.entry if computation is None else computation
        instructions = self.computations[computation]
        for position, instruction in enumerate(instructions):
            yield _Occurrence(instructions, position, executed, loops, computation)
            if instruction.op == "while":
                trips = trip_count(instruction)
                for name in instruction.called:
                    yield from self.walk(name, executed * trips, (*loops, trips))
            elif instruction.op in RUNNING:
                for name, share in self._shares(instruction):
                    yield from self.walk(name, max(1, round(share * executed)), loops)

    def _collective(self, kind: str, occurrence: _Occurrence) -> Collective:
        start = occurrence.instruction
        asynchronous = start.op.endswith("-start")
        between, end = [], start
        if asynchronous:
            later = occurrence.among[occurrence.position + 1 :]
            done = next(i for i, one in enumerate(later) if one.op == f"{kind}-done" and start.name in operands(one))
            between, end = later[:done], later[done]
        buffers = tuple((dtype, shape_of(dims)) for dtype, dims in BUFFER.findall(end.result))
        spans = [instruction for instruction in between if self.has_matmul(instruction)]
        types = {instruction.name: instruction.result for instruction in occurrence.among if spans}
        return Collective(
            kind,
            buffers,
            occurrence.executed,
            occurrence.loops,
            *self._axes_of(start.text),
            asynchronous,
            spans_matmul=bool(spans),
            spans_loop=any(instruction.op == "while" for instruction in spans),
            flops_behind=sum(self.flops_of(instruction, types) for instruction in spans),
            name=start.name,
            computation=occurrence.computation,
        )

    def has_matmul(self, instruction: Instruction) -> bool:
        """Whether it is a matmul or fused attention, or a loop or call with one."""
        target = TARGET.search(instruction.text)
        if instruction.op == "dot" or (target and re.search(r"gemm|cublas|cudnn", target[1])):
            return True
        return any(self.has_matmul(i) for name in instruction.called for i in self.computations.get(name, []))

    def _axes_of(self, text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """(the axes along which the devices of a group differ, the first group)"""
        names, sizes = tuple(self.axes), tuple(self.axes.values())
        varying, groups = set(), device_groups(text, math.prod(sizes))
        for group in groups:
            coordinates = np.unravel_index(np.array(group, int), sizes)
            varying |= {name for name, places in zip(names, coordinates, strict=True) if len(set(places.tolist())) > 1}
        return tuple(name for name in names if name in varying), tuple(groups[0]) if groups else ()


# -------------------------------------------------------------------------------------------------------- largest results

LARGEST = 8
"""Number of results listed."""


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


def largest_results(module: Module) -> tuple[LargeResult, ...]:
    """The largest arrays that instructions produce. Those that are only passed on (arguments, results of loops and calls,
    tuples), values inside fusions, and arrays in host memory are left out. An array updated in place counts once per update.

    XLA's public interface has no buffer assignment for GPUs; some of these results share memory at different times.
    """
    groups: dict[tuple, list[bool]] = {}
    for at in module.walk():
        instruction = at.instruction
        if instruction.op in PASSING or instruction.op.endswith("-start") or ON_HOST in instruction.result:
            continue
        op_name = OP_NAME.search(instruction.text)
        came_from = origin(_argument(at.among, at.position), op_name[1] if op_name else instruction.name)
        for dtype, dims in BUFFER.findall(instruction.result):
            shape = shape_of(dims)
            groups.setdefault((byte_size(dtype, shape), dtype, shape, came_from), []).append(bool(at.loops))
    largest = sorted(groups, key=lambda key: -key[0])[:LARGEST]
    return tuple(LargeResult(*key, len(groups[key]), all(groups[key])) for key in largest)  # type: ignore[call-arg]


def _argument(among: Sequence[Instruction], position: int) -> str:
    """The program's argument of which the result is a copy, cast, slice or gather, through others with a single array input;
    '' if there is none."""
    for _ in range(8):
        instruction = among[position]
        if instruction.op == "parameter":
            name = OP_NAME.search(instruction.text)
            return name[1].replace("\\'", "'") if name else ""
        names = set(OPERAND.findall(instruction.text.split(" = ", 1)[1].split(", calls=")[0]))
        named = [place for place, one in enumerate(among[:position]) if one.name in names]
        inputs = [place for place in named if among[place].op not in ("constant", "iota")]
        if len(inputs) != 1:
            return ""
        (position,) = inputs
    return ""


def origin(argument: str, op_name: str) -> str:
    """'layers.mlp.up' for state.params['layers']['mlp']['up'], else the last informative words of an operation's path."""
    if argument:
        path = argument.removeprefix("state.").removeprefix("params")
        return ".".join(re.findall(r"\w+", path)) or argument
    dull = r"jit\(\w+\)|shard_map|while|body|closed_call|eval_jaxpr|checkpoint|cond|branch_\d+_fun|custom_vjp_call|remat2?"
    words = [word for word in op_name.split("/") if word and not re.fullmatch(dull, word)]
    backward = "backward: " if any("transpose(" in word for word in words) else ""
    informative = [word for word in words if not re.fullmatch(r"(transpose|jvp|rematted_computation)\b.*", word)]
    return backward + "/".join(informative[-2:] or words[-1:]) if words else op_name.rsplit("/", 1)[-1]
