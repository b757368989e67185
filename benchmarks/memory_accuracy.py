"""Compares the closed-form memory estimate of a step with XLA's own figure, on configurations from the planner's space.

python benchmarks/memory_accuracy.py [--limit 50]           compiles missing configurations, and prints the agreement
python benchmarks/memory_accuracy.py --rescore              computes the estimates again; compiles nothing
python benchmarks/memory_accuracy.py --summary [--json]     only prints the agreement
python benchmarks/memory_accuracy.py --into OTHER.csv       compiles the table's rows that OTHER lacks, by the JAX of today
python benchmarks/memory_accuracy.py --networks [...]        the same for networks beside Llama: memory_networks.csv
python benchmarks/memory_accuracy.py --mixtures [...]        the same for mixtures of experts: memory_mixtures.csv
python benchmarks/memory_accuracy.py --picture scatter.png

It needs the extra aot, and no GPU. There are as many configurations as the published study of Megatron-LM's memory has runs
(454). Two in five are within 15% of a GPU's capacity, where a verdict is hard. Configuration `index` is drawn from SEED and the
index only, so a run can stop at any time: each compiled configuration becomes a row of memory_accuracy.csv at once, and the
next run resumes. A row keeps its configuration. The script reports how many would be drawn differently today, because the
estimate decides what is within 15%; `--redo changed` compiles those again.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from megatron_stages import megatron_memory_by_stage

from jaxllm.config import Config, ConfigError, layer_stack, load_config
from jaxllm.config.attention import require_trains
from jaxllm.config.model_spec import has_experts
from jaxllm.config.types import BLOCK_TENSORS
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.memory import MemoryEstimate, estimate_memory
from jaxllm.plan.space import REMATS, Choice, choice_in, groups, meshes, why_not

SEED, COUNT = 455, 460
HOST_BYTES_PER_GPU = 128 * 2**30
"""The planner's limit of host memory when the configurations were drawn."""
HELD = ("offload_state", "expert")
"""Settings of the planner's space that are drawn apart."""
TABLE = Path(__file__).with_name("memory_accuracy.csv")

MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b")
NETWORKS = (
    *8 * ("qwen2.5-0.5b", "qwen3-8b", "qwen2.5-14b", "qwen3-0.6b", "mistral-nemo-12b", "qwen3-32b"),
    *2 * ("olmo-2-1b", "olmo-2-7b", "olmo-2-13b", "olmo-2-32b"),
    *2 * ("gemma-3-1b", "mistral-7b-v0.1", "gemma-3-4b", "gemma-3-27b", "gemma-3-12b"),
)
"""The network beside Llama of each index, so that later ones do not change the draws of earlier ones."""
NETWORKS_SEED, NETWORKS_COUNT = 457, len(NETWORKS)
NETWORKS_TABLE = TABLE.with_name("memory_networks.csv")
MIXTURES = 20 * ("olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x7b")
SHARED = range(36, 54)
"""Mixtures of these indices have parallel.expert."""
MIXTURES_SEED, MIXTURES_COUNT, MIXTURES_TABLE = 461, len(MIXTURES), TABLE.with_name("memory_mixtures.csv")
GPU_NAMES = ("a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb")
GPU_COUNTS = (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 256, 512, 1024)
SEQUENCE_LENGTHS = tuple(2**k for k in range(11, 18))
"""2,048 to 131,072 tokens."""
BATCHES = tuple(2**k for k in range(13))
"""Sequences per step; three times that if the number of GPUs is divisible by three."""
MAPPINGS = (
    dict.fromkeys(("query", "key", "value", "attention_output", "attention_lse"), "keep"),
    dict.fromkeys(("mlp_gate", "mlp_up"), "keep"),
    {"block_input": "offload"},
    {"query": "keep", "attention_out": "keep", "mlp_up": "offload"},
    {name: "offload" if name.startswith("mlp") else "keep" for name in BLOCK_TENSORS},
)
MOST_MICROBATCHES = 256
"""Limit of microbatches per step: enough that any pipeline's memory no longer grows."""

NEAR = 0.15
"""Distance from the capacity, as a fraction of it, within which a verdict is hard."""
NEAR_INDICES = (1, 3)
"""Indices, of each five, that are drawn near capacity."""
VERDICT_SHARE = 0.95
"""Fraction of the capacity up to which an estimate is called safe."""
SHARES = (0.02, 2.5)
"""Range of the estimate as a fraction of capacity. Outside it the verdict is obvious."""
PROPOSALS, MOVES = 400, 12
COMPILE_LIMIT_S = 900
FRESH_WORKER_AFTER = 40
"""Number of compilations per worker process. JAX keeps some memory of each."""


