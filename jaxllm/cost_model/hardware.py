"""Figures of each kind of GPU, by NVIDIA's data sheets. Every estimate and every MFU uses them.

    gpu = find_gpu("h100-80gb")      # the value of --gpu: a name, or a YAML file that describes another kind
    gpu.capacity_bytes               # the most that one train step may use

Data sheets list tensor core speeds with 2:4 sparsity, which training does not use. The values here are dense: half of that.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxllm.config.errors import ConfigError
from jaxllm.display import readable
from jaxllm.untrusted import RefusedInput, read_yaml, reason_of

MIB = 2**20
TERA = 1e12
GIGA = 1e9
PCIE_SHARE = 0.86
"""Share of a data sheet's PCIe figure that a large copy from pinned memory reaches. A packet of 256 bytes has 24 to 28 bytes of
header and framing (PCI Express base specification), and flow control takes its part: 55 of 64 GB/s. Calculated, not
measured."""

HOST_MEMORY_SHARE = 0.8
"""Share of a data sheet's DRAM bandwidth that the copies of all GPUs of a host reach together: about what STREAM reaches,
also as memory modules often run below the CPU's fastest speed. A rule of thumb, not measured; `jaxllm doctor` measures."""

XLA_MEMORY_FRACTION = 0.92
"""Share of a GPU's memory that XLA allocates at the start for all its buffers (xla_flags.apply sets it; JAX's default is 0.75).
The other 8%, 3.2 GiB of an A100's 40 and 6.4 of an H100's 80, are for the driver's allocations: the CUDA context and loaded
kernels (about 0.5 GiB), and NCCL's buffers (about 0.5 GiB for each group of ranks). Both are rules of thumb."""
RESERVE_BYTES = 2**30
"""Reserve in XLA's share that every verdict keeps free: for the CUDA context and NCCL if they need more than the 8% (the share
can then be lowered by as much), and for everything beside the step: the next batch, cuBLAS's workspaces, gaps between buffers.
Chosen, not measured."""

NVLINK_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 14e-6
"""Latency of one ring step, as NCCL's own tuning assumes for long messages (hwLat in graph/tuning.cc, ring, protocol
Simple)."""


