"""The train step of jaxllm beside that of MaxText 0.2.5: both compiled for absent H100s, read by one kernel account.

    pip install -e '.[aot]' aqtp omegaconf && pip install --no-deps maxtext==0.2.5        Python 3.12 or newer
    python benchmarks/beside_maxtext.py [STEP ...] [--file FILE] [--table | --write]

    STEP         steps to compile, of those in STEPS; default: all, 20 to 30 minutes on two cores
    --file       file of figures, default benchmarks/beside_maxtext.json: what it lacks is compiled and added
    --table      prints the table of the file, and compiles nothing
    --write      writes the tables into benchmarks/RESULTS.md and docs/comparison.md too

Nothing runs on a GPU and nothing is timed. Each program is compiled in a process of its own. The kernels of both sides count by
the same rates, as in `jaxllm compile --kernels` (jaxllm/compile/kernels.py).

Equal on both sides: JAX, XLA and cuDNN, the description of the GPU, dims, tokens, microbatches, AdamW on float32 weights and
moments, bfloat16 compute, and cuDNN's causal attention without document masks. Everything else is each side's own choice.
MaxText's is what it ships for GPUs: remat policy and embedding of its Llama 3 8B, and XLA's flags of its Llama 2 7B on one host
of H100s. Its other programs have XLA's default flags, or layers that are not scanned.

Not as MaxText ships it:

- Its attention is cuDNN's through JAX, not TransformerEngine's, which is built with CUDA. In scanned layers cuDNN's forward
  then runs twice; the table has that time by itself.
- Modules of EMPTY are empty: clouds, tokenizers, data sets, quantization, conversion of checkpoints. The step uses none of
  them, or it would not trace. With the real qwix, tokamax, drjax, pathwaysutils, sentencepiece and tiktoken the program of 1B
  was the same, letter by letter.
- Its train_compile.py takes the GPUs that are present, and JAX asks one for cuDNN's version and its compute capability. Here
  devices are described, and the answers are those of the description.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import subprocess_runner
from gpu_peers import EmptyModules
from jax.sharding import AxisType, Mesh
from markdown_sections import write_between

from jaxllm.cluster.initialize import code_hash
from jaxllm.compile.aot import compile_step, gpu_devices, require_compiler
from jaxllm.compile.hlo import TRIPS, Module
from jaxllm.compile.kernels import kernel_account, kernels
from jaxllm.compile.overlap import by_kind, simulate_overlap, total
from jaxllm.config import Config, ConfigError, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.machine.host import installed_version
from jaxllm.mesh.axes import axis_sizes
from jaxllm.private_jax import cudnn_binding
from jaxllm.run.memory_check import total_bytes

GPU, GPUS_PER_HOST = GPUS["h100-80gb"], 8
MAXTEXT = "0.2.5"
INSTALL = f"pip install aqtp omegaconf && pip install --no-deps maxtext=={MAXTEXT}"
CHECKOUT = Path(__file__).resolve().parents[1]
FILE, RESULTS = Path(__file__).with_name("beside_maxtext.json"), Path(__file__).with_name("RESULTS.md")
PAGE = CHECKOUT / "docs" / "comparison.md"
SEQUENCE_LENGTH, LIMIT_S = 8192, 1800
Figures = dict[str, Any]

# -------------------------------------------------------------------------------------------------- steps and their programs


class Step(NamedTuple):
    title: str
    gpus: int
    overrides: Sequence[str]
    """jaxllm's. MaxText gets its dims, tokens and microbatches from the same config."""
    layout: Sequence[str] = ()
    """MaxText's keys of the same layout."""


