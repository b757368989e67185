"""XLA's flags and the variables of CUDA and NCCL, set before JAX starts: presets by purpose and by kind of GPU. Only this
module and cluster/distributed.py read the environment.

The user's settings take precedence, and a flag that the installed jaxlib does not know is left out. Each preset was measured,
or its maker documents it; a comment says which.

Options that change the order of the step, and with it the memory that `jaxllm estimate` predicts, are on where compiled
schedules show that they hide transfers (`_collective_options`). JAX_OPTIMIZATION_LEVEL, which sets several of them at once, is
left to the user.

All sets of options were compiled with JAX 0.10.2, 0.11.2 and 0.12.0, for H100s. A comment names a version where its figures are
of one.
"""

import functools
import mmap
import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxllm.config import Config, ConfigError, RunConfig
from jaxllm.config.attention import HOPPER, Capability, window_shares
from jaxllm.config.layer_stack import has_own_layers, rings_tensor, sends_once
from jaxllm.config.model_spec import LAYERS, layer_parameters
from jaxllm.config.remat_policy import policy_of
from jaxllm.config.run_sections import MOST_CPU_DEVICES
from jaxllm.config.types import ITEMSIZE
from jaxllm.cost_model.hardware import XLA_MEMORY_FRACTION, compute_capability, gpu_from_device_kind
from jaxllm.cost_model.step_sizes import parameters
from jaxllm.machine.host import available_cpus
from jaxllm.private_jax import number_collectives
from jaxllm.untrusted import RefusedInput, shown, whole_number

MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
MEMORY_VARIABLES = (
    MEMORY_FRACTION,
    # Its old name; JAX refuses both at once. And two other variables that control how memory is allocated.
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)

CPU_FLAGS = {
    # jaxlib 0.10.2's YNNPACK matmul fusions give wrong numbers for some shapes: a gradient with a batch of 384 came out nonzero
    # where it is exactly 0 (tests/model/test_llama.py, a_document_never_sees_another). Without them it is right, and no slower.
    "xla_cpu_experimental_ynn_fusion_type": "",
    # Forced CPU devices share a few cores: a collective's last rank may arrive long after the first. XLA's own limits (20 s and
    # 40 s) abort the process on a loaded machine.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "600",
}
SEVERAL_CPU_DEVICES_FLAGS = {
    # The scheduler that runs independent thunks at once lets two devices start two collectives in different order: each then
    # waits for the other forever. A pipeline's tick has such pairs: it hung in its first step, or crashed in a matmul that read
    # unwritten memory (jaxlib 0.10.2).
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    # Nor may the thread pool of a device's operations take half of the ready ones: a pipeline's tick runs layers forward and
    # backward in two independent loops, and XLA does not see that both contain collectives. One device of a pair then waited in
    # a loop's all-gather for the other, in the other loop's reduce-scatter; or the loops' messages met and gradients were
    # wrong, NaN too (2 of 6 first runs; 4 stages x context 2, ZeRO 3). With one thread all devices follow one order, and each
    # has only its share of the cores anyway.
    #
    # This alone does not order all collectives. XLA's executor moves what may block, as a collective does, to a thread pool if
    # anything else is ready, and then counts the loop around it as scheduled: a collective that needs no result of that loop
    # starts before the loop ends, on some devices and not on others. private_jax.number_collectives keeps them apart.
    "xla_cpu_multi_thread_eigen": "false",
}
CPU_THREADS = "PJRT_NPROC"
"""Number of threads in the pool that a process's CPU devices share; by default the larger of devices and cores.

A collective holds a thread until all devices have arrived. A device may be in several at once: XLA's executor continues past a
loop that still runs (its `while` counts as scheduled), so that a program with C loops of collectives may hold 1 + C threads for
each device. With one thread more than devices a ring of eight hung for ever: 2 of about 800 steps on a busy machine, none of
3,600 with two threads for each device, none of 3,600 with four (jaxlib 0.10.2). Idle threads cost nothing.

With no thread to spare a pipeline's last tick read hidden states whose first rows were not written yet (jaxlib 0.10.2, SmolLM2
at 1,024 positions, two devices on two cores: the loss was wrong in 20 of 20 runs; with one thread more in none of 25). The
cause is not known: fences after each collective change nothing.
"""
CPU_THREADS_EACH, MOST_CPU_THREADS = 8, 256
DETERMINISTIC_GPU_FLAGS = {
    # XLA's description: "Guarantees run-to-run determinism on GPU". Scatters are expanded into ordered loops, cuDNN's attention
    # uses its deterministic backward, and no kernel is chosen by timing, where two runs might choose differently. The last is
    # the price.
    "xla_gpu_deterministic_ops": "true",
    # Of the kernels that XLA generates for a matmul it then takes the first, with tiles of 16 x 8 or 64 x 32 (compiled with JAX
    # 0.11.2). cuBLAS chooses by its own rule, the same in every run.
    "xla_gpu_enable_triton_gemm": "false",
    # With cuBLAS alone and JAX 0.11 this pass computes matmuls of a layer loop twice: once into the stack of layers, and once
    # for their other reader.
    "xla_gpu_enable_dynamic_slice_fusion": "false",
}


