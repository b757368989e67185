"""NVIDIA's management library: what a process asks it of its own GPUs, and that jaxllm does without it."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nvml as stand_in
import outside
import pytest

from jaxllm.doctor.fabric import HIDDEN, UNCORRECTED_ECC
from jaxllm.machine import gpus

UUIDS = [f"GPU-{number}" for number in range(4)]
LOAD = {"PowerUsage": 700_125, "ClockInfo": 1980, "UtilizationRates": SimpleNamespace(gpu=99, memory=40)}


def devices(*numbers: int):
    return [SimpleNamespace(platform="gpu", local_hardware_id=number) for number in numbers]


@pytest.fixture
def load(monkeypatch):
    """The load of a process whose devices are these, of the GPUs that CUDA shows it."""

    def read(*numbers: int, shown=UUIDS):
        monkeypatch.setattr(gpus, "visible_gpus", lambda: shown)
        return gpus.load(devices(*numbers))

    return read


def test_without_the_module_or_a_driver_nothing_is_told(monkeypatch, load):
    monkeypatch.setattr(gpus, "pynvml", None)
    assert gpus.nvml("Init") is gpus.nvml("DeviceGetCount") is None
    assert load(0) == {}
    stand_in.install(monkeypatch, driver=None)
    assert gpus.nvml("DeviceGetCount") is None
    assert gpus.nvml("Init", tells=True) == "NVML Shared Library Not Found"
    assert load(0) == {}


@pytest.mark.parametrize("older", [True, False])
def test_an_older_module_counts_as_none(tmp_path, older):
    """The modules of pynvml 11 and nvidia-ml-py3 answer in bytes, and know no version of memory."""
    newest = "" if older else "def nvmlDeviceGetCurrentClocksEventReasons(handle): ...\n"
    (tmp_path / "pynvml.py").write_text(f"class NVMLError(Exception): ...\ndef nvmlDeviceGetCount(): return 1\n{newest}")
    program = "from jaxllm.machine.gpus import nvml; print(nvml('DeviceGetCount'))"
    environment = outside.environment(PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("None\n" if older else "1\n", "")


def test_a_process_asks_of_its_own_gpus_alone(monkeypatch, load):
    """NVML knows all GPUs of the host, in an order of its own; CUDA shows some of them, in another."""
    stand_in.install(
        monkeypatch, *(stand_in.gpu(uuid, used=2**number, **LOAD) for number, uuid in reversed([*enumerate(UUIDS)]))
    )
    assert load(1, shown=UUIDS[2:])["gpu_used_bytes"] == 2**3
    assert load(0, 1, shown=UUIDS[2:])["gpu_used_bytes"] == 2**3
    assert load(0, shown=[UUIDS[2], UUIDS[0]])["gpu_used_bytes"] == 2**2
    assert load(0, shown=None) == load(0, shown=[]) == load(0, shown=["GPU-of-another-host"]) == {}
    monkeypatch.setattr(gpus, "visible_gpus", lambda: pytest.fail("the driver was asked"))
    assert gpus.gpus_of([SimpleNamespace(platform="cpu", local_hardware_id=None)]) == []


def test_the_units_and_which_gpu_is_told_of(monkeypatch, load):
    """NVML's power is in milliwatts. The slowest and the fullest GPU count: a step waits for one and fails by the other."""
    slow = {"PowerUsage": 300_000, "ClockInfo": 900, "UtilizationRates": SimpleNamespace(gpu=50, memory=1)}
    stand_in.install(monkeypatch, stand_in.gpu("GPU-0", used=5, **LOAD), stand_in.gpu("GPU-1", used=7, **slow))
    assert load(0) == {
        "gpu_power_w": 700.125,
        "gpu_sm_mhz": 1980,
        "gpu_used_bytes": 5,
        "gpu_utilization_percent": 99,
    }
    assert load(0, 1) == {
        "gpu_power_w": 500.0625,
        "gpu_sm_mhz": 900,
        "gpu_used_bytes": 7,
        "gpu_utilization_percent": 50,
    }


@pytest.mark.parametrize("lacking", [*LOAD, "MemoryInfo"])
def test_a_field_that_a_gpu_lacks_is_absent_alone(monkeypatch, load, lacking):
    one = stand_in.gpu("GPU-0", **LOAD)
    stand_in.install(monkeypatch, one)
    whole = load(0)
    del one.fields[lacking]
    without = load(0)
    assert len(without) == len(whole) - 1 == 3
    assert without.items() < whole.items()


def test_a_part_of_a_gpu_is_found_by_its_own_uuid(monkeypatch, load):
    """CUDA gives it the UUID that NVML writes with MIG in front. The power of the GPU is not that of the part."""
    whole = stand_in.gpu("GPU-0", used=2**36, **LOAD)
    part = stand_in.gpu("MIG-5", parent=whole, used=2**30)
    stand_in.install(monkeypatch, whole, parts=(part,))
    assert load(0, shown=["GPU-5"]) == {"gpu_used_bytes": 2**30}


def test_the_stand_in_is_like_nvidias_module(monkeypatch):
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("needs nvidia-ml-py")
    import pynvml

    stand_in.install(monkeypatch)
    functions = [name for name in vars(gpus.pynvml) if name.startswith("nvml")]
    for name in functions:
        field = name.removeprefix("nvmlDeviceGet")
        given = {"nvmlDeviceGetP2PStatus": 3, "nvmlInit": 0, "nvmlDeviceGetCount": 0, "nvmlSystemGetDriverVersion": 0}
        count = given.get(name, 1 + len(stand_in.ARGUMENTS.get(field, ())))
        inspect.signature(getattr(pynvml, name)).bind(*range(count))
    assert pynvml.nvmlMemory_v2 == gpus.MEMORY_V2
    assert pynvml.NVML_CLOCK_SM == gpus.SM_CLOCK
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC) == UNCORRECTED_ECC
    assert str(pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)) == HIDDEN
    assert {name for name, _ in pynvml.c_nvmlMemory_v2_t._fields_} >= {"total", "used"}
    assert "gpu" in dict(pynvml.c_nvmlUtilization_t._fields_)