@dataclass(frozen=True)
class Chip:
    """Properties of a GPU, besides its memory, that XLA needs to compile for it."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    fpus_per_multiprocessor: int
    """float32 units."""
    shared_memory_per_multiprocessor: int
    """Bytes; one block may have 1 KiB less."""
    l2_cache_bytes: int
    clock_ghz: float

    @property
    def shared_memory_per_block(self) -> int:
        """Bytes that a block can request; 48 KiB need no request."""
        return self.shared_memory_per_multiprocessor - 1024

    @property
    def runs_ahead(self) -> bool:
        """Whether XLA starts transfers as early as they could be useful: for Hopper and later it does, and holds more for it;
        for an A100 it starts them late (compiled steps; its scheduler goes by the GPU's speeds)."""
        return self.compute_capability >= (9, 0)


# Multiprocessors, L2 and boost clocks: NVIDIA's architecture papers (A100, H100, Blackwell) and what XLA's own descriptions of
# these boards (xla/backends/gpu/target_config/specs) read from the driver; shared memory: CUDA programming guide, compute
# capabilities 8.0, 9.0 and 10.0.
A100 = Chip((8, 0), 108, 64, 164 * 1024, 40 * MIB, 1.41)
H100 = Chip((9, 0), 132, 128, 228 * 1024, 50 * MIB, 1.98)
H100_NVL = dataclasses.replace(H100, clock_ghz=1.785)
B200 = Chip((10, 0), 148, 128, 228 * 1024, 132_644_864, 1.965)


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in the host in which it is usually sold."""

    name: str
    memory_bytes: int
    """Total memory as the driver reports it. A train step gets less: see capacity_bytes."""
    dense_flops: Mapping[str, float]
    """Peak FLOP/s without sparsity: bfloat16 and tf32 on tensor cores, float32 on the CUDA cores."""
    memory_bandwidth_bytes_per_s: float
    gpus_per_host: int
    """GPUs that reach each other at link_bandwidth_bytes_per_s."""
    link_bandwidth_bytes_per_s: float
    """NVLink bandwidth in one direction; data sheets list the sum of both."""
    link_latency_s: float
    """Latency of one ring step inside the host."""
    network_bandwidth_bytes_per_s: float
    """Bandwidth between hosts, per GPU, in one direction: that of the reference system's adapters, not of every cluster."""
    network_latency_s: float
    """Latency of one ring step that crosses hosts."""
    host_bandwidth_bytes_per_s: float
    """Bandwidth to and from the host's pinned memory, each way: PCIe's, less the packet overhead (see PCIE_SHARE). Several GPUs
    at once get less: host_copy_bytes_per_s."""
    gpus_per_uplink: int
    """GPUs behind one PCIe link to a CPU; 1 where nothing says that they share one."""
    host_memory_bytes: int
    """DRAM of the host."""
    host_memory_bandwidth_bytes_per_s: float
    """DRAM bandwidth of the whole host, all channels of all CPUs, reads and writes together, by the CPUs' data sheets."""
    chip: Chip
    source: str
    device_kind: str = ""
    """JAX's name (`jax.Device.device_kind`), in full: a PCIe card or a cut-down export model of the same family has other
    figures. '' if the name is not known."""

    def peak_flops(self, compute_dtype: str) -> float:
        """Dense peak, FLOP/s, of matmuls in a compute dtype. XLA multiplies float32 matrices in TF32 on these chips."""
        return self.dense_flops["tf32" if compute_dtype == "float32" else "bfloat16"]

    @property
    def float8_flops(self) -> float | None:
        """Peak FLOP/s of FP8 without sparsity: twice that of bfloat16 on every chip with FP8 (NVIDIA's data sheets of H100,
        H200 and B200). None before Ada."""
        return 2 * self.dense_flops["bfloat16"] if self.chip.compute_capability >= (8, 9) else None

    @property
    def capacity_bytes(self) -> int:
        """Bytes that one train step may use: XLA's share of the memory, less the reserve."""
        return int(self.memory_bytes * XLA_MEMORY_FRACTION) - RESERVE_BYTES


class _Dram(NamedTuple):
    """Memory of a host, in the units of data sheets."""

    gib: int
    channels: int
    """Of all CPUs."""
    megatransfers_per_s: int
    """A transfer moves 8 bytes."""


class _Links(NamedTuple):
    """How the GPUs of a host reach each other, other hosts and their own, in the units of data sheets."""

    gpus_per_host: int
    nvlink_gb_per_s: float
    """One direction."""
    network_gbit_per_s: float
    pcie_gb_per_s: float
    dram: _Dram
    gpus_per_uplink: int = 1


_A100_TFLOPS = {"bfloat16": 312, "tf32": 156, "float32": 19.5}
_H100_TFLOPS = {"bfloat16": 989, "tf32": 494, "float32": 67}
_NVL_TFLOPS = {"bfloat16": 835, "tf32": 417, "float32": 60}
_B200_TFLOPS = {"bfloat16": 2250, "tf32": 1100, "float32": 80}
# Two EPYC 7742 (8 channels each; 1 TB with the 40 GB board and 2 with the other, the smaller is assumed); two Xeon 8480C; two
# Xeon 8570 (2 TB, at most 4). Two A100s are behind one PCIe switch with one uplink, and each H100 has its own, by NCCL's
# topology files of Azure's hosts with the same boards (ndv4-topo.xml and ndv5-topo.xml in Azure/azhpc-images).
_DGX_A100 = _Links(8, 300, 200, 32, _Dram(1024, 16, 3200), gpus_per_uplink=2)
_DGX_H100 = _Links(8, 450, 400, 64, _Dram(2048, 16, 4800))
_DGX_B200 = _Links(8, 900, 400, 64, _Dram(2048, 16, 5600))
# Two EPYC 9654 (12 channels each).
_TSUBAME4 = _Links(4, 450, 200, 64, _Dram(768, 24, 4800))

# Name, device_kind, memory in MiB, memory bandwidth in GB/s, TFLOP/s, links, chip. The memory is nvidia-smi's "total". The GB
# of a name is a GiB up to Hopper ("80gb": 79.6 GiB); "192gb" is decimal.
_TABLE = (
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", 40960, 1555, _A100_TFLOPS, _DGX_A100, A100),
    ("a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, 2039, _A100_TFLOPS, _DGX_A100, A100),
    ("h100-80gb", "NVIDIA H100 80GB HBM3", 81559, 3350, _H100_TFLOPS, _DGX_H100, H100),
    # The SXM5 board with HBM2e, four per host: more memory than the 80 GB board, and slower. The H100 NVL below is another
    # card.
    ("h100-94gb", "", 95830, 2396, _H100_TFLOPS, _TSUBAME4, H100),
    # A PCIe card. NVLink bridges connect two; more of them in a host communicate over PCIe. The network and the host's memory
    # are a guess: no reference system exists.
    ("h100-nvl-94gb", "NVIDIA H100 NVL", 95830, 3900, _NVL_TFLOPS, _Links(2, 300, 200, 64, _Dram(1024, 16, 4800)), H100_NVL),
    ("h200-141gb", "NVIDIA H200", 143771, 4800, _H100_TFLOPS, _DGX_H100, H100),
    ("b200-192gb", "NVIDIA B200", 183359, 8000, _B200_TFLOPS, _DGX_B200, B200),
)
_SOURCES = {
    "a100-40gb": "NVIDIA A100 Tensor Core GPU data sheet, A100 40GB SXM; network: NVIDIA DGX A100 data sheet",
    "a100-80gb": "NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM; network: NVIDIA DGX A100 data sheet",
    "h100-80gb": "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM; network: NVIDIA DGX H100 data sheet",
    "h100-94gb": "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM; memory and network: TSUBAME4.0 hardware description",
    "h100-nvl-94gb": "NVIDIA H100 Tensor Core GPU data sheet, H100 NVL",
    "h200-141gb": "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; network: NVIDIA DGX H200 data sheet",
    "b200-192gb": "NVIDIA Blackwell Architecture Technical Brief, HGX B200; network: NVIDIA DGX B200 data sheet",
}


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        name: Gpu(
            name=name,
            memory_bytes=memory_mib * MIB,
            dense_flops=MappingProxyType({dtype: speed * TERA for dtype, speed in tflops.items()}),
            memory_bandwidth_bytes_per_s=memory_gb_per_s * GIGA,
            gpus_per_host=links.gpus_per_host,
            link_bandwidth_bytes_per_s=links.nvlink_gb_per_s * GIGA,
            link_latency_s=NVLINK_LATENCY_S,
            network_bandwidth_bytes_per_s=links.network_gbit_per_s * GIGA / 8,
            network_latency_s=NETWORK_LATENCY_S,
            host_bandwidth_bytes_per_s=links.pcie_gb_per_s * GIGA * PCIE_SHARE,
            gpus_per_uplink=links.gpus_per_uplink,
            host_memory_bytes=links.dram.gib * 1024 * MIB,
            host_memory_bandwidth_bytes_per_s=links.dram.channels * links.dram.megatransfers_per_s * 8e6,
            chip=chip,
            source=_SOURCES[name],
            device_kind=device_kind,
        )
        for name, device_kind, memory_mib, memory_gb_per_s, tflops, links, chip in _TABLE
    }
)
"""All kinds, by the name that `--gpu` accepts."""


