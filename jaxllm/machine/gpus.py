"""What NVIDIA's management library (NVML) says of GPUs: of all on the host. Which are a process's, CUDA knows (host.py)."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from statistics import fmean
from typing import Any

from jaxllm.machine.host import visible_gpus

pynvml: Any = None
"""From nvidia-ml-py 12.535 on. Other packages have older modules of this name."""
with suppress(ImportError):
    import pynvml
if not hasattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons"):
    pynvml = None

MEMORY_V2, SM_CLOCK = 0x02000028, 1
"""nvmlMemory_v2, by which `used` leaves out what the driver keeps for itself, as in nvidia-smi; NVML_CLOCK_SM."""


def nvml(name: str, *arguments: Any, tells: bool = False) -> Any:
    """The answer of NVML, such as nvml("DeviceGetName", gpu) of nvmlDeviceGetName. None where it has none: without a driver or
    pynvml, and for what this kind of GPU does not tell. With `tells`, an error's text instead.
    """
    if pynvml is None:
        return None
    try:
        return getattr(pynvml, f"nvml{name}")(*arguments)
    except pynvml.NVMLError as error:
        return str(error) if tells else None


def gpus_of(devices: Iterable[Any]) -> list[Any]:
    """NVML's handles of JAX's devices: of GPUs, or of parts of them (MIG)."""
    # A device's own number counts the GPUs that the driver shows to this process.
    numbers = {device.local_hardware_id for device in devices if device.platform != "cpu"}
    names = [name for number, name in enumerate((visible_gpus() or []) if numbers else []) if number in numbers]
    nvml("Init")
    handles = (nvml("DeviceGetHandleByUUID", name) or nvml("DeviceGetHandleByUUID", f"MIG{name[3:]}") for name in names)
    return [handle for handle in handles if handle]


def load(devices: Iterable[Any]) -> dict[str, float]:
    """Metrics of the GPUs of JAX's devices: gpu_power_w, their mean; gpu_sm_mhz and gpu_utilization_percent, of the lowest;
    gpu_used_bytes, by all programs, of the fullest. What no GPU tells has no key.
    """
    gpus = gpus_of(devices)

    def told(name: str, *arguments: Any) -> list[Any]:
        return [answer for gpu in gpus if (answer := nvml(name, gpu, *arguments)) is not None]

    found: dict[str, tuple[Callable[[list[float]], float], list[float]]] = {
        "gpu_power_w": (fmean, [milliwatts / 1000 for milliwatts in told("DeviceGetPowerUsage")]),
        "gpu_sm_mhz": (min, told("DeviceGetClockInfo", SM_CLOCK)),
        "gpu_used_bytes": (max, [memory.used for memory in told("DeviceGetMemoryInfo", MEMORY_V2)]),
        "gpu_utilization_percent": (min, [rates.gpu for rates in told("DeviceGetUtilizationRates")]),
    }
    return {key: of(values) for key, (of, values) in found.items() if values}
