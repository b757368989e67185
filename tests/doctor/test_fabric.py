"""What `jaxllm doctor` says of adapters, locked memory and GPUs. The answers of NVML and dcgmi are written after NVIDIA's
manuals (NVML API reference; DCGM user guide); none was recorded on a machine with such a fault.
"""

import ctypes
import dataclasses
import resource

import nvml
import pytest
from test_doctor import ONE, alike

from jaxllm.doctor import fabric
from jaxllm.doctor.checks import FAIL, OK, WARN
from jaxllm.doctor.fabric import PLUGIN, VERBS, Fabric

MIB = 2**20
SOUND = Fabric(adapters=("mlx5_0", "mlx5_1"))

HEALTH = """+---------------------------+----------------------------------------------------------+
| Health Monitor Report                                                                |
+===========================+==========================================================+
| Overall Health            | {}                                                  |
+---------------------------+----------------------------------------------------------+
"""

# ----------------------------------------------------------------------------------------------------- the driver, and DCGM


def told(monkeypatch, *gpus: nvml.Gpu | str) -> dict[str, tuple[str, ...]]:
    nvml.install(monkeypatch, *gpus)
    monkeypatch.setattr(fabric, "health", str)
    return {name: texts for name, texts in fabric.of_host().items() if texts}


def test_ecc_errors(monkeypatch):
    gpus = nvml.Gpu(TotalEccErrors=0), nvml.Gpu(TotalEccErrors=3), nvml.Gpu()
    assert told(monkeypatch, *gpus) == {"gpu_errors": ("GPU 1 has 3 uncorrectable ECC errors",)}


def test_rows_of_memory(monkeypatch):
    """NVML counts those that were replaced first: these are repaired."""
    rows = (9, 2, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)
    assert told(monkeypatch, *(nvml.Gpu(RemappedRows=row) for row in rows), nvml.Gpu()) == {
        "gpu_errors": ("GPU 1 has a damaged row of memory",),
        "gpu_damage": ("GPU 2 cannot replace a damaged row of memory",),
    }


def test_clocks_held_down(monkeypatch):
    """An idle GPU, one at its power cap and one with set clocks are not held down."""
    healthy = [*(nvml.Gpu(CurrentClocksEventReasons=reason) for reason in (1, 4, 2)), nvml.Gpu()]
    assert told(monkeypatch, *healthy) == {}
    hot = (nvml.Gpu(CurrentClocksEventReasons=reasons) for reasons in (0x48, 0xA4))
    assert told(monkeypatch, *healthy, *hot) == {
        "slowed": (
            "GPU 4: hardware slowdown, too hot (hardware slowdown)",
            "GPU 5: too hot (software slowdown), power brake",
        )
    }


def test_pairs_of_gpus_are_named_once(monkeypatch):
    apart = [nvml.gpu("a", peers={"c": 5, "d": 6}), nvml.gpu("b", peers={"c": 1}), nvml.gpu("c", peers={"a": 5, "b": 1})]
    assert told(monkeypatch, *apart, nvml.gpu("d")) == {
        "unreached": (
            "GPU0 and GPU2 (not supported)",
            "GPU0 and GPU3 (unknown)",
            "GPU1 and GPU2 (the chipset does not support it)",
        )
    }
    assert told(monkeypatch, nvml.gpu("a"), nvml.gpu("b")) == told(monkeypatch, nvml.gpu("a")) == told(monkeypatch) == {}


def test_a_gpu_that_does_not_answer_is_named_and_one_of_another_job_is_not(monkeypatch):
    """The others keep their numbers."""
    found = told(monkeypatch, fabric.HIDDEN, "GPU is lost", nvml.Gpu(TotalEccErrors=1))
    assert found == {"gpu_errors": ("GPU 1: GPU is lost", "GPU 2 has 1 uncorrectable ECC errors")}


