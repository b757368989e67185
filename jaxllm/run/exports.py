"""Exports beside training (checkpoint.export_every_steps): a process for each reads a complete checkpoint from the disk."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxllm.checkpoint.files import saved_steps
from jaxllm.cluster import distributed, progress
from jaxllm.machine.host import program
from jaxllm.run.hooks import Run
from jaxllm.untrusted import reason_of
from jaxllm.weights.staging import remove_left

# It asks to end with its parent itself: between fork and exec Python code may hang, since JAX has threads.
CHILD = program("""
import sys
if sys.platform == "linux":
    from jaxllm.cluster.supervisor import die_with_parent
    die_with_parent(int(sys.argv[1]))
del sys.argv[1]
from jaxllm.cli.app import main
main()
""")
# The standard tools, because the environment of this process is not read here. It is on the CPU, and other work comes first.
BESIDE_TRAINING = ("env", "JAX_PLATFORMS=cpu", "nice", "-n", "19", sys.executable, *CHILD, str(os.getpid()), "export")
TAIL = 300
"""Characters of an error to show."""
LOOK_S = 1.0
"""Seconds between looks at the end of a run, each of which shows the watchdogs that it is not stuck."""


def register(run: Run) -> None:
    """Exports what the run's checkpoints complete, on process 0, and first every older checkpoint that is still there, due by
    checkpoint.export_every_steps and without an export. At the end of a run that was not stopped, all processes wait for the
    rest; a signal stops that too."""
    every = run.trainer.config.checkpoint.export_every_steps
    if every is not None:
        run.stack.enter_context(exporting(run, every))


@contextmanager
def exporting(run: Run, every: int) -> Iterator[None]:
    trainer, checkpoints, folder = run.trainer, run.checkpoints, run.folder
    config = trainer.config
    exports = Exports(folder, every, run.console.say, config.run.phase_timeout_s, config.checkpoint.keeps_forever)
    if distributed.is_main_process():
        # Exports end with their run, and run.dir is held.
        remove_left(folder / "exports")
        checkpoints.on_saved, checkpoints.is_awaited = exports.begin, exports.waits_for
        latest = -1 if checkpoints.latest is None else checkpoints.latest
        # Before any save, which may delete one.
        exports.begin(*(step for step in saved_steps(folder / "checkpoints") if step <= latest))
    try:
        yield
        while not trainer.stopped_by and distributed.first_nonempty("" if exports.done(LOOK_S) else "not yet"):
            with progress.phase("save"):
                trainer.stopped_by = run.signals.agreed_signal()
            if trainer.stopped_by:
                run.console.say(f"stopped by {trainer.stopped_by}; the next start exports the rest")
    finally:
        exports.close()


class Exports:
    """Exports of a run, one at a time.

    Args:
      every: steps that are no multiple of it are not exported.
      say: receives a line about each.
      limit_s: seconds for each. The watchdog does not limit them: the end of a run may wait for several.
      can_wait: whether the checkpoint of a step stays; the others come first, and the older ones of each kind.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        say: Callable[[str], None],
        limit_s: float,
        can_wait: Callable[[int], bool] = lambda step: False,
    ):
        self._folder, self._every, self._say, self._limit_s, self._can_wait = folder, every, say, limit_s, can_wait
        self._one_at_a_time = ThreadPoolExecutor(max_workers=1)
        self._jobs: list[Future] = []
        self._awaited = set[int]()
        self._process: subprocess.Popen | None = None
        self._closed, self._starting = False, threading.Lock()

    def done(self, timeout_s: float) -> bool:
        """Whether all have ended, after at most so many seconds."""
        return not wait(self._jobs, timeout_s).not_done

    def waits_for(self, step: int) -> bool:
        """Whether the export of this checkpoint is still to come, if only at the next start: not one that has failed."""
        return step in self._awaited

    def begin(self, *steps: int) -> None:
        """Exports the checkpoints of these steps when it is their turn, except those that are exported already."""
        with self._starting:
            new = {step for step in steps if step % self._every == 0 and not self._target(step).exists()} - self._awaited
            self._awaited |= new
        self._jobs += [self._one_at_a_time.submit(self._export_next) for _ in new]

    def close(self) -> None:
        """Stops what is still running."""
        with self._starting:
            # Those that are left stay awaited: a save that is under way must not delete them.
            self._closed = True
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
        self._one_at_a_time.shutdown(cancel_futures=True)

    def _target(self, step: int) -> Path:
        return self._folder / "exports" / str(step)

    def _export_next(self) -> None:
        with self._starting:
            # One at a time: none of them has begun.
            step = min(self._awaited, key=lambda one: (self._can_wait(one), one))
        source, target = self._folder / "checkpoints" / str(step), self._target(step)
        try:
            code, said = self._convert(source, target)
        except OSError as error:
            code, said = None, reason_of(error)
        try:
            if code == 0:
                self._say(f"exported step {step} to {target}")
            elif not self._closed:
                reason = "checkpoint.keep deleted it" if not source.exists() else said.rpartition("\n")[2][-TAIL:]
                self._say(f"warning: checkpoint {step} was not exported ({reason or f'exit code {code}'})")
        finally:
            with self._starting:
                if not self._closed or self._target(step).exists():
                    self._awaited.remove(step)

    def _convert(self, source: Path, target: Path) -> tuple[int | None, str]:
        """Exit code and output of a process; None, with the reason, if it did not start or took too long."""
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            with self._starting:
                if self._closed:
                    return None, ""
                # A signal to the run's terminal is not for it.
                self._process = subprocess.Popen(
                    [*BESIDE_TRAINING, str(source), str(target), "--to", "hf"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                code = self._process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                # One that a disk holds does not end even then.
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(LOOK_S)
                return None, f"it took longer than run.phase_timeout_s={self._limit_s:g}"
            output.seek(0)
            return code, output.read().strip()
