"""The number of GPUs that a config is for, how they are grouped into hosts, and their share of a host's memory."""

from jaxllm.config import AUTO, Config, ConfigError, ParallelConfig, divisors
from jaxllm.cost_model.hardware import Gpu
from jaxllm.untrusted import shown

MOST_GPUS = 2**20
HOST_GPUS = 8
"""GPUs of the usual host; a default host has at most this many."""
SYSTEM_SHARE = 1 / 8
"""Share of a host's memory that is left to the operating system, to the processes themselves and to the data loader with its
page cache: 256 GB of a DGX H100. Chosen, not measured."""
UNKNOWN_HOST_BYTES = 128 * 2**30
"""Host memory per GPU where the kind of GPU is not known: 1 TB for eight, as in the smaller DGX A100."""


def named_devices(config: Config, gpus: int | None) -> int | None:
    """The given number, else run.cpu_devices, else the size of the config's mesh; None if it depends on the devices present
    (parallel.data=auto).

    Raises:
      ConfigError: the number is below one, or above MOST_GPUS.
    """
    if gpus is None:
        return config.run.cpu_devices or (None if config.parallel.data == AUTO else config.devices)
    if not 1 <= gpus <= MOST_GPUS:
        limit = "at least 1" if gpus < 1 else f"at most {MOST_GPUS:,}"
        raise ConfigError(f"--gpus={shown(gpus)} is not valid: it should be {limit}.")
    return gpus


def require_devices(config: Config, gpus: int | None) -> int:
    """As named_devices(), for GPUs that need not be present.

    Raises:
      ConfigError: the number is not given anywhere.
    """
    named = named_devices(config, gpus)
    if named is None:
        raise ConfigError("parallel.data=auto uses all present GPUs: give their number with --gpus, or set parallel.data.")
    return named


def hosts_text(gpus: int, per_host: int) -> str:
    """'2 hosts of 8'."""
    hosts = gpus // per_host
    return f"{hosts} {'host' if hosts == 1 else 'hosts'} of {per_host}"


def gpus_beside(gpus: int, parallel: ParallelConfig) -> int:
    """Those of `gpus` that hosts may combine: if a network of their own connects the replicas, those of one replica."""
    return max(1, gpus // parallel.replica) if parallel.names_replica_network else gpus


def choose_gpus_per_host(
    gpus: int, per_host: int | None, largest: int = HOST_GPUS, parallel: ParallelConfig | None = None
) -> tuple[int, str]:
    """(GPUs per host, reason). Without a given number, a host has at most `largest` GPUs.

    Args:
      parallel: of the config; see gpus_beside().

    Raises:
      ConfigError: the given number does not divide the GPUs.
    """
    whose, of_whom = "", ""
    if parallel is not None and parallel.names_replica_network:
        gpus, whose, of_whom = gpus_beside(gpus, parallel), "a replica's ", " of a replica"
    if per_host is None:
        per_host = max(n for n in range(1, min(gpus, largest) + 1) if gpus % n == 0)
        return per_host, f"the largest divisor of {whose}{gpus} not above {largest}, or --gpus-per-host"
    if per_host < 1 or gpus % per_host:
        usable = ", ".join(map(str, divisors(gpus)))
        raise ConfigError(
            f"--gpus-per-host={per_host} does not divide the {gpus} GPU{'s' if gpus > 1 else ''}{of_whom}: use one of {usable}."
        )
    return per_host, "as given"


def host_bytes_per_gpu(gpu: Gpu | None, gpus_per_host: int | None = None) -> float:
    """Bytes of host memory that offloading may use for each GPU of a host. A host of more GPUs than the kind's is taken to have
    the same memory; one of fewer is a part of the kind's host."""
    if gpu is None:
        return UNKNOWN_HOST_BYTES
    return (1 - SYSTEM_SHARE) * gpu.host_memory_bytes / max(gpu.gpus_per_host, gpus_per_host or 1)
