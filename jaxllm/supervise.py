"""Keeps one process of a run going, from outside: python -m jaxllm.supervise [OPTION ...] -- COMMAND...

Starts COMMAND, starts it again where another try may go better (exits.py), and kills it when it is frozen. The process cannot
do this itself: JAX ends it from C++ without a Python exception, and a stopped process runs no watchdog. With several hosts each
process has its own supervisor, and these need not know of each other: a lost process ends all others with exits.LOST, all are
started again, and wait for each other as at the first start.

COMMAND runs in a process group of its own, without standard input. It inherits a pipe, JAXLLM_BEAT_FD, into which jaxllm
writes a byte a second. Only a beat that stops counts: a command that never beats is never called frozen, but a shell that does
more once its training has ended is. SIGTERM and SIGINT are passed on to the group, SIGHUP and SIGUSR1 as SIGTERM (mpirun passes
SIGUSR1 on, but ends everybody a second after a SIGTERM); whoever was told to stop is not started again. COMMAND does not
outlive its supervisor (Linux).

Standard library only, and no JAX: this process must stay small and alive when the other does not.
"""

from __future__ import annotations

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
from typing import Literal, NoReturn

from jaxllm import exits

TICK_S = 1.0
"""How often the time limits are looked at. Signals, beats and the end of COMMAND wake it up by themselves."""
LONGEST_PAUSE_S = 300.0
ONE_OF_SEVERAL = ("SLURM_JOB_ID", "JAXLLM_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
"""Where one is set, other supervisors may belong to this launch. SLURM's jobs have a name anyway."""
NESTED = 1000
"""A supervisor under another counts its attempts from this times the outer's on: attempts of one launch only ever go up."""
PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,
}
ORDERS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "KILL": signal.SIGKILL}
KEPT_BYTES = 2**20
"""Of COMMAND's output, while nobody takes it."""
LAST_WORDS_S = 5.0
"""For handing on what COMMAND said before it ended."""
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True)
class Limits:
    restarts: int = 10
    """In a row."""
    backoff_s: float = 5
    """Before the first restart; doubles with each in a row, up to 5 minutes."""
    silent_after_s: float = 60
    """Without a beat: the process is frozen."""
    anew_after_s: float = 600
    """An attempt that lasted so long made progress: restarts are counted anew."""
    hang_up_s: float = 60
    """Between SIGTERM and SIGKILL once the launcher is gone."""

    def pause_s(self, restarts_in_a_row: int) -> float:
        # The exponent is bounded because a float is not.
        return min(self.backoff_s * 2 ** min(restarts_in_a_row, 30), LONGEST_PAUSE_S)


def environment(outer: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """What COMMAND is told of this launch in its first attempt, by what we were told of it ourselves."""
    inner = dict(outer)
    if limits.restarts:
        attempt = int(outer.get("JAXLLM_ATTEMPT") or 0)
        inner |= {"JAXLLM_RESTARTS": "yes", "JAXLLM_ATTEMPT": str(attempt * NESTED)}
    if not any(outer.get(name) for name in ("JAXLLM_LAUNCH_ID", *ONE_OF_SEVERAL)):
        # Each of several supervisors would make another, and processes of two launches do not meet.
        inner["JAXLLM_LAUNCH_ID"] = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 10**6}"
    return inner


def in_words(code: int) -> str:
    """How a process ended, by its exit code."""
    if code == exits.RESTART:
        return "stopped by a signal, and saved"
    if code == exits.LOST:
        return "a process was lost, or a step was stuck"
    if code > 128:
        with suppress(ValueError):
            return f"ended by {signal.Signals(code - 128).name}"
    return "an error"


