"""Reads XLA's optimised HLO text: which collectives run, how often, over which mesh axes, what moves between device and host,
what lies between the start and the done of either, how many kernels there are. Plain text work, no JAX.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxllm.compile.hlo_text import (
    BUFFER,
    OPERAND,
    TRIPS,
    Instruction,
    attention_flops,
    byte_size,
    coordinates_of,
    device_groups,
    matmul_flops,
    parsed,
    reads,
    shape_of,
    turns,
)

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
ON_HOST = "S(5)"
"""How XLA marks arrays in the host's memory."""
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_PASSING = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "constant", "opt-barrier")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_RUNNING = ("while", "call", "conditional", "async-start")
"""Operations that run other computations instruction by instruction."""
NO_KERNELS = (*_PASSING, "add-dependency", "after-all", "partition-id", "replica-id", "domain")
"""Operations that launch nothing. Nor does the done of an asynchronous one."""


@dataclass(frozen=True)
class _Place:
    """An instruction where it runs."""

    among: list[Instruction]
    position: int
    executed: int
    loops: tuple[int, ...]
    computation: str = ""
    """The name of what it stands in."""

    @property
    def instruction(self) -> Instruction:
        return self.among[self.position]

    def until(self, op: str) -> tuple[list[Instruction], Instruction]:
        """(what lies between, the done), for a start."""
        name, later = self.instruction.name, range(self.position + 1, len(self.among))
        done = next(i for i in later if reads(self.among[i], name, op))
        return self.among[self.position + 1 : done], self.among[done]

    def inputs(self) -> list[Instruction]:
        names = set(OPERAND.findall(self.instruction.text.split(" = ", 1)[1].split(", calls=")[0]))
        return [instruction for instruction in self.among[: self.position] if instruction.name in names]


@dataclass(frozen=True)
class Collective:
    """One collective instruction (the start of an asynchronous one)."""

    kind: str
    buffers: tuple[tuple[str, tuple[int, ...]], ...]
    """dtype and shape of each result, per device."""
    executed: int
    """Times in one run of the program, loops multiplied out."""
    loops: tuple[int, ...]
    """Trip counts of the loops round it, outermost first."""
    axes: tuple[str, ...]
    """Mesh axes it runs over."""
    asynchronous: bool
    spans_matmul: bool
    """Whether a matmul or fused attention, or a loop or call that holds one, lies between start and done."""
    spans_loop: bool
    """Whether a whole loop that holds one does."""
    flops_behind: int = 0
    """Of the matmuls and attention that lie there, loops multiplied out; each time that it runs."""
    name: str = ""
    computation: str = ""
    """Of the instruction, and of what it stands in."""

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.buffers)


@dataclass(frozen=True)
class Launch:
    """What the device is told to do."""

    op: str
    """As HLO calls it: fusion, custom-call, copy, all-gather-start, ..."""
    executed: int
    """Times in one run of the program."""


@dataclass(frozen=True)
class HostCopy:
    """One move between the device's memory and the host's, where XLA writes `S(5)`."""

    to_host: bool
    buffer: tuple[str, tuple[int, ...]]
    """dtype and shape of what moves."""
    executed: int
    loops: tuple[int, ...]
    asynchronous: bool
    spans_matmul: bool
    """These four as of a Collective."""


@dataclass(frozen=True)
class Result:
    """An array that an instruction makes."""

    dtype: str
    shape: tuple[int, ...]
    op_name: str
    """Where in the traced program it comes from; the instruction's own name where XLA does not say."""
    argument: str
    """The program's argument that it is a copy, cast, part or gathering of; '' if there is none."""
    executed: int
    in_loop: bool

    @property
    def size_bytes(self) -> int:
        return byte_size(self.dtype, self.shape)


