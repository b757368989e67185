"""Training speed of one GPU, compared with its ceilings and with PyTorch. It runs everything, the most important first.

    python benchmarks/gpu.py [--minutes 30]        resumes: it does not measure existing rows again
    python benchmarks/gpu.py --dry-run             a trial at tiny sizes on the local device
    python benchmarks/gpu.py --only 8B             only cases with matching names; --table: only prints the tables
    python benchmarks/gpu.py --block 1             a block of gpu_day.py's plan for fifteen minutes of one GPU

Ceilings come first: a large copy, and bfloat16 matmuls of random numbers. Then complete Llama 3.2 1B and 3B, and Llama 3.1 8B
with as many layers as fit (by the estimate, `selective`, 8,192 tokens), at sequences of 4,096, 8,192 and 32,768 tokens, with
each remat policy that fits and the largest microbatch that fits by the estimate. Then the same model, batch and dtype in
PyTorch, with the largest microbatch that fits there: transformers with torch.compile, flash attention, a chunked loss and fused
AdamW, and variants (`Theirs` in step.py). Then the parts of a step alone, the blocks of a ring, and the targets. A step has
65,536 tokens on every side.

Consecutive cases of jaxllm share a process (gpu_cases.py), because on a cold machine a process takes 20 s to start; PyTorch's
have their own. So memory in use is known where a case needs more than those before it. A row is written when its case ends. An
out-of-memory error or a crash costs one row: the rest continue, after a crash in a new process. Rows are JSON lines in --out,
by default gpu.jsonl in $OUT or runs/gpu. Rows in --known, of the same kind of GPU, are read too. A line with the case's
prediction is written before the case begins. Standard error of the cases goes to gpu.log beside it,
and power and clocks by NVML to gpu.power.csv. A case that does not fit into the remaining time, or is interrupted by its
end, is left for the next run. A failed case is not repeated without --again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_power
import gpu_table
import subprocess_runner
from gpu_cases import config_of, largest_microbatch

from jaxllm.config import ConfigError
from jaxllm.cost_model.hardware import FIT_SHARE, gpu_from_device_kind
from jaxllm.cost_model.memory import estimate_memory

CHECKOUT = Path(__file__).resolve().parents[1]
CASES = Path(__file__).with_name("gpu_cases.py")
KNOWN = Path(__file__).with_name("gpu_h100.jsonl")
"""Rows of earlier days."""

MODELS = {"1B": "llama-3.2-1b", "3B": "llama-3.2-3b", "8B": "llama-3.1-8b"}
VARIANTS = {
    "": (),
    "documents": ("data.mask_documents=true",),
    "documents by halves": ("data.mask_documents=true", "model.attention=cudnn_halves"),
    "fp8": ("model.matmul_dtype=fp8",),
    "looped": ("model.scan_layers=true",),
    "deterministic": ("run.deterministic=true",),
}
"""Variants of jaxllm's step, by name. The base is one text per sequence in bfloat16."""
STEP_TOKENS = 65_536
LOSS_CHUNK = 8192
"""Tokens of a chunk of PyTorch's loss."""
STEPS, DRY_RUN_STEPS = 5, 2
DRY_RUN_MODEL = (
    *("model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=8", "model.vocab_size=256"),
)
DRY_RUN_LENGTH, DRY_RUN_SEQUENCES = 32, 4