class Supervisor:
    """Supervisor(...).run(), once, in the main thread.

    Args:
      follow: how the end of whoever launched us shows, for launchers whose end should end the run: "stdin" closes, or "parent"
        is another. "stdin" also takes orders: TERM, INT or KILL on a line. Either way COMMAND's output goes through this
        process: a write to a launcher that is gone would be an error in the middle of a step, and mpirun (Open MPI 4) gives
        terminals, on which COMMAND would draw.
    """

    def __init__(self, command: Sequence[str], limits: Limits, follow: Literal["stdin", "parent"] | None = None):
        self._command, self._limits, self._follow = list(command), limits, follow
        self._environment = environment(os.environ, limits)
        self._selector = selectors.PollSelector()
        self._process: subprocess.Popen | None = None
        self._told = False
        """To stop: nothing is started any more."""
        self._kill_at_s = float("inf")
        self._heard = False
        self._parent = os.getppid()
        self._orders = b""
        self._relays: list[_Relay] = []

    def run(self) -> int:
        """Returns COMMAND's exit code, 128 + n where signal n ended it; exits.RESTART if told to stop between two attempts, or,
        where somebody restarts the run, by a SIGTERM that COMMAND did not listen to yet.
        """
        limits, in_a_row = self._limits, 0
        with self._listening():
            while True:
                began_s = time.monotonic()
                code = self._attempt()
                # What came while it ended.
                self._listen(0)
                if self._told and code == 128 + signal.SIGTERM and self._environment.get("JAXLLM_RESTARTS") == "yes":
                    # It did not listen yet, so nothing is lost.
                    return exits.RESTART
                if code in (0, exits.BAD_INPUT) or self._told:
                    return code
                if time.monotonic() - began_s >= limits.anew_after_s:
                    in_a_row = 0
                if in_a_row == limits.restarts:
                    if limits.restarts:
                        self._say(f"exit code {code} ({in_words(code)}); given up after {in_a_row} restarts in a row")
                    return code
                pause_s = limits.pause_s(in_a_row)
                in_a_row += 1
                self._environment["JAXLLM_ATTEMPT"] = str(int(self._environment["JAXLLM_ATTEMPT"]) + 1)
                self._say(
                    f"exit code {code} ({in_words(code)}); restart {in_a_row} of at most {limits.restarts} in {pause_s:g} s"
                )
                if not self._rest(pause_s):
                    return exits.RESTART

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """To signals, the end of COMMAND among them, and to orders."""
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
                    self._relays = [_Relay(self._selector, sink) for sink in (1, 2)]
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
            outputs: list[int | None] = [None, None]
            if self._relays:
                pipes = [os.pipe() for _ in self._relays]
                outputs = [writer for _, writer in pipes]
                for relay, (reader, _) in zip(self._relays, pipes, strict=True):
                    relay.take_from(reader)
                    stack.callback(relay.finish)
            try:
                process = self._process = subprocess.Popen(
                    self._command,
                    env=self._environment | {"JAXLLM_BEAT_FD": str(beat_fd)},
                    stdin=subprocess.DEVNULL,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    pass_fds=[beat_fd],
                    process_group=0,
                    preexec_fn=_end_with_supervisor if _prctl else None,
                )
            except OSError as error:
                self._say(f"{self._command[0]} cannot be started ({error.strerror}): correct the command")
                return 1 if error.errno in (errno.EAGAIN, errno.ENOMEM) else exits.BAD_INPUT
            finally:
                for fd in (beat_fd, *outputs):
                    if fd is not None:
                        os.close(fd)
            self._selector.register(beats, selectors.EVENT_READ, lambda: self._take_beats(beats))
            stack.callback(self._ignore, beats)
            try:
                code = self._watch(process)
            finally:
                self._process = None
            if code:
                # What it had started would be in the way of the next attempt.
                _signal_group(process, signal.SIGKILL)
            return 128 - code if code < 0 else code

    def _watch(self, process: subprocess.Popen) -> int:
        """Until it ends; returns what Popen does."""
        beating, silent_s, before_s = False, 0.0, time.monotonic()
        while (code := process.poll()) is None:
            self._heard = False
            self._listen(TICK_S)
            now_s = time.monotonic()
            # By our own clock: a machine that was frozen whole froze us too.
            silent_s = 0.0 if self._heard else silent_s + min(now_s - before_s, 2 * TICK_S)
            beating, before_s = beating or self._heard, now_s
            if beating and silent_s > self._limits.silent_after_s:
                self._say(f"process {process.pid} is frozen, no sign of life for {self._limits.silent_after_s:g} s: killing it")
                _signal_group(process, signal.SIGKILL)
                beating = False
            if now_s > self._kill_at_s:
                _signal_group(process, signal.SIGKILL)
        return code

    def _rest(self, seconds: float) -> bool:
        """Whether nobody told us to stop meanwhile."""
        until_s = time.monotonic() + seconds
        while not self._told and (left_s := until_s - time.monotonic()) > 0:
            self._listen(min(left_s, TICK_S))
        return not self._told

    def _listen(self, seconds: float) -> None:
        """To whatever comes first, for so long."""
        for key, _ in self._selector.select(seconds):
            key.data()
        if self._follow == "parent" and os.getppid() != self._parent:
            self._launcher_gone()

    def _take_signals(self, ours: socket.socket) -> None:
        for number in ours.recv(64):
            if number in PASSED_ON:
                self._tell(PASSED_ON[signal.Signals(number)])

    def _take_beats(self, beats: int) -> None:
        if os.read(beats, 2**16):
            self._heard = True
        else:
            # Closed by all who had it.
            self._ignore(beats)

    def _take_orders(self) -> None:
        data = os.read(0, 2**10)
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            if (number := ORDERS.get(line.decode(errors="replace").strip())) is not None:
                self._tell(number)
        if not data:
            self._ignore(0)
            self._launcher_gone()

    def _launcher_gone(self) -> None:
        self._follow = None
        self._say("the launcher is gone; stopping")
        self._kill_at_s = time.monotonic() + self._limits.hang_up_s
        self._tell(signal.SIGTERM)

    def _tell(self, number: int) -> None:
        self._told = True
        if self._process is not None and self._process.returncode is None:
            _signal_group(self._process, number)

    def _ignore(self, fd: int) -> None:
        with suppress(KeyError):
            self._selector.unregister(fd)

    def _say(self, sentence: str) -> None:
        line = f"jaxllm: {sentence}\n".encode()
        if self._relays:
            self._relays[1].put(line)
        else:
            # A closed stderr is no reason to end.
            with suppress(OSError):
                os.write(2, line)


