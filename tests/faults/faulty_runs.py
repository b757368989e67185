"""Shared by the tests of faults: a run of several real processes with injected faults, and what remains of it.

A Run is a run directory and the program that trains in it; each `launch` restarts its processes, and each resumes from what the
previous one has left.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from outside import free_port
from run_files import records, saved_state
from tiny import TINY

from jaxllm.checkpoint.files import saved_steps

CHECKOUT = Path(__file__).parents[2]
HOST = re.escape(socket.gethostname())
"""For patterns."""
STEPS = 120
"""Steps of the whole run: more than all its disturbed launches together complete."""
PACE_S = 0.2
"""Pause before each step, to leave time for a fault."""
SLOW_SAVE_S = 1.0
SLOW_COMPILATION_S = 5.0
SECOND_WAIT_S = 3.0
"""launch.wait_s of the start after the first fault. All other starts have to wait for all."""
TRAINS = "told process 0 of a step"
FIRST_BAD_BATCH = 4
"""Index in a launch, from 0: some steps and a save come before it."""
PEER_S, SILENT_S = 10, 15
"""Silence after which the others give a process up, and after which its supervisor kills it. The others must be first: if a
frozen process were killed first, they would report a killed one."""
START_S, END_S = 150.0, 90.0
"""Limits: for what a launch does by itself, on a machine that has other work; from a fault to the end of all processes."""

COMMON = (
    "run.cpu_devices=1",
    f"run.peer_timeout_s={PEER_S}",
    "run.stuck_min_s=20",
    # A launch has to start and compile within it, too.
    "run.phase_timeout_s=60",
    f"train.steps={STEPS}",
    # A run of fewer steps sees the same learning rates.
    "optimizer.schedule=constant",
    "data.held_out_fraction=0.0",
    "checkpoint.every_steps=2",
    "log.every_steps=1",
)

# jaxllm train, at a fixed pace, with one fault. It bypasses Python's buffers to print its progress: several threads print.
PROGRAM = f"""
import errno, os, sys, time
from dataclasses import replace
from jaxllm.cli import app as cli
from jaxllm.cluster import peer_monitor
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.run import fewer_hosts
from jaxllm.run.trainer import Trainer

pace_s, fault = float(os.environ["TEST_PACE_S"]), os.environ["TEST_FAULT"]
advance, compile_step, train_batch = Trainer.advance, Trainer.compile_step, Trainer.train_batch
list_files, beat, first_batch, trains = Checkpoints._list_files, peer_monitor.PeerMonitor._beat, None, False
saves, rules = 0, fewer_hosts.rules

def say(words):
    os.write(1, f"{{words}}\\n".encode())

def at_its_pace(self):
    time.sleep(pace_s)
    return advance(self)

def said(self, batch):
    say("compiling")
    if fault == "slow compilation":
        time.sleep({SLOW_COMPILATION_S})
    return compile_step(self, batch)

def slowly(self):
    say("saving")
    time.sleep({SLOW_SAVE_S})
    list_files(self)

def never_done(self):
    global saves
    saves += 1
    if saves == 2:
        say("saving")
        time.sleep(1000)
    list_files(self)

def plan(*_):
    say("planning")
    time.sleep(1000)

def waits_briefly_once(config):
    found = rules(config)
    return replace(found, wait_s={SECOND_WAIT_S}) if os.environ.get("JAXLLM_ATTEMPT") == "1" else found

def read(self, step):
    global first_batch
    first_batch = step if first_batch is None else first_batch
    if step - first_batch == {FIRST_BAD_BATCH}:
        say("reading fails")
        if fault == "unreadable data":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(1000)
    return train_batch(self, step)

def beat_and_say(self):
    global trains
    beat(self)
    # What was sent, not the current phase.
    if self.rank and not trains and self._seen[0].step:
        trains = True
        say("{TRAINS}")

Trainer.advance, Trainer.compile_step, peer_monitor.PeerMonitor._beat = at_its_pace, said, beat_and_say
if fault == "slow save":
    Checkpoints._list_files = slowly
elif fault == "short second wait":
    fewer_hosts.rules = waits_briefly_once
elif fault == "endless save and planning":
    Checkpoints._list_files, fewer_hosts.layout = never_done, plan
elif fault.endswith("data"):
    Trainer.train_batch = read
say(f"pid {{os.getpid()}}")
sys.argv[1:1] = ["train"]
cli.main()
"""


class Run:
    def __init__(self, folder: Path, text_file: Path, name: str = "run"):
        self.dir = folder / name
        self._recipe, self._program = folder / "tiny.yaml", folder / "disturbed.py"
        self._recipe.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
        self._program.write_text(PROGRAM)

    @contextmanager
    def launch(self, *overrides: str, count: int = 2, pace_s: float = PACE_S) -> Iterator[Launch]:
        """Starts nothing yet; nothing of it remains afterwards."""
        command = [sys.executable, self._program, self._recipe, f"run.dir={self.dir}", *COMMON, *overrides]
        launch = Launch(self, [str(word) for word in command], count, pace_s)
        try:
            yield launch
        finally:
            launch.close()

    @property
    def saved(self) -> list[int]:
        return saved_steps(self.dir / "checkpoints")

    def records(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm): JSON keeps every bit of them."""
        lines = records(self.dir) if (self.dir / "metrics.jsonl").exists() else []
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]

    def final_state(self) -> Any:
        return saved_state(self.dir, STEPS)


