"""How the CUDA driver's answers are read. The driver is a stand-in: a real one needs a machine with GPUs."""

import ctypes

import pytest

from jaxllm.machine.host import NO_DEVICE, visible_gpus


class Driver:
    """libcuda with `count` GPUs, whose UUIDs are their numbers."""

    def __init__(self, count: int, status: int = 0):
        self.count, self.status = count, status

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 100 + ordinal
        return 0

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid._obj[15] = device.value
        return 0


@pytest.mark.parametrize(
    ("driver", "gpus"),
    [
        (Driver(2), ["GPU-00000000-0000-0000-0000-000000000064", "GPU-00000000-0000-0000-0000-000000000065"]),
        (Driver(0), []),
        (Driver(0, NO_DEVICE), []),
        # For example a driver that does not match its library: JAX reports more than this module could.
        (Driver(0, 803), None),
    ],
)
def test_gpus_that_the_driver_shows(driver, gpus, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert visible_gpus() == gpus


def test_no_driver(monkeypatch):
    monkeypatch.setattr("jaxllm.machine.host.LIBRARY", "libnothing.so.1")
    assert visible_gpus() == []
