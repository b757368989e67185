"""Runs a rehearsal: the shrunk config without faults, then with them.

    report = rehearse(config, 4, {"kill": 2, "freeze": 1, "cut": 0}, seed=7)
    report.held

This process starts no JAX. It watches the run directory and what the hosts print, and acts at the planned moments.
"""

import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from jaxllm.config import Config, ConfigError
from jaxllm.display import readable
from jaxllm.json_lines import read_lines
from jaxllm.machine.host import available_cpus, host_memory
from jaxllm.rehearsal.faults import NAMED_WITHIN_S, Fault, History, Kind, Report, Strike, naming, plan_faults, steps_for
from jaxllm.rehearsal.hosts import Hosts, Network, networks_are_possible
from jaxllm.rehearsal.shrink import PEER_TIMEOUT_S, changes, count_devices, reads_own_text, shrink

LOOK_S = 0.01
STALL_S = 600.0
"""Without a step, a checkpoint or a line for so long, the run has stopped."""
PROCESS_BYTES, DEVICE_BYTES = 800 * 2**20, 8 * 2**20
START_CPU_S = 9.0
"""A training process and its supervisor; imports, tracing and reading the compiled program from the cache."""
HEADER = re.compile(r"\d+ .* devices?; mesh ")
"""The first line of a start: all processes have met."""
UNFINISHED = re.compile(r"(\d+)\.orbax-checkpoint-tmp")
say = partial(print, flush=True)
"""Shows a line at once, also where output is a file or a pipe."""


def rehearse(config: Config, hosts: int, counts: Mapping[Kind, int], seed: int | None = None) -> Report:
    """Takes some minutes. Hosts are network namespaces if this process may make them. Removes the runs if the promise held.

    Args:
      counts: of each kind of fault.
      seed: of the faults; None: a random one.

    Raises:
      ConfigError: the mesh does not fit the hosts, the machine is too small, or the shrunk config does not train here.
    """
    if sys.platform != "linux":
        raise ConfigError("jaxllm rehearse needs Linux, where no process outlives its parent: run it in a container or a VM.")
    networks = networks_are_possible()
    if counts["cut"] and not networks:
        raise ConfigError("--cut needs network namespaces, which root may make with iproute2: run it as root, or use --cut 0.")
    seed = random.randrange(10**6) if seed is None else seed
    faults = plan_faults(seed, hosts, counts)
    require_room(hosts, count_devices(config, hosts), len(faults))
    folder = Path(tempfile.mkdtemp(prefix="jaxllm-rehearsal-"))
    held = True
    try:
        small = shrink(config, hosts, steps_for(len(faults)), folder)
        for line in changes(config, small):
            say(f"shrunk  {line}")
        say(f"data    {'as in the config' if reads_own_text(config) else 'made-up words, as bytes'}; nothing is evaluated")
        say(f"hosts   {'network namespaces' if networks else 'processes of this machine, on loopback'}")
        say(f"seed    {seed}: {'; '.join(map(str, faults)) or 'no fault'}")
        with Network([f"h{rank}" for rank in range(hosts)], folder) if networks else nullcontext() as cables:
            reference = _Watched(small, folder / "undisturbed", hosts, cables).run(())
            if reference.unfinished:
                raise ConfigError(f"The shrunk config does not train here: {reference.unfinished}.")
            history = _Watched(small, folder / "disturbed", hosts, cables).run(faults)
        report = Report(small.train.steps, reference.metrics, history)
        if not (held := report.held):
            say(f"kept    {folder}")
        return report
    finally:
        if held:
            shutil.rmtree(folder, ignore_errors=True)


def require_room(hosts: int, devices: int, faults: int) -> None:
    """Says what the rehearsal takes of this machine.

    Raises:
      ConfigError: it has too little memory.
    """
    needed, (_, available) = hosts * PROCESS_BYTES + devices * DEVICE_BYTES, host_memory()
    start_s = hosts * START_CPU_S / available_cpus()
    minutes = ((faults + 2) * start_s + faults * PEER_TIMEOUT_S) / 60
    processes = f"{hosts} processes of {devices // hosts} CPU devices"
    say(
        f"needs   {processes}: {readable(needed)} of memory; {start_s:.0f} s a start on {available_cpus()} idle cores, "
        f"{minutes:.0f} minutes in all"
    )
    if available is not None and needed > available:
        raise ConfigError(
            f"{processes} need about {readable(needed)}, and this machine has {readable(available)} left: use fewer --hosts."
        )


