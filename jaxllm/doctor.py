"""`jaxllm doctor`: is this machine, or this whole launch, fit to train?

    config, parallel, run = read(files, overrides)
    report = examine(run, parallel, config)      every process of a launch calls it, and all come to the same report
    report.failed

What is looked at: versions, driver, XLA's flags and variables, launcher and hosts, devices, memory, clocks, the run directory
and its disk, and along each axis of the mesh how fast all-reduce, all-gather and permute are, beside what plan/network.py
expects of this kind of GPU. On CPU devices they are measured, and nothing is expected. The figures are probes.py's, the
verdicts diagnosis.py's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from jaxllm import diagnosis, distributed, probes, xla_flags
from jaxllm.config import AUTO, Config, ConfigError, ParallelConfig, RunConfig, Section, load_config, with_overrides
from jaxllm.config_errors import one_sentence
from jaxllm.diagnosis import FAIL, OK, WARN, Row, named
from jaxllm.mesh import hosts_of, make_mesh, widest_group
from jaxllm.peers import print_sentence
from jaxllm.plan.flops import parameter_count
from jaxllm.plan.hardware import Gpu, gpu_from_device_kind
from jaxllm.plan.network import links_of
from jaxllm.plan.step_parts import BANDWIDTH_SHARE
from jaxllm.probes import Collective, Facts

GPU_BYTES, CPU_BYTES = 512 * 2**20, 4 * 2**20
"""Of one collective. On GPUs so much that its start, 0.1 ms, is a few percent of it."""
STUCK_S = 300.0
"""How long a collective may take to start and to be measured; NCCL's first may take a minute on many hosts."""
STATE_BYTES = 12
"""Of a checkpoint, for each parameter: the master weight and two moments in float32."""


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]
    processes: tuple[Facts, ...] = ()
    collectives: tuple[Collective, ...] = ()
    expected_s: Mapping[str, float] = field(default_factory=dict)
    """Of those collectives of which something is expected, by `named`."""
    speaks: bool = True
    """Whether it is for this process to show it."""

    @property
    def failed(self) -> bool:
        return any(row.status == FAIL for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """`ok`: nothing failed; `rows`; `processes`: what each found; `collectives`: seconds measured and expected, or null."""
        return {
            "ok": not self.failed,
            "rows": [asdict(row) for row in self.rows],
            "processes": [asdict(one) for one in self.processes],
            "collectives": [asdict(one) | {"expected_s": self.expected_s.get(named(one))} for one in self.collectives],
        }


class _Start(Section):
    """The sections that matter where there is no recipe."""

    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()


def read(files: Sequence[str], overrides: Sequence[str]) -> tuple[Config | None, ParallelConfig | None, RunConfig]:
    """(the config, its mesh, how it runs) from a recipe and overrides; without a recipe no config, and a mesh if an override
    says one.

    Raises:
      ConfigError: more than one recipe, or one that cannot be; without a recipe, overrides of other sections.
    """
    if len(files) > 1:
        raise ConfigError(f"At most one config file is needed and {len(files)} were given: {', '.join(files)}.")
    if files:
        config = load_config(files[0], overrides)
        return config, config.parallel, config.run
    values = with_overrides({}, overrides)
    if other := values.keys() - _Start.model_fields.keys():
        raise ConfigError(f"Without a config file doctor takes parallel.* and run.*, not {min(other)}.*: give the file too.")
    try:
        start = _Start.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, _Start)) from None
    return None, start.parallel if "parallel" in values else None, start.run


def examine(
    run: RunConfig, parallel: ParallelConfig | None = None, config: Config | None = None, gpu: Gpu | None = None
) -> Report:
    """Looks at everything; every process of a launch must call it, with the same.

    Args:
      parallel: the mesh to measure; None: hosts along `data`, and the devices of a host along `tensor`.
      config: whose checkpoints the run directory should have room for.
      gpu: what to expect of the devices; None: what the hardware table says of their kind.
    """
    # Asked before JAX takes the GPUs' memory, and before it meets a flag that ends it.
    driver, cards = probes.gpu_cards()
    if unknown := xla_flags.unknown_flags():
        return Report((diagnosis.unknown_flags(unknown, jaxlib.__version__),))
    try:
        distributed.start(run)
    except ConfigError as error:
        return Report((Row("start", FAIL, str(error), "as it says; nothing else was looked at"),))
    with distributed.leaving_on_errors():
        return _examine(run, parallel, config, gpu, probes.facts(driver, cards))