EIGHT_B = ("model.name=llama-3.1-8b", "train.global_batch_sequences=16", "train.microbatch_sequences=1")
ONE_B = ("model.name=llama-3.2-1b", "train.global_batch_sequences=8", "train.microbatch_sequences=4")
STEPS: Mapping[str, Step] = {
    "1b": Step("1B, 1 GPU, 2 microbatches of 4", 1, ONE_B),
    "8b-10-layers": Step(
        "10 layers of 8B, 1 GPU, 8 microbatches of 1", 1, (*EIGHT_B, "model.num_layers=10", "train.global_batch_sequences=8")
    ),
    "8b-zero3": Step("8B, 8 GPUs, ZeRO 3, 2 microbatches of 1", 8, (*EIGHT_B, "parallel.zero=3"), ("ici_fsdp_parallelism=8",)),
    "8b-tensor": Step(
        "8B, 8 GPUs, tensor 4, 8 microbatches of 1",
        8,
        (*EIGHT_B, "parallel.tensor=4", "parallel.zero=1"),
        ("ici_fsdp_parallelism=2", "ici_tensor_sequence_parallelism=4"),
    ),
}
XLA_FLAGS = (
    *("--xla_gpu_enable_latency_hiding_scheduler=true", "--xla_gpu_enable_triton_gemm=false"),
    *("--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_highest_priority_async_stream=true"),
    *("--xla_gpu_all_reduce_combine_threshold_bytes=134217728", "--xla_gpu_all_gather_combine_threshold_bytes=134217728"),
    *("--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864", "--xla_gpu_pipeline_all_gather=on"),
    *("--xla_gpu_pipeline_reduce_scatter=on", "--xla_gpu_pipeline_all_reduce=on"),
    *("--xla_gpu_enable_while_loop_double_buffering=true", "--xla_gpu_enable_all_gather_combine_by_dim=false"),
    *("--xla_gpu_enable_reduce_scatter_combine_by_dim=false", "--xla_disable_hlo_passes=rematerialization"),
)
"""All of MaxText's configs/gpu/a3/llama_2_7b/1vm.sh, but the dump."""
RECIPE = {"remat_policy": "minimal_with_context", "use_iota_embed": True, "attention": "cudnn_flash_jax"}
"""MaxText's configs/gpu/models/llama3_8b.yml, but for the attention."""
OURS = "jaxllm"
OUR_PROGRAMS: Mapping[str, Sequence[str]] = {
    OURS: (),
    f"{OURS}, bfloat16 sums": ("parallel.reduce_dtype=bfloat16",),
}
"""Program -> overrides. The second is of the step with ZeRO 3 alone: MaxText adds gradients in bfloat16 too."""
THEIRS, NOT_SCANNED = "MaxText", ("scan_layers=false",)
THEIR_PROGRAMS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    THEIRS: (XLA_FLAGS, ()),
    f"{THEIRS}, unrolled": (XLA_FLAGS, NOT_SCANNED),
    f"{THEIRS}, XLA's flags": ((), ()),
    f"{THEIRS}, XLA's flags, unrolled": ((), NOT_SCANNED),
}
"""Program -> (XLA's flags, MaxText's keys). The first is as MaxText ships it."""
EMPTY = (
    *("PIL", "datasets", "drjax", "fastapi", "maxtext.checkpoint_conversion", "ml_collections", "pathwaysutils", "qwix"),
    *("requests", "sentencepiece", "sympy", "tensorflow", "tensorflow_datasets", "tiktoken", "tokamax", "torchdata"),
    *("transformers", "tyro", "uvicorn", "xprof"),
)


def programs(name: str) -> list[str]:
    return [*(program for program in OUR_PROGRAMS if program == OURS or name == "8b-zero3"), *THEIR_PROGRAMS]


def configured(name: str, program: str = OURS) -> Config:
    sections = {"data": {"mask_documents": False}, "train": {"steps": 1, "sequence_length": SEQUENCE_LENGTH}}
    overrides = ("parallel.remat=selective", *STEPS[name].overrides, *OUR_PROGRAMS.get(program, ()))
    return load_config(sections, overrides).resolve(STEPS[name].gpus)


def maxtext_keys(name: str, program: str = THEIRS) -> dict[str, str]:
    """MaxText's settings of a program, with the dims, tokens and microbatches of jaxllm's config."""
    config = configured(name)
    model, M = config.model, config.num_microbatches
    values: dict[str, Any] = {
        **{"run_name": "beside", "hardware": "gpu", "dataset_type": "synthetic", "enable_checkpointing": False},
        **{"skip_jax_distributed_system": True, "log_config": False, "jax_cache_dir": "", "base_output_directory": "unused"},
        **{"compile_topology": "a3", "compile_topology_num_slices": 1, "internal_compile": True},
        **{"internal_compile_num_devices": config.devices, "model_name": "llama3.1-8b", "override_model_config": True},
        **{"base_num_decoder_layers": model.num_layers, "base_emb_dim": model.hidden_size, "head_dim": model.head_dim},
        **{"base_mlp_dim": model.intermediate_size, "base_num_query_heads": model.num_heads, "vocab_size": model.vocab_size},
        **{"base_num_kv_heads": model.num_kv_heads, "logits_via_embedding": model.tie_embeddings},
        **{"normalize_embedding_logits": False, "dtype": model.compute_dtype, "weight_dtype": "float32"},
        **{"max_target_length": config.train.sequence_length, "gradient_accumulation_steps": M},
        **{"per_device_batch_size": config.train.global_batch_sequences / M / config.devices},
        **RECIPE,
        **dict(key.split("=") for key in (*STEPS[name].layout, *THEIR_PROGRAMS[program][1])),
    }
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}


