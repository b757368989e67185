"""What one GPU can do, by NVIDIA's data sheets: the figures behind every estimate and every MFU.

Data sheets print tensor core speeds with 2:4 sparsity, which training does not use; here they are dense, half of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MIB = 2**20
TERA = 1e12
GIGA = 1e9
PCIE_SHARE = 0.86
"""Of a data sheet's PCIe figure, what a large copy from pinned memory reaches: a packet of 256 bytes has 24 to 28 of header and
framing (PCI Express base specification), and flow control takes its part: 55 of 64 GB/s. By that reckoning, not measured."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in the host it is usually sold in."""

    name: str
    memory_bytes: int
    """What the driver reports as total. XLA gets less: the CUDA context and its own reserve come off."""
    dense_flops: Mapping[str, float]
    """Peak FLOP/s without sparsity: bfloat16 and tf32 on tensor cores, float32 on the ordinary ones."""
    memory_bandwidth_bytes_per_s: float
    gpus_per_host: int
    """GPUs that reach each other at link_bandwidth_bytes_per_s."""
    link_bandwidth_bytes_per_s: float
    """NVLink, one direction; data sheets print the sum of both."""
    network_bandwidth_bytes_per_s: float
    """Between hosts, per GPU, one direction: the adapters of the reference system, not of every cluster."""
    host_bandwidth_bytes_per_s: float
    """To and from pinned memory of the host, each way: PCIe's, less what packets cost (see PCIE_SHARE)."""
    source: str


def _gpu(
    name: str,
    *,
    memory_mib: int,
    bfloat16_tflops: float,
    tf32_tflops: float,
    float32_tflops: float,
    memory_gb_per_s: float,
    gpus_per_host: int,
    link_gb_per_s: float,
    network_gbit_per_s: float,
    pcie_gb_per_s: float,
    source: str,
) -> Gpu:
    flops = {"bfloat16": bfloat16_tflops * TERA, "tf32": tf32_tflops * TERA, "float32": float32_tflops * TERA}
    return Gpu(
        name=name,
        memory_bytes=memory_mib * MIB,
        dense_flops=MappingProxyType(flops),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * GIGA,
        gpus_per_host=gpus_per_host,
        link_bandwidth_bytes_per_s=link_gb_per_s * GIGA,
        network_bandwidth_bytes_per_s=network_gbit_per_s * GIGA / 8,
        host_bandwidth_bytes_per_s=pcie_gb_per_s * GIGA * PCIE_SHARE,
        source=source,
    )


# memory_mib is nvidia-smi's "total". The GB of a name is a GiB up to Hopper ("80gb": 79.6 GiB); "192gb" is decimal.
_TABLE = (
    _gpu(
        "a100-40gb",
        memory_mib=40960,
        bfloat16_tflops=312,
        tf32_tflops=156,
        float32_tflops=19.5,
        memory_gb_per_s=1555,
        gpus_per_host=8,
        link_gb_per_s=300,
        network_gbit_per_s=200,
        pcie_gb_per_s=32,
        source="NVIDIA A100 Tensor Core GPU data sheet, A100 40GB SXM; network: NVIDIA DGX A100 data sheet",
    ),
    _gpu(
        "a100-80gb",
        memory_mib=81920,
        bfloat16_tflops=312,
        tf32_tflops=156,
        float32_tflops=19.5,
        memory_gb_per_s=2039,
        gpus_per_host=8,
        link_gb_per_s=300,
        network_gbit_per_s=200,
        pcie_gb_per_s=32,
        source="NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM; network: NVIDIA DGX A100 data sheet",
    ),
    _gpu(
        "h100-80gb",
        memory_mib=81559,
        bfloat16_tflops=989,
        tf32_tflops=494,
        float32_tflops=67,
        memory_gb_per_s=3350,
        gpus_per_host=8,
        link_gb_per_s=450,
        network_gbit_per_s=400,
        pcie_gb_per_s=64,
        source="NVIDIA H100 Tensor Core GPU data sheet, H100 SXM; network: NVIDIA DGX H100 data sheet",
    ),
    # The SXM5 board of four with HBM2e: more memory than the 80 GB one, and slower. Not the H100 NVL, which is below.
    _gpu(
        "h100-94gb",
        memory_mib=95830,
        bfloat16_tflops=989,
        tf32_tflops=494,
        float32_tflops=67,
        memory_gb_per_s=2396,
        gpus_per_host=4,
        link_gb_per_s=450,
        network_gbit_per_s=200,
        pcie_gb_per_s=64,
        source="NVIDIA H100 Tensor Core GPU data sheet, H100 SXM; memory and network: TSUBAME4.0 hardware description",
    ),
    # A PCIe card. NVLink bridges join two; more of them in a host talk over PCIe. The network is a guess: no reference
    # system exists.
    _gpu(
        "h100-nvl-94gb",
        memory_mib=95830,
        bfloat16_tflops=835,
        tf32_tflops=417,
        float32_tflops=60,
        memory_gb_per_s=3900,
        gpus_per_host=2,
        link_gb_per_s=300,
        network_gbit_per_s=200,
        pcie_gb_per_s=64,
        source="NVIDIA H100 Tensor Core GPU data sheet, H100 NVL",
    ),
    _gpu(
        "h200-141gb",
        memory_mib=143771,
        bfloat16_tflops=989,
        tf32_tflops=494,
        float32_tflops=67,
        memory_gb_per_s=4800,
        gpus_per_host=8,
        link_gb_per_s=450,
        network_gbit_per_s=400,
        pcie_gb_per_s=64,
        source="NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; network: NVIDIA DGX H200 data sheet",
    ),
    _gpu(
        "b200-192gb",
        memory_mib=183359,
        bfloat16_tflops=2250,
        tf32_tflops=1100,
        float32_tflops=80,
        memory_gb_per_s=8000,
        gpus_per_host=8,
        link_gb_per_s=900,
        network_gbit_per_s=400,
        pcie_gb_per_s=64,
        source="NVIDIA Blackwell Architecture Technical Brief, HGX B200; network: NVIDIA DGX B200 data sheet",
    ),
)

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _TABLE})
"""By the name that `--gpu` takes."""

# Whole names, not patterns: a PCIe card or a cut-down export model of the same family has other figures.
_NAMES_BY_DEVICE_KIND = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA B200": "b200-192gb",
}


def gpu_from_device_kind(kind: str) -> Gpu | None:
    """The GPU that JAX calls `kind` (`jax.Device.device_kind`); None for a CPU and for a GPU not in the table."""
    name = _NAMES_BY_DEVICE_KIND.get(kind)
    return None if name is None else GPUS[name]


def readable(size_bytes: float) -> str:
    """'1.5 MiB': powers of 1024."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"