@dataclass
class Module:
    """An HLO module.

    Args:
      text: `compiled.as_text()`.
      axes: mesh axis names and sizes, in device order.
    """

    text: str
    axes: Mapping[str, int]
    computations: dict[str, list[Instruction]] = field(init=False)
    entry: str = field(init=False)
    _flops: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.computations, current = {}, None
        for line in self.text.splitlines():
            if (header := _HEADER.match(line)) and not line.startswith("HloModule"):
                current = self.computations.setdefault(header[1], [])
                if line.startswith("ENTRY"):
                    self.entry = header[1]
            elif current is not None and " = " in line:
                current.append(parsed(line))

    def collectives(self) -> list[Collective]:
        kinds = {op: kind for kind in COLLECTIVES for op in (kind, f"{kind}-start")}
        places = self._walk(self.entry, 1, ())
        return [self._collective(kinds[place.instruction.op], place) for place in places if place.instruction.op in kinds]

    def loops_of_unknown_turns(self) -> int:
        """Those with collectives inside of which XLA does not say how often they turn: all in them counts once. Ours are told;
        what XLA's collective pipeliner makes of the loop over microbatches is not (JAX 0.10.2)."""
        loops = (place.instruction for place in self._walk(self.entry, 1, ()) if place.instruction.op == "while")
        return sum(not TRIPS.search(loop.text) and self._has_collective(loop) for loop in loops)

    def _has_collective(self, loop: Instruction) -> bool:
        inside = (place.instruction.op.removesuffix("-start") for name in loop.called for place in self._walk(name, 1, ()))
        return any(op in COLLECTIVES for op in inside)

    def running(self) -> list[str]:
        """Names of the computations whose instructions run one by one, the program's own and those of loops and calls; each
        after all that it runs."""
        order: dict[str, None] = {}

        def visit(computation: str) -> None:
            for instruction in self.computations[computation]:
                for name in instruction.called if instruction.op in _RUNNING else ():
                    visit(name)
            order.setdefault(computation)

        visit(self.entry)
        return list(order)

    def launches(self) -> list[Launch]:
        """Every kernel, copy, library call and collective, where it runs; an asynchronous one once."""
        return [
            Launch(place.instruction.op, place.executed)
            for place in self._walk(self.entry, 1, ())
            if place.instruction.op not in NO_KERNELS and not place.instruction.op.endswith(("-done", "-update"))
        ]

    def host_copies(self) -> list[HostCopy]:
        """Slices of arrays in the host's memory that are read from the device or written from it."""
        return [copy for place in self._walk(self.entry, 1, ()) if (copy := self._host_copy(place))]

    def results(self) -> list[Result]:
        """Every array that an instruction makes, where it is made, one each: not those that only pass by (arguments, loops'
        and calls' results, tuples), not the insides of fusions, nor what lies in the host's memory. Arrays that are updated in
        place appear once for each update.
        """
        found = []
        for place in self._walk(self.entry, 1, ()):
            instruction = place.instruction
            if instruction.op in _PASSING or instruction.op.endswith("-start") or ON_HOST in instruction.result:
                continue
            argument, op_name = self._argument(place), _OP_NAME.search(instruction.text)
            name = op_name[1] if op_name else instruction.name
            for dtype, dims in BUFFER.findall(instruction.result):
                found.append(Result(dtype, shape_of(dims), name, argument, place.executed, bool(place.loops)))
        return found

    def _argument(self, place: _Place) -> str:
        """What an instruction reads through others that have one array to read, if that is an argument of the program."""
        for _ in range(8):
            if place.instruction.op == "parameter":
                name = _OP_NAME.search(place.instruction.text)
                return name[1].replace("\\'", "'") if name else ""
            inputs = [instruction for instruction in place.inputs() if instruction.op not in ("constant", "iota")]
            if len(inputs) != 1:
                return ""
            place = _Place(place.among, place.among.index(inputs[0]), place.executed, place.loops)
        return ""

    def flops(self, computation: str) -> int:
        """Of the matmuls and fused attention of a computation, in one run of it: 2 for each product. A loop whose turns XLA
        does not know counts as one turn, a conditional as all its branches, and what does not say its shapes as nothing."""
        if computation not in self._flops:
            among = self.computations.get(computation, [])
            types = {instruction.name: instruction.result for instruction in among}
            self._flops[computation] = sum(self.flops_of(instruction, types) for instruction in among)
        return self._flops[computation]

    def flops_of(self, instruction: Instruction, types: Mapping[str, str]) -> int:
        """Of one instruction and what it calls.

        Args:
          types: the types of the results among which it stands, by name.
        """
        target = found[1] if (found := _TARGET.search(instruction.text)) else ""
        if instruction.op == "dot" or re.search(r"gemm|cublas", target):
            return matmul_flops(instruction, types)
        if "fmha" in target:
            return attention_flops(instruction, target, types)
        inside = sum(self.flops(name) for name in instruction.called)
        return inside * turns(instruction)

    def _walk(self, computation: str, executed: int, loops: tuple[int, ...]) -> Iterator[_Place]:
        instructions = self.computations[computation]
        for position, instruction in enumerate(instructions):
            yield _Place(instructions, position, executed, loops, computation)
            if instruction.op == "while":
                trips = turns(instruction)
                for name in instruction.called:
                    yield from self._walk(name, executed * trips, (*loops, trips))
            elif instruction.op in _RUNNING:
                for name in instruction.called:
                    yield from self._walk(name, executed, loops)

    def _collective(self, kind: str, place: _Place) -> Collective:
        start = place.instruction
        asynchronous = start.op.endswith("-start")
        between, end = place.until(f"{kind}-done") if asynchronous else ([], start)
        buffers = tuple((dtype, shape_of(dims)) for dtype, dims in BUFFER.findall(end.result))
        spans = [instruction for instruction in between if self._has_matmul(instruction)]
        types = {instruction.name: instruction.result for instruction in place.among if spans}
        return Collective(
            kind,
            buffers,
            place.executed,
            place.loops,
            self._axes_of(start.text),
            asynchronous,
            spans_matmul=bool(spans),
            spans_loop=any(instruction.op == "while" for instruction in spans),
            flops_behind=sum(self.flops_of(instruction, types) for instruction in spans),
            name=start.name,
            computation=place.computation,
        )

    def _host_copy(self, place: _Place) -> HostCopy | None:
        """XLA fuses the slice with the copy, and starts it as `fusion-start` if it can."""
        start = place.instruction
        asynchronous = start.op == "fusion-start"
        if not asynchronous and start.op not in ("fusion", "copy", "dynamic-slice", "dynamic-update-slice"):
            return None
        between, end = place.until("fusion-done") if asynchronous else ([], start)
        to_host = ON_HOST in end.result
        inputs = place.inputs()
        if not to_host and not any(ON_HOST in instruction.result for instruction in inputs):
            return None
        # What is written: the one large input that is not the array it goes into.
        moved = [instruction.result for instruction in inputs if ON_HOST not in instruction.result] if to_host else [end.result]
        buffers = [(dtype, shape_of(dims)) for result in moved for dtype, dims in BUFFER.findall(result)]
        largest = max(buffers, key=lambda buffer: math.prod(buffer[1]))
        spans = any(self._has_matmul(instruction) for instruction in between)
        return HostCopy(to_host, largest, place.executed, place.loops, asynchronous, spans)

    def _has_matmul(self, instruction: Instruction) -> bool:
        target = _TARGET.search(instruction.text)
        if instruction.op == "dot" or (target and re.search(r"gemm|cublas|cudnn", target[1])):
            return True
        inner = itertools.chain.from_iterable(self.computations.get(name, []) for name in instruction.called)
        return any(self._has_matmul(i) for i in inner)

    def _axes_of(self, text: str) -> tuple[str, ...]:
        """The axes along which the devices of a group differ."""
        names, sizes = tuple(self.axes), tuple(self.axes.values())
        groups = device_groups(text, math.prod(sizes))
        varying = set()
        for group in groups:
            coordinates = [coordinates_of(device, sizes) for device in group]
            varying |= {name for i, name in enumerate(names) if len({c[i] for c in coordinates}) > 1}
        return tuple(name for name in names if name in varying)
