"""The kernels of a compiled step: how often each runs, what it reads and writes, what it multiplies, and where it comes from.

    for kernel in kernels(Module(text, axes)): kernel.runs, kernel.moved_bytes, kernel.flops

Bytes follow from the shapes in the program. An operand counts once, as if nothing of it were in the cache. Of an array that a
fusion only slices, the slice counts; of one that it updates in place, the update.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxllm.compile.hlo import (
    BUFFER,
    COLLECTIVES,
    MATMULS,
    ON_HOST,
    OP_NAME,
    PASSING,
    RUNNING,
    TARGET,
    TRIPS,
    Instruction,
    Module,
    byte_size,
    operands,
    shape_of,
)

NO_KERNELS = (*PASSING, "add-dependency", "after-all", "partition-id", "replica-id", "domain")
"""Operations that launch nothing. The done of an asynchronous one launches nothing either."""
ATTENTION = re.compile(r"fmha")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_WORKSPACES = ("s8", "u8")


@dataclass(frozen=True)
class Kernel:
    """One instruction that a GPU launches. Bytes and FLOPs are of one run."""

    name: str
    kind: str
    """matmul, attention forward, attention backward, collective, host copy, copy, or fusion (anything else)."""
    runs: int
    """Runs in one step."""
    read_bytes: int
    written_bytes: int
    flops: int
    is_fp8: bool
    op_names: tuple[str, ...]
    """Paths of the traced operations: a matmul's own, the instruction's, then those that are fused into it."""
    body: tuple[str, ...]
    """HLO's names of the fused operations on arrays, or of the operation itself. Those on scalars compute indices."""

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


def kernels(module: Module) -> Iterator[Kernel]:
    """Every kernel, copy, library call and collective of one run of the module, in the order of the program."""
    return _Kernels(module).all()


class _Kernels:
    def __init__(self, module: Module):
        self.module = module
        self.types: dict[str, dict[str, str]] = {}

    def all(self) -> Iterator[Kernel]:
        for at in self.module.walk():
            instruction = at.instruction
            if at.computation in self.counted_conditions or instruction.op in (*NO_KERNELS, *RUNNING):
                continue
            if instruction.op.endswith(("-done", "-update")) or target_of(instruction) == "AllocateBuffer":
                continue
            yield self.kernel(instruction, self.types_in(at.computation), at.executed)

    @cached_property
    def counted_conditions(self) -> set[str]:
        """Conditions of loops whose trip count is known: the host counts, and nothing is launched for them."""
        everything = (i for among in self.module.computations.values() for i in among)
        loops = [i.text for i in everything if i.op == "while" and TRIPS.search(i.text)]
        return {match[1] for text in loops if (match := _CONDITION.search(text))}

    def types_in(self, computation: str) -> dict[str, str]:
        if computation not in self.types:
            self.types[computation] = {i.name: i.result for i in self.module.computations[computation]}
        return self.types[computation]

    def kernel(self, instruction: Instruction, types: Mapping[str, str], runs: int) -> Kernel:
        fused = [i for name in instruction.called for i in self.module.computations.get(name, [])]
        if instruction.op.startswith("fusion") and fused:
            read, written = _moved_by_fusion(instruction, fused, types)
        else:
            read, written = _moved(instruction, types)
        kind = _kind(instruction, fused, types)
        is_product = kind == "matmul" or kind.startswith("attention")
        flops = self.module.flops_of(instruction, types) if is_product else 0
        product = next((i for i in (*fused, instruction) if _is_matmul(i)), None)
        first = operands(product)[0] if product else ""
        is_fp8 = next((i.result for i in fused if i.name == first), types.get(first, "")).startswith("f8")
        # Of a matmul into which XLA fused the slice of its operand or of its result, the fusion has the slice's name.
        traced = (*([product] if product else []), instruction, *fused)
        names = tuple(match[1] for i in traced if (match := OP_NAME.search(i.text)))
        body = tuple(i.op for i in fused if not _is_scalar(i)) or (instruction.op.removesuffix("-start"),)
        return Kernel(instruction.name, kind, runs, read, written, flops, is_fp8, names, body)


def target_of(instruction: Instruction) -> str:
    """The library function of a custom call; '' for anything else."""
    match = TARGET.search(instruction.text) if instruction.op == "custom-call" else None
    return match[1] if match else ""


