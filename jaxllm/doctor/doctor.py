"""`jaxllm doctor`: checks whether this machine, or this whole launch, is ready to train.

    config, parallel, run = read(files, overrides)
    report = examine(run, parallel, config)      every process of a launch calls it, and all get the same report
    report.failed

It checks versions, driver, XLA's flags and variables, launcher and hosts, devices, memory, CPUs, clocks, the run directory and
its disk. Along each mesh axis it measures all-reduce, all-gather and permute, and copies between all devices of a host and its
memory, and compares them with the speeds that cost_model/network.py and hardware.py expect of this kind of GPU. CPU devices are
measured without an expectation. probes.py measures, checks.py judges; links.py does both for what is sent. fabric.py looks for
what would make NCCL take a slow way: adapters without their library, locked memory, GPUs that do not reach each other, damaged
or slowed GPUs.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jaxlib
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from jaxllm.cluster import distributed
from jaxllm.cluster.initialize import time_limit
from jaxllm.config import AUTO, Config, ConfigError, ParallelConfig, RunConfig, Section, load_config, with_overrides
from jaxllm.config.errors import one_sentence
from jaxllm.cost_model.flops import state_bytes
from jaxllm.cost_model.hardware import Gpu, gpu_from_device_kind
from jaxllm.cost_model.network import links_of
from jaxllm.cost_model.step_parts import BANDWIDTH_SHARE
from jaxllm.doctor import checks, fabric, links, probes
from jaxllm.doctor.checks import FAIL, OK, WARN, Row
from jaxllm.doctor.links import Collective, HostCopy
from jaxllm.doctor.probes import Facts
from jaxllm.machine import xla_flags
from jaxllm.mesh.placement import hosts_of, mesh_on_hosts
from jaxllm.terminal import print_sentence, terminal_table

GPU_BYTES, CPU_BYTES = 512 * 2**20, 4 * 2**20
"""Size of one collective, and of one copy to the host: on GPUs so large that the start, 0.1 ms, is a few percent of it."""
STUCK_S = 300.0
"""Time limit for a collective to start and to be measured; NCCL's first may take a minute on many hosts."""


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]
    processes: tuple[Facts, ...] = ()
    collectives: tuple[Collective, ...] = ()
    host_copies: tuple[HostCopy, ...] = ()
    is_shown_here: bool = True
    """Whether this process prints it."""

    @property
    def failed(self) -> bool:
        return any(row.status == FAIL for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """`ok`: nothing failed; `rows`; `processes`: facts of each; `collectives`: seconds measured, and expected or null;
        `host_copies`: bytes per second measured, and expected or null."""
        return {
            "ok": not self.failed,
            "rows": [asdict(row) for row in self.rows],
            "processes": [asdict(one) for one in self.processes],
            "collectives": [asdict(one) for one in self.collectives],
            "host_copies": [asdict(one) | {"bytes_per_s": one.bytes_per_s} for one in self.host_copies],
        }


class _SectionsWithoutRecipe(Section):
    """The sections that apply without a recipe."""

    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()


def read(files: Sequence[str], overrides: Sequence[str]) -> tuple[Config | None, ParallelConfig | None, RunConfig]:
    """(the config, its mesh, its run section) from a recipe and overrides. Without a recipe the config is None, and so is the
    mesh unless an override sets it.

    Raises:
      ConfigError: there is more than one recipe, or the recipe is not valid; without a recipe, an override is of another
        section.
    """
    if len(files) > 1:
        raise ConfigError(f"At most one config file is needed and {len(files)} were given: {', '.join(files)}.")
    if files:
        config = load_config(files[0], overrides)
        return config, config.parallel, config.run
    values = with_overrides({}, overrides)
    if other := values.keys() - _SectionsWithoutRecipe.model_fields.keys():
        raise ConfigError(f"Without a config file doctor takes parallel.* and run.*, not {min(other)}.*: give the file too.")
    try:
        start = _SectionsWithoutRecipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, _SectionsWithoutRecipe)) from None
    return None, start.parallel if "parallel" in values else None, start.run


def examine(
    run: RunConfig, parallel: ParallelConfig | None = None, config: Config | None = None, gpu: Gpu | None = None
) -> Report:
    """Runs all checks; every process of a launch must call it, with the same arguments.

    Args:
      parallel: the mesh to measure; None: hosts along `data`, and the devices of a host along `tensor`.
      config: the run directory should have room for its checkpoints.
      gpu: the GPU whose speed is expected; None: the hardware table's entry for this kind of device.
    """
    # Asked before JAX takes the GPUs' memory, and before an unknown flag ends it.
    driver, cards = probes.gpu_cards()
    if unknown := xla_flags.unknown(xla_flags.flag_names()):
        return Report((checks.unknown_flags(unknown, jaxlib.__version__),))
    try:
        distributed.start(run)
    except ConfigError as error:
        return Report((Row("start", FAIL, str(error), "follow this message; no other check ran"),))
    with distributed.leaving_on_errors():
        return _examine(run, parallel, config, gpu, probes.facts(driver, cards))


