"""Reads XLA's buffer assignment from its dump: how much device memory a train step has in use at each of its instructions.

    compiled = lowered.compile(compiler_options=options | {"xla_dump_to": folder})
    curve = read_dump(folder)

XLA's public interface has a field for the assignment (memory_analysis().serialized_buffer_assignment_proto), which is empty for
GPUs (JAX 0.10.2). A compilation's dump has all of it as text: the offset of every buffer, and the first and last instruction at
which it is live. No JAX.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

FORWARD, BACKWARD, UPDATE = PHASES = ("forward", "backward", "update")
_STEM = "gpu_after_optimizations"


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Temporaries of one step on one device."""

    used_bytes: np.ndarray
    """int64 [instructions]: bytes in use at each instruction, in execution order; a loop's body counts once."""
    allocated_bytes: int
    """What XLA allocates for them: the peak in use plus the gaps between buffers."""
    phases: tuple[str, ...]
    """forward, backward or update, for each instruction."""

    def spans(self, shortest: float = 0) -> list[tuple[str, int, int]]:
        """(phase, first instruction, one past the last) of each stretch of one phase. A stretch of fewer instructions than
        `shortest` is merged into the one before it."""
        found: list[tuple[str, int, int]] = []
        for phase, group in groupby(range(len(self.phases)), key=self.phases.__getitem__):
            same = list(group)
            if found and (found[-1][0] == phase or len(same) < shortest):
                found[-1] = (*found[-1][:2], same[-1] + 1)
            else:
                found.append((phase, same[0], same[-1] + 1))
        return found


def read_dump(folder: str | Path) -> StepMemory:
    """Reads the largest program that was dumped into the folder.

    Raises:
      FileNotFoundError: there is no dump, or this XLA dumps something else.
    """
    dumps = sorted(Path(folder).glob(f"*{_STEM}-buffer-assignment.txt"), key=lambda path: path.stat().st_size)
    if not dumps:
        raise FileNotFoundError(f"No buffer assignment was dumped into {folder}.")
    stem = str(dumps[-1]).removesuffix("-buffer-assignment.txt")
    texts = (
        Path(stem + ending).read_text(encoding="utf-8") for ending in ("-buffer-assignment.txt", "-live-range.txt", ".txt")
    )
    return step_memory(*texts)


def step_memory(assignment: str, live_range: str, hlo: str) -> StepMemory:
    """Parses the texts of one dump: *-buffer-assignment.txt, *-live-range.txt and the program itself."""
    order = re.findall(r"^ +\d+:(\S+)$", live_range, re.MULTILINE)
    found = re.findall(r"^ +(\S+\{[\d,]*\}):(\d+)-(\d+)$", live_range, re.MULTILINE)
    lives = {value: (int(start), int(last)) for value, start, last in found}
    pieces, allocated = [], 0
    for size, buffers in _temporaries(assignment):
        # Allocations are placed end to end, so that no two overlap.
        pieces += [(allocated + offset, length, *lives[name]) for name, length, offset in buffers if name in lives]
        allocated += size
    return StepMemory(_union(pieces, len(order)), allocated, tuple(_phases(order, hlo)))


def _temporaries(text: str) -> Iterator[tuple[int, list[tuple[str, int, int]]]]:
    """(size, [(value, size, offset)]) of each allocation for temporaries in device memory."""
    for block in re.split(r"^(?=allocation \d+: )", text, flags=re.MULTILINE):
        head = re.match(r"allocation \d+: size (\d+),(.*)", block)
        if head is None or "preallocated-temp" not in head[2] or re.search(r"\bcolor [1-9]", head[2]):
            continue
        values = re.findall(r"^ +value: <\d+ (\S+?)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)", block, re.MULTILINE)
        # The live ranges append {} to the name of a value that is not part of a tuple.
        named = [(name if "{" in name else name + "{}", int(size), int(offset)) for name, _, size, offset in values]
        yield int(head[1]), named


def _union(pieces: list[tuple[int, int, int, int]], instructions: int) -> np.ndarray:
    """int64 [instructions]: bytes that at least one piece (offset, size, first instruction, last) covers. Values that share
    memory, as those of a loop do, count once.
    """
    edges = np.unique([edge for offset, size, _, _ in pieces for edge in (offset, offset + size)]).astype(np.int64)
    lengths = np.diff(edges)
    covering, used = np.zeros(len(lengths), np.int64), np.zeros(instructions, np.int64)
    changes = defaultdict(list)
    for offset, size, start, last in pieces:
        where = slice(*np.searchsorted(edges, [offset, offset + size]))
        changes[start].append((where, 1))
        changes[last + 1].append((where, -1))
    now = 0
    for t in range(instructions):
        for where, more in changes[t]:
            before = covering[where] > 0
            covering[where] += more
            now += lengths[where] @ ((covering[where] > 0).astype(np.int64) - before)
        used[t] = now
    return used


def _phases(order: list[str], hlo: str) -> Iterator[str]:
    """The phase of each instruction, by the name of the operation it comes from: autodiff names the forward `jvp` and the
    backward `transpose`; the step names the rest `optimizer`. An instruction with none of these is in the phase of the one
    before it."""
    names = dict(re.findall(r'^ +(?:ROOT )?%?(\S+) = .*?op_name="([^"]*)"', hlo, re.MULTILINE))
    phase, marks = FORWARD, {"/optimizer/": UPDATE, "transpose(": BACKWARD, "jvp(": FORWARD}
    for instruction in order:
        name = names.get(instruction, "")
        found = next((meant for mark, meant in marks.items() if mark in name), phase)
        # XLA computes the update's scalars at the start.
        phase = phase if (phase, found) == (FORWARD, UPDATE) else found
        yield phase
