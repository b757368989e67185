"""`jaxllm doctor`: verdicts on one process and on two, and that each failure comes with a fix."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import nvml
import pytest
import yaml
from rich.console import Console
from tiny import TINY

from jaxllm.cli import app as cli
from jaxllm.cluster import distributed
from jaxllm.cluster.launchers import LaunchInfo
from jaxllm.cost_model.hardware import GPUS, host_copy_bytes_per_s
from jaxllm.cost_model.network import Group, all_gather_s, all_reduce_s, links_of, permute_s
from jaxllm.cost_model.step_parts import BANDWIDTH_SHARE
from jaxllm.doctor import checks, doctor, fabric, links, probes
from jaxllm.doctor.checks import FAIL, OK, WARN, Row
from jaxllm.doctor.links import BOTH_WAYS, FROM_HOST, TO_HOST, Collective, HostCopy
from jaxllm.doctor.probes import Binding, Card, Facts, Folder, binding
from jaxllm.mesh.axes import HOST

CHECKOUT = Path(__file__).parents[2]
H100, GIB = GPUS["h100-80gb"], 2**30
LINKS = links_of(H100, BANDWIDTH_SHARE)

ONE = Facts(
    rank=0,
    host="h0",
    pid=1,
    python="3.12.1",
    versions={"jaxllm": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"},
    driver="580.95.05",
    cards=[Card("NVIDIA H100 80GB HBM3", H100.memory_bytes, 4 * 2**20)] * 8,
    platform="gpu",
    device_kind="NVIDIA H100 80GB HBM3",
    devices=8,
    device_limit_bytes=int(0.92 * H100.memory_bytes),
    host_bytes=2**40,
    host_available_bytes=2**39,
    shared_memory_bytes=2**38,
    binding=Binding(96, 96, [0, 1], 2, {str(gpu): gpu // 4 for gpu in range(8)}),
    environment={"XLA_FLAGS": "--xla_gpu_deterministic_ops=true", "NCCL_DEBUG": "WARN"},
)


def launch(*changes: dict) -> list[Facts]:
    """Process 0 as above, and one more on its own host for each of the changes."""
    others = [dataclasses.replace(ONE, rank=rank, host=f"h{rank}", **one) for rank, one in enumerate(changes, start=1)]
    return [ONE, *others]


def alike(count: int, **changes) -> list[Facts]:
    return [dataclasses.replace(ONE, rank=rank, host=f"h{rank}", **changes) for rank in range(count)]


# ------------------------------------------------------------------------------------------------------------------ verdicts


def judged(processes: list[Facts], forced: bool = False) -> dict[str, Row]:
    """All rows that come from facts alone, by check."""
    hosts = {one.rank: one.host for one in processes}
    rows = [
        checks.versions(processes),
        checks.driver(processes, forced),
        *checks.variables(processes),
        checks.launcher(processes, hosts, LaunchInfo("slurm", 0, "7", True, None)),
        checks.devices(processes, forced),
        *checks.memory(processes),
        *checks.cpus(processes),
    ]
    return {row.check: row for row in rows}


@pytest.mark.parametrize("count", [1, 4])
def test_a_launch_of_equal_processes_passes(count):
    rows = judged(alike(count))
    assert {row.status for row in rows.values()} == {OK}
    assert {row.todo for row in rows.values()} == {""}
    assert rows["devices"].found.startswith(f"{8 * count} x NVIDIA H100 80GB HBM3")
    assert f"{count} process" in rows["launcher"].found


@pytest.mark.parametrize(
    ("processes", "check", "status", "words"),
    [
        (
            launch({"versions": ONE.versions | {"jaxlib": "0.11.0"}}),
            *("versions", FAIL, "not those of process 0 on process 1 on h1: jaxlib"),
        ),
        (alike(2, versions=ONE.versions | {"jax-cuda13-plugin": "0.11.0"}), "versions", FAIL, "jax-cuda13-plugin, not 0.11.0"),
        (alike(2, driver="570.12"), "driver", FAIL, "570.12 on process 0 on h0: CUDA 13 needs 580 or newer"),
        (launch({}, {"driver": "590.1"}), "driver", WARN, "580.95.05 on process 0 on h0, another on process 2 on h2"),
        (
            launch({"environment": ONE.environment | {"XLA_FLAGS": ""}}, {"environment": {"NCCL_DEBUG": "WARN"}}),
            *("xla flags", FAIL, "is not that of processes 1-2 on h1, h2"),
        ),
        (launch({"environment": ONE.environment | {"NCCL_DEBUG": "INFO"}}), "variables", WARN, "NCCL_DEBUG is not the same"),
        (alike(3), "launcher", WARN, "3 processes on 2 hosts (h0: 0-1, h2: 2)"),
        (launch({"device_kind": "NVIDIA H200"}), "devices", FAIL, "but process 1 on h1 have NVIDIA H200"),
        (launch({}, {"devices": 7}), "devices", FAIL, "8 on process 0, 7 on process 2 on h2"),
        (alike(1, platform="cpu", device_kind="cpu"), "devices", FAIL, "although there are GPUs (NVIDIA H100 80GB HBM3)"),
        (alike(1, cards=[Card("x", 80 * GIB, 20 * GIB)]), "gpu memory", WARN, "up to 20.0 GiB of a GPU were in use"),
        (alike(1, device_limit_bytes=60 * GIB), "gpu memory", WARN, "less than 92% of the 79.6 GiB that a h100-80gb has"),
        (launch({"host_available_bytes": GIB}), "host memory", WARN, "little on process 1 on h1"),
        (launch({"shared_memory_bytes": 64 * 2**20}), "host memory", WARN, "/dev/shm has 64.0 MiB on process 1 on h1"),
        (
            launch({"binding": dataclasses.replace(ONE.binding, cpus=1, nodes=[0], gpu_nodes={"0": 0})}),
            *("cpus", WARN, "a single CPU of 96: process 1 on h1"),
        ),
        (
            launch({}, {"binding": dataclasses.replace(ONE.binding, cpus=48, nodes=[0])}),
            *("cpus", WARN, "GPU 4 is on NUMA node 1, the CPUs only on 0: process 2 on h2"),
        ),
    ],
)
def test_each_problem_is_named_with_its_process(processes, check, status, words):
    if check == "launcher":
        processes[1] = dataclasses.replace(processes[1], host="h0")
    rows = judged(processes)
    assert rows[check].status == status
    assert words in rows[check].found
    assert rows[check].todo
    assert [name for name, row in rows.items() if row.status != OK] == [check]


def test_a_run_that_asks_for_cpu_devices_needs_no_driver():
    rows = judged(alike(1, platform="cpu", device_kind="cpu", driver="470.1", device_limit_bytes=None), forced=True)
    assert {row.status for row in rows.values()} == {OK}


@pytest.mark.parametrize(
    ("ahead", "status", "words"),
    [
        ((0.001, 0.004), OK, "at most 4 ms apart"),
        # Bounds that contain 0 prove nothing, however wide.
        ((-30.0, 40.0), OK, "at most 40000 ms apart"),
        ((4.0, 4.1), WARN, "process 1 on h1 is at least 4.0 s behind that of process 0"),
        ((-90.2, -90.0), FAIL, "process 1 on h1 is at least 90.0 s ahead of that of process 0"),
    ],
)
def test_clocks(ahead, status, words):
    (row,) = checks.clocks(alike(2), [(-1e-4, 1e-4), ahead])
    assert row.status == status
    assert words in row.found
    assert list(checks.clocks(alike(1), [(0.0, 0.0)])) == []


WRITABLE = Folder(free_bytes=100 * GIB, write_bytes_per_s=1e9, read_bytes_per_s=2e9)


@pytest.mark.parametrize(
    ("folders", "checkpoint_bytes", "statuses", "words"),
    [
        ([WRITABLE] * 2, None, [OK, OK], "seen and written by all 2; 100.0 GiB free"),
        ([WRITABLE] * 2, 40 * GIB, [OK, OK], "a checkpoint takes 40.0 GiB"),
        ([WRITABLE] * 2, 60 * GIB, [WARN, OK], "a checkpoint takes 60.0 GiB"),
        ([WRITABLE] * 2, 101 * GIB, [FAIL, OK], "a checkpoint takes 101.0 GiB"),
        ([dataclasses.replace(WRITABLE, write_bytes_per_s=9e6)], None, [OK, WARN], "is writable; 100.0 GiB free"),
        (
            [WRITABLE, Folder(error="No space left on device")],
            *(None, [FAIL], "cannot be written by process 1 on h1: No space left on device"),
        ),
        ([WRITABLE, Folder(sees_main=False)], None, [FAIL], "written by process 0 are not seen by process 1 on h1"),
        (
            [dataclasses.replace(WRITABLE, unseen=(1,)), WRITABLE],
            *(None, [FAIL], "written by process 1 on h1 are not seen by process 0"),
        ),
    ],
)
def test_run_directory(folders, checkpoint_bytes, statuses, words):
    rows = list(checks.folder("/runs/a", alike(len(folders)), folders, checkpoint_bytes))
    assert [row.status for row in rows] == statuses
    assert words in rows[0].found
    assert "run.dir=/runs/a" in rows[0].found
    assert all(bool(row.todo) == (row.status != OK) for row in rows)


INSIDE, ACROSS = Group(8, 1), Group(1, 8)


@pytest.mark.parametrize(
    ("group", "share", "status"),
    [
        *((INSIDE, 1.2, OK), (INSIDE, 0.71, OK), (INSIDE, 0.69, WARN), (INSIDE, 0.36, WARN), (INSIDE, 0.34, FAIL)),
        # A cluster's network may well have a fraction of the reference system's speed.
        *((ACROSS, 0.71, OK), (ACROSS, 0.34, WARN), (ACROSS, 0.11, WARN), (ACROSS, 0.09, FAIL)),
    ],
)
@pytest.mark.parametrize("what", ["all-reduce", "all-gather", "permute"])
def test_a_collective_is_held_against_the_model(what, group, share, status):
    cost = {"all-reduce": all_reduce_s, "all-gather": all_gather_s, "permute": permute_s}[what](GIB, group, LINKS)
    assert links.COSTS[what](GIB, group, LINKS) == cost
    one = Collective(what, "data", 8, GIB, cost / share, right=True, expected_s=cost)
    row = links.collective(one, group, H100)
    assert (row.check, row.status) == (f"{what} over data", status)
    assert f"{share:.0%} of the" in row.found
    # Wrong numbers are wrong at any speed, and without an expectation nothing is too slow.
    assert links.collective(dataclasses.replace(one, right=False), group, H100).status == FAIL
    assert links.collective(dataclasses.replace(one, expected_s=None), group, None).status == OK


@pytest.mark.parametrize(("share", "status"), [(1.1, OK), (0.71, OK), (0.69, WARN), (0.01, WARN)])
@pytest.mark.parametrize("way", [TO_HOST, FROM_HOST, BOTH_WAYS])
def test_a_copy_to_the_host_is_held_against_its_figures(way, share, status):
    """Eight H100s both ways share the host's memory; one way they have their links."""
    expected = host_copy_bytes_per_s(H100, 8, both_ways=way == BOTH_WAYS)
    one = HostCopy(way, 8, GIB, GIB / (share * expected), expected)
    row = links.host_copy(one, H100)
    assert (row.check, row.status, bool(row.todo)) == (way, status, status == WARN)
    assert f"each of 8 devices of a host at once; {share:.0%} of the {expected / 1e9:.1f} GB/s" in row.found
    assert links.host_copy(dataclasses.replace(one, expected_bytes_per_s=None), None).status == OK