# ------------------------------------------------------------------------------------------------ one program, in its process


@dataclass
class Compiled:
    """A compiled step, with the axes of its mesh, the tokens of its batch and the CPU seconds from the mesh to the program."""

    executable: Any = None
    axes: Mapping[str, int] | None = None
    tokens: int = 0
    cpu_s: float = 0.0


def compile_ours(config: Config, devices: Sequence[jax.Device]) -> Compiled:
    began_s = time.process_time()
    executable = compile_step(config, devices)
    return Compiled(executable, axis_sizes(config.parallel), config.step_tokens, time.process_time() - began_s)


def compile_theirs(keys: Mapping[str, str], devices: Sequence[jax.Device]) -> Compiled:
    """MaxText's train_compile puts the step together, for a mesh of these devices."""
    sys.meta_path.insert(0, EmptyModules(EMPTY))
    import maxtext.configs
    from maxtext.trainers.pre_train import train_compile
    from maxtext.utils.max_utils import fill_unspecified_mesh_axes

    found, compile_step_of_theirs = Compiled(), train_compile.jit_and_compile

    def mesh_of(config: Any) -> Mesh:
        assert config.shard_mode.value == "auto", config.shard_mode
        sizes = fill_unspecified_mesh_axes(config.ici_parallelism.copy(), len(devices), "ICI")
        mesh = Mesh(np.array(devices).reshape(sizes), config.mesh_axes, axis_types=(AxisType.Auto,) * len(sizes))
        found.axes, found.tokens = dict(mesh.shape), config.global_batch_size_to_train_on * config.max_target_length
        found.cpu_s = -time.process_time()
        return mesh

    def compiled(*arguments: Any) -> Any:
        found.executable = compile_step_of_theirs(*arguments)
        found.cpu_s += time.process_time()
        return found.executable

    answers = {
        "check_cudnn_version": cudnn_number,
        "check_compute_capability": lambda least: GPU.chip.compute_capability >= tuple(map(int, least.split("."))),
        "is_cuda_compute_capability_equal": lambda one: GPU.chip.compute_capability == tuple(map(int, one.split("."))),
    }
    base = Path(maxtext.configs.__file__).parent / "base.yml"
    with (
        mock.patch.multiple(cudnn_binding(), **answers),
        mock.patch.multiple(train_compile, get_topology_mesh=mesh_of, jit_and_compile=compiled),
    ):
        train_compile.main(["train_compile", str(base), *(f"{key}={value}" for key, value in keys.items())])
    return found


def cudnn_number() -> int:
    """The installed cuDNN as it tells its version: 92801 for 9.28.1."""
    major, minor, patch = (int(part) for part in (installed_version("nvidia-cudnn-cu13") or "9.12.0").split(".")[:3])
    return 10_000 * major + 100 * minor + patch


def with_trip_count(text: str, runs: int) -> str:
    """The program with the trip count of a loop for which XLA gives none: the one by which attention's backward kernel runs as
    often as a step must, once a layer and microbatch. XLA's collective pipeliner loses that of the loop over microbatches."""
    loops = [line for line in text.splitlines() if " while(" in line and not TRIPS.search(line)]
    if not loops:
        return text
    (loop,) = loops

    def counted(trips: int) -> str:
        return text.replace(loop, f'{loop}, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}')

    once, twice = (attention_runs(counted(trips)) for trips in (1, 2))
    more, left = divmod(runs - once, twice - once)
    if left:
        raise ValueError(f"No trip count of a loop gives {runs} runs of attention's backward kernel.")
    return counted(1 + more)


def attention_runs(text: str) -> int:
    return sum(kernel.runs for kernel in kernels(Module(text, {})) if kernel.kind == "attention backward")