def _examine(run: RunConfig, parallel: ParallelConfig | None, config: Config | None, gpu: Gpu | None, here: Facts) -> Report:
    processes, hosts = probes.gather(here), hosts_of(jax.devices())
    rows = [
        *diagnosis.versions(processes),
        *diagnosis.driver(processes, forced=run.cpu_devices is not None),
        *diagnosis.variables(processes),
        *diagnosis.launcher(processes, hosts, distributed.place()),
        *diagnosis.devices(processes, forced=run.cpu_devices is not None),
        *diagnosis.memory(processes),
        *diagnosis.clocks(processes, probes.everyones(probes.clock_ahead())),
    ]
    first_of_host = here.rank == min(rank for rank in hosts if hosts[rank] == hosts[here.rank])
    folders = probes.folder(Path(run.dir), measures=first_of_host)
    rows += diagnosis.folder(run.dir, processes, folders, STATE_BYTES * parameter_count(config.model) if config else None)
    measured: list[Collective] = []
    expected_s: dict[str, float] = {}
    try:
        mesh = make_mesh(_mesh(config, parallel, hosts))
    except ConfigError as error:
        rows.append(Row("mesh", FAIL, str(error), "change parallel.*, or the number of devices"))
    else:
        rows += diagnosis.mesh(mesh.devices, hosts)
        known = gpu or gpu_from_device_kind(mesh.devices.flat[0].device_kind)
        for axis in (axis for axis in mesh.axis_names if mesh.shape[axis] > 1):
            lies = widest_group(mesh.devices, hosts, axis)
            for one in _measured(mesh, axis):
                # Ranks that are not spread evenly over their hosts are beyond the model.
                if known is not None and lies.size == one.ranks:
                    links = links_of(known, BANDWIDTH_SHARE)
                    expected_s[named(one)] = diagnosis.expected_s(one.what, one.size_bytes, lies, links)
                measured.append(one)
                rows.append(diagnosis.collective(one, lies, expected_s.get(named(one)), known))
        if mesh.devices.size == 1:
            rows.append(Row("collectives", OK, "one device: nothing to measure"))
    return Report(tuple(rows), tuple(processes), tuple(measured), expected_s, distributed.is_main_process())


def _mesh(config: Config | None, parallel: ParallelConfig | None, hosts: Mapping[int, Any]) -> ParallelConfig:
    """What to measure. Raises ConfigError where a config does not go with the devices here."""
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


def _measured(mesh: jax.sharding.Mesh, axis: str) -> Iterator[Collective]:
    """probes.collectives, each in a limited time: one that hangs cannot be left, only ended with the process."""
    size = CPU_BYTES if mesh.devices.flat[0].platform == "cpu" else GPU_BYTES
    timer: threading.Timer | None = None

    def begins(what: str) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        timer = threading.Timer(STUCK_S, _give_up, [what, axis])
        timer.daemon = True
        timer.start()

    try:
        yield from probes.collectives(mesh, axis, size, begins)
    finally:
        if timer is not None:
            timer.cancel()


def _give_up(what: str, axis: str) -> None:
    print_sentence(
        f"Process {jax.process_index()} is in {what} over {axis} for {STUCK_S:.0f} s: see that all hosts reach each "
        f"other on every port, and with NCCL_DEBUG=INFO which network it takes (NCCL_SOCKET_IFNAME names another)."
    )
    os._exit(1)


def render(report: Report) -> Table:
    """For a terminal of at least 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    style = {OK: "green", WARN: "yellow", FAIL: "bold red"}
    for row in report.rows:
        told = Text(row.found)
        if row.todo:
            told.append(f"\n-> {row.todo}", style="italic")
        table.add_row(Text(row.check), Text(row.status, style=style[row.status]), told)
    return table