def test_copies_are_timed_on_all_devices_at_once(monkeypatch):
    """By a clock that advances half a second each time that it is read. Both ways each device sends as much as in one."""
    clock = SimpleNamespace(perf_counter=lambda ticks=iter(range(1000)): next(ticks) / 2)
    monkeypatch.setattr(links, "time", clock)
    copied = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda arrays, there: copied.append((len(arrays), there)) or put(arrays, there))
    found = list(links.host_copies({0: "h0"}, 2**12, None))
    assert [one.way for one in found] == [TO_HOST, FROM_HOST, BOTH_WAYS]
    assert {(one.devices, one.size_bytes, one.seconds, one.bytes_per_s) for one in found} == {(8, 2**12, 0.5, 2**13)}
    assert sorted({count for count, _ in copied}) == [8, 16]
    assert set(jax.devices()) == set().union(*(one.device_set for _, there in copied for one in there))
    assert {one.memory_kind for one in copied[-1][1]} == {HOST, copied[0][1][0].memory_kind}


def test_the_cards_of_a_host(monkeypatch):
    """A GPU of another job has none, and a size that a GPU does not tell is 0."""
    integrated = nvml.gpu("GPU-c", "00010000:DA:00.0")
    del integrated.fields["MemoryInfo"]
    nvml.install(monkeypatch, nvml.gpu("GPU-a", used=5), fabric.HIDDEN, integrated)
    cards = [
        Card("NVIDIA H200", 2**37, 5, "00000000:19:00.0", "GPU-a", 0),
        Card("NVIDIA H200", 0, 0, "00010000:DA:00.0", "GPU-c", 2),
    ]
    assert probes.gpu_cards() == ("580.95.05", cards)
    nvml.install(monkeypatch, driver=None)
    assert probes.gpu_cards() == (None, [])