THEIRS = "transformers"
"""The kind of PyTorch's cases."""
ALONE = (THEIRS, "pretend", "real_run", "peers")
"""Kinds whose cases have a process of their own."""
EXPECTED_S = {
    **{"ceilings": 30, "train": 45, "transformers": 100, "parts": 60, "ring": 60, "attention": 60},
    **{"pretend": 45, "grouped": 13, "limit": 16, "real_run": 105, "peers": 120},
}
"""Expected duration of a case before one of its kind was measured here. On an H100 with a cold disk, in a process that had
started, ceilings took 8 s, training 29 to 45 s, and PyTorch 65 s with a known microbatch. The rest are guesses."""
BLOCKS_S = {1: 570, 2: 235}
"""Duration of each block of gpu_day.py: a machine that is lent for fifteen minutes runs a command for ten at most, and takes
one to start. After the second block it says in 25 s what it is."""
LIMIT_S, LIMITS_S = 420, {"pretend": 150, "peers": 300}
"""Time limit from one figure of a case to the next, and that of kinds with another."""
VARIABLES = {
    # Lets PyTorch's memory segments grow.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # PyTorch's threads on a CPU would spin while they wait.
    "OMP_WAIT_POLICY": "passive",
    # Compiled programs, and with them the kernels that XLA chose by timing, serve later processes on the same machine.
    "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "jaxllm-gpu-programs"),
}
KILLED_S = 5
"""Part of the remaining time that is kept for writing results."""
MEASURING = ("steps", "traced", "xla", "keep", "first")
"""Options that say how a case is measured. A row with others is of the same work."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    """A function of gpu_cases.py."""
    options: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """Columns that identify the case in tables."""
    predicted: dict[str, Any] = field(default_factory=dict)
    """What its figures should be, by the estimate or by compiling without the GPU."""
    expected_s: float | None = None
    """Expected duration; default: by its kind."""
    after: str = ""
    """Name of a case without whose figures this one says nothing."""


# ------------------------------------------------------------------------------------------------------------------- cases


def ceilings(dry: bool) -> Case:
    sizes = {"copy_bytes": 2**16, "matmul_sizes": [64]} if dry else {"copy_bytes": 2**31, "matmul_sizes": [4096, 8192, 16384]}
    return Case("ceilings", "ceilings", sizes)


def cases(found: Row, dry: bool) -> list[Case]:
    """All other cases, the most important first. They need the results of `ceilings`: the number of 8B's layers depends on the
    GPU's memory, and a remat policy without room for one sequence has no case."""
    if dry:
        tiny = about("1B", DRY_RUN_LENGTH, DRY_RUN_MODEL, DRY_RUN_SEQUENCES)
        return [
            train(tiny, "selective", steps=DRY_RUN_STEPS, traced=True),
            attention([[1, 32, 4, 2, 8]], documents=2),
            parts(tiny, sequences=2, head_chunks=[32]),
            Case("ring", "ring", {"overrides": overrides(tiny), "ranks": [2]}, {"model": "1B"}),
            *their_cases(tiny, "flash", compiled=False, steps=DRY_RUN_STEPS),
        ]
    layers = layers_that_fit(found)
    of = {
        (model, S): about(model, S, [f"model.num_layers={layers}"] if model == "8B" else [])
        for model in MODELS
        for S in (4096, 8192, 32768)
    }
    main = [of[model, 8192] for model in ("1B", "8B", "3B")]
    lengths = [of[model, S] for S in (32768, 4096) for model in ("1B", "8B", "3B")]
    few_layers = about("8B", 8192, ["model.num_layers=4"])
    ring_of = overrides(about("8B", 32768, ["model.num_layers=1"]))
    chunks = [1024, 2048, 4096, 8192, 16384]
    usual = lambda one: "selective" if fits(found, train(one, "selective")) else "full"  # noqa: E731
    wanted = [
        *(train(one, usual(one), traced=True) for one in main),
        train(of["8B", 8192], "selective", "fp8", traced=True),
        attention([[4, 8192, 32, 8, 64], [1, 8192, 32, 8, 128], [1, 32768, 32, 8, 64], [1, 32768, 32, 8, 128]], documents=16),
        *(case for one in main for case in their_cases(one, "flash")),
        train(of["1B", 8192], "selective", "documents", traced=True),
        train(of["1B", 8192], "selective", "documents by halves"),
        train(of["1B", 8192], "none", traced=True),
        train(of["8B", 8192], "full", traced=True),
        Case("ring", "ring", {"overrides": ring_of, "ranks": [2, 4, 8]}, {"model": "8B"}),
        parts(of["1B", 8192], sequences=4, head_chunks=chunks),
        parts(few_layers, sequences=4, head_chunks=chunks),
        *(train(one, usual(one)) for one in lengths),
        *(case for one in main for case in their_cases(one, "flash", liger=True)),
        *(case for one in main for case in their_cases(one, "flash", chunked=False)),
        *their_cases(of["1B", 8192], "cudnn"),
        *their_cases(of["1B", 8192], "flash", float32_weights=True),
        train(of["3B", 8192], "full"),
        train(of["1B", 8192], "full"),
        train(of["3B", 8192], "none"),
        train(of["1B", 8192], "selective", "looped"),
        train(of["8B", 8192], "full", "fp8"),
        *(case for one in lengths for case in their_cases(one, "flash")),
        *(case for one in main[1:] for case in their_cases(one, "cudnn")),
        *(case for one in main[1:] for case in their_cases(one, "flash", float32_weights=True)),
        train(of["1B", 8192], "offload"),
        train(of["1B", 8192], "selective", "fp8"),
        train(of["1B", 8192], "selective", "deterministic"),
        train(of["8B", 8192], "none"),
        parts(of["3B", 8192], sequences=4),
    ]
    named: dict[str, Case] = {}
    for case in wanted:
        if case.kind != "train" or fits(found, case):
            # If names repeat, keep the first case, which may be traced.
            named.setdefault(case.name, case)
    return list(named.values())


