"""Launchers and the variables that each of them sets for its processes, and other signs of several processes: data.

cluster/launchers.py reads the table, and explains the precedence. A new launcher is a row of LAUNCHERS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.untrusted import INT32, LONGEST_TEXT, MIB, RefusedInput, parse_json, read_lines, whole_number

COORDINATOR, NUM_PROCESSES, PROCESS_ID = REQUIRED = ("JAXLLM_COORDINATOR", "JAXLLM_NUM_PROCESSES", "JAXLLM_PROCESS_ID")


@dataclass(frozen=True)
class Launcher:
    """Names of the variables of one launcher; '' for what it does not set."""

    name: str
    """Name for users."""
    rank: str
    count: str = ""
    """Number of processes."""
    count_else: str = ""
    """The same, where `count` is not set."""
    needs: str = ""
    """Another variable without which these were not set by this launcher."""
    address: str = ""
    """host:port of process 0, or the host alone."""
    port: str = ""
    """Port, where `address` has none."""
    hosts: str = ""
    """Hosts, that of process 0 first."""
    hosts_else: str = ""
    """The same, where `hosts` is not set."""
    host_files: tuple[str, ...] = ()
    """Where `hosts` is not set: paths of files whose first line has the host of process 0."""
    job: str = ""
    """A text that is the same on all processes of a run and differs between runs: the port is derived from it."""
    here: str = ""
    """Number of processes on this host."""
    starts_by_slurm: bool = False
    """Inside a SLURM job it starts daemons by srun: SLURM's variables then count those."""
    advice: str = f"set {COORDINATOR}=host:port for all processes,"
    """How to give the coordinator."""

    def started(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher started this process, alone or with others."""
        given = environ.get(self.needs) if self.needs else not self.count or environ.get(self.count)
        return bool(given and environ.get(self.rank))

    def count_name(self, environ: Mapping[str, str]) -> str:
        """The variable with the number of processes."""
        return self.count_else if self.count_else and not environ.get(self.count) else self.count or NUM_PROCESSES


LAUNCHERS = {
    # docs.jax.dev, multi_process.html: jax.distributed.initialize reads the address, and the port if a cluster gives the host.
    # Kubeflow Trainer's JAX runtime sets all four beside JOB_COMPLETION_INDEX: kubeflow.org, Trainer, JAX guide, and
    # pkg/runtime/framework/plugins/jax/jax.go of kubeflow/trainer.
    "jax": Launcher(
        "JAX's environment",
        "JAX_PROCESS_ID",
        "JAX_NUM_PROCESSES",
        address="JAX_COORDINATOR_ADDRESS",
        port="JAX_COORDINATOR_PORT",
        advice="set JAX_COORDINATOR_ADDRESS=host:port for all processes,",
    ),
    # docs.pytorch.org, elastic/run.html, "Environment Variables". MASTER_PORT cannot be used: the agent on the first host keeps
    # its own store there (TORCHELASTIC_USE_AGENT_STORE).
    "torchrun": Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        needs="TORCHELASTIC_RUN_ID",
        hosts="MASTER_ADDR",
        job="MASTER_PORT",
        here="LOCAL_WORLD_SIZE",
    ),
    # docs.open-mpi.org, tuning-apps/environment-var.html.
    "open mpi": Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        here="OMPI_COMM_WORLD_LOCAL_SIZE",
        starts_by_slurm=True,
        advice=f"start with launch/mpi.sh, or give mpirun -x {COORDINATOR}=host:port",
    ),
    # Set by MVAPICH2's mpirun_rsh; the names are those that Hugging Face Accelerate reads.
    "mvapich": Launcher(
        "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", here="MV2_COMM_WORLD_LOCAL_SIZE", starts_by_slurm=True
    ),
    # flux-core, flux-environment(7). It sets PMI_RANK and PMI_SIZE too.
    "flux": Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", advice=f"give flux run --env={COORDINATOR}=host:port"),
    # pals.h of HPE's PALS; SLURM's mpi/cray_shasta plugin sets the same. mpiexec takes its hosts from these variables if it
    # has no option for them.
    "pals": Launcher(
        "PALS",
        "PALS_RANKID",
        "PMI_SIZE",
        hosts="PALS_HOSTLIST",
        host_files=("PALS_HOSTFILE", "PBS_NODEFILE"),
        job="PALS_APID",
        here="PMI_LOCAL_SIZE",
    ),
    # MPICH's Hydra and Intel MPI's; Flux RFC 13 describes PMI-1.
    "pmi": Launcher(
        "PMI (MPICH, Intel MPI)",
        "PMI_RANK",
        "PMI_SIZE",
        here="MPI_LOCALNRANKS",
        starts_by_slurm=True,
        advice=f"give mpiexec -genv {COORDINATOR} host:port",
    ),
    # lightning.ai, LSFEnvironment: set by IBM's jsrun.
    "jsrun": Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    # slurm.schedmd.com, srun, "OUTPUT ENVIRONMENT VARIABLES". A batch script has SLURM_PROCID too, but no step.
    "slurm": Launcher(
        "SLURM",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        count_else="SLURM_NTASKS",
        needs="SLURM_STEP_ID",
        hosts="SLURM_STEP_NODELIST",
        hosts_else="SLURM_NODELIST",
    ),
    # Kubeflow Training Operator 1.9, JAXJob: pkg/controller.v1/jax/envvar.go.
    "jaxjob": Launcher(
        "Kubeflow's JAXJob",
        "PROCESS_ID",
        "NUM_PROCESSES",
        needs="COORDINATOR_ADDRESS",
        address="COORDINATOR_ADDRESS",
        port="COORDINATOR_PORT",
    ),
    # docs.skypilot.co, running-jobs/environment-variables.html: one address a line, in order of rank.
    "skypilot": Launcher(
        "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", hosts="SKYPILOT_NODE_IPS", job="SKYPILOT_TASK_ID"
    ),
    # dstack.ai, docs/concepts/tasks, "System environment variables".
    "dstack": Launcher("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", hosts="DSTACK_MASTER_NODE_IP", job="DSTACK_RUN_NAME"),
    # docs.pytorch.org, distributed.html, "Environment variable initialization": set by DeepSpeed, Ray's TorchTrainer,
    # Kubeflow's PyTorchJob, Volcano's pytorch plugin. Batch scripts set these too, sometimes wrongly, so that they come after
    # others. Torch in the same process may keep its store at MASTER_PORT.
    "pytorch": Launcher(
        "PyTorch's environment", "RANK", "WORLD_SIZE", hosts="MASTER_ADDR", job="MASTER_PORT", here="LOCAL_WORLD_SIZE"
    ),
    # kubernetes.io, concepts/workloads/controllers/job, "Completion mode".
    "kubernetes": Launcher("Kubernetes", "JOB_COMPLETION_INDEX"),
}
"""By key, nearest to the process first."""

COUNTS = {
    "LOCAL_WORLD_SIZE": "torchrun",
    "GROUP_WORLD_SIZE": "torchrun",
    "MPI_LOCALNRANKS": "MPICH, Intel MPI",
    "PMI_LOCAL_SIZE": "PALS",
    "HOROVOD_SIZE": "Horovod",
    # kubeflow.org, Trainer, PyTorch guide: torchrun's options as variables.
    "PET_NNODES": "Kubeflow's torch runtime",
}
"""Further signs of several processes: variables whose value is above 1, and who sets them."""

RANKS = {
    # The PMIx standard's server gives each client its rank; the number of processes only on request.
    "PMIX_RANK": "PMIx",
    "HOROVOD_RANK": "Horovod",
    "GROUP_RANK": "torchrun",
    "NODE_RANK": "PyTorch Lightning, DeepSpeed",
    "PET_NODE_RANK": "Kubeflow's torch runtime",
    # volcano.sh, docs/user-guide/how_to_use_env_plugin.md.
    "VC_TASK_INDEX": "Volcano",
}
"""The same, for variables whose value is above 0."""


def first_sign(environ: Mapping[str, str], nearest: str) -> tuple[str, str] | None:
    """(a variable that says that this process is one of several, who sets it); None if nothing says so.

    Args:
      nearest: key of the launcher that started this process as its only one; '': none is known.
    """
    others = {key: one for key, one in LAUNCHERS.items() if key != nearest and (not one.needs or environ.get(one.needs))}
    if nearest and LAUNCHERS[nearest].starts_by_slurm:
        others.pop("slurm", None)
    # Of launchers with the same variable the nearest is named.
    farthest_first = list(reversed(others.values()))
    counts = {one.count_name(environ): one.name for one in farthest_first} | COUNTS
    ranks = {one.rank: one.name for one in farthest_first} | RANKS
    signs = [
        *((name, by) for name, by in counts.items() if (number_or_none(environ, name) or 0) > 1),
        *((name, by) for name, by in ranks.items() if number_or_none(environ, name)),
        *((name, by) for name, by, count in _lists(environ) if count > 1),
    ]
    if not nearest and environ.get(LAUNCHERS["jax"].address):
        signs.append((LAUNCHERS["jax"].address, LAUNCHERS["jax"].name))
    return next(iter(signs), None)


def _lists(environ: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """(variable, who sets it, number of processes), for variables that list processes or count them in parts."""
    # volcano.sh, docs/user-guide/how_to_use_svc_plugin.md: VC_<TASK>_NUM for each task.
    tasks = [name for name in environ if name.startswith("VC_") and name.endswith("_NUM")]
    # tensorflow.org, guide/distributed_training, "TF_CONFIG"; SageMaker training toolkit, ENVIRONMENT_VARIABLES.md, "SM_HOSTS".
    cluster, hosts = _json(environ.get("TF_CONFIG")), _json(environ.get("SM_HOSTS"))
    cluster = cluster.get("cluster") if isinstance(cluster, dict) else None
    members = cluster.values() if isinstance(cluster, dict) else ()
    return [
        *((name, "Volcano", sum(number_or_none(environ, one) or 0 for one in tasks)) for name in tasks),
        ("TF_CONFIG", "TensorFlow", sum(len(some) for some in members if isinstance(some, list))),
        ("SM_HOSTS", "SageMaker", len(hosts) if isinstance(hosts, list) else 0),
    ]


def _json(text: str | None) -> object:
    try:
        return parse_json(text or "null", MIB)
    except RefusedInput:
        return None


def number_or_none(environ: Mapping[str, str], name: str, at_most: int = INT32) -> int | None:
    """A number that a launcher gives for information: without it there is less to say."""
    try:
        return whole_number(environ.get(name, ""), 0, at_most)
    except RefusedInput:
        return None


def host_in_files(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """First host of the first file that can be read; '' if there is none.

    Args:
      names: variables that hold paths.
    """
    for name in names:
        try:
            line = next(read_lines(Path(environ.get(name, "")), LONGEST_TEXT), b"").decode()
        except (OSError, ValueError):
            continue
        # Some forms give the number of processes too, as host:4 or host slots=4.
        if words := line.replace(":", " ").split():
            return words[0]
    return ""
