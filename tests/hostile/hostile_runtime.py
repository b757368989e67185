"""Hostile environments of launchers, XLA and the supervisor, and a hostile lock in the run directory.

What needs a process of its own, or a watch of 20 s, is beside the rest of its module: XLA_FLAGS with flags that XLA lacks in
tests/machine/test_xla_flags.py, the supervisor's in tests/cluster/test_supervisor.py, messages in
tests/cluster/test_rendezvous.py and tests/cluster/test_peer_monitor.py, locks that are no lock in
tests/checkpoint/test_run_lock.py.
"""

from pathlib import Path

from hostile import Case, train

HUGE = "99999999999999999999"
OURS = {"JAXLLM_COORDINATOR": "127.0.0.1:29500", "JAXLLM_NUM_PROCESSES": "2", "JAXLLM_PROCESS_ID": "0"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "h[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "JAXLLM_COORDINATOR": "h0:29500"}
WORDS = train("train.steps=2")


def refused(says: str, environment: dict[str, str], **changes: str) -> Case:
    name = " ".join(f"{name}={value[:24]}" for name, value in (changes or environment).items())
    return Case(name, WORDS, says, environment=environment | changes)


def link_to_nothing() -> None:
    Path("run").mkdir()
    Path("run/.holder.json").symlink_to("gone")


CASES = [
    refused("JAXLLM_NUM_PROCESSES=99999999999999999999 is not valid", OURS, JAXLLM_NUM_PROCESSES=HUGE),
    refused("it should be a whole number from 1 to 131,072.", OURS, JAXLLM_NUM_PROCESSES="131073"),
    refused("it should be a whole number from 1 to 131,072.", OURS, JAXLLM_NUM_PROCESSES="9" * 5000),
    refused("JAXLLM_NUM_PROCESSES=0 is not valid", OURS, JAXLLM_NUM_PROCESSES="0"),
    refused("JAXLLM_PROCESS_ID=99999999999999999999 is not valid", OURS, JAXLLM_PROCESS_ID=HUGE),
    refused("JAXLLM_PROCESS_ID=1e0 is not valid", OURS, JAXLLM_PROCESS_ID="1e0"),
    refused("JAXLLM_PROCESS_ID=٠ is not valid", OURS, JAXLLM_PROCESS_ID="٠"),
    refused("JAXLLM_START_TIMEOUT_S=99999999999999999999 is not valid", OURS, JAXLLM_START_TIMEOUT_S=HUGE),
    refused("has no port: write host:port", OURS, JAXLLM_COORDINATOR="h0:" + "9" * 5000),
    refused("names no host: write host:port", OURS, JAXLLM_COORDINATOR="h" * 100_000 + ":29500"),
    refused(r"JAXLLM_COORDINATOR=h\x1b[2J:29500 names no host", OURS, JAXLLM_COORDINATOR="h\x1b[2J:29500"),
    refused("The secret in JAXLLM_SECRET has too many bytes", OURS, JAXLLM_SECRET="x" * 100_000),
    refused("JAXLLM_SECRET_FILE=/dev/zero cannot be read", OURS, JAXLLM_SECRET_FILE="/dev/zero"),
    refused(r"JAXLLM_BIND=h\x1b[2J is not one address of this host", OURS, JAXLLM_BIND="h\x1b[2J"),
    refused("JAXLLM_BEAT_FD=99999999999999999999 is not valid", {"JAXLLM_BEAT_FD": HUGE}),
    refused("JAXLLM_BEAT_FD=2147483648 is not valid", {"JAXLLM_BEAT_FD": "2147483648"}),
    refused("JAXLLM_ATTEMPT=99999999999999999999 is not valid", {"JAXLLM_ATTEMPT": HUGE}),
    refused("JAXLLM_ATTEMPT=-1 is not valid", {"JAXLLM_ATTEMPT": "-1"}),
    refused("is not valid: write yes where a supervisor restarts this run", {"JAXLLM_RESTARTS": "y" * 100_000}),
    refused("is not valid: give a name of at most 4,096 characters", {"JAXLLM_LAUNCH_ID": "x" * 100_000}),
    refused("The SLURM node list h[1-999999999] has more than 131,072 hosts", SLURM, SLURM_STEP_NODELIST="h[1-999999999]"),
    refused("has more than 131,072 hosts", SLURM, SLURM_STEP_NODELIST="h[0-9][0-9][0-9][0-9][0-9][0-9][0-9]"),
    refused("cannot be read: set JAXLLM_COORDINATOR", SLURM, SLURM_STEP_NODELIST="h" + "[1]" * 30_000),
    refused("cannot be read: set JAXLLM_COORDINATOR", SLURM, SLURM_STEP_NODELIST="h[1-999999999]n[2-1]"),
    refused("cannot be read: set JAXLLM_COORDINATOR", SLURM, SLURM_STEP_NODELIST="h[" + "0" * 5000 + "-9]"),
    refused("SLURM_STEP_NUM_TASKS=99999999999999999999 is not valid", SLURM, SLURM_STEP_NUM_TASKS=HUGE),
    refused("SLURM_PROCID=x is not valid", SLURM, SLURM_PROCID="x"),
    refused("OMPI_COMM_WORLD_SIZE=99999999999999999999 is not valid", MPI, OMPI_COMM_WORLD_SIZE=HUGE),
    refused("it should be a whole number from 1 to", {"XLA_FLAGS": "--xla_force_host_platform_device_count=" + "9" * 5000}),
    Case(
        "link to nothing as lock",
        WORDS,
        "run/.holder.json is a link to a file that does not exist: remove it.",
        link_to_nothing,
    ),
]
