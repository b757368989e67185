"""A stand-in for NVIDIA's module pynvml, and so for a driver with GPUs. tests/machine/test_gpus.py holds it to the module."""

from types import ModuleType, SimpleNamespace

from jaxllm.doctor.fabric import P2P_READ, UNCORRECTED_ECC
from jaxllm.machine.gpus import MEMORY_V2, SM_CLOCK

ARGUMENTS = {"MemoryInfo": (MEMORY_V2,), "ClockInfo": (SM_CLOCK,), "TotalEccErrors": UNCORRECTED_ECC}
"""What jaxllm asks some fields with."""
FIELDS = ("Name", "UUID", "PciInfo", "RemappedRows", "CurrentClocksEventReasons", "PowerUsage", "UtilizationRates", *ARGUMENTS)


class NVMLError(Exception):
    """Its text is the module's."""


class Gpu:
    """A GPU, or a part of one, that tells these fields and no others. `peers`: statuses of access to others, by their UUID."""

    def __init__(self, parent: "Gpu | None" = None, peers: dict[str, int] | None = None, **fields):
        self.parent, self.peers, self.fields = parent, peers or {}, fields


def gpu(uuid: str, pci: str = "00000000:19:00.0", total: int = 2**37, used: int = 2**22, **more) -> Gpu:
    memory = SimpleNamespace(total=total, used=used)
    return Gpu(**{"Name": "NVIDIA H200", "UUID": uuid, "PciInfo": SimpleNamespace(busId=pci), "MemoryInfo": memory, **more})


def install(monkeypatch, *gpus: Gpu | str, parts: tuple[Gpu, ...] = (), driver: str | None = "580.95.05") -> None:
    """A driver with these GPUs, or errors in their place. It is silent before its start; `driver` None: it does not start."""
    started = []

    def start():
        if driver is None:
            raise NVMLError("NVML Shared Library Not Found")
        started.append(True)

    def tells(field):
        def tell(one, *arguments):
            assert arguments == ARGUMENTS.get(field, ())
            if field not in one.fields:
                raise NVMLError("Not Supported")
            return one.fields[field]

        return tell

    def by_index(number):
        if isinstance(gpus[number], str):
            raise NVMLError(gpus[number])
        return gpus[number]

    def by_uuid(uuid):
        found = [one for one in (*gpus, *parts) if isinstance(one, Gpu) and one.fields["UUID"] == uuid]
        if not found:
            raise NVMLError("Not Found")
        return found[0]

    def whole_of(one):
        if one.parent is None:
            raise NVMLError("Invalid Argument")
        return one.parent

    def access(one, other, what):
        assert what == P2P_READ
        return one.peers.get(other.fields.get("UUID"), 0)

    def once_started(function):
        def call(*arguments):
            if not started:
                raise NVMLError("Uninitialized")
            return function(*arguments)

        return call

    functions = {f"DeviceGet{field}": tells(field) for field in FIELDS} | {
        "SystemGetDriverVersion": lambda: driver,
        "DeviceGetCount": lambda: len(gpus),
        "DeviceGetHandleByIndex": by_index,
        "DeviceGetHandleByUUID": by_uuid,
        "DeviceGetDeviceHandleFromMigDeviceHandle": whole_of,
        "DeviceGetP2PStatus": access,
    }
    module = ModuleType("pynvml")
    module.NVMLError, module.nvmlInit = NVMLError, start
    for name, function in functions.items():
        setattr(module, f"nvml{name}", once_started(function))
    monkeypatch.setattr("jaxllm.machine.gpus.pynvml", module)
