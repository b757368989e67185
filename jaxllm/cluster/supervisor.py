"""Supervisor: runs one process of a run and restarts it: python -m jaxllm.cluster.supervisor [OPTION ...] -- COMMAND...

It starts COMMAND, restarts it when another try may succeed (exit_codes.py), and kills it when it is frozen. The process cannot
do this itself: JAX ends it from C++ without a Python exception, and a stopped process runs no watchdog. With several hosts each
process has its own supervisor, and supervisors do not communicate: a lost process ends all others with exit_codes.LOST, all are
restarted, and wait for each other as at the first start.

COMMAND runs in its own process group, without standard input. It inherits a pipe, JAXLLM_BEAT_FD, into which jaxllm writes a
byte a second. Only a heartbeat that stops counts: a command that never sends one never counts as frozen, but a shell that
continues after its training has ended does. SIGTERM and SIGINT are forwarded to the group, SIGHUP, SIGUSR1 and SIGUSR2 as
SIGTERM (mpirun forwards SIGUSR1, but ends all processes a second after a SIGTERM). After such a signal there is no restart.
COMMAND does not outlive its supervisor (Linux).

Standard library only, and no JAX: this process must stay small, and alive when the other does not.
"""

import argparse
import ctypes
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal, NoReturn

from jaxllm.cluster import exit_codes
from jaxllm.cluster.exit_codes import MOST_ATTEMPTS, NESTED

KEPT_BYTES = 2**20
"""Buffer for COMMAND's output while its reader does not read."""
LAST_WORDS_S = 5.0
"""Time to forward COMMAND's remaining output after its end."""


class Relay:
    """Forwards one output of COMMAND without waiting for its reader, and keeps reading when the reader is gone."""

    def __init__(self, selector: selectors.BaseSelector, sink: int):
        self._selector, self._sink = selector, sink
        self._source: IO[bytes] | None = None
        self._kept = bytearray()
        self._waits = False
        os.set_blocking(sink, False)

    def take_from(self, source: IO[bytes]) -> None:
        os.set_blocking(source.fileno(), False)
        self._source = source
        self._selector.register(source, selectors.EVENT_READ, self._read)

    def put(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        self._write()

    def finish(self) -> None:
        """Forwards the rest, as far as the reader takes it soon."""
        until_s = time.monotonic() + LAST_WORDS_S
        # A process that COMMAND left behind may never stop writing.
        while self._read() and time.monotonic() < until_s:
            pass
        self._drop_source()
        while self._kept and time.monotonic() < until_s:
            self._write()
            time.sleep(0.01)

    def _read(self) -> bool:
        """Returns whether there was any data."""
        if self._source is None:
            return False
        try:
            data = os.read(self._source.fileno(), 2**16)
        except BlockingIOError:
            return False
        if not data:
            self._drop_source()
            return False
        self.put(data)
        return True

    def _drop_source(self) -> None:
        if self._source is not None:
            self._selector.unregister(self._source)
            self._source.close()
            self._source = None

    def _write(self) -> None:
        blocked = False
        while self._kept and not blocked:
            try:
                del self._kept[: os.write(self._sink, self._kept)]
            except BlockingIOError:
                blocked = True
            except OSError:
                self._kept.clear()
        if blocked != self._waits:
            if blocked:
                self._selector.register(self._sink, selectors.EVENT_WRITE, self._write)
            else:
                self._selector.unregister(self._sink)
            self._waits = blocked


TICK_S = 1.0
"""Interval between checks of the time limits. Signals, heartbeats and the end of COMMAND wake it up by themselves."""
LONGEST_PAUSE_S = 300.0
ONE_OF_SEVERAL = ("SLURM_JOB_ID", "JAXLLM_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
"""If one of these is set, other supervisors may belong to this launch. SLURM's jobs have a name anyway."""
AS_SIGTERM = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = {signal.SIGINT: signal.SIGINT, **dict.fromkeys(AS_SIGTERM, signal.SIGTERM)}
ORDERS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "KILL": signal.SIGKILL}
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True)
class Limits:
    restarts: int = 10
    """In a row."""
    backoff_s: float = 5
    """Pause before the first restart; doubles with each restart in a row, up to 5 minutes."""
    silent_after_s: float = 60
    """Without a heartbeat for so long, the process counts as frozen."""
    reset_after_s: float = 600
    """After an attempt that lasted so long, the count of restarts in a row begins at 0 again."""
    hang_up_s: float = 60
    """Time between SIGTERM and SIGKILL once the launcher is gone."""

    def pause_s(self, restarts_in_a_row: int) -> float:
        # The exponent is bounded because floats overflow.
        return min(self.backoff_s * 2 ** min(restarts_in_a_row, 30), LONGEST_PAUSE_S)