class Launch:
    """Processes of one start of a run, by rank: launch[1].

    Attributes:
      first: the step from which it has to resume; 0: from the beginning.
    """

    def __init__(self, run: Run, command: Sequence[str], count: int, pace_s: float):
        self._run, self._command, self._count = run, command, count
        self.port, self.first = free_port(), run.saved[-1] if run.saved else 0
        self._variables = {
            "JAXLLM_COORDINATOR": f"127.0.0.1:{self.port}",
            "JAXLLM_NUM_PROCESSES": str(count),
            "JAXLLM_START_TIMEOUT_S": "60",
            "JAXLLM_LAUNCH_ID": f"launch-{self.port}",
            "TEST_PACE_S": str(pace_s),
        }
        self._processes: dict[int, Process] = {}

    def __getitem__(self, rank: int) -> Process:
        return self._processes[rank]

    def start(self, rank: int, *, under: Sequence[str] = (), fault: str = "", **variables: str) -> None:
        """Starts one process.

        Args:
          under: a command that gets the process's own command as its last arguments.
          fault: one that PROGRAM knows; empty: none.
          variables: more of its environment.
        """
        own = {"JAXLLM_PROCESS_ID": str(rank), "TEST_FAULT": fault}
        self._processes[rank] = Process([*under, *self._command], environment() | self._variables | own | variables)

    def start_all(self, **options: Any) -> None:
        for rank in range(self._count):
            self.start(rank, **options)

    def wait_until(self, true: Callable[[], object], what: str) -> None:
        until_s = time.monotonic() + START_S
        while not true():
            if any(process.has_ended() for process in self._processes.values()) and not true():
                raise AssertionError(f"a process ended before {what}\n{self}")
            assert time.monotonic() < until_s, f"never: {what}\n{self}"
            time.sleep(0.02)

    def wait_for(self, rank: int, line: str) -> None:
        self.wait_until(lambda: line in self[rank].out.lines, f"{line!r} of process {rank}")

    def wait_for_steps(self, count: int) -> None:
        """Waits until this launch has done so many steps; it must have resumed from the newest checkpoint."""
        line = f"step {self.first + count}/"
        self.wait_until(lambda: any(said.startswith(line) for said in self[0].out.lines), line)
        self.assert_resumed()

    def wait_until_it_trains(self) -> None:
        """Waits until it has trained three steps and saved a checkpoint, and all have reported a step to process 0."""
        self.wait_for_steps(3)
        for rank in range(1, self._count):
            self.wait_for(rank, TRAINS)
        self.wait_until(lambda: self._run.saved[-1:] > [self.first], "a checkpoint")

    def assert_resumed(self) -> None:
        lines = [line for line in self[0].out.lines if line.startswith("resumed from")]
        assert lines == ([f"resumed from step {self.first} in {self._run.dir}"] if self.first else []), self
        assert "damaged" not in self[0].out.text, self

    def lose(self, rank: int) -> None:
        """Ends all processes of a host at once, as a loss of power."""
        self._processes.pop(rank).close()

    def strike(self, rank: int, number: signal.Signals) -> None:
        os.kill(self[rank].pid, number)

    def assert_ends(self, *codes: int | tuple[int, ...], within_s: float = END_S) -> None:
        """All processes that were not lost end in time, with these codes by rank; a tuple: one of them."""
        until_s, ranks = time.monotonic() + within_s, sorted(self._processes)
        for rank in ranks:
            try:
                self[rank].popen.wait(max(until_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"process {rank} lives after {within_s:.0f} s\n{self}") from None
            self[rank].has_ended()
        found = [self[rank].popen.returncode for rank in ranks]
        allowed = [code if isinstance(code, tuple) else (code,) for code in codes]
        fits = [code in these for code, these in zip(found, allowed, strict=True)]
        assert all(fits), f"exit codes {found}, not {codes}\n{self}"

    def assert_says(self, rank: int, pattern: str) -> None:
        """One full line of its errors matches the pattern."""
        assert any(re.fullmatch(f"jaxllm: {pattern}", line) for line in self[rank].err.lines), f"no {pattern!r}\n{self}"

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def __str__(self) -> str:
        parts = (
            f"---- process {rank}: {process.popen.poll()}\n{process.out.text}\n--\n{process.err.text}"
            for rank, process in self._processes.items()
        )
        return "\n".join(parts)

    __repr__ = __str__


class Process:
    """One process of a run, or its supervisor, and its output so far."""

    def __init__(self, command: Sequence[str], variables: dict[str, str]):
        self.popen = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.out, self.err = Said(self.popen.stdout), Said(self.popen.stderr)

    @property
    def pid(self) -> int:
        """PID of the training process."""
        return [int(line.split()[1]) for line in self.out.lines if line.startswith("pid ")][-1]

    def has_ended(self) -> bool:
        """If so, all its output has been read."""
        if self.popen.poll() is None:
            return False
        self.out.join(10)
        self.err.join(10)
        return True

    def close(self) -> None:
        # A supervisor's child ends with it.
        self.popen.kill()
        self.popen.wait(10)
        self.has_ended()


class Said(threading.Thread):
    """The lines of a stream, as they come."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self._stream, self.lines = stream, []
        self.start()

    def run(self) -> None:
        with self._stream:
            for line in self._stream:
                self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def environment() -> dict[str, str]:
    """This environment, conftest's XLA_FLAGS included: tiny programs compile fastest unoptimised."""
    foreign = ("JAXLLM_", "SLURM_", "OMPI_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | {"PYTHONPATH": str(CHECKOUT)}


def supervised(restarts: int) -> tuple[str, ...]:
    options = ("--restarts", str(restarts), "--backoff-s", "0.1", "--silent-after", str(SILENT_S))
    return (sys.executable, "-m", "jaxllm.cluster.supervisor", *options, "--")


def is_open(port: int) -> bool:
    """Whether a process listens there; asked of the system, since a connection would take part in the rendezvous."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                return True
    return False
