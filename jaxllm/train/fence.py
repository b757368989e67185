"""Who holds a run directory: two runs that save into one would undo each other's work.

    run.dir/.holder.json    {"launch_id", "attempt", "host", "pid", "machine", "born", "token", "time"}

A lock would not do. The holder may be stopped, or sit behind a cut cable, when its place is given to another, and then come
back. So process 0 of a run puts its token there, changes `time` every BEAT_S seconds as a sign of life, and reads the token
back before it writes what the next run will read: a checkpoint's final name, a line of metrics (`require`). Where it finds
another's token, or none, since the other may have ended by then, it says so, leaves with exits.LOST and writes nothing.

A start takes the directory over from a holder

  - that is the same launch with a lower attempt: whoever restarted it has given it up;
  - whose process has ended, where this machine can tell;
  - that was silent for SILENT_S by the clock of the start: clocks of two hosts are not compared;

and is refused otherwise. The sign of life goes through an open file, which a takeover replaces under its name: whoever lost the
directory can no longer touch the file of the new holder.

One gap is left: a process that freezes between reading its token and the rename or the line that follows, and thaws when
another has taken over. The line is then one too many; the checkpoint is one of the same run under the same config.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from jaxllm import distributed, exits
from jaxllm.config import ConfigError
from jaxllm.peers import print_sentence

HOLDER = ".holder.json"
BEAT_S = 5.0
SILENT_S = 4 * BEAT_S
"""Three beats missed, wherever between two of them the watch began."""
SETTLE_S = 1.0
"""From reading its token to the end of the write, a holder that lives takes less."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    launch_id: str | None
    attempt: int
    host: str
    pid: int
    machine: str
    """The boot and the numbering of processes in which `pid` means something; "" if unknown."""
    born: str
    """When the process started, in ticks of that boot: its pid is given to another one day."""
    token: str
    time: str
    """Of the last sign of life, UTC. For people, and to see that it changes."""

    @property
    def name(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def beat(self) -> bytes:
        """What is in the file as of now. Always of one length: it is written over the beat before, and a reader may come in
        between.
        """
        return json.dumps(asdict(replace(self, time=utc()))).encode() + b"\n"


class Fence:
    """A run directory that this process holds, from `take` to `release`."""

    def __init__(self, folder: Path, me: Holder):
        self._folder, self._path, self._me = folder, folder / HOLDER, me
        self._file: int | None = None
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="fence", daemon=True)

    @classmethod
    def take(cls, folder: Path) -> Fence:
        """Returns when this process holds `folder`; that may take SILENT_S.

        Raises:
          ConfigError: another run holds it, or nothing can be written there.
        """
        place = distributed.place()
        fence = cls(folder, this_process(place.launch_id, place.attempt))
        try:
            fence._take()
        except OSError as error:
            raise ConfigError(
                f"{fence._path} cannot be written ({error.strerror}): remove the cause, or choose another run.dir."
            ) from None
        fence._beats.start()
        return fence

    def require(self) -> None:
        """Ends the process with exits.LOST if the directory is another's by now. To be called right before something is written
        that the next run will read.

        Released, the directory stays this process's until somebody takes it: a save that was under way when the run failed is
        finished after that.

        Raises:
          OSError: the file system does not say whose it is.
        """
        found = read_holder(self._path)
        if found is None and self._ended.is_set():
            return
        if found is None or found.token != self._me.token:
            how = f"was taken over by {found.name}" if found else f"was taken over, or its {HOLDER} removed"
            leave(f"run.dir={self._folder} {how}: {self._me.name} writes nothing more there.")

    def release(self) -> None:
        """The directory is free again. Without it, as after a kill, the next start finds out by itself."""
        self._ended.set()
        if self._beats.is_alive():
            # It may sit in a write that does not come back.
            self._beats.join(BEAT_S)
        try:
            found = read_holder(self._path)
            if found is not None and found.token == self._me.token:
                self._path.unlink()
        except OSError as error:
            log.warning("%s cannot be removed (%s).", self._path, error.strerror)
        if self._file is not None and not self._beats.is_alive():
            os.close(self._file)
            self._file = None

    def _take(self) -> None:
        while True:
            found = read_holder(self._path)
            if found is None and not self._path.exists():
                try:
                    self._put(over=False)
                    return
                except FileExistsError:
                    continue
            verdict = "unsure" if found is None else judge(found, self._me)
            if verdict == "unsure":
                verdict = self._watch(found)
            if verdict == "changed":
                continue
            if verdict == "holds":
                assert found is not None, "no verdict on nobody"
                raise ConfigError(
                    f"run.dir={self._folder} is in use by {found.name}: wait for it, stop it, or choose another run.dir."
                )
            self._put(over=True)
            if verdict == "gone":
                return
            # It may live on for a moment; and another start may have come to the same verdict.
            time.sleep(SETTLE_S)
            if (now := read_holder(self._path)) is not None and now.token == self._me.token:
                return

    def _watch(self, found: Holder | None) -> str:
        """Looks for a sign of life: "holds", "silent", or "changed" where another holds it now, or nobody."""
        who = found.name if found else "another process"
        log.warning("run.dir=%s was held by %s: looking up to %.0f s whether it still is.", self._folder, who, SILENT_S)
        look_s, watched_s = min(0.5, BEAT_S / 4), 0.0
        while watched_s < SILENT_S:
            began_s = time.monotonic()
            time.sleep(look_s)
            woke_s = time.monotonic()
            now = read_holder(self._path)
            # What stood still with this process may have kept the holder from its beats too.
            watched_s += min(woke_s - began_s, 2 * look_s) + time.monotonic() - woke_s
            if now != found:
                return "holds" if now and found and now.token == found.token else "changed"
        return "silent"

    def _put(self, over: bool) -> None:
        """Makes the file this process's.

        Raises:
          FileExistsError: `over` is false and there is one.
        """
        aside = self._folder / f"{HOLDER}-{uuid.uuid4().hex}"
        file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(file, self._me.beat())
            os.fsync(file)
            if over:
                os.replace(aside, self._path)
            else:
                name_anew(aside, self._path)
        except BaseException:
            os.close(file)
            raise
        finally:
            aside.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        self._file = file

    def _beat(self) -> None:
        assert self._file is not None, "begun once the file is this process's"
        while not self._ended.wait(BEAT_S):
            try:
                # First: the file of who has lost the directory may be gone, and not take a sign of life.
                self.require()
                os.pwrite(self._file, self._me.beat(), 0)
                # NFS shows others what was written once it is synced.
                os.fsync(self._file)
            except OSError as error:
                log.debug("no sign of life in %s: %s", self._path, error)


