"""XLA's flags, set before JAX starts. With distributed.py the only reader of the environment."""

from __future__ import annotations

import functools
import mmap
import os
import re
from pathlib import Path

import jaxlib

from jaxllm.config import Config, RunConfig
from jaxllm.plan.activations import policy_of
from jaxllm.plan.hardware import XLA_MEMORY_FRACTION

MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
MEMORY_VARIABLES = (
    MEMORY_FRACTION,
    # Its old name; JAX refuses both at once. And two other ways to say how memory is taken.
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)

CPU_FLAGS = {
    # jaxlib 0.10.2's YNNPACK matmul fusions give wrong numbers for some shapes: a gradient with a batch of 384 came out
    # nonzero where it is exactly 0 (tests/model/test_llama.py, a_document_never_sees_another). Without them it is right,
    # and no slower.
    "xla_cpu_experimental_ynn_fusion_type": "",
    # Forced CPU devices share a few cores: a collective's last rank may arrive long after the first. XLA's own limits
    # (20 s and 40 s) abort the process on a loaded machine.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "600",
}
SEVERAL_CPU_DEVICES_FLAGS = {
    # The scheduler that runs independent thunks at once lets two devices take two collectives in different order: each then
    # waits for the other for good. A pipeline's tick has such pairs: it hung in its first step, or crashed in a matmul that
    # read what was not there (jaxlib 0.10.2).
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # Nor may the thread pool of a device's operations take half of what is ready: a pipeline's tick runs layers forward and
    # backward in two loops that need nothing of each other, and XLA does not see that both hold collectives. One device of a
    # pair then waited in a loop's all-gather for the other, in the other loop's reduce-scatter; or the loops' messages met and
    # gradients were wrong, NaN too (2 of 6 first runs; 4 stages x context 2, ZeRO 3). With one thread all devices take one
    # order, and each has its core to share anyway.
    "xla_cpu_multi_thread_eigen": "false",
}
DETERMINISTIC_GPU_FLAGS = {"xla_gpu_deterministic_ops": "true"}

PIPELINE_GPU_OPTIONS = {
    # A loop with collectives inside may by default not run beside another collective: no message between stages would travel
    # behind a layer loop.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
OFFLOAD_GPU_OPTIONS = {
    # A block has up to nine tensors to fetch from the host; by default each waits for the one before, at the loop's top.
    "xla_gpu_experimental_parallel_async_compute_limit": 16,
}
HOST_GPU_OPTIONS = {
    # Percent of the GPU's memory beyond which XLA rematerialises, by default 95. It counts what lies in the host's memory too,
    # and would compute again for a limit that computing again cannot reach: 280 instructions of Llama 3 8B's step that offloads
    # 46 GiB, and 76 of one that has 49 GiB of state on the host (JAX 0.10.2, a H100's memory). What really does not fit is
    # for the estimate to refuse.
    "xla_gpu_memory_limit_slop_factor": 2000,
}


def compile_options(config: Config, platform: str) -> dict[str, int]:
    """Options to compile this config's train step with. What the user set in XLA_FLAGS wins."""
    if platform == "cpu":
        return {}
    options = PIPELINE_GPU_OPTIONS if config.parallel.pipe > 1 else {}
    offloads = bool(policy_of(config.parallel.remat).offload)
    options = options | (OFFLOAD_GPU_OPTIONS if offloads else {})
    options = options | (HOST_GPU_OPTIONS if offloads or config.parallel.offload_state != "none" else {})
    given = given_flags()
    return {name: value for name, value in options.items() if f"--{name}" not in given and is_known(name)}


def apply(run: RunConfig) -> list[str]:
    """Puts the flags of this run into XLA_FLAGS, and into the environment which share of a GPU's memory XLA may take; returns
    what was not there. What the user set there wins. Once JAX has started a device they have no effect.
    """
    flags = CPU_FLAGS | (DETERMINISTIC_GPU_FLAGS if run.deterministic else {})
    given = given_flags()
    cpu_devices = run.cpu_devices or _forced_cpu_devices(given)
    if cpu_devices is not None:
        flags |= SEVERAL_CPU_DEVICES_FLAGS
    added = [f"--{name}={value}" for name, value in flags.items() if f"--{name}" not in given and is_known(name)]
    if added:
        os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    if not any(os.environ.get(name) for name in MEMORY_VARIABLES):
        os.environ[MEMORY_FRACTION] = str(XLA_MEMORY_FRACTION)
        added.append(f"{MEMORY_FRACTION}={XLA_MEMORY_FRACTION}")
    return added


def _forced_cpu_devices(flags: str) -> int | None:
    given = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(given[-1]) if given else None


def given_flags() -> str:
    """XLA_FLAGS as they are now: what is compiled depends on them."""
    return os.environ.get("XLA_FLAGS", "")


@functools.cache
def is_known(flag: str) -> bool:
    """Whether the installed jaxlib has this flag. XLA aborts the process at one it does not know, so its libraries are searched
    for the name (0.1 s)."""
    for library in Path(jaxlib.__file__).parent.glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(flag.encode() + b"\0") != -1:
                return True
    return False