# ----------------------------------------------------------------------------------------------------------------- draws


@dataclass(frozen=True)
class Case:
    """One configuration on GPUs of one kind."""

    index: int
    wanted: str
    """near (capacity) or any."""
    gpu: str
    gpus: int
    knobs: dict[str, Any]
    """Values of the columns KNOBS."""

    @cached_property
    def config(self) -> Config:
        k = self.knobs
        parallel = {key: k[key] for key in PARALLEL_KNOBS}
        train = {key: k[key] for key in ("sequence_length", "global_batch_sequences", "microbatch_sequences")}
        return load_config(
            {
                "model": _shape(k["model"]),
                "train": {"steps": 1, **train},
                "parallel": parallel,
                "data": {"mask_documents": k["mask_documents"]},
            }
        )

    @property
    def gpus_per_host(self) -> int:
        return choose_gpus_per_host(self.gpus, None, find_gpu(self.gpu).gpus_per_host)[0]

    @property
    def capacity_bytes(self) -> int:
        return find_gpu(self.gpu).capacity_bytes

    @property
    def hash(self) -> str:
        knobs = {key: value for key, value in self.knobs.items() if (key, value) != ("expert", 1)}
        result = json.dumps([self.gpu, self.gpus, knobs], sort_keys=True)
        return hashlib.sha256(result.encode()).hexdigest()[:12]


PARALLEL_KNOBS = (
    *("pipe", "data", "context", "tensor", "zero", "schedule", "virtual_stages", "remat", "offload_state", "context_method"),
    "expert",
)
KNOBS = ("model", *PARALLEL_KNOBS, "mask_documents", "sequence_length", "global_batch_sequences", "microbatch_sequences")

Estimate = Callable[[Config, Gpu], MemoryEstimate]
ESTIMATES: dict[str, Estimate] = {
    "jaxllm": partial(estimate_memory, on_device=False),
    "megatron": lambda config, gpu: megatron_memory_by_stage(config),
}
"""Choices of --estimate. Megatron's describes another program. It keeps the draw fixed while jaxllm's estimate changes, because
its formula does not change."""


def draw(
    seed: int = SEED, count: int = COUNT, estimate: Estimate = ESTIMATES["jaxllm"], models: Sequence[str] = MODELS
) -> list[Case]:
    """Draws the first `count` configurations of a seed. Each depends on its index and on which ones the estimate calls near,
    not on the others.
    """
    return [draw_case(seed, index, estimate, models) for index in range(count)]


def draw_case(seed: int, index: int, estimate: Estimate = ESTIMATES["jaxllm"], models: Sequence[str] = MODELS) -> Case:
    """Takes the models in turn and draws the rest axis by axis, uniformly among the possible values. A configuration that
    should be near capacity is then moved there by its microbatch, sequence length, remat and kind of GPU.

    Raises:
      RuntimeError: nothing was found; the space or the estimate must have changed a lot.
    """
    rng, near = random.Random(f"{seed}/{index}"), index % 5 in NEAR_INDICES
    for _ in range(PROPOSALS):
        case = propose(rng, index, near, models)
        for _ in range(MOVES if near else 1):
            if case is None or (share := share_of_capacity(case, estimate)) is None:
                break
            if abs(share - 1) <= NEAR if near else SHARES[0] <= share <= SHARES[1]:
                return case
            case = moved(rng, case, larger=share < 1) if near else None
    raise RuntimeError(f"Nothing near capacity was found for index {index} of seed {seed}.")


def share_of_capacity(case: Case, estimate: Estimate) -> float | None:
    """Estimate / capacity. None if the search refuses the case: ZeRO finds no divisible dim, or host memory is too small."""
    try:
        gpu = find_gpu(case.gpu)
        require_trains(case.config, gpu.chip.compute_capability, gpu.name)
        result = estimate(case.config, gpu)
    except ConfigError:
        return None
    return None if result.host_bytes > HOST_BYTES_PER_GPU else result.peak_bytes / case.capacity_bytes