def environment(outer: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """Environment of COMMAND in its first attempt: ours, and the variables of this launch. ValueError if JAXLLM_ATTEMPT is not
    valid."""
    inner = dict(outer)
    if limits.restarts:
        attempt, most = outer.get("JAXLLM_ATTEMPT") or "0", MOST_ATTEMPTS // NESTED
        # Not by jaxllm.untrusted: its imports would triple this process's time to start, and double its memory.
        if not (attempt.isascii() and attempt.isdecimal() and len(attempt) <= 20 and int(attempt) <= most):
            wish = f"it should be a whole number from 0 to {most:,}, as an outer supervisor sets it; unset it otherwise"
            raise ValueError(f"JAXLLM_ATTEMPT={attempt[:80]!a} is not valid: {wish}")
        inner |= {"JAXLLM_RESTARTS": "yes", "JAXLLM_ATTEMPT": str(int(attempt) * NESTED)}
    if not any(outer.get(name) for name in ("JAXLLM_LAUNCH_ID", *ONE_OF_SEVERAL)):
        # Each of several supervisors would choose another name, and processes of two launches do not meet.
        inner["JAXLLM_LAUNCH_ID"] = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 10**6}"
        # The same over all restarts. Not by the module `secrets`: its imports take time and memory.
        if not any(name in outer for name in ("JAXLLM_SECRET", "JAXLLM_SECRET_FILE")):
            inner["JAXLLM_SECRET"] = os.urandom(32).hex()
    return inner


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code."""
    if code == exit_codes.RESTART:
        return "stopped by a signal, and saved"
    if code == exit_codes.LOST:
        return "a process was lost, a step was stuck, or a store did not answer"
    if code > 128:
        with suppress(ValueError):
            return f"ended by {signal.Signals(code - 128).name}"
    return "an error"


class Supervisor:
    """Supervisor(...).run(), once, in the main thread.

    Args:
      follow: how to notice the launcher's end, for launchers whose end should end the run: "stdin" closes, or the "parent"
        process changes. "stdin" also takes orders: TERM, INT or KILL on a line. In both modes COMMAND's output goes through
        this process: a write to a dead launcher would be an error in the middle of a step, and mpirun (Open MPI 4) provides
        terminals, on which COMMAND would draw.
    """

    def __init__(self, command: Sequence[str], limits: Limits, follow: Literal["stdin", "parent"] | None = None):
        self._command, self._limits, self._follow = list(command), limits, follow
        self._environment = environment(os.environ, limits)
        self._selector = selectors.PollSelector()
        self._process: subprocess.Popen | None = None
        self._stop_requested = False
        """No new attempt starts."""
        self._kill_at_s = float("inf")
        self._heard = False
        self._parent = os.getppid()
        self._orders = b""
        self._relays: list[Relay] = []

    def run(self) -> int:
        """Returns COMMAND's exit code, 128 + n if signal n ended it. Returns exit_codes.RESTART if a signal stops it between
        two attempts or, where a supervisor restarts the run, if a SIGTERM ends COMMAND before it handles signals.
        """
        limits, in_a_row = self._limits, 0
        with self._listening():
            while True:
                began_s = time.monotonic()
                code = self._attempt()
                # Signals that came while it ended.
                self._listen(0)
                if self._stop_requested and code == 128 + signal.SIGTERM and self._environment.get("JAXLLM_RESTARTS") == "yes":
                    # COMMAND did not handle signals yet, so nothing is lost.
                    return exit_codes.RESTART
                if code in (0, exit_codes.BAD_INPUT) or self._stop_requested:
                    return code
                if time.monotonic() - began_s >= limits.reset_after_s:
                    in_a_row = 0
                if in_a_row == limits.restarts:
                    if limits.restarts:
                        self._print(f"exit code {code} ({describe_exit(code)}); given up after {in_a_row} restarts in a row")
                    return code
                pause_s = limits.pause_s(in_a_row)
                in_a_row += 1
                self._environment["JAXLLM_ATTEMPT"] = str(int(self._environment["JAXLLM_ATTEMPT"]) + 1)
                restart = f"restart {in_a_row} of at most {limits.restarts} in {pause_s:g} s"
                self._print(f"exit code {code} ({describe_exit(code)}); {restart}")
                if not self._sleep(pause_s):
                    return exit_codes.RESTART

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Handles signals, the end of COMMAND among them, and orders."""
        ours, wakes = socket.socketpair()
        with ours, wakes, self._selector:
            ours.setblocking(False)
            wakes.setblocking(False)
            handlers = {number: signal.getsignal(number) for number in (*PASSED_ON, signal.SIGCHLD)}
            previous_fd = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
            try:
                for number, handler in handlers.items():
                    # Under nohup it stays ignored.
                    if number != signal.SIGHUP or handler != signal.SIG_IGN:
                        signal.signal(number, lambda *_: None)
                self._selector.register(ours, selectors.EVENT_READ, lambda: self._take_signals(ours))
                if self._follow == "stdin":
                    self._selector.register(0, selectors.EVENT_READ, self._take_orders)
                if self._follow:
                    self._relays = [Relay(self._selector, sink) for sink in (1, 2)]
                yield
            finally:
                for relay in self._relays:
                    relay.finish()
                signal.set_wakeup_fd(previous_fd)
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def _attempt(self) -> int:
        """Runs COMMAND once; returns its exit code."""
        with ExitStack() as stack:
            beats, beat_fd = os.pipe()
            stack.callback(os.close, beats)
            os.set_blocking(beats, False)
            output = subprocess.PIPE if self._relays else None
            try:
                process = self._process = subprocess.Popen(
                    self._command,
                    env=self._environment | {"JAXLLM_BEAT_FD": str(beat_fd)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    bufsize=0,
                    pass_fds=[beat_fd],
                    process_group=0,
                    preexec_fn=partial(die_with_parent, os.getpid()) if _prctl else None,
                )
            except OSError as error:
                self._print(f"{self._command[0]} cannot be started ({error.strerror}): correct the command")
                return 1 if error.errno in (errno.EAGAIN, errno.ENOMEM) else exit_codes.BAD_INPUT
            finally:
                os.close(beat_fd)
            for relay, source in zip(self._relays, filter(None, (process.stdout, process.stderr)), strict=True):
                relay.take_from(source)
                stack.callback(relay.finish)
            self._selector.register(beats, selectors.EVENT_READ, lambda: self._take_beats(beats))
            stack.callback(self._ignore, beats)
            try:
                code = self._watch(process)
            finally:
                self._process = None
            if code:
                # Leftover children would disturb the next attempt.
                _signal_group(process, signal.SIGKILL)
            return 128 - code if code < 0 else code

    def _watch(self, process: subprocess.Popen) -> int:
        """Waits until the process ends; returns what Popen does."""
        beating, silent_s, before_s = False, 0.0, time.monotonic()
        while (code := process.poll()) is None:
            self._heard = False
            self._listen(TICK_S)
            now_s = time.monotonic()
            # By our own clock: a machine that froze as a whole froze us too.
            silent_s = 0.0 if self._heard else silent_s + min(now_s - before_s, 2 * TICK_S)
            beating, before_s = beating or self._heard, now_s
            if beating and silent_s > self._limits.silent_after_s:
                self._print(
                    f"process {process.pid} is frozen, no sign of life for {self._limits.silent_after_s:g} s: killing it"
                )
                _signal_group(process, signal.SIGKILL)
                beating = False
            if now_s > self._kill_at_s:
                _signal_group(process, signal.SIGKILL)
        return code

    def _sleep(self, seconds: float) -> bool:
        """Returns whether no signal asked to stop meanwhile."""
        until_s = time.monotonic() + seconds
        while not self._stop_requested and (left_s := until_s - time.monotonic()) > 0:
            self._listen(min(left_s, TICK_S))
        return not self._stop_requested

    def _listen(self, seconds: float) -> None:
        """Handles the first event within so many seconds."""
        for key, _ in self._selector.select(seconds):
            key.data()
        if self._follow == "parent" and os.getppid() != self._parent:
            self._launcher_gone()

    def _take_signals(self, ours: socket.socket) -> None:
        for number in ours.recv(64):
            if number in PASSED_ON:
                self._forward(PASSED_ON[signal.Signals(number)])

    def _take_beats(self, beats: int) -> None:
        if os.read(beats, 2**16):
            self._heard = True
        else:
            # All holders closed it.
            self._ignore(beats)

    def _take_orders(self) -> None:
        data = os.read(0, 2**10)
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            if (number := ORDERS.get(line.decode(errors="replace").strip())) is not None:
                self._forward(number)
        if not data:
            self._ignore(0)
            self._launcher_gone()

    def _launcher_gone(self) -> None:
        self._follow = None
        self._print("the launcher is gone; stopping")
        self._kill_at_s = time.monotonic() + self._limits.hang_up_s
        self._forward(signal.SIGTERM)

    def _forward(self, number: int) -> None:
        self._stop_requested = True
        if self._process is not None and self._process.returncode is None:
            _signal_group(self._process, number)

    def _ignore(self, fd: int) -> None:
        with suppress(KeyError):
            self._selector.unregister(fd)

    def _print(self, sentence: str) -> None:
        line = f"jaxllm: {sentence}\n".encode()
        if self._relays:
            self._relays[1].put(line)
        else:
            # A closed stderr is not a reason to end.
            with suppress(OSError):
                os.write(2, line)


def die_with_parent(parent: int) -> None:
    """Ends this process when `parent`, which started it, ends, also if that has happened already. The supervisor calls it in
    COMMAND's process before COMMAND, which must not continue alone. Linux only."""
    assert _prctl is not None, "used on Linux only"
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It was killed before the call, which then sends nothing (prctl(2)).
        os.kill(os.getpid(), signal.SIGKILL)


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"jaxllm: supervise: {message}", file=sys.stderr)
        raise SystemExit(exit_codes.BAD_INPUT)


