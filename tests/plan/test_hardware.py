"""The GPU table: names that commands take, peaks that MFU divides by, and what JAX calls the devices."""

import pytest

from jaxllm.plan.hardware import GPUS, gpu_from_device_kind

GIB = 2**30


def test_every_name_of_the_gpu_option_is_there():
    names = {"a100-40gb", "a100-80gb", "h100-80gb", "h100-94gb", "h200-141gb", "b200-192gb"}
    assert names <= set(GPUS)
    assert all(name == gpu.name for name, gpu in GPUS.items())


@pytest.mark.parametrize(
    ("name", "bfloat16_flops"),
    [
        ("a100-40gb", 312e12),
        ("a100-80gb", 312e12),
        ("h100-80gb", 989e12),
        ("h200-141gb", 989e12),
        ("b200-192gb", 2250e12),
    ],
)
def test_dense_bfloat16_peak(name, bfloat16_flops):
    assert GPUS[name].dense_flops["bfloat16"] == bfloat16_flops


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_figures_fit_together(gpu):
    assert gpu.dense_flops.keys() == {"bfloat16", "tf32", "float32"}
    # Tensor cores halve their speed from bfloat16 to TF32; the tolerance is the data sheets' rounding.
    assert gpu.dense_flops["tf32"] == pytest.approx(gpu.dense_flops["bfloat16"] / 2, rel=0.03)
    assert gpu.dense_flops["float32"] < gpu.dense_flops["tf32"]
    stated_gb = int(gpu.name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.99 * stated_gb * 1e9 <= gpu.memory_bytes <= stated_gb * GIB
    slowest_first = (
        gpu.network_bandwidth_bytes_per_s,
        gpu.link_bandwidth_bytes_per_s,
        gpu.memory_bandwidth_bytes_per_s,
    )
    assert slowest_first == tuple(sorted(slowest_first))
    assert "NVIDIA" in gpu.source


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA B200", "b200-192gb"),
    ],
)
def test_device_kind(kind, name):
    assert gpu_from_device_kind(kind) is GPUS[name]


@pytest.mark.parametrize("kind", ["cpu", "", "NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA GeForce RTX 4090", "TPU v5e"])
def test_unknown_device_kind(kind):
    assert gpu_from_device_kind(kind) is None


def test_entries_cannot_be_changed():
    with pytest.raises(AttributeError):
        GPUS["h100-80gb"].memory_bytes = 0
    with pytest.raises(TypeError):
        GPUS["h100-80gb"].dense_flops["bfloat16"] = 0
