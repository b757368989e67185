"""Lock on a run directory. It prevents two runs from writing checkpoints into the same directory.

    run.dir/.holder.json    {"launch_id", "attempt", "host", "pid", "machine", "born", "token", "time"}

A plain file lock is not enough. The holder may be stopped, or cut off from the network, while another run takes its place, and
then come back. So process 0 of a run writes its token into this file, updates `time` every BEAT_S seconds as a heartbeat, and
reads the token back (fencing) before it writes anything that the next run will read: a checkpoint's final name, a line of
metrics (`require`). If it finds another token, or none because the other run may have ended by then, it prints a message, exits
with exit_codes.LOST and writes nothing.

docs/checkpoints.md says from whom a start takes the directory over. SILENT_S count by the clock of the start, as clocks of two
hosts are not compared. The heartbeat goes through an open file, which a takeover replaces under its name: a run that has lost
the directory can no longer touch the file of the new holder.

One gap remains: a process that freezes between reading its token and the rename or line that follows, and resumes after another
run has taken over. The extra line is then a duplicate; the checkpoint is one of the same run under the same config.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jaxllm.cluster import distributed, exit_codes
from jaxllm.cluster.distributed import raising_together
from jaxllm.cluster.socket_messages import Name, Pid
from jaxllm.config import ConfigError
from jaxllm.machine.host import rename_if_free
from jaxllm.terminal import print_sentence
from jaxllm.untrusted import RefusedInput, Text, Whole, checked, parse_json, read_bytes, reason_of

HOLDER = ".holder.json"
HOLDER_BYTES = 2**16
BEAT_S = 5.0
SILENT_S = 4 * BEAT_S
"""At least three missed heartbeats, whenever the watch began between two of them."""
SETTLE_S = 1.0
"""A live holder needs less time from reading its token to the end of the write."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    launch_id: Text | None
    attempt: Whole
    host: Name
    pid: Pid
    machine: Text
    """The boot and PID namespace in which `pid` is valid; "" if unknown."""
    born: Text
    """Start time of the process, in clock ticks since that boot: the system reuses PIDs."""
    token: Text
    time: Text
    """Last heartbeat, UTC. For people, and to detect changes."""

    @property
    def name(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def beat(self) -> bytes:
        """Content of the file now. Its length is constant: it overwrites the previous heartbeat, and a reader may come in
        between.
        """
        return json.dumps(asdict(self) | {"time": utc()}).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> Holder:
        """Raises RefusedInput if the content is no holder."""
        return checked(checked(parse_json(content, HOLDER_BYTES), dict[str, Any]), cls)


class HolderLock(ABC):
    """A lock of this process: who may take it over, and heartbeats. A subclass says where the holder is written; `what` is what
    it locks, as "run.dir=runs/first", and `key` the key of the config. `times_s` are the seconds between two heartbeats, and
    without any until a holder counts as gone.
    """

    file = HOLDER

    def __init__(self, what: str, key: str, me: Holder, times_s: tuple[float, float]):
        self._what, self._key, self._me, self._times_s = what, key, me, times_s
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name=f"{key}-lock", daemon=True)

    @abstractmethod
    def _read(self) -> Holder | None:
        """None if there is no holder, or what is written is none."""

    @abstractmethod
    def _write_holder(self, over: bool) -> None:
        """Makes this process the holder. Raises FileExistsError if something is written; with `over` also a store, if
        that is not what was read last."""

    @abstractmethod
    def _write_beat(self) -> None: ...

    @abstractmethod
    def _remove(self) -> None: ...

    @abstractmethod
    def require(self) -> None:
        """Raises, or ends the process, if the lock is lost."""

    def lost(self) -> str:
        """How this process has lost what it held, as the rest of a sentence; "" if it has not. After `release` it is still this
        process's until another run takes it: a save that was in progress when the run failed may finish after that.
        """
        found = self._read()
        if found is None and self._ended.is_set():
            return ""
        if found is None:
            return f"was taken over, or its {self.file} removed"
        return "" if found.token == self._me.token else f"was taken over by {found.name}"

    def _take(self) -> None:
        while True:
            if (found := self._read()) is None:
                try:
                    self._write_holder(over=False)
                    return
                except FileExistsError:
                    # Another start was faster, or what is written is no holder.
                    found = self._read()
            verdict = "unsure" if found is None else holder_status(found, self._me)
            if verdict == "unsure":
                verdict = self._watch(found)
            if verdict == "changed":
                continue
            if verdict == "holds":
                assert found is not None, "a missing holder has no verdict"
                in_use = ConfigError(
                    f"{self._what} is in use by {found.name}: wait for it, stop it, or choose another {self._key}."
                )
                if found.launch_id is not None and found.launch_id == self._me.launch_id:
                    # A part of this run that does not reach the other: once it does, a restart joins it.
                    in_use.exit_code = exit_codes.LOST
                raise in_use
            # FileExistsError: another start was faster.
            with suppress(FileExistsError):
                self._write_holder(over=True)
                if verdict == "gone":
                    return
            # The old holder may live for another moment, and another start may have reached the same verdict.
            time.sleep(SETTLE_S)
            if (now := self._read()) is not None and now.token == self._me.token:
                return

    def _watch(self, found: Holder | None) -> str:
        """Waits for a heartbeat: "holds", "silent", or "changed" if there is another holder now, or none."""
        beat_s, silent_s = self._times_s
        who = found.name if found else "another process"
        log.warning("%s was held by %s: watching up to %.0f s for a sign of life.", self._what, who, silent_s)
        look_s, watched_s = min(0.5, beat_s / 4), 0.0
        while watched_s < silent_s:
            began_s = time.monotonic()
            time.sleep(look_s)
            woke_s = time.monotonic()
            now = self._read()
            # Whatever stopped this process may have stopped the holder's heartbeats too.
            watched_s += min(woke_s - began_s, 2 * look_s) + time.monotonic() - woke_s
            if now != found:
                return "holds" if now and found and now.token == found.token else "changed"
        return "silent"

    def _beat(self) -> None:
        while not self._ended.wait(self._times_s[0]):
            try:
                # First: after a takeover what is written is another's, and must not get a heartbeat.
                self.require()
                self._write_beat()
            except (OSError, ConfigError) as error:
                log.debug("no heartbeat of %s: %s", self._what, error)

    def release(self) -> None:
        """Frees it. If that does not happen, as after a kill, the next start detects it by itself."""
        self._ended.set()
        if self._beats.is_alive():
            # The thread may hang in a write.
            self._beats.join(BEAT_S)
        try:
            found = self._read()
            if found is not None and found.token == self._me.token:
                self._remove()
        except (OSError, ConfigError) as error:
            why = reason_of(error) if isinstance(error, OSError) else error
            log.warning("The %s of %s cannot be removed (%s).", self.file, self._what, why)