def _examine(run: RunConfig, parallel: ParallelConfig | None, config: Config | None, gpu: Gpu | None, here: Facts) -> Report:
    processes, hosts = probes.gather(here), hosts_of(jax.devices())
    rows = [
        checks.versions(processes),
        checks.driver(processes, forced=run.cpu_devices is not None),
        *checks.variables(processes),
        checks.launcher(processes, hosts, distributed.launch_info()),
        checks.devices(processes, forced=run.cpu_devices is not None),
        *checks.memory(processes),
        *checks.cpus(processes),
        *checks.clocks(processes, distributed.gathered(probes.clock_ahead())),
    ]
    first_of_host = here.rank == min(rank for rank in hosts if hosts[rank] == hosts[here.rank])
    folders = probes.folder(Path(run.dir), measures=first_of_host)
    has_store = config is not None and config.checkpoint.store is not None
    rows += checks.folder(run.dir, processes, folders, state_bytes(config) if config else None, has_store)
    measured: list[Collective] = []
    device = jax.local_devices()[0]
    known, size = gpu or gpu_from_device_kind(device.device_kind), CPU_BYTES if device.platform == "cpu" else GPU_BYTES
    copies = tuple(links.host_copies(hosts, size, known))
    rows += [links.host_copy(one, known) for one in copies]
    try:
        mesh = mesh_on_hosts(_mesh(config, parallel, hosts))
    except ConfigError as error:
        rows.append(Row("mesh", FAIL, str(error), "change parallel.*, or the number of devices"))
    else:
        rows += checks.mesh(mesh.devices, hosts)
        for axis in (axis for axis in mesh.axis_names if mesh.shape[axis] > 1):
            group = links.widest_group(mesh.devices, hosts, axis)
            # A collective that hangs can be ended only with the process.
            for one in links.collectives(mesh, axis, size, limited=partial(time_limit, STUCK_S, _give_up, axis)):
                # The model does not cover ranks that are spread unevenly over their hosts.
                if known is not None and group.size == one.ranks:
                    network = links_of(known, BANDWIDTH_SHARE)
                    one = replace(one, expected_s=links.COSTS[one.what](one.size_bytes, group, network))
                measured.append(one)
                rows.append(links.collective(one, group, known))
        if mesh.devices.size == 1:
            rows.append(Row("collectives", OK, "one device: nothing to measure"))
    # After the collectives: clocks are held down where there is work.
    rows += fabric.rows(processes, fabric.gather(asks=first_of_host))
    return Report(tuple(rows), tuple(processes), tuple(measured), copies, distributed.is_main_process())


def _mesh(config: Config | None, parallel: ParallelConfig | None, hosts: Mapping[int, Any]) -> ParallelConfig:
    """The mesh to measure. Raises ConfigError if the config does not fit the devices here."""
    count = jax.device_count()
    if config is not None:
        return config.resolve(count).parallel
    if parallel is None:
        number = len(set(hosts.values()))
        return ParallelConfig(data=number, tensor=count // number) if count % number == 0 else ParallelConfig(data=count)
    if parallel.data == AUTO:
        others = parallel.replica * parallel.pipe * parallel.context * parallel.tensor
        return parallel.model_copy(update={"data": max(count // others, 1)})
    return parallel


def _give_up(axis: str, what: str) -> None:
    print_sentence(
        f"Process {jax.process_index()} has been in {what} over {axis} for {STUCK_S:.0f} s: check that all hosts reach each "
        f"other on every port, and with NCCL_DEBUG=INFO which network NCCL uses (NCCL_SOCKET_IFNAME selects another)."
    )
    os._exit(1)


def render(report: Report) -> Table:
    """Table for a terminal of at least 80 columns."""
    style = {OK: "green", WARN: "yellow", FAIL: "bold red"}
    rows = []
    for row in report.rows:
        text = Text(row.found)
        if row.todo:
            text.append(f"\n-> {row.todo}", style="italic")
        rows.append((row.check, Text(row.status, style=style[row.status]), text))
    return terminal_table(rows, ("check", "", "found, and what to do"), whole=("check", ""))