class _Watched:
    """One run of the shrunk config, and what is seen of it."""

    def __init__(self, config: Config, folder: Path, hosts: int, cables: Network | None):
        folder.mkdir()
        self._config, self._folder, self._count, self._cables = config, folder, hosts, cables
        self._run_dir = folder / "run"
        values = config.model_dump(mode="json", exclude_unset=True)
        values["run"]["dir"] = str(self._run_dir)
        self._recipe = folder / "recipe.yaml"
        self._recipe.write_text(yaml.safe_dump(values))
        self._size = 0
        self._step = self._saving = self._reached = 0
        """The last step and its save in progress, as the run directory has them now; the last step ever."""
        self._stepped_unix_s = 0.0
        self._committed: dict[int, float] = {}
        self._changed_s = time.monotonic()

    def run(self, faults: Sequence[Fault]) -> History:
        """Returns when the run has ended, or can no longer end by itself. No process is left then."""
        patience_s = self._config.run.peer_timeout_s
        hosts = self._hosts = Hosts(self._count, self._recipe, self._folder / "hosts", self._cables, patience_s)
        strikes: list[Strike] = []
        try:
            for rank in range(self._count):
                hosts.power_on(rank)
            for fault in faults:
                if not self._wait_for(lambda fault=fault: self._is_due(fault, strikes)):
                    break
                strikes.append(self._strike(fault))
                say(f"fault {len(strikes)} of {len(faults)}: {fault}, during {strikes[-1].during}")
                limit_s = time.monotonic() + NAMED_WITHIN_S
                self._wait_for(lambda limit_s=limit_s: naming(strikes[-1], hosts.lines) or time.monotonic() > limit_s)
                self._repair(fault)
            self._wait_for(lambda: len(hosts.exit_codes()) == self._count)
            unfinished = self._why_unfinished()
        finally:
            hosts.close()
        self._look()
        return History(
            faults, strikes, hosts.lines, self._metrics(), self._committed, self._damaged() if faults else {}, unfinished
        )

    def _is_due(self, fault: Fault, strikes: Sequence[Strike]) -> bool:
        since_s = strikes[-1].unix_s if strikes else 0.0
        starts = [line.unix_s for line in self._hosts.lines if line.host == 0 and HEADER.match(line.text)]
        if not starts or starts[-1] < since_s:
            return False
        if fault.moment == "start":
            return True
        trains = self._stepped_unix_s > starts[-1] and self._step >= fault.step
        return trains and (fault.moment == "step" or self._saving >= fault.step)

    def _strike(self, fault: Fault) -> Strike:
        during = {"step": f"step {self._step + 1}", "save": f"save of step {self._saving}", "start": "start"}
        # Before the fault: what is said of it comes later.
        strike = Strike(fault, time.time(), during[fault.moment], self._reached)
        if fault.kind == "kill":
            self._hosts.power_off(fault.host)
        elif fault.kind == "freeze":
            self._hosts.freeze(fault.host)
        elif self._cables:
            self._cables.unplug(f"h{fault.host}")
        return strike

    def _repair(self, fault: Fault) -> None:
        """A frozen process is its supervisor's."""
        if fault.kind == "kill":
            self._hosts.power_on(fault.host)
        elif fault.kind == "cut" and self._cables:
            self._cables.plug(f"h{fault.host}")

    def _wait_for(self, true: Callable[[], object]) -> bool:
        """Whether it came true. It cannot any more when the run has ended, has failed on a host, or stands still."""
        while not true():
            codes = self._hosts.exit_codes()
            if len(codes) == self._count or any(codes.values()) or time.monotonic() - self._changed_s > STALL_S:
                return bool(true())
            time.sleep(LOOK_S)
            self._look()
        return True

    def _why_unfinished(self) -> str:
        codes = self._hosts.exit_codes()
        if failed := {rank: code for rank, code in codes.items() if code}:
            rank, code = next(iter(failed.items()))
            said = [line.text for line in self._hosts.lines if line.host == rank and line.text.startswith("jaxllm: ")]
            return f"host {rank} ended with exit code {code}{f' ({said[-1][8:]})' if said else ''}"
        if len(codes) < self._count:
            return f"the run stood still for {STALL_S:.0f} s after step {self._step}"
        return ""

    def _look(self) -> None:
        """Updates what is seen of the run directory."""
        before = (self._stepped_unix_s, len(self._committed), len(self._hosts.lines))
        path, folder = self._run_dir / "metrics.jsonl", self._run_dir / "checkpoints"
        with suppress(FileNotFoundError):
            if (size := path.stat().st_size) != self._size:
                self._size = size
                for _, line in read_lines(path, last=1):
                    self._step, self._stepped_unix_s = line["step"], line["unix_s"]
        self._reached = max(self._reached, self._step)
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        self._saving = max((int(found[1]) for name in names if (found := UNFINISHED.match(name))), default=0)
        for name in names:
            if name.isdecimal():
                self._committed.setdefault(int(name), time.time())
        if before != (self._stepped_unix_s, len(self._committed), len(self._hosts.lines)):
            self._changed_s = time.monotonic()

    def _metrics(self) -> list[Mapping[str, Any]]:
        files = sorted(self._run_dir.glob("metrics*.jsonl"))
        found = {text: line for path in files for text, line in read_lines(path, containing='"loss"')}
        return sorted(found.values(), key=lambda line: line["unix_s"])

    def _damaged(self) -> dict[int, str]:
        """Checkpoints that should be kept and are not intact."""
        # This imports JAX.
        from jaxllm.checkpoint.files import changed, damage

        kept = self._config.checkpoint
        steps = sorted(self._committed)
        wanted = {*steps[-kept.keep :], *(step for step in steps if kept.keeps_forever(step))}
        found = {}
        for step in sorted(wanted):
            folder = self._run_dir / "checkpoints" / str(step)
            if reason := (damage(folder) or changed(folder)) if folder.is_dir() else "it is missing":
                found[step] = reason
        return found
