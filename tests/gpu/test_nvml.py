"""NVIDIA's management library tells of the GPUs that JAX has, in the units that jaxllm takes them for."""

import time

import jax
import jax.numpy as jnp
import pytest

from jaxllm.doctor import fabric, probes
from jaxllm.machine.gpus import MEMORY_V2, gpus_of, load, nvml

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def module():
    pytest.importorskip("pynvml")


def test_names_and_memory_are_those_of_jax():
    devices = sorted(jax.local_devices(), key=lambda device: device.local_hardware_id)
    gpus = gpus_of(devices)
    assert [nvml("DeviceGetName", gpu) for gpu in gpus] == [device.device_kind for device in devices]
    kept = [jax.device_put(jnp.ones(2**28, jnp.uint8), device) for device in devices]
    jax.block_until_ready(kept)
    for gpu, device in zip(gpus, devices, strict=True):
        memory, stats = nvml("DeviceGetMemoryInfo", gpu, MEMORY_V2), device.memory_stats()
        print(memory, stats)
        assert stats["bytes_in_use"] <= memory.used <= memory.total
        assert 0.5 < stats["bytes_limit"] / memory.total < 1


def test_the_doctors_cards_are_the_gpus_that_this_process_drives():
    driver, cards = probes.gpu_cards()
    here = probes.facts(driver, cards)
    print(here.driver, here.cards, here.binding, fabric.of_host())
    assert driver
    assert int(driver.split(".")[0]) >= 525
    assert here.device_kind in {card.name for card in cards}
    nodes = probes.binding({str(card.number): card.pci for card in cards}).gpu_nodes
    assert here.binding.gpu_nodes.items() <= nodes.items()
    if jax.local_device_count() == len(cards):
        assert here.binding.gpu_nodes == nodes


def test_the_load_of_a_gpu_at_work():
    """A second of matmuls: NVML's power and utilization are means over up to a second."""
    x, until_s = jnp.ones((8192, 8192), jnp.bfloat16), time.monotonic() + 2
    work = jax.jit(lambda x: x @ x * 1e-4)
    load(jax.local_devices())
    while time.monotonic() < until_s:
        work(x).block_until_ready()
    begin = time.perf_counter()
    found = load(jax.local_devices())
    taken_s = time.perf_counter() - begin
    print(found, f"in {1e3 * taken_s:.2f} ms")
    assert found["gpu_utilization_percent"] > 50
    assert 50 < found["gpu_power_w"] < 2000
    assert 300 < found["gpu_sm_mhz"] < 4000
    assert found["gpu_used_bytes"] > 2**27
    assert taken_s < 0.01 * jax.local_device_count()
