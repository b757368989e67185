"""The program of rank 0 of many GPUs, on one GPU: the real program's kernels, shapes, buffers and launches, but no transfers.

    python benchmarks/gpu_pretend.py --dry-run [PATTERN]                 tiny models on eight CPU devices, here
    python benchmarks/gpu_pretend.py --predict h100-80gb [PATTERN]       compiles the cases without a GPU (extra aot)

`pretend` measures a case of gpu.py, in a process of its own: JAX starts for one topology. How it works, by the sources of XLA
and the machine code in the plugin of JAX 0.11.2 (0.10.2 has the same names):

- jax_mock_gpu_topology=1x8x1 (jax/_src/xla_bridge.py, _options_from_jax_configs) starts the client with enable_mock_nccl. It
  copies the description of the local GPU to eight processes (BuildDistributedDevices in xla/pjrt/gpu/se_gpu_pjrt_client.cc).
  The last number must be the number of visible GPUs. Compiled for 1x8x1 and for 1x1x8, a step is the same, letter by letter.
- With enable_mock_nccl no communicator is made, and the executor SKIPS every collective (mock_collectives in
  xla/backends/gpu/runtime/thunk_executor.cc and command_executor.cc, ExecuteThunksImpl in gpu_executable.cc). So a step takes
  the time of its compute alone, and what should have arrived is whatever the buffer held before.
- xla_gpu_collectives_implementation=loopback copies in the place of transfers, but a mocked client never reaches it. Without
  the mock its communicators count the ranks of this process alone (loopback_collectives.cc). A reduce-scatter then copies its
  whole input into a result that has room for one part: it overwrites other memory. So it is not used.
- Kernels would be timed in parts by the processes, which would wait for each other (autotuner_pass.cc):
  xla_gpu_shard_autotuning is off. Nothing else waits for absent ranks: no service, no heartbeats, no barrier at the end.

As no transfer runs, memory that only a transfer writes is filled with small numbers before steps are timed. The loss is not
right, and may not be finite.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import step
from gpu_cases import BASE, Figures, Tell, capacity_of, covered, kind_of, op_names, peak_bytes
from trace_parts import gpu_planes, kernels_of, trace_parts

from jaxllm.compile.hlo import Collective, Module
from jaxllm.compile.kernels import kernel_account
from jaxllm.compile.overlap import by_kind, done_of, simulate_overlap, total
from jaxllm.config import Config, load_config
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import GPUS, Gpu, gpu_from_device_kind
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.mesh.axes import axis_sizes

PER_HOST = 8
"""GPUs of a pretended host."""
SCALE = 0.02
"""Standard deviation of the weights, which are evenly distributed."""
CHUNK_BYTES, FILLED_SHARE = 2**28, 0.97
"""Memory is filled in chunks, up to this share of what the allocator may take."""
TINY = (
    *("model.num_layers=4", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=16", "model.vocab_size=256"),
)
KEPT = ("query", "key", "attention_output", "attention_lse", "attention_out", "mlp_gate", "mlp_up")
BUT_VALUE = f"parallel.remat={{{', '.join(f'{name}: keep' for name in KEPT)}}}"
OF_70B = "parallel.remat={key: keep, value: keep, mlp_gate: keep}"
LAYOUTS = {
    "tiny": ("8B", 8, 256, 8, ("parallel.zero=3",)),
    "ZeRO 3": ("8B", 8, 8192, 16, ("parallel.zero=3", "parallel.remat=selective")),
    "ZeRO 1, tensor 2": ("8B", 8, 8192, 16, ("parallel.zero=1", "parallel.tensor=2", "parallel.remat=selective")),
    "1F1B 2, tensor 2": (
        *("8B", 8, 8192, 16),
        ("parallel.zero=1", "parallel.pipe=2", "parallel.schedule=1f1b", "parallel.tensor=2", "parallel.remat=selective"),
    ),
    "context 2": ("8B", 8, 32768, 4, ("parallel.zero=3", "parallel.context=2", BUT_VALUE)),
    "best": ("70B", 64, 8192, 32, ("parallel.zero=3", "parallel.context=2", OF_70B)),
}
"""Name of a case -> model, GPUs, sequence length, sequences of a step, keys. The remat of `context 2` and the mesh of `best`
are what `jaxllm plan --host-gib-per-gpu 0` ranks first, of larger batches too. The plan for 70B keeps `up` too: compiled, that
takes 97% of what a step may take on an H100."""
MODELS = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b"}
EXPECTED_S = {"tiny": 25, "ZeRO 3": 48, "ZeRO 1, tensor 2": 63, "1F1B 2, tensor 2": 58, "context 2": 56, "best": 56}
"""Seconds of a case: 12 to start, as long to compile as --predict takes on two CPU cores, 3 to fill, the step's account six
times (five times for 70B), and a fifth more. Not measured."""


def cases(dry: bool) -> list[dict[str, Any]]:
    """Fields of each `gpu.Case`. The first is a probe: if it fails, so will the others."""
    found = []
    for name, (model, gpus, S, sequences, keys) in LAYOUTS.items():
        tiny = dry or name == "tiny"
        gpus, S, sequences = (8, 256, 16) if dry else (gpus, S, sequences)
        of_model = [f"model.name={MODELS[model]}", *(TINY if tiny else ())]
        of_step = [f"train.sequence_length={S}", f"train.global_batch_sequences={sequences}", "train.microbatch_sequences=1"]
        options = {
            "overrides": [*of_model, *of_step, *keys],
            "topology": f"1x{gpus}x1",
            "steps": 2 if dry or gpus > PER_HOST else 3,
            "traced": True,
        }
        about = {"model": model, "gpus": gpus, "sequence_length": S}
        case = {"name": f"pretend {gpus}, {model}, {name}", "kind": "pretend", "options": options, "about": about}
        found.append({**case, "expected_s": EXPECTED_S[name], "after": found[0]["name"] if found else ""})
    return found


def pretend(tell: Tell, overrides: Sequence[str], topology: str, steps: int, traced: bool = True) -> Figures:
    """Times the step of rank 0 of a run on the GPUs of `topology` (1 x GPUs x 1), whose transfers do not run."""
    import jax

    from jaxllm.compile.pretend import random_batch

    began = time.perf_counter()
    device = start(topology)
    devices = jax.devices()
    config = config_of(overrides, len(devices))
    gpu = gpu_from_device_kind(device.device_kind) or GPUS["h100-80gb"]
    mocked = device.platform == "gpu"
    tell(device=device.device_kind, devices=len(devices), local=jax.local_device_count(), transfers_run=not mocked)
    tell(start_s=time.perf_counter() - began, **predictions(config, gpu))
    compiled, arguments, compile_s = compile_for(config, devices, capacity_of(device))
    text = compiled.as_text()
    module = Module(text, axis_sizes(config.parallel))
    tell(compile_s=compile_s, **read_back(config, compiled, module, gpu))
    began = time.perf_counter()
    (state, _), (shardings, of_batch) = arguments, compiled.input_shardings[0]
    state, batch = filled(state, shardings), random_batch(config, of_batch["tokens"].mesh)
    jax.block_until_ready((state, batch))
    tell(fill_s=time.perf_counter() - began)

    def launch(number: int) -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"].addressable_data(0)

    losses = [float(launch(0))]
    # Filling the memory sets the allocator's peak, so it is read before.
    tell(in_use_bytes=peak_bytes(device))
    if mocked:
        fill_memory(device)
    window = time.time()
    lower, median, upper = np.percentile(step.time_block(launch, steps), [25, 50, 75]).tolist()
    tell(timed=[window, time.time()], step_s={"median": median, "lower_quartile": lower, "upper_quartile": upper})
    last_loss, traced_step = trace(launch, text, module) if traced else (float(launch(0)), None)
    losses = [loss if np.isfinite(loss) else None for loss in (*losses, last_loss)]
    return {"losses": losses, "finite": None not in losses, "trace": traced_step}


def config_of(overrides: Sequence[str], gpus: int) -> Config:
    return load_config({**BASE, "parallel": {"data": "auto"}}, overrides).resolve(gpus)


def start(topology: str) -> Any:
    """Starts JAX for this topology: with as many CPU devices where there is no GPU. Returns the device of rank 0."""
    import jax

    from jaxllm.compile import pretend
    from jaxllm.config import RunConfig

    devices = int(np.prod([int(size) for size in topology.split("x")]))
    # Programs of earlier runs would hide the time to compile.
    pretend.start(RunConfig(compilation_cache="off"), devices)
    if len(jax.devices()) != devices:
        raise RuntimeError(f"JAX shows {len(jax.devices())} devices instead of {devices}.")
    return jax.local_devices()[0]


def compile_for(config: Config, devices: Sequence[Any], capacity_bytes: int | None) -> tuple[Any, Any, float]:
    """(the compiled step, the shapes of its arguments, seconds)"""
    from jaxllm.compile import aot
    from jaxllm.mesh import placement

    began = time.perf_counter()
    hosts = {device.process_index: number // PER_HOST for number, device in enumerate(devices)}
    # Each pretended GPU has a process, as if it were a host.
    with mock.patch.object(placement, "hosts_of", return_value=hosts):
        lowered = aot.trace_step(config, devices).lowered
    options = aot.options_for(config, lowered, devices[0], capacity_bytes)
    if devices[0].platform != "cpu":
        options |= {"xla_gpu_shard_autotuning": False}
    compiled = lowered.compile(compiler_options=options)
    return compiled, lowered.args_info[0], time.perf_counter() - began


def predictions(config: Config, gpu: Gpu) -> Figures:
    """What is known before compiling."""
    predicted = estimate_step_time(config, gpu, PER_HOST)
    return {
        "microbatches": config.num_microbatches,
        "tokens_per_step": config.step_tokens,
        "estimate_bytes": estimate_memory(config, gpu).peak_bytes,
        "predicted_s": predicted.step_s,
        "predicted_compute_s": predicted.step_s - predicted.transfers_s,
    }


def read_back(config: Config, compiled: Any, module: Module, gpu: Gpu) -> Figures:
    """What XLA's program tells: its bytes, its compute by the kernel account, and behind what its schedule hides transfers."""
    from jaxllm.run.memory_check import total_bytes

    overlap = by_kind(simulate_overlap(module, gpu, PER_HOST, parallel=config.parallel))
    account = kernel_account(module, config, gpu, PER_HOST, overlap)
    transfers = sum(part.seconds for part in account.parts if part.part == "transfers")
    return {
        "compiled_bytes": total_bytes(compiled.memory_analysis()),
        "account_step_s": account.step_s,
        "account_compute_s": account.step_s - transfers,
        "exposed_transfers_s": total(overlap).exposed_s,
        "schedule": schedule(module.collectives()),
    }