def figures(compiled: Compiled, config: Config) -> Figures:
    """Figures of one GPU by the account. `config` gives the rates and the model FLOPs."""
    text = with_trip_count(compiled.executable.as_text(), config.model.num_layers * config.num_microbatches)
    module, memory = Module(text, compiled.axes or {}), compiled.executable.memory_analysis()
    rows = by_kind(simulate_overlap(module, GPU, GPUS_PER_HOST))
    account, sent = kernel_account(module, config, GPU, GPUS_PER_HOST, rows), total(rows)
    seconds = {row.part: row.seconds for row in account.parts}
    products = [row for row in account.parts if row.flops]
    return {
        "step_s": account.step_s,
        "mfu": account.mfu_full_square,
        "products_s": sum(row.seconds for row in products),
        "attention_again_s": seconds.get("attention_again", 0.0),
        "moves_s": sum(seconds.get(part, 0.0) for part in ("stacks", "slices", "zero_fills", "copies")),
        "exposed_s": sent.exposed_s,
        "product_flops": sum(row.flops for row in products),
        "moved_bytes": sum(row.bytes for row in account.parts if row.part != "transfers"),
        "launches": sum(row.runs for row in account.parts),
        "total_bytes": total_bytes(memory),
        "argument_bytes": memory.argument_size_in_bytes,
        "sent_bytes": round(sent.sent_bytes),
        "bare_share": sent.bare_share,
        "tokens": compiled.tokens,
        "cpu_s": compiled.cpu_s,
    }


def compile_here(name: str, program: str) -> None:
    """Prints the figures of a program as JSON."""
    config = configured(name, program)
    devices = gpu_devices(1, config.devices, GPU)
    in_peer = program in THEIR_PROGRAMS
    compiled = compile_theirs(maxtext_keys(name, program), devices) if in_peer else compile_ours(config, devices)
    print(json.dumps(figures(compiled, config)), flush=True)


# ------------------------------------------------------------------------------------------------------------ all programs


def versions() -> dict[str, str | None]:
    """What the figures depend on."""
    packages = {"jax": "jax", "plugin": "jax-cuda13-plugin", "cudnn": "nvidia-cudnn-cu13", "nvcc": "nvidia-cuda-nvcc"}
    return {**{name: installed_version(package) for name, package in packages.items()}, "jaxllm": code_hash()[:10]}


def commit() -> str:
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False).stdout.strip() or "not known"


def read(file: Path) -> dict[str, Any]:
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    return {"versions": {}, "maxtext": MAXTEXT, "commit": commit(), "date": datetime.date.today().isoformat(), "steps": {}}


def missing(stored: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, program) for name in names for program in programs(name) if program not in stored["steps"].get(name, {})]


def refusal(stored: Mapping[str, Any], wanted: Sequence[tuple[str, str]], file: Path) -> str | None:
    """Why these programs cannot be compiled and stored here, in one sentence; None: they can."""
    found = installed_version("maxtext")
    if found != MAXTEXT and any(program in THEIR_PROGRAMS for _, program in wanted):
        return f"MaxText {MAXTEXT} is needed, and {'none' if found is None else found} is installed: {INSTALL}"
    if wanted and stored["steps"] and stored["versions"] != (here := versions()):
        others = [f"{name} {version}" for name, version in stored["versions"].items() if version != here.get(name)]
        return f"{file} has figures of other versions ({', '.join(others)}): name another file with --file, or delete it."
    try:
        require_compiler(GPU)
    except ConfigError as error:
        return str(error)
    return None