def propose(rng: random.Random, index: int, near: bool, models: Sequence[str] = MODELS) -> Case | None:
    """Draws any configuration of the planner's space. None if no mesh divides the batch."""
    gpus, S = rng.choice(GPU_COUNTS), rng.choice(SEQUENCE_LENGTHS)
    base = {
        "model": models[index % len(models)],
        "sequence_length": S,
        "global_batch_sequences": rng.choice(BATCHES) * (3 if gpus % 3 == 0 else 1),
        "mask_documents": rng.random() < 0.6,
        "offload_state": rng.choices(("none", "optimizer", "optimizer_and_master"), (8, 1, 1))[0],
        "context_method": rng.choices(("auto", "ring", "all_gather"), (4, 1, 1))[0],
        "remat": rng.choice(MAPPINGS) if rng.random() < 0.12 else rng.choice(REMATS),
        "gpu": rng.choice(GPU_NAMES),
    }
    template = _template(base)
    per_host, _ = choose_gpus_per_host(gpus, None)
    left = [mesh for mesh in meshes(template, gpus) if why_not(template, mesh, per_host) is None]
    # Pipelines compile most slowly.
    without = [mesh for mesh in left if mesh.pipe == 1]
    left = without if without and rng.random() < 0.6 else left
    for axis in ("pipe", "context", "tensor"):
        if left:
            size = rng.choice(sorted({getattr(mesh, axis) for mesh in left}))
            left = [mesh for mesh in left if getattr(mesh, axis) == size]
    if not left:
        return None
    (mesh,) = left
    if shared := has_experts(template.model) and index in SHARED:
        template = template.model_copy(update={"parallel": template.parallel.model_copy(update={"expert": 2})})
    every = groups(template, mesh, per_host, HELD[:1] if shared else HELD)
    found = [group for group in every if group.microbatches and (group.expert > 1) == shared]
    if not found:
        return None
    schedule = rng.choice(sorted({group.schedule for group in found}))
    group = rng.choice([group for group in found if group.schedule == schedule])
    share = base["global_batch_sequences"] // mesh.data
    sizes = [size for size in group.microbatches if share // size <= MOST_MICROBATCHES]
    if not sizes:
        return None
    return _case(index, near, gpus, base, group.choice(base["remat"], rng.choice(sizes), base["offload_state"]))


def moved(rng: random.Random, case: Case, larger: bool) -> Case | None:
    """The case with one change that needs more memory (less, if not `larger`). None if there is no such change."""
    k, by = case.knobs, 1 if larger else -1
    b = k["microbatch_sequences"]
    ladders = [
        ("sequence_length", SEQUENCE_LENGTHS),
        ("remat", REMATS),
        ("gpu", GPU_NAMES[::-1]),
        ("microbatch_sequences", (b // 2, b, 2 * b) if b > 1 else (b, 2 * b)),
    ]
    rng.shuffle(ladders)
    for key, ladder in ladders:
        now = {**k, "gpu": case.gpu}[key]
        if now not in ladder or not 0 <= (place := ladder.index(now) + by) < len(ladder):
            continue
        changed = {**k, "gpu": case.gpu, key: ladder[place]}
        gpu = changed.pop("gpu")
        new = dataclasses.replace(case, gpu=gpu, knobs=changed)
        if belongs(new) and new.config.num_microbatches <= MOST_MICROBATCHES:
            return new
    return None


def belongs(case: Case) -> bool:
    """Whether the planner's search would include it."""
    try:
        config = case.config
    except ConfigError:
        return False
    choice = choice_in(config)
    if why_not(config, choice.mesh, case.gpus_per_host) is not None:
        return False
    key = (choice.zero, choice.schedule, choice.virtual_stages, choice.expert)
    for group in groups(config, choice.mesh, case.gpus_per_host, HELD):
        if (group.zero, group.schedule, group.virtual_stages, group.expert) == key:
            return choice.remat in group.remats and choice.microbatch_sequences in group.microbatches
    return False


@lru_cache
def _shape(name: str) -> dict[str, Any]:
    """A published model's keys without its name, so that its file is read once."""
    train = {"steps": 1, "sequence_length": 2, "global_batch_sequences": 1}
    return load_config({"model": {"name": name}, "train": train}).model.model_dump(exclude={"name"})


def _template(base: dict[str, Any]) -> Config:
    """The config that the planner searches from."""
    return load_config(
        {
            "model": _shape(base["model"]),
            "train": {"steps": 1, **{key: base[key] for key in ("sequence_length", "global_batch_sequences")}},
            "parallel": {key: base[key] for key in ("remat", "offload_state", "context_method")},
            "data": {"mask_documents": base["mask_documents"]},
        }
    )


def _case(index: int, near: bool, gpus: int, base: dict[str, Any], choice: Choice) -> Case:
    axes = dataclasses.asdict(choice.mesh)
    chosen = {key: getattr(choice, key) for key in ("zero", "schedule", "virtual_stages", "microbatch_sequences", "expert")}
    values = {**base, **axes, **chosen}
    return Case(index, "near" if near else "any", base["gpu"], gpus, {key: values[key] for key in KNOBS})


# ----------------------------------------------------------------------------------------------------------------- table

COMPILED = ("argument_bytes", "temp_bytes", "output_bytes", "alias_bytes", "total_bytes", "host_bytes")
"""XLA's figures for one device, compiled with more memory than needed."""
ESTIMATED = ("estimate_bytes", "estimate_stage", "estimate_moment", "estimate_terms_bytes", "estimate_host_bytes")
COLUMNS = (
    *("index", "seed", "hash", "wanted", "gpu", "gpus", "gpus_per_host", *KNOBS, "microbatches", "capacity_bytes"),
    *(*ESTIMATED, *COMPILED, "attention", "compile_s", "versions", "error"),
)
JSON_COLUMNS = ("remat", "mask_documents", "estimate_terms_bytes")
UNNAMED = {"expert": "1"}
"""Columns that older tables do not have."""
INTEGER_COLUMNS = frozenset(COLUMNS) - {
    *JSON_COLUMNS,
    *("hash", "wanted", "gpu", "model", "schedule", "offload_state", "context_method", "attention", "versions", "error"),
    "estimate_moment",
    "compile_s",
}

Row = dict[str, Any]
"""Values by COLUMNS; '' for missing ones, for example if compilation failed."""


def case_of(row: Row) -> Case:
    return Case(row["index"], row["wanted"], row["gpu"], row["gpus"], {key: row[key] for key in KNOBS})


def row_of(case: Case, compiled: dict[str, Any], seed: int = SEED, estimate: Estimate = ESTIMATES["jaxllm"]) -> Row:
    """Args: compiled: the result of compile_case()."""
    result = {
        **{"index": case.index, "seed": seed, "hash": case.hash, "wanted": case.wanted},
        **{"gpu": case.gpu, "gpus": case.gpus, "gpus_per_host": case.gpus_per_host, **case.knobs},
        "microbatches": case.config.num_microbatches,
        "capacity_bytes": case.capacity_bytes,
        **estimated(case, estimate, compiled.get("versions", "")),
        **compiled,
    }
    return {column: result.get(column, "") for column in COLUMNS}


def rescored(row: Row, estimate: Estimate = ESTIMATES["jaxllm"]) -> dict[str, Any]:
    """The columns ESTIMATED by today's estimate, for the JAX that compiled the row."""
    return estimated(case_of(row), estimate, row["versions"])


def estimated(case: Case, estimate: Estimate = ESTIMATES["jaxllm"], versions: str = "") -> dict[str, Any]:
    """For the JAX here, if no `versions` name another: 'jax 0.10.2, jax-cuda13-plugin 0.10.2'."""
    older = layer_stack.has_older_xla(versions)
    with patch.object(layer_stack, "has_older_xla", lambda: older):
        result = estimate(case.config, find_gpu(case.gpu))
    peak = result.peak_stage
    values = (result.peak_bytes, peak.stage, result.moment, dict(peak.terms_bytes), result.host_bytes)
    return dict(zip(ESTIMATED, values, strict=True))


def read_table(path: Path) -> list[Row]:
    """Reads the rows in the order of the file. Skips a truncated last line and lines without an index."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        raw = list(csv.DictReader(file))
    rows = []
    for number, line in enumerate(raw):
        try:
            rows.append({column: _read_value(column, line.get(column, UNNAMED.get(column))) for column in COLUMNS})
        except (KeyError, ValueError):
            if number < len(raw) - 1:
                sys.exit(f"{path} has a line that is not a row of this table (index {line.get('index')}): fix or remove it.")
    return rows


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Writes the table atomically, sorted by index."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(_written(row) for row in sorted(rows, key=lambda row: row["index"]))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def append_row(path: Path, row: Row) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(_written(row))


def _written(row: Row) -> list[str]:
    return [json.dumps(row[column]) if column in JSON_COLUMNS and row[column] != "" else str(row[column]) for column in COLUMNS]


def _read_value(column: str, text: str | None) -> Any:
    if text is None:
        raise ValueError(f"{column} is missing")
    if text and column in INTEGER_COLUMNS:
        return int(text)
    if text and column in JSON_COLUMNS:
        return json.loads(text)
    return float(text) if text and column == "compile_s" else text


# --------------------------------------------------------------------------------------------------------------- compile


def compile_case(case: Case) -> dict[str, Any]:
    """The columns that the compiler fills, or `error`. Imports JAX."""
    import jax

    from jaxllm.compile import aot
    from jaxllm.compile.report import compile_report

    versions = f"jax {jax.__version__}, {', '.join(aot.versions())}"
    try:
        report = compile_report(case.config, find_gpu(case.gpu), case.gpus, case.gpus_per_host)
    except Exception as error:
        return {"versions": versions, "error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    finally:
        jax.clear_caches()
    result = {column: getattr(report, column) for column in COMPILED}
    result["total_bytes"] -= report.workspace_bytes
    return {**result, "attention": report.attention, "compile_s": round(report.compile_s, 2), "versions": versions}


def serve() -> None:
    """Worker loop: reads cases, one JSON object per line, and writes their results in the same form."""
    answers = os.fdopen(os.dup(1), "w")
    # Output of libraries must not mix with results.
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(compile_case(Case(**json.loads(line)))) + "\n")
        answers.flush()


class Worker:
    """A compiling process. It is replaced if it dies, hangs or has grown: XLA may abort and take its process down."""

    command = (sys.executable, str(Path(__file__).resolve()), "--serve")

    def __init__(self):
        self.process: subprocess.Popen[str] | None = None
        self.kernels: tempfile.TemporaryDirectory[str] | None = None
        self.served = 0
        self.stopped = False

    def compile(self, case: Case) -> dict[str, Any]:
        if self.process is None or self.served >= FRESH_WORKER_AFTER:
            self._end()
            self._start()
        process, self.served = self.process, self.served + 1
        timer = threading.Timer(COMPILE_LIMIT_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        code = process.wait()
        self.log.seek(0)
        last = " ".join(self.log.read()[-300:].split())
        self._end()
        return {"error": f"The compiler's process ended with {code} (limit {COMPILE_LIMIT_S} s): {last}"}

    def stop(self) -> None:
        """Called from another thread: the current compilation is lost."""
        self.stopped = True
        if (process := self.process) is not None:
            process.kill()

    def close(self) -> None:
        self._end()
        if self.kernels is not None:
            self.kernels.cleanup()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.log.close()
            self.process = None

    def _start(self) -> None:
        # Not the caller's own XLA_FLAGS, such as those of tests. Two thirds of a compilation generate machine code of kernels,
        # most of which an earlier configuration had too. The memory of a step is decided before that.
        self.kernels = self.kernels or tempfile.TemporaryDirectory()
        flags = f"--xla_gpu_kernel_cache_file={self.kernels.name}/kernels"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (as long as the process)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process, self.served = subprocess.Popen(self.command, env=environment, text=True, **pipes), 0


def compile_all(cases: Sequence[Case], workers: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yields (case, result of compile_case()) as they complete. Closing the generator stops the workers."""
    waiting: queue.SimpleQueue[Case | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Case, dict[str, Any] | BaseException]] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    crew = [Worker() for _ in range(min(workers, len(cases)))]

    def work(worker: Worker) -> None:
        try:
            while (case := waiting.get()) is not None and not worker.stopped:
                done.put((case, worker.compile(case)))
        except BaseException as error:
            done.put((case, error))
        finally:
            worker.close()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in crew]
    for thread in threads:
        waiting.put(None)
        thread.start()
    try:
        for _ in cases:
            case, result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield case, result
    finally:
        for worker in crew:
            worker.stop()
        for thread in threads:
            thread.join()


def run(
    cases: Sequence[Case],
    path: Path,
    workers: int,
    seed: int = SEED,
    estimate: Estimate = ESTIMATES["jaxllm"],
    say: Callable[[str], None] = print,
) -> None:
    """Compiles the cases. Each becomes a row of the table as soon as it is compiled."""
    started = time.monotonic()
    if not path.exists():
        write_table(path, [])
    for number, (case, compiled) in enumerate(compile_all(cases, workers), start=1):
        row = row_of(case, compiled, seed, estimate)
        append_row(path, row)
        elapsed_s = time.monotonic() - started
        left_min = elapsed_s / number * (len(cases) - number) / 60
        say(f"{number}/{len(cases)}, {left_min:.0f} min left: {line_of(row)}")


def line_of(row: Row) -> str:
    remat = row["remat"] if isinstance(row["remat"], str) else "mapping"
    mesh = " x ".join(str(row[axis]) for axis in ("pipe", "data", "context", "tensor"))
    what = f"{row['index']} {row['model']} {row['gpu']} {mesh} ZeRO {row['zero']} {row['schedule']} {remat}"
    what += f" S {row['sequence_length']} b {row['microbatch_sequences']}"
    if row["error"]:
        return f"{what}: {row['error']}"
    return (
        f"{what}: {row['estimate_bytes'] / 2**30:.2f} GiB estimated, {row['total_bytes'] / 2**30:.2f} compiled "
        f"({100 * relative_error(row):+.1f}%), {row['compile_s']:.0f} s"
    )


def still_to_do(
    rows: Sequence[Row], seed: int, count: int, estimate: Estimate, models: Sequence[str] = MODELS
) -> tuple[list[Case], int]:
    """Cases without a row of this seed, and the number of rows that differ from today's draw."""
    stored = {row["index"]: row["hash"] for row in rows if row["seed"] == seed}
    cases = draw(seed, count, estimate, models)
    changed = sum(case.index in stored and stored[case.index] != case.hash for case in cases)
    return [case for case in cases if case.index not in stored], changed


def subset(rows: Sequence[Row], size: int) -> list[Row]:
    """About `size` of the fastest-compiling fifth of the rows, evenly over models, ZeRO levels, schedules, remat policies and
    nearness. The choice is fixed for a given table.
    """
    compiled = [row for row in rows if not row["error"]]
    if not compiled:
        return []
    compiled.sort(key=lambda row: (row["compile_s"], row["index"]))
    quick = compiled[: max(size + size // 10, len(compiled) // 5)]
    quick.sort(key=lambda row: (row["model"], row["zero"], row["schedule"], str(row["remat"]), row["wanted"], row["index"]))
    places = np.linspace(0, len(quick) - 1, min(size, len(quick)))
    return [quick[round(place)] for place in places]


# --------------------------------------------------------------------------------------------------------------- summary


def relative_error(row: Row) -> float:
    """(estimate - compiled) / compiled."""
    return row["estimate_bytes"] / row["total_bytes"] - 1


def is_near(row: Row) -> bool:
    """Whether the estimate or XLA's figure is within 15% of capacity."""
    capacity = row["capacity_bytes"]
    return any(abs(row[figure] - capacity) <= NEAR * capacity for figure in ("estimate_bytes", "total_bytes"))


def agrees(row: Row) -> bool:
    """Whether estimate and XLA's figure are on the same side of 95% of capacity."""
    line = VERDICT_SHARE * row["capacity_bytes"]
    return (row["estimate_bytes"] <= line) == (row["total_bytes"] <= line)


def is_false_promise(row: Row) -> bool:
    """Whether the row was called safe but is above capacity."""
    return row["estimate_bytes"] <= VERDICT_SHARE * row["capacity_bytes"] and row["total_bytes"] > row["capacity_bytes"]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Statistics of compiled rows: errors in percent of XLA's figure, shares from 0 to 1; None without rows."""
    errors = np.array([100 * relative_error(row) for row in rows])
    near = [row for row in rows if is_near(row)]
    some = len(rows) > 0
    return {
        "configurations": len(rows),
        "median_error_percent": float(np.median(np.abs(errors))) if some else None,
        "p95_error_percent": float(np.percentile(np.abs(errors), 95)) if some else None,
        "mean_signed_error_percent": float(errors.mean()) if some else None,
        "worst_underestimate_percent": float(max(0.0, -errors.min())) if some else None,
        "worst_overestimate_percent": float(max(0.0, errors.max())) if some else None,
        "underestimated_by_more_than_10_percent": int((errors < -10).sum()),
        "verdict_agreement": sum(map(agrees, rows)) / len(rows) if some else None,
        "near_capacity": len(near),
        "verdict_agreement_near_capacity": sum(map(agrees, near)) / len(near) if near else None,
        "called_safe_and_above_capacity": sum(map(is_false_promise, rows)),
    }


BREAKDOWNS = (
    *("model", "gpu", "gpus", "zero", "schedule", "remat", "pipe", "context", "tensor", "offload_state", "mask_documents"),
    *("attention", "sequence_length", "estimate_moment"),
)


def _value(row: Row, column: str) -> str:
    if column == "remat" and not isinstance(row["remat"], str):
        return "mapping"
    if column == "schedule" and row["pipe"] == 1:
        return "no pipeline"
    return str(row[column])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """figures() of all compiled rows, and by each value of BREAKDOWNS; the five worst each way; failed compilations."""
    compiled = [row for row in rows if not row["error"]]
    by: dict[str, dict[str, Any]] = {}
    for column in BREAKDOWNS:
        values = {_value(row, column): row[column] for row in compiled}
        order = sorted(values, key=lambda name: (isinstance(values[name], str | dict), len(name), name))
        by[column] = {value: figures([row for row in compiled if _value(row, column) == value]) for value in order}
    ranked = sorted(compiled, key=relative_error)
    return {
        **figures(compiled),
        "failed": len(rows) - len(compiled),
        "compile_s": {
            "total": sum(row["compile_s"] for row in compiled),
            "median": float(np.median([row["compile_s"] for row in compiled])) if compiled else None,
            "most": max((row["compile_s"] for row in compiled), default=None),
        },
        "most_underestimated": [line_of(row) for row in ranked[:5] if relative_error(row) < 0],
        "most_overestimated": [line_of(row) for row in ranked[:-6:-1] if relative_error(row) > 0],
        "errors": [line_of(row) for row in rows if row["error"]],
        "by": by,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    compiled = f"{result['configurations']} configurations compiled, {result['near_capacity']} near capacity"
    yield f"{compiled}; {result['failed']} failed"
    if not result["configurations"]:
        return
    compile_s, near = result["compile_s"], result["verdict_agreement_near_capacity"]
    yield (
        f"compiled in {compile_s['total'] / 60:.0f} min of workers' time, median {compile_s['median']:.1f} s, most "
        f"{compile_s['most']:.0f} s"
    )
    yield (
        f"error: median {result['median_error_percent']:.2f}%, 95th percentile {result['p95_error_percent']:.2f}%, mean "
        f"{result['mean_signed_error_percent']:+.2f}%"
    )
    yield (
        f"worst underestimate {result['worst_underestimate_percent']:.1f}%, overestimate "
        f"{result['worst_overestimate_percent']:.1f}%; underestimated by more than 10%: "
        f"{result['underestimated_by_more_than_10_percent']}"
    )
    yield (
        f"same verdict at 95% of capacity: {100 * result['verdict_agreement']:.1f}% of all, "
        f"{'none' if near is None else f'{100 * near:.1f}%'} of those near capacity"
    )
    yield f"called safe (at most 95% of capacity) and above capacity: {result['called_safe_and_above_capacity']}"
    yield ""
    yield "| | | configurations | median | 95th | signed mean | worst under | worst over | under by > 10% | same verdict |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for column, values in result["by"].items():
        for value, f in values.items():
            keys = ("median", "p95", "mean_signed")
            cells = [f"{f[f'{key}_error_percent']:.2f}" for key in keys]
            cells += [f"{f[f'worst_{way}estimate_percent']:.1f}" for way in ("under", "over")]
            cells += [str(f["underestimated_by_more_than_10_percent"]), f"{100 * f['verdict_agreement']:.1f}%"]
            yield f"| {column} | {value} | {f['configurations']} | {' | '.join(cells)} |"
    for title in ("most_underestimated", "most_overestimated", "errors"):
        if result[title]:
            yield ""
            yield f"{title.replace('_', ' ')}:"
            yield from (f"  {line}" for line in result[title])


# --------------------------------------------------------------------------------------------------------------- picture


def picture(rows: Sequence[Row], path: Path) -> None:
    """Plots estimate against XLA's figure, and the error by how full the GPU is. Raises ConfigError as plots.schedule.save."""
    from jaxllm.plots import schedule

    compiled = [row for row in rows if not row["error"]]
    figure = schedule.new_figure(12, 5.4, dpi=100)
    both, errors = figure.subplots(1, 2)
    totals = [row[key] / 2**30 for row in compiled for key in ("total_bytes", "estimate_bytes")] or [1.0, 10.0]
    ends = [min(totals) / 1.2, max(totals) * 1.2]
    both.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="0.9", lw=0, label="within 10%")
    both.plot(ends, ends, color="0.5", lw=0.8)
    errors.axhspan(-10, 10, color="0.9", lw=0)
    errors.axhline(0, color="0.5", lw=0.8)
    errors.axvspan(1 - NEAR, 1 + NEAR, color=(1, 0.75, 0.3), alpha=0.3, lw=0, zorder=1.5)
    models = [
        model for model in dict.fromkeys((*MODELS, *NETWORKS, *MIXTURES)) if any(row["model"] == model for row in compiled)
    ]
    colors = ("#1f5fa6", "#d46a0e", "#2a8048", "#8a4fa3", "#b03a48", "#5f5f5f", "#0d8a8a", "#c2a300", "#7a4a1e", "#d06ba8")
    for model, marker, color in zip(models, "o^svD<>PX*", colors, strict=False):
        mine = [row for row in compiled if row["model"] == model]
        style = {"s": 16, "marker": marker, "color": color, "alpha": 0.65, "linewidths": 0}
        x, y = ([row[key] / 2**30 for row in mine] for key in ("total_bytes", "estimate_bytes"))
        both.scatter(x, y, label=f"{model} ({len(mine)})", **style)
        shares = [row["total_bytes"] / row["capacity_bytes"] for row in mine]
        errors.scatter(shares, [100 * relative_error(row) for row in mine], **style)
    both.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="compiled by XLA, GiB", ylabel="estimated, GiB")
    both.set_title(f"Memory of a train step on one GPU, {len(compiled)} configurations")
    both.legend(loc="upper left", frameon=False)
    errors.set(xscale="log", xlabel="XLA's figure, share of capacity", ylabel="estimate's error, %")
    errors.set_title("Error; grey: within 10%, amber: within 15% of capacity")
    schedule.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_mutually_exclusive_group()
    of_kind = partial(kinds.add_argument, dest="own", action="store_const", default=(TABLE, SEED, COUNT, MODELS))
    beside = (NETWORKS_TABLE, NETWORKS_SEED, NETWORKS_COUNT, NETWORKS)
    of_kind("--networks", const=beside, help="networks beside Llama, with their own table, seed and count")
    of_kind("--mixtures", const=(MIXTURES_TABLE, MIXTURES_SEED, MIXTURES_COUNT, MIXTURES), help="mixtures of experts, likewise")
    parser.add_argument("--table", type=Path, help="the CSV")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, help="total number of configurations")
    parser.add_argument("--limit", type=int, help="maximum number of configurations to compile now")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--estimate", choices=list(ESTIMATES), default="jaxllm", help="estimate for drawing and scoring")
    parser.add_argument("--redo", choices=["errors", "changed"], help="drop these rows first")
    parser.add_argument("--subset", type=int, help="compile so many of the table's quick rows again, into a separate table")
    parser.add_argument("--into", type=Path, help="compile the table's rows again, those that this other table lacks")
    parser.add_argument("--rescore", action="store_true", help="compute estimates again, compile nothing")
    parser.add_argument("--summary", action="store_true", help="only print the agreement")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object, alone on standard output")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in zip(("table", "seed", "count"), options.own[:3], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.serve:
        return serve()
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else (lambda text: print(text, flush=True))
    estimate, rows = ESTIMATES[options.estimate], read_table(options.table)
    if options.rescore:
        rows = [row | rescored(row, estimate) for row in rows]
        write_table(options.table, rows)
    elif options.subset:
        rows = compile_subset(rows, options, say)
    elif options.into:
        rows = compile_into(rows, options, say)
    elif not (options.summary or options.picture):
        rows = compile_more(rows, options, say)
    if options.picture:
        picture(rows, options.picture)
    result = summary(rows)
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    return None


def compile_subset(rows: Sequence[Row], options: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    if not rows:
        sys.exit(f"{options.table} has nothing to choose from: compile first, without --subset.")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "subset.csv"
        cases = [case_of(row) for row in subset(rows, options.subset)]
        run(cases, table, options.workers, options.seed, ESTIMATES[options.estimate], say)
        return read_table(table)


def compile_into(rows: Sequence[Row], options: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    """Compiles the rows again that options.into lacks, up to --limit. Pipelines of fewer microbatches than stages come last."""
    done = {row["index"] for row in read_table(options.into)}
    left = sorted((row for row in rows if row["index"] not in done), key=lambda row: row["microbatches"] < row["pipe"])
    run(
        [case_of(row) for row in left[: options.limit]],
        options.into,
        options.workers,
        options.seed,
        ESTIMATES[options.estimate],
        say,
    )
    rows = read_table(options.into)
    write_table(options.into, rows)
    return rows


def compile_more(rows: Sequence[Row], options: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    """Compiles cases without a row, up to --limit."""
    estimate, models = ESTIMATES[options.estimate], options.own[3]
    if options.redo == "errors":
        rows = [row for row in rows if not row["error"]]
    elif options.redo == "changed":
        drawn = {case.index: case.hash for case in draw(options.seed, options.count, estimate, models)}
        rows = [row for row in rows if row["seed"] == options.seed and drawn.get(row["index"]) == row["hash"]]
    # Also removes a truncated last line.
    write_table(options.table, rows)
    cases, changed = still_to_do(rows, options.seed, options.count, estimate, models)
    if changed:
        say(f"{changed} rows differ from today's draw; they are kept (--redo changed compiles them again).")
    try:
        run(cases[: options.limit], options.table, options.workers, options.seed, estimate, say)
    except KeyboardInterrupt:
        say("Stopped; rerun the same command to resume.")
    rows = read_table(options.table)
    write_table(options.table, rows)
    return rows


if __name__ == "__main__":
    main()