@contextmanager
def alone_in(folder: Path) -> Iterator[Callable[[], None]]:
    """Holds the run directory for this run; every process of it must call it. What it gives is Fence.require on process 0, and
    does nothing on the others.

    Raises:
      ConfigError: on all processes, if another run holds it.
    """
    fence, refusal = None, ""
    if distributed.is_main_process():
        try:
            fence = Fence.take(folder)
        except ConfigError as error:
            refusal = str(error)
    try:
        if refusal := distributed.broadcast(refusal):
            raise ConfigError(refusal)
        yield unfenced if fence is None else fence.require
    finally:
        if fence is not None:
            fence.release()


def unfenced() -> None:
    """In place of Fence.require where nobody holds the directory."""


def judge(found: Holder, me: Holder) -> str:
    """What can be said of a holder at once: "gone", "replaced" (an earlier attempt of this launch), "holds", or "unsure"."""
    is_here = bool(found.machine) and found.machine == me.machine
    if is_here and born(found.pid) != found.born:
        return "gone"
    if found.launch_id and found.launch_id == me.launch_id and found.attempt < me.attempt:
        return "replaced"
    return "holds" if is_here else "unsure"


def this_process(launch_id: str | None, attempt: int) -> Holder:
    pid = os.getpid()
    return Holder(launch_id, attempt, socket.gethostname(), pid, machine(), born(pid), uuid.uuid4().hex, utc())


def machine() -> str:
    """The boot and the namespace of pids of this process; "" where /proc does not tell. Not the host's name: containers may
    share it, and number their processes each for itself.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def born(pid: int) -> str:
    """When a process of this machine started; "" if there is none, or it has ended and its parent has not noticed yet."""
    try:
        # The program's name stands before it in parentheses, and may hold some.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_holder(path: Path) -> Holder | None:
    """None if there is no such file, or it holds something else.

    Raises:
      OSError: it cannot be read.
    """
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def name_anew(aside: Path, path: Path) -> None:
    """Gives a file a name that is free. Where the file system knows no links it looks first, and two may come at once.

    Raises:
      FileExistsError: the name is taken.
    """
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(aside, path)


def leave(sentence: str) -> NoReturn:
    """At once, whatever the other threads do: what they would write is no longer theirs."""
    print_sentence(sentence)
    os._exit(exits.LOST)