def compile_all(stored: dict[str, Any], wanted: Sequence[tuple[str, str]], file: Path) -> list[str]:
    """Compiles one program after the other, and stores the figures of each at once. Returns a sentence for each that failed."""
    failures = []
    stored["versions"] = versions() if wanted else stored["versions"]
    for name, program in wanted:
        flags = " ".join(THEIR_PROGRAMS[program][0]) if program in THEIR_PROGRAMS else ""
        variables = {"XLA_FLAGS": flags, "DECOUPLE_GCLOUD": "TRUE", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        said, error = subprocess_runner.run([sys.executable, __file__, "--one", name, program], LIMIT_S, variables)
        if error is None and said:
            stored["steps"].setdefault(name, {})[program] = said[-1]
            file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        else:
            failures.append(f"{name}, {program}: {error}")
        print(f"{name}, {program}: {error or 'compiled'}", file=sys.stderr, flush=True)
    return failures


# ------------------------------------------------------------------------------------------------------------------ tables


def table(stored: Mapping[str, Any]) -> str:
    """A row for each program, those of jaxllm first."""
    head = ["step, sequences of 8,192", "program", "ms", "matmuls, attention", "attention again", "moves", "exposed", "rest"]
    head += ["MFU", "TFLOP", "GB moved", "launches", "memory", "GB sent", "bare", "compiled in", "ms, of jaxllm's"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, by_program in in_order(stored):
        for n, (program, row) in enumerate(by_program.items()):
            lines.append(f"| {' | '.join([STEPS[name].title if n == 0 else '', program, *cells(row, by_program.get(OURS))])} |")
    return "\n".join(lines)


def cells(row: Figures, ours: Figures | None) -> Iterator[str]:
    rest_s = row["step_s"] - row["products_s"] - row["moves_s"] - row["exposed_s"]
    times = (row["step_s"], row["products_s"], row["attention_again_s"], row["moves_s"], row["exposed_s"], rest_s)
    yield from (f"{1e3 * seconds:,.0f}" for seconds in times)
    yield from (f"{row['mfu']:.1%}", f"{row['product_flops'] / 1e12:,.0f}", f"{row['moved_bytes'] / 1e9:,.0f}")
    yield from (f"{row['launches']:,}", gib(row))
    yield from (f"{row['sent_bytes'] / 1e9:.0f}", f"{row['bare_share']:.0%}") if row["sent_bytes"] else ("", "")
    yield f"{row['cpu_s']:.0f} s"
    yield f"{row['step_s'] / ours['step_s']:.2f}" if ours else ""


def gib(row: Figures) -> str:
    return f"{row['total_bytes'] / 2**30:.1f} GiB" + ("" if fits(row) else " (does not fit)")


def fits(row: Figures) -> bool:
    return row["total_bytes"] <= GPU.capacity_bytes


def in_order(stored: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Figures]]]:
    for name in STEPS:
        if found := stored["steps"].get(name):
            yield name, {program: found[program] for program in programs(name) if program in found}


def best_of_theirs(by_program: Mapping[str, Figures]) -> str:
    """The fastest of MaxText's programs that fit."""
    fitting = [program for program in THEIR_PROGRAMS if program in by_program and fits(by_program[program])]
    return min(fitting, key=lambda program: by_program[program]["step_s"])


def short_table(stored: Mapping[str, Any]) -> str:
    """A row for each step: jaxllm, MaxText as it ships, and its fastest program that fits."""
    lines = ["| step, sequences of 8,192 | jaxllm | MaxText, as shipped | MaxText, fastest that fits |", "|---|---|---|---|"]
    for name, by_program in in_order(stored):
        best = best_of_theirs(by_program)
        how = best.removeprefix(THEIRS).removeprefix(", ") or "as shipped"
        texts = [short(by_program[OURS]), short(by_program[THEIRS]), f"{short(by_program[best])}; {how}"]
        lines.append(f"| {' | '.join([STEPS[name].title, *texts])} |")
    return "\n".join(lines)


def short(row: Figures) -> str:
    sent = f"{row['sent_bytes'] / 1e9:.0f} GB sent, " if row["sent_bytes"] else ""
    return f"{1e3 * row['step_s']:,.0f} ms, {gib(row)}, {sent}compiled in {row['cpu_s']:.0f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--write", action="store_true", help="write the tables into both pages")
    parser.add_argument("--one", nargs=2, metavar=("STEP", "PROGRAM"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        compile_here(*given.one)
        return
    if unknown := [name for name in given.names if name not in STEPS]:
        parser.error(f"there is no step {unknown[0]}: choose from {', '.join(STEPS)}")
    stored = read(given.file)
    wanted = [] if given.table else missing(stored, given.names or list(STEPS))
    if wanted and (reason := refusal(stored, wanted, given.file)):
        sys.exit(reason)
    failures = compile_all(stored, wanted, given.file)
    print(table(stored))
    if given.write and not (incomplete := missing(stored, list(STEPS))):
        write_between(RESULTS, "beside-maxtext", table(stored))
        write_between(PAGE, "beside-maxtext", short_table(stored))
    elif given.write:
        failures.append(f"The pages have all programs, and {given.file} lacks {len(incomplete)}: nothing was written.")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