def about(model: str, S: int, changes: Sequence[str], sequences: int | None = None) -> dict[str, Any]:
    return {
        "model": model,
        "sequence_length": S,
        "sequences": sequences or STEP_TOKENS // S,
        "changes": list(changes),
    }


def overrides(of: dict[str, Any]) -> list[str]:
    return [
        f"model.name={MODELS[of['model']]}",
        *of["changes"],
        f"train.sequence_length={of['sequence_length']}",
        f"train.global_batch_sequences={of['sequences']}",
    ]


def name_of(of: dict[str, Any]) -> str:
    return f"{of['model']}, S {of['sequence_length']}"


def train(of: dict[str, Any], remat: str, variant: str = "", steps: int = STEPS, traced: bool = False) -> Case:
    name = ", ".join([name_of(of), remat, *([variant] if variant else [])])
    extra = [f"parallel.remat={remat}", *VARIANTS[variant]]
    options = {"overrides": [*overrides(of), *extra], "steps": steps, "traced": traced}
    return Case(name, "train", options, {**of, "remat": remat, "variant": variant})


def their_cases(
    of: dict[str, Any],
    kernel: str,
    liger: bool = False,
    float32_weights: bool = False,
    chunked: bool = True,
    compiled: bool | None = None,
    steps: int = STEPS,
) -> Iterator[Case]:
    """The PyTorch case if PyTorch is installed. Its loss goes by chunks, as ours does. Liger's kernels have their own loss, and
    run without compilation, as their users run them."""
    if any(find_spec(package) is None for package in ("torch", "transformers", *(["liger_kernel"] if liger else []))):
        return
    chunked = chunked and not liger
    marks = {"Liger": liger, "chunked loss": chunked, "float32 weights": float32_weights}
    side = ", ".join([kernel, *(mark for mark, has in marks.items() if has)])
    options = {
        "overrides": overrides(of),
        "steps": steps,
        "kernel": kernel,
        "compiled": not liger if compiled is None else compiled,
        "liger": liger,
        "float32_weights": float32_weights,
        "loss_chunk": LOSS_CHUNK if chunked else None,
    }
    yield Case(f"{name_of(of)}, PyTorch, {side}", "transformers", options, {**of, "side": side})


def attention(shapes: Sequence[Sequence[int]], documents: int) -> Case:
    return Case("attention", "attention", {"shapes": shapes, "documents": documents})


def parts(of: dict[str, Any], sequences: int, head_chunks: Sequence[int] = ()) -> Case:
    options = {"overrides": overrides(of), "sequences": sequences, "head_chunks": list(head_chunks)}
    return Case(f"{name_of(of)}, parts", "parts", options, of)


def layers_that_fit(found: Row) -> int:
    """Layers of 8B: the most that fit with sequences of 8,192 and `selective`; 8 if the memory is not known."""
    if not found.get("capacity_bytes"):
        return 8
    tried = ((layers, about("8B", 8192, [f"model.num_layers={layers}"])) for layers in range(32, 1, -1))
    return next((layers for layers, of in tried if fits(found, train(of, "selective"))), 1)


def fits(found: Row, case: Case) -> bool:
    """Whether a training case fits by the estimate with any microbatch. True if the memory is not known."""
    if not (capacity := found.get("capacity_bytes")):
        return True
    gpu, overrides = gpu_from_device_kind(found["device"]), case.options["overrides"]
    # One microbatch may need less than two, which need an accumulator in addition.
    config = config_of(overrides, microbatch_sequences=largest_microbatch(overrides, capacity, gpu))
    return estimate_memory(config, gpu).peak_bytes <= FIT_SHARE * capacity


# ----------------------------------------------------------------------------------------------------------------- running


class Waiting:
    """Cases that are not measured yet, in their order."""

    def __init__(self, cases: Iterator[Case]):
        self._cases, self._first = cases, []

    def next_(self, shares: str | None = None) -> Case | None:
        """Takes the next case. None if there is none, or if it cannot share the process of a case of the kind `shares`."""
        case = self._first.pop() if self._first else next(self._cases, None)
        if case is not None and shares is not None and (shares in ALONE or case.kind in ALONE):
            self.again(case)
            return None
        return case

    def again(self, case: Case) -> None:
        """Puts a case in front of the others."""
        self._first.append(case)