def test_a_process_is_bound_to_its_own_gpus(monkeypatch):
    """Also to the GPU of a part (MIG); and a silent library is a row that says what to install."""
    whole = nvml.gpu("GPU-b", "00000000:DA:00.0")
    part = nvml.gpu("MIG-5", parent=whole)
    nvml.install(monkeypatch, nvml.gpu("GPU-a"), whole, parts=(part,))
    monkeypatch.setattr(probes, "_node_of", lambda address, sysfs: int(address == "00000000:DA:00.0"))
    for driven, nodes in (([whole], {"1": 1}), ([part], {"1": 1}), ([], {})):
        monkeypatch.setattr(probes, "gpus_of", lambda devices, driven=driven: driven)
        here = probes.facts(*probes.gpu_cards())
        assert (here.driver, here.binding.gpu_nodes) == ("580.95.05", nodes)
    row = checks.driver(alike(1, driver=None, cards=[]), forced=False)
    assert (row.status, "nvidia-ml-py" in row.todo) == (WARN, True)


# ------------------------------------------------------------------------------------------------------------------ NUMA


@pytest.fixture
def sysfs(tmp_path):
    """A host of two sockets, each with half of the CPUs of this machine, and a third node of memory alone; a GPU on each."""
    first, *others = sorted(os.sched_getaffinity(0))
    files = {
        "devices/system/node/node0/cpulist": f"{first}\n",
        "devices/system/node/node1/cpulist": ",".join(f"{cpu}-{cpu}" for cpu in others) + ",1000-1003\n",
        "devices/system/node/node2/cpulist": "\n",
        "bus/pci/devices/0000:19:00.0/numa_node": "0\n",
        "bus/pci/devices/0000:da:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:3b:00.0/numa_node": "-1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


PCI = {"0": "00000000:19:00.0", "1": "00000000:DA:00.0", "2": "00000000:3B:00.0", "3": ""}


@pytest.fixture
def one_cpu():
    """The number of the only CPU that this process may use."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield min(allowed)
    os.sched_setaffinity(0, allowed)


def test_a_process_of_one_cpu_is_far_from_the_other_nodes_gpu(sysfs, one_cpu):
    found = binding(PCI, sysfs)
    assert found == Binding(1, os.cpu_count(), [0], 2, {"0": 0, "1": 1})
    assert found.far_gpus == ["1"]
    assert binding({gpu: PCI[gpu] for gpu in "02"}, sysfs).far_gpus == []
    if os.cpu_count() > 1:
        rows = list(checks.cpus([dataclasses.replace(ONE, binding=found)]))
        assert [row.found for row in rows] == [
            f"a single CPU of {os.cpu_count()}: process 0 on h0",
            "GPU 1 is on NUMA node 1, the CPUs only on 0: process 0 on h0",
        ]
        assert rows[0].todo.startswith("give each process its share: srun --cpus-per-task=N, mpirun --bind-to none")


def test_a_process_that_may_use_all_cpus(sysfs, tmp_path):
    cpus = len(os.sched_getaffinity(0))
    nodes = [0, 1][:cpus]
    assert binding({"1": PCI["1"]}, sysfs) == Binding(cpus, os.cpu_count(), nodes, 2, {"1": 1})
    # A container without these files.
    assert binding(PCI, tmp_path / "none") == Binding(cpus, os.cpu_count(), [], 0, {})
    (row,) = checks.cpus([ONE])
    assert (row.status, row.found) == (OK, "96 of 96 CPUs, NUMA nodes 0-1 of 2, GPUs 0-3 on node 0, GPUs 4-7 on node 1")


def test_the_kernel_tells_of_this_machine():
    found = binding({})
    assert found.cpus == len(os.sched_getaffinity(0))
    assert len(found.nodes) <= found.host_nodes
    assert bool(found.nodes) == Path("/sys/devices/system/node/node0/cpulist").exists()


# --------------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(probes, "DISK_BYTES", 2**20)
    monkeypatch.setattr(doctor, "CPU_BYTES", 2**12)


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["jaxllm", "doctor", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    return end.value.code, out, err


def rows_of(text: str) -> dict[str, Row]:
    return {row["check"]: Row(**row) for row in json.loads(text)["rows"]}


def test_one_host_with_forced_cpu_devices(monkeypatch, capsys, tmp_path):
    mesh = ("parallel.pipe=2", "parallel.context=2", "parallel.tensor=2")
    folder = tmp_path / "runs" / "new"
    code, out, _ = run(monkeypatch, capsys, "run.cpu_devices=8", f"run.dir={folder}", *mesh, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["ok"] is True
    assert [row["check"] for row in found["rows"] if row["status"] == FAIL] == []
    measured = {(one["what"], one["axis"]) for one in found["collectives"]}
    assert measured == {
        (what, axis) for what in ("all-reduce", "all-gather", "permute") for axis in ("pipe", "context", "tensor")
    }
    assert all(one["right"] and one["seconds"] > 0 and one["expected_s"] is None for one in found["collectives"])
    assert {one["ranks"] for one in found["collectives"]} == {2}
    assert [(one["way"], one["devices"], one["expected_bytes_per_s"]) for one in found["host_copies"]] == [
        (way, 8, None) for way in (TO_HOST, FROM_HOST, BOTH_WAYS)
    ]
    # The folders that it created are gone again.
    assert list(tmp_path.iterdir()) == []


def test_wrong_numbers_fail(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(links.lax, "ppermute", lambda x, axis_name, perm: x)
    code, out, _ = run(monkeypatch, capsys, "run.cpu_devices=8", f"run.dir={tmp_path}", "--json")
    rows = rows_of(out)
    assert code == 1
    assert "the result is wrong" in rows["permute over tensor"].found
    assert [check for check, row in rows.items() if row.status == FAIL] == ["permute over tensor"]


def test_a_recipe_and_what_its_gpus_should_do(monkeypatch, capsys, tmp_path, text_file):
    """CPU devices compared with an H100: everything is measured, and far too slow."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    arguments = (str(recipe), "run.cpu_devices=8", f"run.dir={tmp_path / 'run'}", "parallel.tensor=2")
    code, out, _ = run(monkeypatch, capsys, *arguments, "parallel.data=4", "--gpu", "h100-80gb", "--json")
    rows, collectives = rows_of(out), json.loads(out)["collectives"]
    assert code == 1
    assert "a checkpoint takes" in rows["run directory"].found
    assert {one["axis"] for one in collectives} == {"data", "tensor"}
    for one in collectives:
        expected = links.COSTS[one["what"]](one["size_bytes"], Group(one["ranks"], 1), LINKS)
        assert one.pop("expected_s") == expected
        row = rows[f"{one['what']} over {one['axis']}"]
        assert (row.status == FAIL) == (expected / one["seconds"] < links.POOR_SHARE)
        assert "expected of h100-80gb" in row.found
    # A mesh that does not fit these devices.
    code, out, _ = run(monkeypatch, capsys, *arguments, "parallel.data=2", "--json")
    assert (code, rows_of(out)["mesh"].status) == (1, FAIL)
    assert "but there are 8" in rows_of(out)["mesh"].found


def test_a_folder_that_cannot_be_created(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    code, out, _ = run(monkeypatch, capsys, "run.cpu_devices=8", f"run.dir={tmp_path / 'file' / 'run'}", "--json")
    row = rows_of(out)["run directory"]
    assert (code, row.status) == (1, FAIL)
    assert "cannot be written by process 0" in row.found
    assert row.found.endswith("Not a directory")


def test_an_unknown_flag_is_found_before_it_ends_the_process(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "start", lambda run: pytest.fail("JAX was started"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_no_such_flag=1")
    code, out, _ = run(monkeypatch, capsys, "--json")
    assert code == 1
    (row,) = rows_of(out).values()
    assert row.status == FAIL
    assert "does not know --xla_gpu_no_such_flag" in row.found


def test_a_start_that_is_refused_is_a_row(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "run.cpu_devices=3")
    assert code == 1
    assert "start" in out
    # The table wraps lines.
    assert "run.cpu_devices=3, but JAX already runs on 8 cpu devices" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a.yaml", "b.yaml"), "At most one config file is needed and 2 were given: a.yaml, b.yaml."),
        (("train.steps=3",), "Without a config file doctor takes parallel.* and run.*, not train.*: give the file too."),
        (("run.cpu_device=3",), "Unknown key run.cpu_device: did you mean run.cpu_devices?"),
        (("--gpu", "h100"), "There is no GPU h100: did you mean h100-80gb?"),
    ],
)
def test_invalid_arguments(arguments, sentence, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    (line,) = err.splitlines()
    assert sentence in line


def test_the_table_fits_a_terminal():
    rows = [Row("run directory", FAIL, "found " * 40, "do this " * 20), Row("clocks", OK, "at most 1 ms apart")]
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    console.print(doctor.render(doctor.Report(tuple(rows))))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[2] for line in lines if line.startswith("run directory")] == [FAIL]
    assert "-> do this" in console.file.getvalue()
    assert doctor.Report(tuple(rows)).failed
    assert not doctor.Report((Row("mesh", WARN, "", ""),)).failed


# ------------------------------------------------------------------------------------------------------------ two processes

# Examines twice: a folder that both see, then a separate folder for each, with one clock 90 s behind.
PROGRAM = """
import json, os, sys, time
from types import SimpleNamespace
from jaxllm.doctor import doctor
from jaxllm.doctor import probes
from jaxllm.config import ParallelConfig, RunConfig

folder, rank = sys.argv[1], int(os.environ["JAXLLM_PROCESS_ID"])
probes.DISK_BYTES, probes.SEEN_LIMIT_S, doctor.CPU_BYTES = 2**20, 1.0, 2**12
mesh = ParallelConfig(pipe=2, data=1, tensor=2)
sound = doctor.examine(RunConfig(cpu_devices=2, dir=f"{folder}/shared"), mesh)
os.makedirs(f"{folder}/{rank}")
os.chdir(f"{folder}/{rank}")
late = 90 * rank
probes.time = SimpleNamespace(**{**vars(time), "time": lambda: time.time() - late})
ill = doctor.examine(RunConfig(cpu_devices=2, dir="run"), mesh)
assert sound.is_shown_here == ill.is_shown_here == (rank == 0)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump([sound.to_json(), ill.to_json()], file)
sys.exit(ill.failed)
"""


@pytest.mark.launcher
def test_two_processes_come_to_one_report(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        "bash",
        str(CHECKOUT / "launch" / "local_cluster.sh"),
        "2",
        "python",
        str(tmp_path / "program.py"),
        str(tmp_path),
    ]
    variables = {"JAXLLM_VENV": "none", "PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT)}
    ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    sound, ill = ({row["check"]: row for row in report["rows"]} for report in first)
    assert first[0]["ok"] is True
    assert "2 processes on 1 host" in sound["launcher"]["found"]
    assert "seen and written by all 2" in sound["run directory"]["found"]
    assert sound["clocks"]["status"] == OK
    assert [one["rank"] for one in first[0]["processes"]] == [0, 1]
    assert {one["devices"] for one in first[0]["host_copies"]} == {4}
    assert {(one["axis"], one["right"]) for one in first[0]["collectives"]} == {("pipe", True), ("tensor", True)}
    assert first[1]["ok"] is False
    assert [check for check, row in ill.items() if row["status"] == FAIL] == ["clocks", "run directory"]
    assert "written by process 0 are not seen by process 1" in ill["run directory"]["found"]
    assert "process 1" in ill["clocks"]["found"]
    assert "behind that of process 0" in ill["clocks"]["found"]
    # Nothing that they wrote is left.
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir()) == ["0", "1"]
    assert list(tmp_path.rglob(".doctor-*")) == []