def schedule(collectives: Sequence[Collective]) -> dict[str, Figures]:
    """For each kind over the same axes: executions a step, and the share of them with a matmul between start and done."""
    count, behind = Counter(), Counter()
    for c in collectives:
        if c.axes:
            key = f"{c.kind} over {' x '.join(c.axes)}"
            count[key] += c.executed
            behind[key] += c.executed * c.spans_matmul
    return {key: {"count": n, "behind_matmuls": behind[key] / n} for key, n in count.most_common()}


# -------------------------------------------------------------------------------------------------------------------- values


def filled(shapes: Any, shardings: Any) -> Any:
    """Arrays of these shapes, of which only the shards of this process are made: small numbers in weights, ones in the scales
    of norms, zeros in the rest."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    def values(shape: tuple[int, ...], dtype: Any, way: str) -> Any:
        if way == "small":
            return spread(shape).astype(dtype)
        return jnp.full(shape, way == "one", dtype)

    make = jax.jit(values, static_argnums=(0, 1, 2))

    def one(path: Any, info: Any, sharding: Any) -> Any:
        name = jax.tree_util.keystr(path)
        is_weight = "params" in name and jnp.issubdtype(info.dtype, jnp.floating)
        way = ("one" if "norm" in name else "small") if is_weight else "zero"
        devices = sorted(sharding.addressable_devices, key=lambda device: device.id)
        with jax.default_device(devices[0]):
            shard = make(sharding.shard_shape(info.shape), info.dtype, way)
        # A shard that several devices hold has the same numbers on each, and so have others of its shape.
        wheres = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        shards = [jax.device_put(shard, where) for where in wheres]
        return jax.make_array_from_single_device_arrays(info.shape, sharding, shards)

    return jax.tree_util.tree_map_with_path(one, shapes, shardings)


def spread(shape: Sequence[int]) -> Any:
    """Evenly distributed float32 numbers: a hash of their places, which compiles faster than a random generator."""
    import jax
    import jax.numpy as jnp

    place = jax.lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    hashed = (place * jnp.uint32(2654435761)) ^ (place >> 7)
    hashed = (hashed ^ (hashed >> 15)) * jnp.uint32(2246822519)
    return SCALE * 12**0.5 * ((hashed >> 8).astype(jnp.float32) / 2**24 - 0.5)


def fill_memory(device: Any) -> None:
    """Writes small numbers into the free memory of the allocator. Each pair of bfloat16 numbers is a small float32 too."""
    import jax
    import jax.numpy as jnp

    make, held = jax.jit(lambda: spread((CHUNK_BYTES // 2,)).astype(jnp.bfloat16)), []
    with suppress(jax.errors.JaxRuntimeError):  # Free memory may be in smaller pieces.
        while (stats := device.memory_stats())["bytes_in_use"] + 2 * CHUNK_BYTES < FILLED_SHARE * stats["bytes_limit"]:
            held.append(jax.block_until_ready(make()))


# --------------------------------------------------------------------------------------------------------------------- trace


def trace(launch: step.Launch, text: str, module: Module) -> tuple[float, Figures]:
    """(loss, profile of one step: seconds by kind of kernel, copies by their names, and the order of the launches)"""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        loss = float(launch(0))
        jax.profiler.stop_trace()
        file = next(Path(folder).rglob("*.xplane.pb"))
        profile = jax.profiler.ProfileData.from_file(str(file))
        ran, by_kind_s, copies_s = list(kernels_of(profile)), Counter(), Counter()
        op_name_of = op_names(text)
        for name, op, start_ns, end_ns in ran:
            kind = kind_of(name, op_name_of.get(op, ""))
            by_kind_s[kind] += 1e-9 * (end_ns - start_ns)
            if kind == "copy":
                copies_s[name] += 1e-9 * (end_ns - start_ns)
        return loss, {
            "busy_s": 1e-9 * covered([(start_ns, end_ns) for *_, start_ns, end_ns in ran]),
            "by_kind_s": dict(by_kind_s.most_common()),
            "copies_s": dict(copies_s.most_common(10)),
            "order": order(launches(profile, module), module),
            **(trace_parts(text, profile, 1) if gpu_planes(profile) else {}),
        }


def launches(profile: Any, module: Module) -> Iterator[str]:
    """Names of the program's instructions in the order in which the host launched them. A collective that the client skips has
    its place too."""
    known = {instruction.name for among in module.computations.values() for instruction in among}
    found = []
    for plane in profile.planes:
        if not plane.name.startswith("/host"):
            continue
        for line in plane.lines:
            for event in line.events:
                name = str(dict(event.stats).get("hlo_op", event.name)).removeprefix("Thunk:").lstrip("#%")
                if name in known:
                    found.append((event.start_ns, name))
    return (name for _, name in sorted(found))


def order(names: Iterator[str], module: Module) -> dict[str, Figures]:
    """As `schedule`, for the launches of a trace: matmuls between the start and the done of each asynchronous collective. The
    matmuls of a CUDA graph are launched at once: they count at its launch."""
    kind_at = {c.name: f"{c.kind} over {' x '.join(c.axes)}" for c in module.collectives() if c.axes and c.asynchronous}
    start_of, matmuls = {}, Counter()
    for among in module.computations.values():
        for instruction in among:
            if start := done_of(instruction, kind_at):
                start_of[instruction.name] = start
            elif instruction.op not in ("while", "conditional"):
                matmuls[instruction.name] = _matmuls_in(instruction, module)
    under_way, behind = {}, {}
    for name in names:
        if name in kind_at:
            under_way[name] = 0
        elif (start := start_of.get(name)) in under_way:
            behind.setdefault(kind_at[start], []).append(under_way.pop(start))
        else:
            under_way = {start: n + matmuls[name] for start, n in under_way.items()}
    return {
        key: {"count": len(n), "behind_matmuls": sum(map(bool, n)) / len(n), "matmuls": sum(n) / len(n)}
        for key, n in behind.items()
    }


def _matmuls_in(instruction: Any, module: Module) -> int:
    if instruction.op == "call":
        return sum(_matmuls_in(inner, module) for name in instruction.called for inner in module.computations[name])
    return int(module.has_matmul(instruction))


# ----------------------------------------------------------------------------------------------------------- without a GPU


def predict(gpu: Gpu, overrides: Sequence[str], topology: str, **_: Any) -> Figures:
    """The figures of a case that need no GPU: the step is compiled for absent ones, of the same topology."""
    from jaxllm.cluster import distributed
    from jaxllm.compile.aot import gpu_devices
    from jaxllm.cost_model.memory import cudnn_workspace

    distributed.start_without_devices()
    _, gpus, _ = map(int, topology.split("x"))
    config = config_of(overrides, gpus)
    devices = gpu_devices(gpus, 1, gpu)
    compiled, _, compile_s = compile_for(config, devices, gpu.capacity_bytes)
    module = Module(compiled.as_text(), axis_sizes(config.parallel))
    figures = {"compile_s": compile_s, **predictions(config, gpu), **read_back(config, compiled, module, gpu)}
    # Without a GPU, XLA does not know it.
    figures["compiled_bytes"] += cudnn_workspace(config, gpu)
    larger = max(figures["compiled_bytes"], figures["estimate_bytes"])
    return {**figures, "share": larger / gpu.capacity_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--dry-run", action="store_true")
    way.add_argument("--predict", metavar="GPU")
    parser.add_argument("pattern", nargs="?", default="")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    for case in cases(options.dry_run):
        if not re.search(options.pattern, case["name"]):
            continue
        found: Figures = {"name": case["name"]}
        if options.predict:
            found |= predict(find_gpu(options.predict), **case["options"])
        else:
            found |= pretend(lambda **figures: found.update(figures), **case["options"])  # noqa: B023
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
