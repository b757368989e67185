"""Shared by the tests of launch scripts: required programs, processes of a launch found by its name, and a slow run that leaves
time for faults.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny import TINY

import jaxllm
from jaxllm.run.loop import fit

CHECKOUT = Path(__file__).parents[2]
LIMIT_S = 240
INSTALL_LIMIT_S = 240
STEPS, STEP_S = 60, 0.2
"""Enough that a fault after step 7 finds the run in progress."""
COMMON = ("optimizer.schedule=constant", "checkpoint.every_steps=2", f"train.steps={STEPS}")

# jaxllm train, with a pause before each step.
PROGRAM = """
import os, sys, time
from jaxllm.cli import app as cli
from jaxllm.run.trainer import Trainer

advance, step_s = Trainer.advance, float(sys.argv.pop(1))

def slowly(self):
    if not os.path.exists(os.path.join(os.path.dirname(__file__), "quickly")):
        time.sleep(step_s)
    return advance(self)

Trainer.advance = slowly
sys.argv[1:1] = ["train"]
cli.main()
"""


def require(**packages: str) -> None:
    """Requires these programs, and installs missing ones from Debian packages; skips the test if that fails."""
    if "/usr/sbin" not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    missing = sorted({package for program, package in packages.items() if not shutil.which(program)})
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"{' and '.join(missing)} cannot be installed here: no root, or no apt-get")
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *missing]
    options = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "timeout": INSTALL_LIMIT_S}
    # Other test files run beside this one, and apt-get does not wait for another.
    with (Path(tempfile.gettempdir()) / "jaxllm-tests-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (install, ["apt-get", "update", "--quiet"], install):
            try:
                result = subprocess.run(command, capture_output=True, text=True, **options)
            except subprocess.TimeoutExpired:
                pytest.skip(f"{' and '.join(missing)} cannot be installed here in {INSTALL_LIMIT_S} s")
            if command is install and result.returncode == 0:
                return
    pytest.skip(f"{' and '.join(missing)} cannot be installed here: {result.stderr.strip()[-200:]}")


def environment(**variables: str) -> dict[str, str]:
    """This environment, conftest's XLA_FLAGS included: tiny programs compile fastest unoptimised."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("JAXLLM_", "SLURM_", "OMPI_"))}
    return ours | {"JAXLLM_VENV": "none", "PYTHON": sys.executable, "JAXLLM_LAUNCH_ID": name_of_launch()} | variables


def name_of_launch() -> str:
    """Name of all launches of the running test."""
    return f"test-{os.getpid()}-{abs(hash(os.environ['PYTEST_CURRENT_TEST'].split()[0]))}"


def processes_of_launch() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """PID, command line and environment of all processes here that belong to this test's launches."""
    for folder in Path("/proc").iterdir():
        # Gone meanwhile, or another user's.
        with suppress(OSError, ValueError):
            pid, command = int(folder.name), (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if variables.get("JAXLLM_LAUNCH_ID") == name_of_launch():
                yield pid, command, variables


def pid_of(word: str, rank: int) -> int:
    """The process of this rank with this word in its command line, not its supervisor."""
    (found,) = (
        pid
        for pid, command, variables in processes_of_launch()
        if any(word in part for part in command)
        and "jaxllm.cluster.supervisor" not in command
        and variables.get("JAXLLM_PROCESS_ID", variables.get("OMPI_COMM_WORLD_RANK")) == str(rank)
    )
    return found


def wait_until(true: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until_s, f"never: {what}"
        time.sleep(0.05)


@contextmanager
def launched(script: str, *arguments, cwd: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """Runs the script of launch/ in its own process group; nothing of its launch remains afterwards."""
    command = ["bash", str(CHECKOUT / "launch" / script), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for _ in range(2):
            for pid, *_ in processes_of_launch():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)


def launch(script: str, *arguments, cwd: Path, **variables: str) -> tuple[int, str, str]:
    """Runs the script to its end; returns its exit code and its output."""
    with launched(script, *arguments, cwd=cwd, **variables) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


class Run:
    """A recipe, a slow program that trains it as `python FOLDER/slowly.py SECONDS ...`, and the results."""

    def __init__(self, folder: Path, text_file: Path, *more: str, steps: int = STEPS):
        self.folder, self.dir, self.steps = folder, folder / "run", steps
        self.more = (f"train.steps={steps}", *more)
        self.recipe, self.program = folder / "tiny.yaml", folder / "slowly.py"
        self.recipe.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
        self.program.write_text(PROGRAM)

    def command(self, step_s: float = STEP_S) -> tuple[str, ...]:
        """For two processes with one device each: they compile fastest."""
        overrides = ("run.cpu_devices=1", "parallel.data=2", f"run.dir={self.dir}", "run.peer_timeout_s=20", *COMMON)
        overrides += self.more
        return ("python", str(self.program), str(step_s), str(self.recipe), *overrides)

    def go_on_quickly(self) -> None:
        """Ends the pauses: no fault is to come."""
        (self.folder / "quickly").touch()

    def wait_for(self, step: int, process: subprocess.Popen) -> None:
        """Waits until the run has this step's loss; the launch must be alive."""

        def reached() -> bool:
            assert process.poll() is None, "".join(process.communicate())
            return step in self._records(self.dir, "step")

        wait_until(reached, f"step {step}")

    def assert_losses_of_one_process(self) -> None:
        """Compares with a run without faults, on another mesh."""
        alone = self.folder / "alone"
        mesh = ("run.cpu_devices=8", "parallel.data=2", "parallel.tensor=4")
        fit(jaxllm.load_config(self.recipe, [f"run.dir={alone}", *COMMON, *self.more, *mesh]))
        assert self._records(self.dir, "step") == self._records(alone, "step") == list(range(1, self.steps + 1))
        np.testing.assert_allclose(self._records(self.dir, "loss"), self._records(alone, "loss"), rtol=1e-5)

    def steps_done(self) -> list[int]:
        return self._records(self.dir, "step")

    def starts(self) -> list[dict]:
        """The first line of each start."""
        lines = map(json.loads, (self.dir / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "start_unix_s" in line]

    @staticmethod
    def _records(folder: Path, key: str) -> list:
        try:
            lines = (folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return []
        records = []
        for line in lines:
            # The last line may be incomplete.
            with suppress(ValueError):
                records.append(json.loads(line))
        return [record[key] for record in records if "loss" in record]