def gpu_from_device_kind(kind: str) -> Gpu | None:
    """The GPU whose `jax.Device.device_kind` is `kind`; None for a CPU and for a GPU that is not in the table."""
    return next((gpu for gpu in GPUS.values() if kind and gpu.device_kind == kind), None)


def host_copy_bytes_per_s(gpu: Gpu, gpus: int, *, both_ways: bool) -> float:
    """Bytes per second in one direction that each GPU gets when `gpus` of one host copy at once, one way or both ways.

    The least of the PCIe link, its part of a shared uplink and its part of the host's memory bandwidth, of which a copy in
    either direction takes its own bytes once. A PCIe link carries both directions at once at full speed.
    """
    link = gpu.host_bandwidth_bytes_per_s / min(gpus, gpu.gpus_per_uplink)
    directions = 2 if both_ways else 1
    return min(link, HOST_MEMORY_SHARE * gpu.host_memory_bandwidth_bytes_per_s / (gpus * directions))


FIRST_WITH = {"fp8": (8, 9), "mxfp8": (10, 0)}
"""The first compute capability that multiplies a model.matmul_dtype."""
GENERATION = {"fp8": "Ada, Hopper", "mxfp8": "Blackwell"}


def compute_capability(device: Any) -> tuple[int, int] | None:
    """CUDA compute capability of a `jax.Device`; None: not an NVIDIA GPU, or unknown."""
    if device.platform not in ("gpu", "cuda"):
        return None
    stated = getattr(device, "compute_capability", None)
    if stated is None:
        # A description of a device that is not present may have only a name.
        gpu = gpu_from_device_kind(device.device_kind)
        return gpu.chip.compute_capability if gpu else None
    major, _, minor = str(stated).partition(".")
    return int(major), int(minor or 0)