def _is_matmul(instruction: Instruction) -> bool:
    return instruction.op == "dot" or MATMULS.search(target_of(instruction)) is not None


def _kind(instruction: Instruction, fused: Sequence[Instruction], types: Mapping[str, str]) -> str:
    op = instruction.op.removesuffix("-start")
    if op in COLLECTIVES:
        return "collective"
    if any(_is_matmul(i) for i in (instruction, *fused)):
        return "matmul"
    if ATTENTION.search(target := target_of(instruction)):
        return "attention backward" if "Backward" in target else "attention forward"
    if ON_HOST in instruction.result or any(ON_HOST in types.get(name, "") for name in operands(instruction)):
        return "host copy"
    return "copy" if op in ("copy", "transpose") else "fusion"


def _is_scalar(instruction: Instruction) -> bool:
    return re.fullmatch(r"\w+\[\]", instruction.result) is not None


def bytes_of(result: str) -> int:
    """Bytes of all arrays in a type as HLO writes it."""
    return sum(byte_size(dtype, shape_of(dims)) for dtype, dims in BUFFER.findall(result))


def _moved(instruction: Instruction, types: Mapping[str, str]) -> tuple[int, int]:
    """(bytes read, bytes written) by an instruction that is not a fusion."""
    read = [bytes_of(types.get(name, "")) for name in operands(instruction)]
    op = instruction.op.removesuffix("-start")
    if op in ("copy", "dynamic-update-slice"):
        moved = read[1 if op == "dynamic-update-slice" else 0]
        return moved, moved
    if op in ("dynamic-slice", "slice", "gather"):
        return bytes_of(instruction.result), bytes_of(instruction.result)
    written = [(dtype, byte_size(dtype, shape_of(dims))) for dtype, dims in BUFFER.findall(instruction.result)]
    if target_of(instruction):
        # The first result is the product; a library's workspace is not read again.
        return sum(read), sum(size for n, (dtype, size) in enumerate(written) if n == 0 or dtype not in _WORKSPACES)
    return sum(read), sum(size for _, size in written)


def _moved_by_fusion(instruction: Instruction, fused: Sequence[Instruction], types: Mapping[str, str]) -> tuple[int, int]:
    by_name = {i.name: i for i in fused}
    used = _used_shares(fused)

    def read(parameter: Instruction) -> float:
        return bytes_of(parameter.result) * min(1.0, used[parameter.name])

    def behind_bitcasts(i: Instruction) -> Instruction:
        while i.op == "bitcast":
            i = by_name[operands(i)[0]]
        return i

    def written(output: Instruction) -> int:
        output = behind_bitcasts(output)
        if output.op == "dynamic-update-slice":
            updated, update = (by_name[name] for name in operands(output)[:2])
            updated = behind_bitcasts(updated)
            if updated.op in ("parameter", "dynamic-update-slice"):
                return bytes_of(update.result) + (0 if updated.op == "parameter" else written(updated))
        if output.op == "scatter":
            # Each row is read, added to and written.
            return 2 * bytes_of(by_name[operands(output)[-1]].result)
        results = BUFFER.findall(output.result)
        several = len(results) > 1
        return sum(byte_size(d, shape_of(s)) for n, (d, s) in enumerate(results) if not (several and n and d in _WORKSPACES))

    root = next(i for i in fused if i.text.lstrip().startswith("ROOT "))
    outputs = [by_name[name] for name in operands(root)] if root.op == "tuple" else [root]
    parameters = [i for i in fused if i.op == "parameter"]
    outputs = [output for output in outputs if not (output.op == "get-tuple-element" and output.result.startswith(_WORKSPACES))]
    return round(sum(map(read, parameters))), sum(map(written, outputs))


def _used_shares(fused: Sequence[Instruction]) -> dict[str, float]:
    """The share of each value's elements that a fusion reads or computes: those that its result needs."""
    sizes = {i.name: bytes_of(i.result) for i in fused}
    used: dict[str, float] = defaultdict(float)
    for user in reversed(fused):
        own = 1.0 if user.text.lstrip().startswith("ROOT ") else min(1.0, used[user.name])
        for place, name in enumerate(operands(user)):
            share = own
            if place == 0 and user.op in ("dynamic-slice", "slice", "gather"):
                share *= sizes[user.name] / sizes[name]
            elif place == 0 and user.op in ("dynamic-update-slice", "scatter"):
                share = 0.0
            used[name] += share
    return used