@dataclass
class Runner:
    """Measures cases while time remains, and reads previous measurements."""

    out: Path
    known: list[Path]
    until: float
    """End time by time.monotonic."""
    again: str | None = None
    """Pattern of names: their rows, and failed ones, are measured again."""
    device: str | None = None
    """Kind of this GPU: rows of another are not read."""
    rows: dict[str, Row] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """Names of cases without enough time."""

    def __post_init__(self):
        for file in [*self.known, self.out]:
            if file.exists():
                for line in file.read_text(encoding="utf-8").splitlines():
                    row = json.loads(line)
                    if "begun" not in row and self.device in (None, row.get("device", self.device)):
                        self.rows[row["name"]] = row
        if self.again is not None:
            kept = lambda row: "error" not in row and not re.search(self.again, row["name"])  # noqa: E731
            self.rows = {name: row for name, row in self.rows.items() if kept(row)}

    def is_done(self, case: Case) -> bool:
        work = lambda options: {name: value for name, value in options.items() if name not in MEASURING}  # noqa: E731
        row = self.rows.get(case.name)
        return row is not None and work(row["options"]) == work(case.options)

    def remaining_s(self) -> float:
        return self.until - time.monotonic()

    def expected_s(self, case: Case) -> float:
        if case.expected_s is not None:
            return case.expected_s
        took = [row["took_s"] for row in self.rows.values() if row["kind"] == case.kind and "took_s" in row]
        return statistics.median(took) if took else EXPECTED_S[case.kind]

    def run(self, cases: Iterable[Case]) -> None:
        """Measures those of the cases that have no row yet: consecutive ones of jaxllm in one process. A crash costs one case,
        and the rest continue in a new process. A later case may depend on the rows of earlier ones."""
        waiting = Waiting(case for case in cases if not self.is_done(case))
        while (case := waiting.next_()) is not None:
            if self._may_begin(case):
                self._run_process(case, waiting)

    def _may_begin(self, case: Case) -> bool:
        if case.after and "error" in self.rows.get(case.after, {}):
            self._write({**dataclasses.asdict(case), "error": f"Left out: {case.after!r} has no figures."})
            return False
        if case.after and case.after not in self.rows:
            self.left.append(case.name)
            return False
        enough = self.remaining_s() >= self.expected_s(case) + KILLED_S
        if not enough:
            self.left.append(case.name)
        return enough

    def _run_process(self, first: Case, waiting: Waiting) -> None:
        """Measures a case, and those after it that may share its process."""
        case: Case | None = first
        found, began = {}, time.monotonic()

        def begin() -> str:
            nonlocal found, began
            found, began = {}, time.monotonic()
            say(f"{case.name} ({case.kind}; about {self.expected_s(case):.0f} s, {self.remaining_s():.0f} s left)")
            self._append({**dataclasses.asdict(case), "begun": time.strftime("%Y-%m-%d %H:%M:%S")})
            return json.dumps(dataclasses.asdict(case))

        def each(said: Row) -> str | None:
            nonlocal case
            if "ready" not in said:
                found.update(said)
                return None
            if found:
                self._end(case, found, began, waiting)
                case = waiting.next_(shares=first.kind)
                while case is not None and not self._may_begin(case):
                    case = waiting.next_(shares=first.kind)
            return "" if case is None else begin()

        command, variables = [sys.executable, str(CASES)], {"CUDA_VISIBLE_DEVICES": gpu_power.first_gpu(), **VARIABLES}
        limit_s = self.remaining_s() - KILLED_S
        silent_s = LIMITS_S.get(first.kind, LIMIT_S)
        _, error = subprocess_runner.run(command, limit_s, variables, self.out.with_suffix(".log"), each, silent_s)
        if case is None:
            return
        # Measurements before a crash count.
        measured = "tokens_per_s" in found or "step_s" in found
        if not measured and subprocess_runner.is_late(error) and self.remaining_s() <= KILLED_S:
            self.left.append(case.name)
            # Like a beginning, no row: the case is measured again.
            self._append({**dataclasses.asdict(case), **found, "begun": "cut off by the end"})
            return
        found["died" if measured else "error"] = error or "It printed nothing."
        self._end(case, found, began, waiting)

    def _end(self, case: Case, found: Row, began: float, waiting: Waiting) -> None:
        """Writes the row of a case, or repeats the case if its microbatch was too large."""
        microbatch = found.get("microbatch", 1)
        if found.get("error") == subprocess_runner.OUT_OF_MEMORY and case.kind == "train" and microbatch > 1:
            say(f"  {subprocess_runner.OUT_OF_MEMORY} with {microbatch} sequences a microbatch")
            waiting.again(dataclasses.replace(case, options={**case.options, "at_most": microbatch - 1}))
            return
        row = {**dataclasses.asdict(case), **found}
        if "timed" in found:
            row |= gpu_power.means(self.power_file, *found["timed"])
        if "at_most" in case.options:
            # Stored under the requested options.
            row["ran_out_at"] = row["options"].pop("at_most") + 1
        python, date = platform.python_version(), time.strftime("%Y-%m-%d")
        self._write({**row, "took_s": time.monotonic() - began, "python": python, "date": date})

    @property
    def power_file(self) -> Path:
        return self.out.with_suffix(".power.csv")

    def _append(self, row: Row) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _write(self, row: Row) -> None:
        self.rows[row["name"]] = row
        self._append({"device": self.device, **row} if self.device else row)
        if "error" in row:
            say(f"  {row['error']}")
        elif "tokens_per_s" in row:
            say(f"  {row['tokens_per_s']:,.0f} tokens/s, {row['tflops_full_square']:.1f} TFLOP/s full-square")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    options = parse(sys.argv[1:])
    # A terminated run also terminates its case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    until = time.monotonic() + 60 * options.minutes
    try:
        device = None if options.dry_run else gpu_power.kind_of_gpu()
        runner = Runner(options.out, options.known, until, options.again, device)
        if not options.table:
            measure(runner, options.dry_run, re.compile(options.only), options.block)
    except ConfigError as error:
        say(f"benchmarks/gpu.py: {error}")
        sys.exit(2)
    report(runner, options.json)
    if options.dry_run and any("error" in row for row in runner.rows.values()):
        sys.exit(1)


