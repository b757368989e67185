"""Memory of the real train step, compiled for H100s without a GPU: ZeRO levels on eight, remat policies on one, long contexts,
numbers of GPUs that divide no dim, and everything on the host that can go.

python benchmarks/compiled_memory.py        (needs the extra aot; six minutes)
python benchmarks/compiled_memory.py host   (the last alone; three minutes)

H200s are H100s with 141 GB of memory, so a program compiled for one uses the same memory on the other.
"""

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxllm.compile.aot import compile_step, gpu_devices
from jaxllm.config import load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.memory import estimate_memory

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 8192}


def temporary_mib(gpus: int, layers: int, train: dict, *overrides: str) -> float:
    config = load_config({"model": {**SHAPE, "num_layers": layers}, "train": {"steps": 10, **train}}, overrides)
    return compile_step(config, gpu_devices(hosts=1, gpus_per_host=gpus)).memory_analysis().temp_size_in_bytes / 2**20


def long_context(hosts: int, S: int, *overrides: str) -> None:
    """Llama 3.1 8B, one sequence of packed documents per step, ZeRO 3 over the context ranks."""
    train = {"steps": 10, "sequence_length": S, "global_batch_sequences": 1}
    fixed = ("parallel.data=1", "parallel.zero=3", "parallel.context_method=ring")
    config = load_config({"model": {"name": "llama-3.1-8b"}, "train": train}, [*fixed, *overrides])
    started = time.perf_counter()
    memory = compile_step(config, gpu_devices(hosts=hosts, gpus_per_host=8)).memory_analysis()
    arguments, temporary = memory.argument_size_in_bytes / 2**30, memory.temp_size_in_bytes / 2**30
    compiled_s = time.perf_counter() - started
    print(
        f"8B, S {S:,}, {8 * hosts} GPUs, {' '.join(overrides)}: state {arguments:.1f} GiB and temporaries {temporary:.1f} GiB "
        f"a GPU; compiled in {compiled_s:.0f} s",
        flush=True,
    )


def any_ranks(model: str, hosts: int, *overrides: str) -> None:
    """Llama 3.1 with remat full, 8,192 tokens and four microbatches of one sequence."""
    train = {"steps": 10, "sequence_length": 8192, "global_batch_sequences": 32 * hosts, "microbatch_sequences": 1}
    recipe = {"model": {"name": model}, "train": train, "data": {"mask_documents": False}, "parallel": {"remat": "full"}}
    config = load_config(recipe, overrides).resolve(8 * hosts)
    estimated = estimate_memory(config, GPUS["h100-80gb"]).peak_bytes / 2**30
    memory = compile_step(config, gpu_devices(hosts=hosts, gpus_per_host=8)).memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    compiled = (used - memory.alias_size_in_bytes) / 2**30
    print(
        f"{model}, {8 * hosts} GPUs, {' '.join(overrides)}: {compiled:.1f} GiB, estimated {estimated:.1f} "
        f"({100 * (estimated / compiled - 1):+.1f}%)",
        flush=True,
    )


def on_host(gpus: int, model: str, microbatches: int, *overrides: str) -> None:
    """Sequences of 4,096 tokens, with the state on the host and with everything that can go."""
    per_microbatch = 4 if "train.microbatch_sequences=4" in overrides else 1
    train = {"steps": 10, "sequence_length": 4096, "global_batch_sequences": gpus * per_microbatch * microbatches}
    recipe = {"model": {"name": model}, "train": {**train, "microbatch_sequences": 1}, "data": {"mask_documents": False}}
    print(f"{model}, {gpus} GPUs, {microbatches} microbatches, {' '.join(overrides)}:", flush=True)
    for what in ("optimizer_and_master", "all"):
        config = load_config(recipe, [*overrides, "parallel.zero=3", f"parallel.offload_state={what}"]).resolve(gpus)
        estimated = estimate_memory(config, GPUS["h100-80gb"], on_device=False)
        memory = compile_step(config, gpu_devices(hosts=1, gpus_per_host=gpus)).memory_analysis()
        used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        compiled = used - memory.alias_size_in_bytes
        there = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
        print(
            f"    {what}: {compiled / 2**30:.1f} GiB a GPU, estimated {100 * (estimated.peak_bytes / compiled - 1):+.1f}%; "
            f"{there / 2**30:.1f} on the host, estimated {100 * (estimated.host_bytes / there - 1):+.2f}%",
            flush=True,
        )


def everything_on_the_host() -> None:
    for remat in ("full", "selective", "offload"):
        on_host(1, "llama-2-13b", 4, f"parallel.remat={remat}")
    on_host(1, "llama-2-13b", 2, "parallel.remat=full", "train.microbatch_sequences=4")
    on_host(1, "llama-2-13b", 1, "parallel.remat=full")
    for remat in ("full", "offload"):
        on_host(8, "llama-3-70b", 4, f"parallel.remat={remat}")
    on_host(8, "llama-2-70b", 4, "parallel.remat=full")


if __name__ == "__main__":
    if sys.argv[1:] == ["host"]:
        everything_on_the_host()
        sys.exit()
    batch = {"sequence_length": 1024, "global_batch_sequences": 32, "microbatch_sequences": 1}
    for zero in (0, 1, 2, 3):
        print(f"8 H100s, 8 layers, ZeRO {zero}: {temporary_mib(8, 8, batch, f'parallel.zero={zero}'):,.0f} MiB", flush=True)
    batch = {"sequence_length": 2048, "global_batch_sequences": 4}
    for scan in ("true", "false"):
        for remat in ("none", "selective", "full"):
            mib = temporary_mib(1, 6, batch, f"parallel.remat={remat}", f"model.scan_layers={scan}")
            print(f"1 H100, 6 layers, scan_layers {scan}, remat {remat}: {mib:,.0f} MiB", flush=True)
    for remat in ("full", "selective"):
        long_context(1, 2**17, "parallel.context=8", f"parallel.remat={remat}")
    long_context(8, 2**20, "parallel.context=64", "parallel.remat=full")
    long_context(8, 2**20, "parallel.context=8", "parallel.tensor=8", "parallel.remat=full")
    for hosts in (3, 7, 12, 48):
        for zero in (1, 3):
            any_ranks("llama-3.1-8b", hosts, f"parallel.zero={zero}")
            any_ranks("llama-3.1-70b", hosts, f"parallel.zero={zero}", "parallel.tensor=8")
    everything_on_the_host()
