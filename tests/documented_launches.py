"""What each launcher sets for a process, as its documentation or source says: jaxllm/cluster/launcher_table.py names the place.

environment_of("torchrun", rank=1, count=2, port=29500)
"""

DOCUMENTED = {
    # A pod of Kubeflow Trainer's JAX runtime.
    "jax": {
        "JAX_NUM_PROCESSES": "{count}",
        "JAX_PROCESS_ID": "{rank}",
        "JAX_COORDINATOR_ADDRESS": "{host}:{port}",
        "JAX_COORDINATOR_PORT": "{port}",
        "JAX_DISTRIBUTED_BACKEND": "gloo",
        "JOB_COMPLETION_INDEX": "{rank}",
    },
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "{count}",
        "RANK": "{rank}",
        "LOCAL_RANK": "{rank}",
        "LOCAL_WORLD_SIZE": "{count}",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "{host}",
        "MASTER_PORT": "{port}",
    },
    "open mpi": {
        "OMPI_COMM_WORLD_SIZE": "{count}",
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "{count}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "PMIX_RANK": "{rank}",
    },
    "mvapich": {
        "MV2_COMM_WORLD_SIZE": "{count}",
        "MV2_COMM_WORLD_RANK": "{rank}",
        "MV2_COMM_WORLD_LOCAL_SIZE": "{count}",
        "MV2_COMM_WORLD_LOCAL_RANK": "{rank}",
    },
    "flux": {
        "FLUX_JOB_ID": "ƒ38rBqEWT",
        "FLUX_JOB_SIZE": "{count}",
        "FLUX_JOB_NNODES": "1",
        "FLUX_TASK_RANK": "{rank}",
        "FLUX_TASK_LOCAL_ID": "{rank}",
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "{count}",
    },
    "pals": {
        "PALS_APID": "7bf8eb8d-7a2f-4a9b-a0a5-8f6d24ac5e50-{port}",
        "PALS_RANKID": "{rank}",
        "PALS_NODEID": "0",
        "PALS_LOCAL_RANKID": "{rank}",
        "PALS_HOSTLIST": "{host}",
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "{count}",
        "PMI_LOCAL_RANK": "{rank}",
        "PMI_LOCAL_SIZE": "{count}",
    },
    "pmi": {"PMI_RANK": "{rank}", "PMI_SIZE": "{count}", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "{count}"},
    "jsrun": {"JSM_NAMESPACE_RANK": "{rank}", "JSM_NAMESPACE_SIZE": "{count}", "JSM_NAMESPACE_LOCAL_RANK": "{rank}"},
    "slurm": {
        "SLURM_JOB_ID": "{port}",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "{host}",
        "SLURM_STEP_NUM_TASKS": "{count}",
        "SLURM_NTASKS": "{count}",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
    },
    "jaxjob": {
        "COORDINATOR_ADDRESS": "{host}",
        "COORDINATOR_PORT": "{port}",
        "NUM_PROCESSES": "{count}",
        "PROCESS_ID": "{rank}",
    },
    "skypilot": {
        "SKYPILOT_TASK_ID": "sky-2026-11-26-18-00-00-000000_{port}",
        "SKYPILOT_NODE_RANK": "{rank}",
        "SKYPILOT_NODE_IPS": "{host}\nh1",
        "SKYPILOT_NUM_NODES": "{count}",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    },
    "dstack": {
        "DSTACK_RUN_NAME": "clever-owl-{port}",
        "DSTACK_NODE_RANK": "{rank}",
        "DSTACK_NODES_NUM": "{count}",
        "DSTACK_MASTER_NODE_IP": "{host}",
        "DSTACK_NODES_IPS": "{host}\nh1",
    },
    # A pod of Kubeflow's PyTorchJob, or a process of Ray's TorchTrainer or of DeepSpeed.
    "pytorch": {"WORLD_SIZE": "{count}", "RANK": "{rank}", "MASTER_ADDR": "{host}", "MASTER_PORT": "{port}"},
    "kubernetes": {"JOB_COMPLETION_INDEX": "{rank}"},
}
WITHOUT_HOST = ("open mpi", "mvapich", "flux", "pmi", "jsrun", "kubernetes")
"""Launchers that do not give the host of process 0."""


def environment_of(key: str, rank: int, count: int, port: int, host: str = "h0") -> dict[str, str]:
    """`host`: of process 0."""
    return {name: text.format(rank=rank, count=count, port=port, host=host) for name, text in DOCUMENTED[key].items()}