def _number(kind: Callable[[str], float], what: str, text: str) -> float:
    with suppress(ValueError):
        if (number := kind(text)) >= 0:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not valid: give a {what} of at least 0")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    usage = "python -m jaxllm.cluster.supervisor [OPTION ...] -- COMMAND..."
    parser = _Parser(usage=usage, description="Runs COMMAND, and again when it fails or freezes.")
    count, seconds, defaults = partial(_number, int, "whole number"), partial(_number, float, "number"), Limits()
    parser.add_argument("--restarts", type=count, default=defaults.restarts, help="at most, in a row (%(default)s)")
    parser.add_argument("--backoff-s", type=seconds, default=defaults.backoff_s, help="before the first; doubles (%(default)s)")
    for option, limit in (("--silent-after", "silent_after_s"), ("--anew-after", "reset_after_s"), ("--hang-up", "hang_up_s")):
        parser.add_argument(option, type=seconds, default=getattr(defaults, limit), dest=limit, metavar="SECONDS")
    parser.add_argument("--follow", choices=["stdin", "parent"], help="how to notice the launcher's end, which ends COMMAND")
    at = given.index("--") if "--" in given else len(given)
    options, command = vars(parser.parse_args(given[:at])), given[at + 1 :]
    if not command:
        parser.error(f"there is no command; write {usage}")
    follow = options.pop("follow")
    try:
        supervisor = Supervisor(command, Limits(**options), follow)
    except ValueError as error:
        parser.error(str(error))
    return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(main())
