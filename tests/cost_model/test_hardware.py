"""The GPU table: names for commands, peaks for MFU, and JAX's names of the devices."""

import os
from pathlib import Path

import pytest

from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import (
    GPUS,
    HOST_MEMORY_SHARE,
    RESERVE_BYTES,
    XLA_MEMORY_FRACTION,
    gpu_from_device_kind,
    host_copy_bytes_per_s,
)

GIB = 2**30


def test_every_name_of_the_gpu_option_is_there():
    assert set(GPUS) == {
        *("v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "rtx3090-24gb", "a10g-24gb", "rtx4090-24gb", "l40s-48gb"),
        *("h100-80gb", "h100-94gb", "h100-nvl-94gb", "h200-141gb", "gh200-96gb", "gh200-144gb", "b200-192gb", "b300-288gb"),
    }
    assert all(name == gpu.name for name, gpu in GPUS.items())


def test_the_page_lists_every_kind():
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    table = page.split("## Kinds of GPU")[1].split("\n\n")[1]
    listed = [name for line in table.splitlines()[2:] for name in line.split("|")[1].strip().split(", ")]
    assert sorted(listed) == sorted(GPUS)


@pytest.mark.parametrize(
    ("name", "bfloat16_flops"),
    [
        ("a100-40gb", 312e12),
        ("a100-80gb", 312e12),
        ("h100-80gb", 989e12),
        ("h200-141gb", 989e12),
        ("b200-192gb", 2250e12),
        ("rtx3090-24gb", 71e12),
        ("rtx4090-24gb", 165.2e12),
        ("l40s-48gb", 362e12),
    ],
)
def test_dense_bfloat16_peak(name, bfloat16_flops):
    assert GPUS[name].dense_flops["bfloat16"] == bfloat16_flops


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_figures_fit_together(gpu):
    assert gpu.dense_flops.keys() == {"bfloat16", "tf32", "float32"}
    if gpu.chip.compute_capability >= (8, 0):
        # Tensor cores halve their speed from bfloat16 to TF32; the tolerance is the data sheets' rounding.
        assert gpu.dense_flops["tf32"] == pytest.approx(gpu.dense_flops["bfloat16"] / 2, rel=0.03)
        assert gpu.dense_flops["float32"] <= gpu.dense_flops["tf32"]
    else:
        assert len(set(gpu.dense_flops.values())) == 1
    stated_gb = int(gpu.name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.99 * stated_gb * 1e9 <= gpu.memory_bytes <= stated_gb * GIB
    slowest_first = (
        gpu.network_bandwidth_bytes_per_s,
        gpu.link_bandwidth_bytes_per_s,
        gpu.memory_bandwidth_bytes_per_s,
    )
    assert slowest_first == tuple(sorted(slowest_first))
    assert 0 < gpu.link_latency_s < gpu.network_latency_s < 1e-4
    assert "NVIDIA" in gpu.source


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_peaks_follow_from_the_chip(gpu):
    """float32: multiprocessors x units x 2 x clock, at the clock that data sheets assume."""
    chip = gpu.chip
    units = chip.multiprocessors * chip.fpus_per_multiprocessor
    assert 2 * units * chip.clock_ghz * 1e9 == pytest.approx(gpu.dense_flops["float32"], rel=0.08)
    assert chip.shared_memory_per_block < chip.shared_memory_per_multiprocessor
    family = gpu.name.split("-")[0]
    by_family = {"v100": (7, 0), "a100": (8, 0), "rtx3090": (8, 6), "a10g": (8, 6), "rtx4090": (8, 9), "l40s": (8, 9)}
    by_family |= {"h100": (9, 0), "h200": (9, 0), "gh200": (9, 0), "b200": (10, 0), "b300": (10, 3)}
    assert chip.compute_capability == by_family[family]
    # GeForce-like chips have smaller multiprocessors.
    assert chip.threads_per_multiprocessor == (1536 if chip.shared_memory_per_multiprocessor == 100 * 1024 else 2048)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_capacity_is_xlas_share_less_the_reserve(gpu):
    assert gpu.capacity_bytes == int(gpu.memory_bytes * XLA_MEMORY_FRACTION) - RESERVE_BYTES
    # More than JAX's default share, with room beside it for the CUDA context and NCCL.
    assert 0.75 * gpu.memory_bytes < gpu.capacity_bytes < gpu.memory_bytes - 2 * GIB


def test_xla_is_given_that_share_unless_the_user_says_otherwise(monkeypatch):
    from jaxllm.config import RunConfig
    from jaxllm.machine import xla_flags

    monkeypatch.setenv("XLA_FLAGS", "")
    for name in xla_flags.MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    xla_flags.apply(RunConfig())
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == str(XLA_MEMORY_FRACTION)
    # JAX rejects the variable's two names together.
    for name, value in (("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5"), ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")):
        monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
        monkeypatch.setenv(name, value)
        xla_flags.apply(RunConfig())
        assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
        monkeypatch.delenv(name)
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.3")
        xla_flags.apply(RunConfig())
        assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.3"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA B200", "b200-192gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
    ],
)
def test_device_kind(kind, name):
    assert gpu_from_device_kind(kind) is GPUS[name]


@pytest.mark.parametrize("kind", ["cpu", "", "NVIDIA H100 PCIe", "NVIDIA H20", "Tesla V100-PCIE-32GB", "TPU v5e"])
def test_unknown_device_kind(kind):
    assert gpu_from_device_kind(kind) is None


def test_entries_cannot_be_changed():
    with pytest.raises(AttributeError):
        GPUS["h100-80gb"].memory_bytes = 0
    with pytest.raises(TypeError):
        GPUS["h100-80gb"].dense_flops["bfloat16"] = 0


# -------------------------------------------------------------------------------------------------------- a user's own kind


@pytest.fixture
def described(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_describes_another_kind(described):
    text = "{like: h100-80gb, memory_bytes: 102_625_181_696, dense_flops: {bfloat16: 148.0e+12}, multiprocessors: 78}"
    mine, h100 = find_gpu(described(text)), GPUS["h100-80gb"]
    assert mine.name == "mine"
    assert mine.memory_bytes == 102_625_181_696
    assert mine.dense_flops == {**h100.dense_flops, "bfloat16": 148e12}
    assert (mine.chip.multiprocessors, mine.chip.l2_cache_bytes) == (78, h100.chip.l2_cache_bytes)
    assert mine.link_bandwidth_bytes_per_s == h100.link_bandwidth_bytes_per_s
    assert find_gpu("h100-80gb") is h100


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("memory_bytes: 5", "does not say which GPU it is like: write like: and one of v100-16gb"),
        ("- 1", "does not say which GPU it is like"),
        ("like: [h100-80gb]", "does not say which GPU it is like"),
        ("{like: [}", "cannot be read as the description of a GPU"),
        ("{like: h100-80gb, memory_byte: 5}", "Unknown key memory_byte in .*: did you mean memory_bytes?"),
        ("{like: h100-80gb, memory_bytes: 80GB}", "memory_bytes=80GB in .* is not valid: it should be a whole number above"),
        ("{like: h100-80gb, memory_bytes: 1000000}", "leaves no memory for a step: it should be above 1.1 GiB"),
        ("{like: h100-80gb, link_latency_s: -1}", "link_latency_s=-1 in .* is not valid: it should be a number above zero"),
        ("{like: h100-80gb, dense_flops: {fp8: 1.0}}", "should be numbers above zero for any of bfloat16, tf32, float32"),
        ("{like: h100-80gb, compute_capability: 9.0}", r"should be two whole numbers, such as \[9, 0\]"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(described, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        find_gpu(described(text))


def test_an_unknown_name_gets_the_choices():
    with pytest.raises(ConfigError, match=r"There is no GPU H100: did you mean h100-80gb\? Choose one of v100-16gb, .*YAML"):
        find_gpu("H100")


# ------------------------------------------------------------------------------------------------------------------ the host


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_a_copy_to_the_host_shares_its_memory(gpu):
    """All GPUs together stay within the host's memory bandwidth, one alone has its whole link, and no GPU more than it."""
    for gpus in range(1, gpu.gpus_per_host + 1):
        one_way, both = (host_copy_bytes_per_s(gpu, gpus, both_ways=ways) for ways in (False, True))
        assert both <= one_way <= gpu.host_bandwidth_bytes_per_s
        assert max(one_way, 2 * both) * gpus <= HOST_MEMORY_SHARE * gpu.host_memory_bandwidth_bytes_per_s * (1 + 1e-9)
    if gpu.chip is not GPUS["gh200-96gb"].chip:
        # NVLink-C2C alone is faster than its CPU's memory.
        assert host_copy_bytes_per_s(gpu, 1, both_ways=True) == gpu.host_bandwidth_bytes_per_s


def test_the_hosts_memory_by_the_cpus_data_sheets():
    assert GPUS["a100-80gb"].host_memory_bandwidth_bytes_per_s == 2 * 204.8e9
    assert GPUS["h100-80gb"].host_memory_bandwidth_bytes_per_s == 2 * 307.2e9
    assert GPUS["h100-94gb"].host_memory_bandwidth_bytes_per_s == 2 * 460.8e9
    # 8 GPUs both ways: 16 streams share 80% of 614 GB/s. Two A100s share one PCIe uplink.
    assert host_copy_bytes_per_s(GPUS["h100-80gb"], 8, both_ways=True) == pytest.approx(0.8 * 614.4e9 / 16)
    assert host_copy_bytes_per_s(GPUS["a100-80gb"], 8, both_ways=True) == GPUS["a100-80gb"].host_bandwidth_bytes_per_s / 2


def test_a_file_describes_the_host_too(described):
    mine = find_gpu(
        described("{like: h100-80gb, host_memory_bytes: 5, host_memory_bandwidth_bytes_per_s: 1.6e+9, gpus_per_uplink: 4}")
    )
    assert (mine.host_memory_bytes, mine.gpus_per_uplink) == (5, 4)
    assert host_copy_bytes_per_s(mine, 8, both_ways=True) == HOST_MEMORY_SHARE * 1.6e9 / 16