def find_gpu(name: str) -> Gpu:
    """The GPU for a value of `--gpu`: one of GPUS, or a YAML file (ends in .yaml or .yml) that describes another.

    In such a file, `like: NAME` gives the default of every field; any field of Gpu and Chip may follow by its name, and any
    entries of dense_flops. Bytes, seconds and FLOP/s are plain numbers:

        like: h100-80gb
        name: h20-96gb
        memory_bytes: 102_625_181_696
        dense_flops: {bfloat16: 148.0e+12}
        multiprocessors: 78

    Raises:
      ConfigError: the name, file or field does not exist, or a value is invalid.
    """
    if name.endswith((".yaml", ".yml")):
        return _gpu_from_file(Path(name))
    if name not in GPUS:
        nearest = [known for known in GPUS if name and known.startswith(name.lower())] or difflib.get_close_matches(name, GPUS)
        choose = f"did you mean {nearest[0]}? Choose" if nearest else "choose"
        raise ConfigError(
            f"There is no GPU {name or repr(name)}: {choose} one of {', '.join(GPUS)}, or a YAML file of your own."
        )
    return GPUS[name]


def _gpu_from_file(path: Path) -> Gpu:
    try:
        given = read_yaml(path)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{path} cannot be read as the description of a GPU: {reason_of(error)}.") from None
    if not isinstance(given, dict) or not isinstance(given.get("like"), str) or given["like"] not in GPUS:
        raise ConfigError(f"{path} does not say which GPU it is like: write like: and one of {', '.join(GPUS)}.")
    base = GPUS[given.pop("like")]
    on_chip = {field.name for field in dataclasses.fields(Chip)}
    known = on_chip | {field.name for field in dataclasses.fields(Gpu)} - {"chip"}
    for key, value in given.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it may have {', '.join(sorted(known))}."
            raise ConfigError(f"Unknown key {key} in {path}: {hint}")
        _check_value(path, key, value, getattr(base.chip if key in on_chip else base, key))
    chip = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key in on_chip}
    rest = {key: value for key, value in given.items() if key not in on_chip}
    if "dense_flops" in rest:
        rest["dense_flops"] = MappingProxyType({**base.dense_flops, **rest["dense_flops"]})
    named = {"name": path.stem, "source": str(path), "device_kind": ""}
    gpu = dataclasses.replace(base, **{**named, **rest, "chip": dataclasses.replace(base.chip, **chip)})
    if gpu.capacity_bytes <= 0:
        raise ConfigError(f"memory_bytes={gpu.memory_bytes} in {path} leaves no memory for a step: it should be above 2 GiB.")
    return gpu


def _check_value(path: Path, key: str, value: Any, example: Any) -> None:
    """Raises ConfigError unless the value has the example's type: text, numbers above zero, or several of them."""
    is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0  # noqa: E731
    is_whole = lambda x: isinstance(x, int) and is_number(x)  # noqa: E731
    if isinstance(example, str):
        right, should = isinstance(value, str), "text"
    elif isinstance(example, Mapping):
        right = isinstance(value, dict) and all(dtype in example and is_number(x) for dtype, x in value.items())
        should = f"numbers above zero for any of {', '.join(example)}"
    elif isinstance(example, tuple):
        right = isinstance(value, list) and len(value) == 2 and is_whole(value[0]) and value[1] in range(10)
        should = "two whole numbers, such as [9, 0]"
    elif isinstance(example, int):
        right, should = is_whole(value), "a whole number above zero"
    else:
        # YAML 1.1 reads 3.35e12 as text, because the exponent has no sign.
        right, should = is_number(value), "a number above zero; with an exponent, write 1.0e+12"
    if not right:
        raise ConfigError(f"{key}={value} in {path} is not valid: it should be {should}.")


def fits_text(size_bytes: int, capacity_bytes: int) -> str:
    """Whether a step of that size fits into a GPU's capacity."""
    share = f"{size_bytes / capacity_bytes:.1%} of the {readable(capacity_bytes)} that a step may take"
    if size_bytes <= capacity_bytes:
        return f"Fits: {share}"
    return f"DOES NOT FIT: {share}, {readable(size_bytes - capacity_bytes)} too much"


def capacity_text(memory_bytes: int) -> str:
    """How the capacity follows from a GPU's memory."""
    share = f"{XLA_MEMORY_FRACTION:.0%} of {readable(memory_bytes)}, which jaxllm gives XLA"
    return f"  ({share}, less {readable(RESERVE_BYTES)} kept back)"
