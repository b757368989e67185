"""Figures of each kind of GPU, by NVIDIA's data sheets. Every estimate and every MFU uses them.

    GPUS["h100-80gb"].capacity_bytes       # the most that one train step may use

Data sheets list tensor core speeds with 2:4 sparsity, which training does not use. The values here are dense: half of that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.config.attention import AMPERE, FIRST_WITH, Capability, require_runs
from jaxllm.config.errors import ConfigError
from jaxllm.display import readable

if TYPE_CHECKING:
    from jaxllm.config.model_config import ModelConfig

MIB = 2**20
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
FIT_SHARE = 0.95
"""Largest share of the capacity at which an estimated config counts as fitting. The rest covers underestimates."""

NVLINK_LATENCY_S, PCIE_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 5.7e-6, 14e-6
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
    threads_per_multiprocessor: int = 2048

    @property
    def shared_memory_per_block(self) -> int:
        """Bytes that a block can request; 48 KiB need no request."""
        return self.shared_memory_per_multiprocessor - 1024

    @property
    def runs_ahead(self) -> bool:
        """Whether XLA starts transfers as early as they could be useful: for Hopper and later it does, and holds more for it;
        for an A100 it starts them late (compiled steps; its scheduler goes by the GPU's speeds)."""
        return self.compute_capability >= (9, 0)


# Multiprocessors, L2 and boost clocks: NVIDIA's architecture papers (V100, A100, GA102, Ada, H100, Blackwell) and what XLA's
# own descriptions of these boards (xla/backends/gpu/target_config/specs) read from the driver. Users' programs count 80
# multiprocessors on an A10G, which fits the 35 TFLOP/s of its data sheet, and 148 on a B300, of which XLA's description has
# 158. Shared memory and threads: CUDA programming guide, compute capabilities.
V100 = Chip((7, 0), 80, 64, 96 * 1024, 6 * MIB, 1.53)
A100 = Chip((8, 0), 108, 64, 164 * 1024, 40 * MIB, 1.41)
RTX_3090 = Chip((8, 6), 82, 128, 100 * 1024, 6 * MIB, 1.695, 1536)
A10G = dataclasses.replace(RTX_3090, multiprocessors=80, clock_ghz=1.71)
RTX_4090 = Chip((8, 9), 128, 128, 100 * 1024, 72 * MIB, 2.52, 1536)
L40S = dataclasses.replace(RTX_4090, multiprocessors=142, l2_cache_bytes=96 * MIB)
H100 = Chip((9, 0), 132, 128, 228 * 1024, 50 * MIB, 1.98)
H100_NVL = dataclasses.replace(H100, clock_ghz=1.785)
GH200 = dataclasses.replace(H100, l2_cache_bytes=60 * MIB)
B200 = Chip((10, 0), 148, 128, 228 * 1024, 132_644_864, 1.965)
B300 = dataclasses.replace(B200, compute_capability=(10, 3))


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in the host in which it is usually sold."""

    name: str
    memory_bytes: int
    """Total memory as the driver reports it. A train step gets less: see capacity_bytes."""
    dense_flops: Mapping[str, float]
    """Peak FLOP/s without sparsity: bfloat16 and tf32 on tensor cores, float32 on the CUDA cores. Before Ampere, which has no
    tensor cores for them, all three are float32's."""
    memory_bandwidth_bytes_per_s: float
    gpus_per_host: int
    """GPUs that reach each other at link_bandwidth_bytes_per_s."""
    link_bandwidth_bytes_per_s: float
    """NVLink bandwidth in one direction; data sheets list the sum of both. PCIe's where there is no NVLink."""
    link_latency_s: float
    """Latency of one ring step inside the host."""
    network_bandwidth_bytes_per_s: float
    """Bandwidth between hosts, per GPU, in one direction: that of the reference system's adapters, not of every cluster."""
    network_latency_s: float
    """Latency of one ring step that crosses hosts."""
    host_bandwidth_bytes_per_s: float
    """Bandwidth to and from the host's pinned memory, each way: that of PCIe, less the packet overhead (see PCIE_SHARE), or of
    NVLink-C2C. Several GPUs at once get less: host_copy_bytes_per_s."""
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
        """Dense peak, FLOP/s, of matmuls in a compute dtype. XLA multiplies float32 matrices in TF32 where the chip has it."""
        if compute_dtype == "float32":
            return self.dense_flops["tf32" if self.chip.compute_capability >= AMPERE else "float32"]
        return self.dense_flops["bfloat16"]

    @property
    def float8_flops(self) -> float | None:
        """Peak FLOP/s of FP8 without sparsity: twice that of bfloat16 on every chip with FP8 (NVIDIA's data sheets of L40S,
        H100, H200 and B200, and the Ada architecture paper). None before Ada."""
        return 2 * self.dense_flops["bfloat16"] if self.chip.compute_capability >= FIRST_WITH["fp8"] else None

    @property
    def capacity_bytes(self) -> int:
        """Bytes that one train step may use: XLA's share of the memory, less the reserve."""
        return int(self.memory_bytes * XLA_MEMORY_FRACTION) - RESERVE_BYTES


class _Host(NamedTuple):
    """How the GPUs of a host reach each other, other hosts and the host's memory, in the units of data sheets."""

    gpus: int
    nvlink_gb_per_s: float
    """One direction; 0: none, they reach each other over PCIe."""
    network_gbit_per_s: float
    """Per GPU."""
    pcie_gb_per_s: float
    """One direction, of one uplink."""
    memory_gib: int
    memory_gb_per_s: float
    gpus_per_uplink: int = 1


# bfloat16, TF32, float32. float32 for all three on a V100: its tensor cores have float16 alone. GeForce cards sum tensor
# products in float32 at half the rate of their float16 sums, the rate that advertisements name.
_V100_TFLOPS = (15.7, 15.7, 15.7)
_A100_TFLOPS = (312, 156, 19.5)
_H100_TFLOPS = (989, 494, 67)

# The hosts' memory bandwidth is channels x 8 bytes x transfers: 8 x DDR4-2133 in a DGX-1, 16 x DDR4-3200 (two EPYC 7742, 7R32
# or 7R13), 16 x DDR5-4800 (two Xeon 8480C), 16 x DDR5-5600 (two Xeon 8570), 16 x DDR5-6400 (two Xeon 6776P), 24 x DDR5-4800
# (two EPYC 9654). Where a system is sold with two sizes of memory, this is the smaller.
#
# Uplinks by NVIDIA's paper on the DGX-1, and by NCCL's topology files for Azure's hosts with the same boards as a DGX A100 and
# H100 (ndv4-topo.xml and ndv5-topo.xml in Azure/azhpc-images): two V100s or A100s are behind one PCIe switch, an H100 has its
# own. A DGX-1 has no NVSwitch: a pair of its GPUs has one or two of the six links, and messages between two are predicted too
# fast.
_DGX_1 = _Host(8, 150, 50, 16, 512, 136.5, gpus_per_uplink=2)
_DGX_A100 = _Host(8, 300, 200, 32, 1024, 409.6, gpus_per_uplink=2)
_DGX_H100 = _Host(8, 450, 400, 64, 2048, 614.4)
_DGX_B200 = _Host(8, 900, 400, 64, 2048, 716.8)
_DGX_B300 = _Host(8, 900, 800, 64, 2048, 819.2)
_TSUBAME4 = _Host(4, 450, 200, 64, 768, 921.6)
# A PCIe card. NVLink bridges connect two; more of them in a host communicate over PCIe. Network and memory are a guess: no
# reference system exists.
_NVL_PAIR = _Host(2, 300, 200, 64, 1024, 614.4)
_AWS_G5, _AWS_G6E = _Host(8, 0, 12.5, 32, 768, 409.6), _Host(8, 0, 50, 32, 1536, 409.6)
# A guess: a PC with two cards, which share the CPU's 16 lanes of PCIe 4.0, 128 GiB in two channels of DDR5-5600, and 10 Gbit/s
# Ethernet. A bridge connects two RTX 3090s.
_PC = _Host(2, 0, 5, 32, 128, 89.6, gpus_per_uplink=2)
_PC_BRIDGED = _PC._replace(nvlink_gb_per_s=56.25)
# One superchip; "pcie" is NVLink-C2C, and that it reaches the same share as PCIe is assumed. 480 GB of LPDDR5X are slower (384
# GB/s) than the smaller sizes (512). The network is a guess: one ConnectX-7.
_GRACE = _Host(1, 450, 400, 450, 447, 384)

# Name, device_kind, memory in MiB, memory bandwidth in GB/s, watts of the board, TFLOP/s, host, chip. The memory is
# nvidia-smi's "total". The GB of a name are NVIDIA's: GiB of some ("80gb": 79.6 GiB), decimal of others ("192gb": 179.1).
_TABLE = (
    ("v100-16gb", "Tesla V100-SXM2-16GB", 16384, 900, 300, _V100_TFLOPS, _DGX_1, V100),
    ("v100-32gb", "Tesla V100-SXM2-32GB", 32768, 900, 300, _V100_TFLOPS, _DGX_1, V100),
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", 40960, 1555, 400, _A100_TFLOPS, _DGX_A100, A100),
    ("a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, 2039, 400, _A100_TFLOPS, _DGX_A100, A100),
    ("rtx3090-24gb", "NVIDIA GeForce RTX 3090", 24576, 936, 350, (71, 35.6, 35.6), _PC_BRIDGED, RTX_3090),
    ("a10g-24gb", "NVIDIA A10G", 23028, 600, 300, (70, 35, 35), _AWS_G5, A10G),
    ("l40s-48gb", "NVIDIA L40S", 46068, 864, 350, (362, 183, 91.6), _AWS_G6E, L40S),
    ("rtx4090-24gb", "NVIDIA GeForce RTX 4090", 24564, 1008, 450, (165.2, 82.6, 82.6), _PC, RTX_4090),
    ("h100-80gb", "NVIDIA H100 80GB HBM3", 81559, 3350, 700, _H100_TFLOPS, _DGX_H100, H100),
    # The SXM5 board with HBM2e, four per host: more memory than the 80 GB board, and slower.
    ("h100-94gb", "", 95830, 2396, 700, _H100_TFLOPS, _TSUBAME4, H100),
    ("h100-nvl-94gb", "NVIDIA H100 NVL", 95830, 3900, 400, (835, 417, 60), _NVL_PAIR, H100_NVL),
    ("h200-141gb", "NVIDIA H200", 143771, 4800, 700, _H100_TFLOPS, _DGX_H100, H100),
    # 480 GB is its host's memory.
    ("gh200-96gb", "NVIDIA GH200 480GB", 97871, 4000, 1000, _H100_TFLOPS, _GRACE, GH200),
    ("gh200-144gb", "NVIDIA GH200 144G HBM3e", 146831, 4900, 1000, _H100_TFLOPS, _GRACE, GH200),
    ("b200-192gb", "NVIDIA B200", 183359, 8000, 1000, (2250, 1100, 80), _DGX_B200, B200),
    ("b300-288gb", "NVIDIA B300 SXM6 AC", 275040, 8000, 1100, (2250, 1100, 75), _DGX_B300, B300),
)
_DGX_1_SOURCE = "network and host: NVIDIA DGX-1 With Tesla V100 System Architecture"
_SOURCES = {
    "v100-16gb": f"NVIDIA Tesla V100 GPU Accelerator data sheet, SXM2; {_DGX_1_SOURCE}",
    "v100-32gb": f"NVIDIA Tesla V100 GPU Accelerator data sheet, SXM2; {_DGX_1_SOURCE}",
    "a100-40gb": "NVIDIA A100 Tensor Core GPU data sheet, A100 40GB SXM; network: NVIDIA DGX A100 data sheet",
    "a100-80gb": "NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM; network: NVIDIA DGX A100 data sheet",
    "rtx3090-24gb": "NVIDIA Ampere GA102 GPU Architecture paper, GeForce RTX 3090; network and host: a guess",
    "a10g-24gb": "NVIDIA A10G data sheet of AWS; network and host: Amazon EC2 g5.48xlarge",
    "rtx4090-24gb": "NVIDIA Ada GPU Architecture paper, GeForce RTX 4090; network and host: a guess",
    "l40s-48gb": "NVIDIA L40S data sheet; network and host: Amazon EC2 g6e.48xlarge",
    "h100-80gb": "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM; network: NVIDIA DGX H100 data sheet",
    "h100-94gb": "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM; memory and network: TSUBAME4.0 hardware description",
    "h100-nvl-94gb": "NVIDIA H100 Tensor Core GPU data sheet, H100 NVL",
    "h200-141gb": "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; network: NVIDIA DGX H200 data sheet",
    "gh200-96gb": "NVIDIA GH200 Grace Hopper Superchip data sheet, HBM3; network: a guess",
    "gh200-144gb": "NVIDIA GH200 Grace Hopper Superchip data sheet, HBM3e; network: a guess",
    "b200-192gb": "NVIDIA Blackwell Architecture Technical Brief, HGX B200; network: NVIDIA DGX B200 data sheet",
    "b300-288gb": "NVIDIA HGX B300 specifications; network: NVIDIA DGX B300 data sheet",
}


def _gpu(row: tuple[str, str, int, float, float, tuple[float, float, float], _Host, Chip]) -> Gpu:
    name, device_kind, memory_mib, memory_gb_per_s, _, tflops, host, chip = row
    to_host = host.pcie_gb_per_s * GIGA * PCIE_SHARE
    flops = {dtype: 1e12 * speed for dtype, speed in zip(("bfloat16", "tf32", "float32"), tflops, strict=True)}
    return Gpu(
        name=name,
        memory_bytes=memory_mib * MIB,
        dense_flops=MappingProxyType(flops),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * GIGA,
        gpus_per_host=host.gpus,
        link_bandwidth_bytes_per_s=host.nvlink_gb_per_s * GIGA or to_host / host.gpus_per_uplink,
        link_latency_s=NVLINK_LATENCY_S if host.nvlink_gb_per_s else PCIE_LATENCY_S,
        network_bandwidth_bytes_per_s=host.network_gbit_per_s * GIGA / 8,
        network_latency_s=NETWORK_LATENCY_S,
        host_bandwidth_bytes_per_s=to_host,
        gpus_per_uplink=host.gpus_per_uplink,
        host_memory_bytes=host.memory_gib * 1024 * MIB,
        host_memory_bandwidth_bytes_per_s=host.memory_gb_per_s * GIGA,
        chip=chip,
        source=_SOURCES[name],
        device_kind=device_kind,
    )


GPUS: Mapping[str, Gpu] = MappingProxyType({row[0]: _gpu(row) for row in _TABLE})
"""All kinds, by the name that `--gpu` accepts."""
BOARD_WATTS: Mapping[str, float] = MappingProxyType({row[0]: float(row[4]) for row in _TABLE})
"""Maximum power of a board, by NVIDIA's data sheets: H100 SXM up to 700 W (the 94 GB board differs only in memory), H100 NVL
350 to 400 W, HGX B200 up to 1,000 W. A GH200's 450 to 1,000 W include its CPU and the host's memory. The first board of a
compute capability stands for kinds that are not in the table."""


def gpu_from_device_kind(kind: str) -> Gpu | None:
    """The GPU whose `jax.Device.device_kind` is `kind`; None for a CPU and for a GPU that is not in the table."""
    return next((gpu for gpu in GPUS.values() if kind and gpu.device_kind == kind), None)


def host_copy_bytes_per_s(gpu: Gpu, gpus: int, *, both_ways: bool) -> float:
    """Bytes per second in one direction that each GPU gets when `gpus` of one host copy at once, one way or both ways.

    The least of the PCIe link, its part of a shared uplink and its part of the host's memory bandwidth, of which a copy in
    either direction takes its own bytes once. A PCIe link carries both directions at once at full speed.
    """
    link = gpu.host_bandwidth_bytes_per_s / min(gpus, gpu.gpus_per_uplink)
    return min(link, HOST_MEMORY_SHARE * gpu.host_memory_bandwidth_bytes_per_s / (2 * gpus if both_ways else gpus))


def compute_capability(device: Any) -> Capability:
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


def require_device_runs(model: ModelConfig, device: Any) -> None:
    """Raises ConfigError if a `jax.Device` cannot multiply the model's dtypes or run its attention (config/attention.py)."""
    if device.platform in ("gpu", "cuda"):
        require_runs(model, compute_capability(device), device.device_kind)
    elif device.platform != "cpu" and model.multiplies_fp8:
        what = f"model.matmul_dtype={model.matmul_dtype}"
        raise ConfigError(f"{what} needs an NVIDIA GPU, and this is {device.platform}: set model.matmul_dtype=compute_dtype.")


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
