"""What memory this machine has for this process."""

import pytest

from jaxllm.machine.host import host_memory

KIB, GIB = 2**10, 2**30
NONE_V1 = 2**63 - 4096


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("0::/\n", {}, (64, 32), id="no limit"),
        pytest.param("0::/job\n", {"job/memory.max": "max", "job/memory.current": 9 * GIB}, (64, 32), id="v2: max"),
        pytest.param("0::/\n", {"memory.max": 16 * GIB, "memory.current": GIB}, (16, 15), id="v2: a container"),
        pytest.param(
            "0::/job\n",
            {
                "job/memory.max": 16 * GIB,
                "job/memory.current": 15 * GIB,
                "job/memory.stat": f"anon {GIB}\nfile {14 * GIB}\ninactive_file {12 * GIB}",
            },
            (16, 13),
            id="v2: the page cache",
        ),
        pytest.param("0::/host/pod\n", {"memory.max": 16 * GIB, "memory.current": GIB}, (16, 15), id="v2: names of the host"),
        pytest.param(
            "0::/slurm/job_7/step_0\n",
            {
                "slurm/job_7/memory.max": 16 * GIB,
                "slurm/job_7/memory.current": 20 * GIB,
                "slurm/job_7/step_0/memory.max": "max",
            },
            (16, 0),
            id="v2: the group around it",
        ),
        pytest.param(
            "5:cpu,cpuacct:/\n4:memory:/slurm/job_7\n0::/\n",
            {
                "memory/memory.limit_in_bytes": NONE_V1,
                "memory/memory.usage_in_bytes": 60 * GIB,
                "memory/slurm/job_7/memory.limit_in_bytes": 48 * GIB,
                "memory/slurm/job_7/memory.usage_in_bytes": 2 * GIB,
            },
            (48, 32),
            id="v1",
        ),
        pytest.param("nonsense\n", {"memory.max": 128 * GIB, "memory.current": GIB}, (64, 32), id="more than there is"),
        pytest.param(
            None, {"memory/memory.limit_in_bytes": 8 * GIB, "memory/memory.usage_in_bytes": GIB}, (8, 7), id="no name"
        ),
    ],
)
def test_the_smaller_of_the_machine_and_its_control_groups(groups, files, expected, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable:  {32 * GIB // KIB} kB\n")
    if groups is not None:
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert host_memory(tmp_path) == tuple(value * GIB for value in expected)


def test_without_proc_it_is_not_known(tmp_path):
    assert host_memory(tmp_path) == (None, None)