@pytest.fixture
def dcgmi(monkeypatch, tmp_path):
    """A dcgmi that prints this."""

    def make(text: str) -> None:
        program = tmp_path / "dcgmi"
        program.write_text(f"#!/bin/sh\n[ \"$*\" = 'health --group 0 --check' ] && cat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


@pytest.mark.parametrize("verdict", ["Healthy", "Warning", "Failure"])
def test_the_verdict_of_dcgm(dcgmi, verdict):
    dcgmi(HEALTH.format(verdict))
    assert fabric.health() == verdict
    dcgmi(f"| Overall Health:  | {verdict}   |")
    assert fabric.health() == verdict
    dcgmi("Error: unable to establish a connection to the specified host: localhost")
    assert fabric.health() == ""


# ------------------------------------------------------------------------------------------------------------- this machine


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel with two adapters of a driver, whose device files are there or not, and a system with some libraries."""

    def make(driver: str, devices: bool, libraries: tuple[str, ...] = ()) -> None:
        module = tmp_path / "drivers" / driver
        module.mkdir(parents=True)
        for number in range(2):
            device = tmp_path / "class" / f"mlx5_{number}" / "device"
            device.mkdir(parents=True)
            (device / "driver").symlink_to(module)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / "rdma_cm").touch()
        if devices:
            (tmp_path / "dev" / "uverbs1").touch()

        def load(name):
            if name not in libraries:
                raise OSError(f"{name}: cannot open shared object file: No such file or directory")

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(fabric, "ADAPTERS", tmp_path / "class")
        monkeypatch.setattr(fabric, "DEVICE_FILES", tmp_path / "dev")

    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    return make


@pytest.mark.parametrize(
    ("driver", "devices", "libraries", "missing"),
    [
        ("mlx5_core", True, (VERBS,), ""),
        ("mlx5_core", True, (), VERBS),
        ("mlx5_core", False, (VERBS,), ""),
        # EFA needs AWS's plugin; libibverbs alone does not help.
        ("efa", True, (VERBS,), PLUGIN),
        ("efa", True, (PLUGIN,), ""),
    ],
)
def test_adapters_and_their_library(kernel, driver, devices, libraries, missing):
    kernel(driver, devices, libraries)
    assert fabric.adapters() == Fabric(("mlx5_0", "mlx5_1"), opens=devices, missing_library=missing)


def test_a_named_plugin_is_the_users_choice(kernel, monkeypatch):
    kernel("mlx5_core", True)
    monkeypatch.setenv("NCCL_NET_PLUGIN", "gIB")
    assert fabric.adapters().missing_library == ""


def test_a_kernel_without_adapters(monkeypatch, tmp_path):
    monkeypatch.setattr(fabric, "ADAPTERS", tmp_path / "none")
    assert fabric.adapters() == Fabric()


@pytest.mark.parametrize(
    ("capabilities", "limit", "found"),
    [
        ("0000000000000000", 8 * MIB, 8 * MIB),
        ("00000000a80425fb", 64 * 2**10, 64 * 2**10),
        ("0000000000000000", resource.RLIM_INFINITY, None),
        # CAP_IPC_LOCK is the capability number 14.
        ("0000000000004000", 8 * MIB, None),
        ("000001ffffffffff", 8 * MIB, None),
    ],
)
def test_the_limit_of_locked_memory(monkeypatch, tmp_path, capabilities, limit, found):
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\nCapBnd:\t000001ffffffffff\n")
    monkeypatch.setattr(fabric, "STATUS", status)
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_MEMLOCK: (limit, limit)}[which])
    assert fabric.locked_limit() == found


def test_a_host_is_asked_by_one_process(monkeypatch, dcgmi):
    monkeypatch.setattr(fabric, "adapters", Fabric)
    monkeypatch.setattr(fabric, "locked_limit", lambda: None)
    ill = {"TotalEccErrors": 1, "RemappedRows": (0, 0, 1, 1), "CurrentClocksEventReasons": 0x40}
    nvml.install(monkeypatch, nvml.gpu("a", peers={"b": 5}, **ill), nvml.gpu("b"))
    dcgmi(HEALTH.format("Warning"))
    assert fabric.gather(asks=True) == [
        Fabric(
            gpu_errors=("GPU 0 has 1 uncorrectable ECC errors", "GPU 0 has a damaged row of memory"),
            gpu_damage=("GPU 0 cannot replace a damaged row of memory",),
            slowed=("GPU 0: too hot (hardware slowdown)",),
            unreached=("GPU0 and GPU1 (not supported)",),
            dcgm="Warning",
        )
    ]
    assert fabric.gather(asks=False) == [Fabric()]


def test_a_host_without_a_driver_and_dcgm_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(fabric, "adapters", Fabric)
    monkeypatch.setattr(fabric, "locked_limit", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    nvml.install(monkeypatch, driver=None)
    assert fabric.gather(asks=True) == [Fabric()]


# ------------------------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    "view", [SOUND, Fabric(), dataclasses.replace(SOUND, dcgm="Healthy", locked_bytes=2 * fabric.LOCKED_BYTES)]
)
def test_sound_hosts_pass(view):
    rows = list(fabric.rows(alike(2), [view, view]))
    assert {(row.status, row.todo) for row in rows} == {(OK, "")}
    names = {row.check for row in rows}
    assert names >= {"network adapters", "access between GPUs", "gpu health", "gpu clocks"}
    assert ("locked memory" in names, "dcgm" in names) == (bool(view.adapters), bool(view.dcgm))


@pytest.mark.parametrize(
    ("change", "check", "status", "found", "todo"),
    [
        (
            {"missing_library": VERBS},
            *("network adapters", WARN, "mlx5_0, mlx5_1, but libibverbs.so.1 cannot be loaded on h1: NCCL would send by TCP"),
            "install libibverbs1",
        ),
        ({"missing_library": PLUGIN}, "network adapters", WARN, "but libnccl-net.so cannot be loaded on h1", "AWS's EFA"),
        ({"opens": False}, "network adapters", WARN, "but /dev/infiniband cannot be opened on h1", "an rdma/ resource"),
        ({"adapters": ()}, "network adapters", WARN, "mlx5_0, mlx5_1, but none on h1", "hosts of one kind"),
        ({"locked_bytes": 8 * MIB}, "locked memory", WARN, "at most 8.0 MiB may be locked on h1", "--ulimit memlock=-1"),
        (
            {"unreached": ("GPU0 and GPU1 (not supported)",)},
            "access between GPUs",
            WARN,
            "GPU0 and GPU1 (not supported) on h1",
            "ACS",
        ),
        (
            {"gpu_errors": ("GPU 1 has 3 uncorrectable ECC errors",)},
            "gpu health",
            WARN,
            "GPU 1 has 3 uncorr",
            "nvidia-smi --gpu-reset",
        ),
        (
            {"gpu_damage": ("GPU 1 cannot",), "gpu_errors": ("x",)},
            "gpu health",
            FAIL,
            "GPU 1 cannot on h1",
            "have them replaced",
        ),
        ({"slowed": ("GPU 4: power brake",)}, "gpu clocks", WARN, "held down: GPU 4: power brake on h1", "cooling and power"),
        ({"dcgm": "Failure"}, "dcgm", WARN, "Failure on h1", "dcgmi diag -r 3"),
    ],
)
def test_each_fault_is_named_with_its_host_and_a_cure(change, check, status, found, todo):
    rows = list(fabric.rows(alike(3), [SOUND, dataclasses.replace(SOUND, **change), SOUND]))
    (row,) = (row for row in rows if row.status != OK)
    assert (row.check, row.status) == (check, status)
    assert found in row.found
    assert todo in row.todo
    assert "\n" not in row.todo


def test_many_faults_are_counted():
    pairs = tuple(f"GPU0 and GPU{other} (not supported)" for other in range(1, 8))
    rows = fabric.rows(alike(6), [dataclasses.replace(SOUND, unreached=pairs)] * 6)
    (row,) = (row for row in rows if row.status != OK)
    assert "GPU0 and GPU4 (not supported) and 3 more on h0, h1, h2, h3 and 2 more" in row.found


def test_cpu_devices_need_no_fabric_and_a_silent_driver_is_not_praised():
    cpus = [dataclasses.replace(ONE, platform="cpu", device_kind="cpu")]
    assert list(fabric.rows(cpus, [dataclasses.replace(SOUND, missing_library=VERBS)])) == []
    silent = [dataclasses.replace(ONE, driver=None)]
    assert [row.check for row in fabric.rows(silent, [Fabric()])] == ["network adapters"]
