"""How many GPUs a config is for, and how they stand in hosts."""

from __future__ import annotations

from jaxllm.config import AUTO, Config, ConfigError, divisors

HOST_GPUS = 8
"""GPUs of the usual host: a default host is no larger."""


def named_devices(config: Config, gpus: int | None) -> int | None:
    """The number given, else run.cpu_devices, else what the config's mesh names; None where only the devices here can tell
    (parallel.data=auto).

    Raises:
      ConfigError: less than one.
    """
    if gpus is not None and gpus < 1:
        raise ConfigError(f"--gpus={gpus} is not valid: it should be at least 1.")
    if gpus is not None:
        return gpus
    if config.run.cpu_devices is not None:
        return config.run.cpu_devices
    return None if config.parallel.data == AUTO else config.devices


def require_devices(config: Config, gpus: int | None) -> int:
    """The same, for GPUs that need not be here.

    Raises:
      ConfigError: nobody says how many.
    """
    named = named_devices(config, gpus)
    if named is None:
        raise ConfigError("parallel.data=auto takes all GPUs there are: say how many with --gpus, or set parallel.data.")
    return named


def hosts_text(gpus: int, per_host: int) -> str:
    """'2 hosts of 8'."""
    hosts = gpus // per_host
    return f"{hosts} {'host' if hosts == 1 else 'hosts'} of {per_host}"


def hosts_of(gpus: int, per_host: int | None, largest: int = HOST_GPUS) -> tuple[int, str]:
    """(GPUs per host, why), for hosts that have at most `largest` unless it was said.

    Raises:
      ConfigError: the number given does not divide the GPUs.
    """
    if per_host is None:
        per_host = max(n for n in range(1, min(gpus, largest) + 1) if gpus % n == 0)
        return per_host, f"the largest divisor of {gpus} not above {largest}, or --gpus-per-host"
    if per_host < 1 or gpus % per_host:
        usable = ", ".join(map(str, divisors(gpus)))
        raise ConfigError(
            f"--gpus-per-host={per_host} does not divide the {gpus} GPU{'s' if gpus > 1 else ''}: use one of {usable}."
        )
    return per_host, "as given"