class RunDirLock(HolderLock):
    """Lock of this process on a run directory, from `take` to `release`."""

    def __init__(self, folder: Path, me: Holder):
        super().__init__(f"run.dir={folder}", "run.dir", me, (BEAT_S, SILENT_S))
        self._folder, self._path = folder, folder / HOLDER
        self._file: int | None = None

    @classmethod
    def take(cls, folder: Path) -> RunDirLock:
        """Returns when this process holds `folder`; that may take SILENT_S.

        Raises:
          ConfigError: another run holds it, the lock file cannot be written, or it is a link to nothing.
        """
        launch = distributed.launch_info()
        lock = cls(folder, this_process(launch.launch_id, launch.attempt))
        try:
            if lock._path.is_symlink() and not lock._path.exists():
                raise ConfigError(f"{lock._path} is a link to a file that does not exist: remove it.")
            lock._take()
        except OSError as error:
            raise ConfigError(
                f"{lock._path} cannot be written ({error.strerror}): remove the cause, or choose another run.dir."
            ) from None
        lock._beats.start()
        return lock

    def require(self) -> None:
        """Ends the process with exit_codes.LOST if another run has taken the directory. Call it right before each write that
        the next run will read. Raises OSError if the file system does not tell who holds it.
        """
        if how := self.lost():
            leave(f"run.dir={self._folder} {how}: {self._me.name} writes nothing more there.")

    def release(self) -> None:
        super().release()
        if self._file is not None and not self._beats.is_alive():
            os.close(self._file)
            self._file = None

    def _read(self) -> Holder | None:
        return read_holder(self._path)

    def _remove(self) -> None:
        self._path.unlink()

    def _write_holder(self, over: bool) -> None:
        aside = self._folder / f"{HOLDER}-{uuid.uuid4().hex}"
        file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(file, self._me.beat())
            os.fsync(file)
            if over:
                os.replace(aside, self._path)
            else:
                rename_if_free(aside, self._path)
        except BaseException:
            os.close(file)
            raise
        finally:
            aside.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        self._file = file

    def _write_beat(self) -> None:
        assert self._file is not None, "started after the file is this process's"
        os.pwrite(self._file, self._me.beat(), 0)
        # NFS shows a write to other hosts after a sync.
        os.fsync(self._file)


@contextmanager
def hold_run_dir(folder: Path, leads: bool = True) -> Iterator[Callable[[], None]]:
    """Holds the run directory for this run; every process of it must call it. Yields RunDirLock.require on the process that
    leads those with this directory (process 0, if all share it), and a function that does nothing on the others.

    Raises:
      ConfigError: on all processes, if another run holds it.
    """
    require = unfenced
    with ExitStack() as stack:
        with raising_together():
            if leads:
                lock = RunDirLock.take(folder)
                stack.callback(lock.release)
                require = lock.require
        yield require


def unfenced() -> None:
    """Stands in for RunDirLock.require where no lock is held."""


def holder_status(found: Holder, me: Holder) -> str:
    """State of a holder, as far as it is known at once: "gone", "replaced" (an earlier attempt of this launch), "holds" or
    "unsure".
    """
    is_here = bool(found.machine) and found.machine == me.machine
    if is_here and start_time_of(found.pid) != found.born:
        return "gone"
    if found.launch_id and found.launch_id == me.launch_id and found.attempt < me.attempt:
        return "replaced"
    return "holds" if is_here else "unsure"


def this_process(launch_id: str | None, attempt: int) -> Holder:
    pid = os.getpid()
    return Holder(launch_id, attempt, socket.gethostname(), pid, machine(), start_time_of(pid), uuid.uuid4().hex, utc())


def machine() -> str:
    """The boot and PID namespace of this process; "" if /proc does not tell. The host's name does not work: containers may
    share it, and each numbers its own processes.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_time_of(pid: int) -> str:
    """Start time of a process of this machine; "" if there is none, or if it has ended and its parent has not waited for it
    yet.
    """
    try:
        # The program's name comes first, in parentheses, and may contain some.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_holder(path: Path) -> Holder | None:
    """None if there is no such file, or it is not a holder's.

    Raises:
      OSError: it cannot be read.
    """
    try:
        return Holder.from_json(read_bytes(path, HOLDER_BYTES))
    except (FileNotFoundError, RefusedInput):
        return None


def leave(sentence: str) -> NoReturn:
    """Exits at once, whatever the other threads do: this process must not write any more."""
    print_sentence(sentence)
    os._exit(exit_codes.LOST)
