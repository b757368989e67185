"""A SLURM cluster on one machine for the tests: a controller and nodes h1, h2 ... that each have their own address, host name
and processes, and can lose their power or their cable.

Every node is a network namespace on a bridge in another namespace, "hsw", where the controller and the users' commands run. A
node's processes are in one PID namespace, whose first process ends the others with it: that is the power switch. Needs root and
Debian's packages of SLURM; missing ones are installed. Nothing of the machine's own network, services or files changes; two
labs at once do not interfere.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import real_launches
from host_networks import ADDRESSES, SWITCH, Network, networks_are_possible

PACKAGES = {
    **{"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"},
    **{"ip": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux"},
}
"""By the program that needs each."""
COMMAND_LIMIT_S, UP_LIMIT_S = 30, 60

# cred_expire decides how long a requeued job waits (2 minutes if not set), SlurmdTimeout when a silent node counts as down: its
# jobs start elsewhere 2 to 4 times that later. RequeueExit keeps its default, nothing: few clusters set it.
CONFIG = """
ClusterName=lab
SlurmctldHost={switch}({network}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=30
BatchStartTimeout=10
MessageTimeout=10
MinJobAge=3600
JobRequeue=1
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName=h[1-{total}] CPUs=4 RealMemory=4000 Gres=gpu:fake:2 State=UNKNOWN
PartitionName=main Nodes=h[1-{count}] Default=YES MaxTime=60 State=UP
PartitionName=apart Nodes=h[{next}-{total}] MaxTime=60 State=UP
"""


def require_slurm() -> None:
    """Installs missing packages; skips the test if that fails."""
    if os.geteuid() != 0:
        pytest.skip("SLURM's nodes need root here")
    real_launches.require(**PACKAGES)


def wait_until(true: Callable[[], bool], limit_s: float, what: str | Callable[[], str], every_s: float = 0.2) -> None:
    """Raises AssertionError with `what` if the condition does not become true in time."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what if isinstance(what, str) else what()}"
        time.sleep(every_s)


@contextmanager
def cluster(folder: Path, count: int, apart: int):
    """A Lab with nodes h1 to h<count>, and `apart` more in a partition of that name, all idle; removed afterwards."""
    lab = Lab(folder, count, apart)
    try:
        lab.start()
        yield lab
    finally:
        lab.close()


class Lab:
    """See `cluster`.

    Args:
      folder: new; holds the daemons' state and logs.
      count: of nodes in the partition of jobs that name none.
      apart: of nodes in the other.
    """

    def __init__(self, folder: Path, count: int, apart: int):
        self.folder, self._count, self._total = folder.resolve(), count, count + apart
        self.nodes = [f"h{number}" for number in range(1, self._total + 1)]
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._network = Network(self.nodes, self.folder)
        self.plug, self.unplug = self._network.plug, self._network.unplug
        self._daemons: dict[str, subprocess.Popen] = {}

    # ------------------------------------------------------------------------------------------------------ the machines

    def start(self) -> None:
        for part in ("log", "munge", "state"):
            (self.folder / part).mkdir(parents=True)
        # Munge distrusts folders that others may write to.
        for part in (self.folder, self.folder / "munge"):
            part.chmod(0o755)
        if not networks_are_possible():
            pytest.skip("no network namespaces here")
        self._network.__enter__()
        self._write_files()
        munge = self.folder / "munge"
        self._spawn(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/sock"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        wait_until((munge / "sock").exists, 10, "munged has a socket", every_s=0.05)
        self._spawn("slurmctld", *self.on(SWITCH), "slurmctld", "-D", "-c", "-f", self.environment["SLURM_CONF"])
        for node in self.nodes:
            self.power_on(node)
        wait_until(lambda: self._idle() == self._total, UP_LIMIT_S, lambda: f"all nodes idle\n{self.logs()}", every_s=0.5)

    def close(self) -> None:
        for daemon in self._daemons.values():
            end(daemon)
        self._network.__exit__()

    def on(self, host: str) -> list[str]:
        """Prefix of a command that shall run on a host; the command dies with this test."""
        return ["setpriv", "--pdeathsig", "KILL", *self._network.on(host)]

    def power_on(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self.plug(node)
        first = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        # The path must be absolute: with a relative one slurmd registers, but each launch hangs.
        self._spawn(node, *self.on(node), *first, "slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"])

    def power_off(self, node: str) -> None:
        """Ends every process of the node at once."""
        # The kernel, which keeps running here, would close their connections properly.
        self.unplug(node)
        end(self._daemons.pop(node))

    def _write_files(self) -> None:
        folder = self.folder
        nodes = {"count": self._count, "next": self._count + 1, "total": self._total}
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, switch=SWITCH, network=ADDRESSES, **nodes))
        for number in (0, 1):
            # SLURM refuses a GPU that is not a device node; these two are /dev/null.
            os.mknod(folder / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu Type=fake File={folder}/gpu[0-1]\n")
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _spawn(self, name: str, *command: str) -> None:
        if command[0] != "setpriv":
            command = ("setpriv", "--pdeathsig", "KILL", *command)
        with (self.folder / "log" / f"{name}.out").open("a") as log:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def _idle(self) -> int:
        # A node has a line for each partition.
        lines = set(self.user("sinfo", "--noheader", "--format=%N %T", "--Node", check=False).splitlines())
        return sum(line.endswith(" idle") for line in lines)

    def logs(self) -> str:
        """The ends of the daemons' logs, for a failed test."""
        ends = (f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(self.folder.glob("log/*")))
        return "\n".join(ends)

    # ---------------------------------------------------------------------------------------------------------- the user

    def user(self, *command: str, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """Output of a user's command."""
        result = subprocess.run(
            [*self.on(SWITCH), *command],
            cwd=cwd,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        assert result.returncode == 0 or not check, f"{' '.join(command)}: {result.stdout}{result.stderr}"
        return result.stdout

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> Job:
        """Runs sbatch ARGUMENTS in a folder, with these variables in the environment."""
        return Job(self, self.user("sbatch", "--parsable", *map(str, arguments), cwd=cwd, **variables).strip(), cwd)


class Job:
    """A submitted job."""

    def __init__(self, lab: Lab, number: str, folder: Path):
        self.lab, self.number, self._folder = lab, number, folder

    @property
    def output(self) -> str:
        """Its output, over all its starts."""
        path = self._folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def show(self, key: str) -> str:
        """A field of `scontrol show job`, such as JobState, Restarts, NodeList, ExitCode, Reason."""
        text = self.lab.user("scontrol", "show", "job", self.number)
        return re.search(rf"\b{key}=(\S*)", text)[1]

    @property
    def nodes(self) -> list[str]:
        """Its nodes, the batch script's node first."""
        return self.lab.user("scontrol", "show", "hostnames", self.show("NodeList")).split()

    def wait(self, *states: str, limit_s: float) -> str:
        """Waits until its state is one of these; returns it."""
        found = ""

        def reached() -> bool:
            nonlocal found
            found = self.show("JobState")
            return found in states

        wait_until(reached, limit_s, lambda: f"job {self.number} {states}, but {found}\n{self.output}", every_s=0.5)
        return found

    def wait_for(self, text: str, limit_s: float) -> None:
        """Waits until it has printed the text."""
        wait_until(lambda: text in self.output, limit_s, lambda: f"{text!r} from job {self.number}\n{self.output}")


# ------------------------------------------------------------------------------------------------------------ cleaning up


def end(daemon: subprocess.Popen) -> None:
    """Kills a process that was started as its own session, and waits."""
    try:
        os.killpg(daemon.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    daemon.wait(timeout=COMMAND_LIMIT_S)