class _Relay:
    """Hands on one output of COMMAND, never waits for whoever takes it, and goes on reading when nobody does any more."""

    def __init__(self, selector: selectors.BaseSelector, sink: int):
        self._selector, self._sink = selector, sink
        self._source: int | None = None
        self._kept = bytearray()
        self._waits = self._closed = False
        os.set_blocking(sink, False)

    def take_from(self, source: int) -> None:
        os.set_blocking(source, False)
        self._source = source
        self._selector.register(source, selectors.EVENT_READ, self._read)

    def put(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        self._write()

    def finish(self) -> None:
        """Hands on the rest, as far as somebody takes it soon."""
        until_s = time.monotonic() + LAST_WORDS_S
        # What COMMAND left running may never stop talking.
        while self._read() and time.monotonic() < until_s:
            pass
        self._drop_source()
        while self._kept and time.monotonic() < until_s:
            self._write()
            time.sleep(0.01)

    def _read(self) -> bool:
        """Whether there was something."""
        if self._source is None:
            return False
        try:
            data = os.read(self._source, 2**16)
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
            os.close(self._source)
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


def _end_with_supervisor() -> None:
    """In COMMAND's process: where we are killed ourselves, it must not go on by itself."""
    assert _prctl is not None, "given on Linux alone"
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"jaxllm: supervise: {message}", file=sys.stderr)
        raise SystemExit(exits.BAD_INPUT)


def _number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = float("nan")
        if not number >= least:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text} is not valid: give a {what} of at least {least}")
        return number

    return read


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    usage = "python -m jaxllm.supervise [OPTION ...] -- COMMAND..."
    parser = _Parser(prog="jaxllm.supervise", usage=usage, description="Runs COMMAND, and again when it fails or freezes.")
    count, seconds, usual = _number(int, 0), _number(float, 0), Limits()
    parser.add_argument("--restarts", type=count, default=usual.restarts, help="at most, in a row (%(default)s)")
    parser.add_argument("--backoff-s", type=seconds, default=usual.backoff_s, help="before the first; doubles (%(default)s)")
    parser.add_argument("--silent-after", type=seconds, default=usual.silent_after_s, dest="silent_after_s", metavar="SECONDS")
    parser.add_argument("--anew-after", type=seconds, default=usual.anew_after_s, dest="anew_after_s", metavar="SECONDS")
    parser.add_argument("--hang-up", type=seconds, default=usual.hang_up_s, dest="hang_up_s", metavar="SECONDS")
    parser.add_argument("--follow", choices=["stdin", "parent"], help="how the launcher's end shows, which ends COMMAND")
    at = given.index("--") if "--" in given else len(given)
    options, command = vars(parser.parse_args(given[:at])), given[at + 1 :]
    if not command:
        parser.error(f"there is no command; write {usage}")
    follow = options.pop("follow")
    return Supervisor(command, Limits(**options), follow).run()


if __name__ == "__main__":
    raise SystemExit(main())