def measure(runner: Runner, dry: bool, only: re.Pattern[str], block: int | None) -> None:
    runner.out.parent.mkdir(parents=True, exist_ok=True)
    if dry and block:
        runner.run(cases_of(block, {}, dry))
        return
    if dry:
        of_torch = [case for case in cases({}, dry) if case.kind == THEIRS]
        of_jax = [ceilings(dry), *(case for case in cases({}, dry) if case.kind != THEIRS)]
        # Beside each other: a trial spends most of its time starting processes.
        with ThreadPoolExecutor() as pool:
            list(pool.map(runner.run, [of_jax, of_torch]))
        return
    with gpu_power.sampling(runner.power_file):
        runner.run(plan(runner, only, block))


def cases_of(block: int | None, found: Row, dry: bool) -> list[Case]:
    if block is None:
        return cases(found, dry)
    import gpu_day

    return gpu_day.cases(block, found, dry)


def plan(runner: Runner, only: re.Pattern[str], block: int | None) -> Iterator[Case]:
    """The ceilings, then the cases that depend on them."""
    first = ceilings(dry=False)
    yield first
    found = runner.rows.get(first.name)
    if found is None or "error" in found:
        say("Without ceilings nothing else can be measured.")
        return
    yield from (case for case in cases_of(block, found, dry=False) if only.search(case.name))


def report(runner: Runner, as_json: bool) -> None:
    if as_json:
        verdicts = [verdict._asdict() for verdict in gpu_table.verdicts(runner.rows)]
        print(json.dumps({"rows": list(runner.rows.values()), "verdicts": verdicts, "left": runner.left}))
        return
    print(gpu_table.text(runner.rows))
    if runner.left:
        print(f"\nNo time for {len(runner.left)} cases: {'; '.join(runner.left)}. Rerun the same command to measure them.")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(os.environ.get("OUT", CHECKOUT / "runs" / "gpu"))
    parser.add_argument("--block", type=int, choices=(1, 2), help="a block of gpu_day.py, for as long as it says there")
    parser.add_argument("--minutes", type=float, help="begin no case that would end later; default: 60, or as the block says")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="rows, read and added to; default: gpu.jsonl in $OUT or runs/gpu"
    )
    parser.add_argument("--known", type=Path, nargs="*", default=[], metavar="FILE", help="rows of earlier runs")
    parser.add_argument("--gone-s", type=float, default=0, metavar="S", help="seconds of the time that have gone before")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only cases with matching names, and the ceilings")
    parser.add_argument("--again", metavar="PATTERN", help="measure rows with matching names, and all failed ones, again")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object, alone on standard output")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the local device")
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = BLOCKS_S[options.block] / 60 if options.block else 60
    options.minutes -= options.gone_s / 60
    if options.block and not options.dry_run:
        options.known = [KNOWN, *options.known]
    # A trial always measures, so it gets a new file.
    options.out = options.out or (Path(tempfile.mkdtemp()) if options.dry_run else folder) / "gpu.jsonl"
    return options


if __name__ == "__main__":
    main()