BLACKWELL = (10, 0)
GPU_ENVIRONMENT = {
    # NVIDIA's NCCL user guide, Troubleshooting, Logging: WARN prints warnings and errors, and is the "production minimum".
    "NCCL_DEBUG": "WARN"
}
GPU_ENVIRONMENT_OF = {
    # NVIDIA's JAX-Toolbox, docs/GPU_performance.md: Hopper needs all streams in one hardware queue to run collectives beside
    # compute; Blackwell does not, and is slower with it. NVIDIA's pull request 1249 there sets it for compute capability 9.0
    # alone. Not measured here.
    HOPPER: {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
}
GPU_FLAGS_OF = {
    # The same document, "Additional XLA Flags" of its tips for B200: CUDA graphs for these two kinds of command alone were
    # faster "in all the models tested". Speed not measured here; the step's memory is the same to the byte (ZeRO 3 x tensor,
    # and a pipeline, compiled for B200s with JAX 0.10.2).
    BLACKWELL: {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL"}
}
DRIVER_FILES = Path("/proc/driver/nvidia/gpus")

MORE_AT_ONCE = {
    # By default a loop with collectives inside may not run beside another collective: no message between stages would overlap
    # with a layer loop, nor would the reduction of the head's gradient.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4
}
CUBLAS_GPU_OPTIONS = {
    # Only cuBLAS adds a product to a float32 sum in the same kernel; a kernel that XLA generates leaves the sum to another. And
    # XLA times dozens of kernels that it generates for each matmul: the step of ten layers of 8B in FP8 was not compiled on an
    # H100 after two minutes, and with cuBLAS alone after 14 s (JAX 0.11.2). In bfloat16 not in a loop over layers, where JAX
    # 0.11's slice fusion computes some of cuBLAS's matmuls twice.
    "xla_gpu_enable_triton_gemm": False
}
ALONE_GPU_OPTIONS = {
    # It hides transfers, and one GPU has none. With JAX 0.11.2 it lets the gradients of weights wait, and with them their
    # inputs: compiled for an H100, 1B takes 53.5 instead of 49.5 GiB with packed documents, 60.7 instead of 49.9 with documents
    # by halves, and 52.5 instead of 49.1 with sequences of 32,768 tokens.
    "xla_gpu_enable_latency_hiding_scheduler": False
}
TENSOR_RING_GPU_OPTIONS = MORE_AT_ONCE | {
    # XLA would make one matmul of those of a ring's chunks, which then hide nothing.
    "xla_gpu_dot_merger_threshold_mb": 0
}
OFFLOAD_GPU_OPTIONS = {
    # A block has up to nine tensors to fetch from the host; by default each waits for the previous one, at the top of the loop.
    "xla_gpu_experimental_parallel_async_compute_limit": 16
}
ALL_ON_HOST_GPU_OPTIONS = {
    # Its nine weights and their sums are fetched too, and nine sums written. With 16, weights wait for sums.
    "xla_gpu_experimental_parallel_async_compute_limit": 48
}
NO_REMAT_GPU_OPTIONS = {
    # Percent of XLA's limit, itself 80% of the GPU's memory, beyond which XLA rematerialises; by default 95. So every step that
    # fills more than 76% of the card would repeat matmuls: 8B's layers on an H100, 97% of what a step may take, 1,449 TFLOP a
    # step for 1,064 and 2 GiB less (JAX 0.11.2, compiled). XLA also counts tensors in the host's memory, and would recompute
    # for a limit that recomputation cannot reach: 280 instructions of 8B's step that offloads 46 GiB (JAX 0.10.2).
    "xla_gpu_memory_limit_slop_factor": 2000
}
LAYER_COMBINED = tuple(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "reduce_scatter", "all_reduce"))


def layer_combined(config: Config) -> dict[str, int]:
    """Combines collectives up to one layer's bytes on a rank: of its weights in the compute dtype, of its shards of reduced
    gradients in `reduce_dtype`, of its full float32 gradients. By default a large model's matrices travel one by one, with a
    start-up time each; and the gradients of unrolled layers, whose shards over many ranks are small, all at once after the
    backward pass. With this there is one transfer per layer.
    """
    ranks = int(config.parallel.data) * config.parallel.context
    here = {path: e for path, e in parameters(config.model, config.parallel).items() if path.startswith(LAYERS)}
    of_rank = {spec.path for spec in layer_parameters(config.model) if spec.of_experts and config.parallel.expert > 1}
    layer = here.values()
    # What is sharded arrives with the zeros that ZeRO pads; of experts that ranks share, a rank's own.
    gathered = sum(e.compute if e.master == e.compute or path in of_rank else ranks * e.master for path, e in here.items())
    reduced, summed = sum(e.master for e in layer), sum(e.compute for e in layer)
    sizes = ITEMSIZE[config.model.compute_dtype] * gathered, ITEMSIZE[config.parallel.reduce_dtype] * reduced, 4 * summed
    return dict(zip(LAYER_COMBINED, sizes, strict=True))


def compile_options(config: Config, device: jax.Device, fits: bool = True) -> dict[str, Any]:
    """Options to compile a resolved config's train step for devices of this kind. The user's XLA_FLAGS take precedence.

    Args:
      fits: whether the step may fit into the device's memory (cost_model/memory.may_fit). XLA may rematerialise what does not.
    """
    if device.platform == "cpu":
        return {}
    options: dict[str, Any] = _collective_options(config, compute_capability(device))
    if config.parallel.context > 1 and any(window_shares(config.model, config.train.sequence_length)):
        # Ranks send both ways along the sequence at once.
        options = options | MORE_AT_ONCE
    options = options | (TENSOR_RING_GPU_OPTIONS if rings_tensor(config, compute_capability(device)) else {})
    offloads = bool(policy_of(config.parallel.remat, config.model).offload)
    uses_host = offloads or config.parallel.offload_state != "none"
    options = options | (OFFLOAD_GPU_OPTIONS if offloads else {})
    options = options | (ALL_ON_HOST_GPU_OPTIONS if config.parallel.offload_state == "all" else {})
    if uses_host or fits:
        options = options | NO_REMAT_GPU_OPTIONS
    if config.model.multiplies_fp8 or has_own_layers(config, compute_capability(device)):
        options = options | CUBLAS_GPU_OPTIONS
    if config.devices == 1 and not uses_host:
        options = options | ALONE_GPU_OPTIONS
    if config.run.deterministic:
        # For steps compiled on another machine: in a run the flags are set from the start.
        options = options | {name: value == "true" for name, value in DETERMINISTIC_GPU_FLAGS.items()}
    given = set(flag_names())
    return {name: value for name, value in options.items() if name not in given and is_accepted(name, value)}


def _collective_options(config: Config, capability: Capability) -> dict[str, Any]:
    """Options by what the step sends."""
    parallel = config.parallel
    if parallel.pipe > 1:
        return MORE_AT_ONCE
    once = sends_once(config, config.num_microbatches, capability)
    if not once and (parallel.zero < 3 or int(parallel.data) * parallel.context == 1):
        return {}
    # Where tensor ranks send too, no weights would arrive behind a layer's forward pass. Elsewhere it takes 2 to 4.5 GiB of
    # 8B's and 70B's steps and hides little more.
    unrolls = not once and has_own_layers(config, capability)
    at_once = MORE_AT_ONCE if (once and parallel.tensor > 1) or unrolls else {}
    return at_once | layer_combined(config)


def apply(run: RunConfig, kinds: tuple[str, ...] = ()) -> list[str]:
    """Adds this run's flags to XLA_FLAGS, and to the environment the share of a GPU's memory that XLA may take; returns what
    was added. The user's settings take precedence. Once JAX has started a device, they have no effect.

    Args:
      kinds: GPUs to set the flags for; default: those of this machine, if the run uses them.

    Raises:
      ConfigError: the number of CPU devices in XLA_FLAGS is none.
    """
    flags = CPU_FLAGS | (DETERMINISTIC_GPU_FLAGS if run.deterministic else {})
    variables = {}
    if kinds := kinds or (gpu_kinds() if run.cpu_devices is None else ()):
        for_kind, variables = gpu_presets(kinds)
        flags |= for_kind
    given = given_flags()
    cpu_devices = run.cpu_devices or _forced_cpu_devices(given)
    if cpu_devices is not None:
        flags |= SEVERAL_CPU_DEVICES_FLAGS
        number_collectives()
        try:
            whole_number(os.environ.get(CPU_THREADS, ""), 2 * cpu_devices)
        except RefusedInput:
            # A parent process with fewer devices may have set it to less.
            os.environ.pop(CPU_THREADS, None)
            variables[CPU_THREADS] = str(
                max(min(CPU_THREADS_EACH * cpu_devices, MOST_CPU_THREADS), 2 * cpu_devices, available_cpus() + 1)
            )
    names = flag_names()
    added = [f"--{name}={value}" for name, value in flags.items() if name not in names and is_known(name)]
    if added:
        os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    if not any(os.environ.get(name) for name in MEMORY_VARIABLES):
        os.environ[MEMORY_FRACTION] = str(XLA_MEMORY_FRACTION)
        added.append(f"{MEMORY_FRACTION}={XLA_MEMORY_FRACTION}")
    for name, value in variables.items():
        if name not in os.environ:
            os.environ[name] = value
            added.append(f"{name}={value}")
    return added


def gpu_presets(kinds: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """(XLA flags, environment variables) for a machine with GPUs of these kinds. If the kinds differ, or one is not in
    cost_model/hardware.py, it gets the settings for any GPU.
    """
    found: set[Any] = {gpu and gpu.chip.compute_capability for gpu in map(gpu_from_device_kind, kinds)}
    capability: Any = next(iter(found)) if len(found) == 1 else None
    return GPU_FLAGS_OF.get(capability, {}), GPU_ENVIRONMENT | GPU_ENVIRONMENT_OF.get(capability, {})


def gpu_kinds() -> tuple[str, ...]:
    """The driver's names of this machine's GPUs, the same as jax.Device.device_kind, without starting JAX: one for each, also
    for GPUs that are hidden from this process.
    """
    kinds = []
    for file in sorted(DRIVER_FILES.glob("*/information")):
        try:
            kinds += re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
    return tuple(kinds)


# -------------------------------------------------------------------------------------------------- flags as XLA reads them

_FLAG = re.compile(r"""[ \t\r\n]*(-[A-Za-z0-9_-]*)(?:='[^']*'?|="(?:\\.|[^"\\])*"?|[^ \t\r\n]*)""", re.DOTALL)
MOST_UNKNOWN = 8
"""It takes a quarter of a second to find that a name is unknown."""
_CPU_DEVICES = "xla_force_host_platform_device_count"
_EVERY_JAXLIB_HAS = "xla_dump_to"


def given_flags() -> str:
    """XLA_FLAGS as they are now: the compiled program depends on them."""
    return os.environ.get("XLA_FLAGS", "")


def flag_names() -> list[str]:
    """Names in XLA_FLAGS without dashes, each once."""
    return _names(_split(given_flags())[0])


def _split(text: str) -> tuple[list[str], str]:
    """Names of the flags with their dashes, each once, and the text where XLA stops reading: at the first word that is none."""
    words, at = [], 0
    while found := _FLAG.match(text, at):
        words.append(found[1])
        at = found.end()
    return list(dict.fromkeys(words)), text[at:].strip(" \t\r\n")


def _names(words: Iterable[str]) -> list[str]:
    return [word[2:] for word in words if word.startswith("--")]


def unknown(names: Iterable[str]) -> list[str]:
    """The first names that the installed jaxlib does not have: the first use of a device would end the process."""
    return list(islice((name for name in names if not is_known(name)), MOST_UNKNOWN))


def require_known(text: str) -> None:
    """Raises ConfigError if XLA would abort the process at these flags, or read only some of them.

    A name that was retired may still be in the library: XLA itself refuses that.
    """
    if not text.strip():
        return
    words, rest = _split(text)
    # XLA takes a text that begins otherwise for the name of a file; ours are added to the text, so that there is none.
    odd = [word for word in words if not word.startswith("--")] + rest.split()[:1]
    if odd:
        raise ConfigError(f"XLA_FLAGS has {shown(odd[0])}, which is no flag: write --name=value for each flag, or unset it.")
    if (lacking := unknown(_names(words))) and is_known(_EVERY_JAXLIB_HAS):
        listed = " and ".join(f"--{shown(name)}" for name in lacking)
        raise ConfigError(
            f"XLA_FLAGS has {listed}, which this JAX (jaxlib {jaxlib.__version__}) does not know: remove "
            f"{'it' if len(lacking) == 1 else 'them'}."
        )


def _forced_cpu_devices(text: str) -> int | None:
    """Raises ConfigError if the number of CPU devices among the flags is none."""
    given = re.findall(rf"--{_CPU_DEVICES}=(\S*)", text)
    if not given:
        return None
    try:
        return whole_number(given[-1].strip("'\""), 1, MOST_CPU_DEVICES)
    except RefusedInput as reason:
        raise ConfigError(f"XLA_FLAGS has --{_CPU_DEVICES}={shown(given[-1])}: {reason}.") from None


@functools.cache
def is_known(flag: str) -> bool:
    """Whether the installed jaxlib has this flag of XLA_FLAGS. XLA aborts the process at an unknown one, and reads flags when
    JAX starts, so this searches its libraries for the name (5 ms, and 0.2 s for a name that is not there).
    """
    if not flag:
        return False
    for library in Path(str(jaxlib.__file__)).parent.glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(flag.encode() + b"\0") != -1:
                return True
    return False


@functools.cache
def is_accepted(option: str, value: Any) -> bool:
    """Whether the installed compiler takes this option with this value: it compiles a number with it (10 ms). A name that was
    retired is still in the library, and a switch may have become a choice of names."""
    # Of one device: inside a mesh of several processes the program would be one of all of them.
    one = jax.make_mesh((1,), ("one",), devices=jax.local_devices()[:1])
    try:
        with jax.set_mesh(one):
            jax.jit(lambda: 0).lower().compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError as error:
        if option not in str(error):
            raise
        return False
    return True
