"""Metrics sinks: metrics.jsonl always, spikes.jsonl, and trackers on request.

Trackers get the lines of metrics.jsonl, which stay the truth: TensorBoard, W&B, MLflow, Prometheus, own sinks
(tracker_kinds.py). Each has a thread of its own that reads the file, and a cursor, kept in run.dir/trackers: the byte up to
which it has all. So training never waits for one. One that was away, or that the config names later, gets every line that it
lacks, also from a later start. A run that was killed continues the same W&B or MLflow run. A line may be sent twice; none is
left out.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.config import Config, ConfigError
from jaxllm.data.manifest import replace_json
from jaxllm.json_lines import before_step, parse
from jaxllm.run.tracker_kinds import PATIENCE_S, Kind, Record, Sink, kinds_of, reason_of
from jaxllm.untrusted import GIB, RefusedInput, Whole, checked, read_bytes, read_json

log = logging.getLogger(__name__)


class JsonLines:
    """Writes one JSON object per line and flushes it. A resumed run appends to the lines up to `last_step`.

    Lines of later steps, which will run again, move to a file beside it: metrics-1.jsonl and so on. If the file disappears, the
    next line begins it again, with a warning.

    Args:
      require: called before anything is written; RunDirLock.require where the run holds the directory.
      line_of: makes a line of a record, or None if there is none; the first line creates the file. Default: each record is one.
    """

    def __init__(
        self,
        path: Path,
        last_step: int,
        require: Callable[[], None] = unfenced,
        line_of: Callable[[Record], Record | None] | None = None,
    ):
        self._path, self._last_step, self._require, self._line_of = path, last_step, require, line_of
        self._file: IO[str] | None = None
        if line_of is None or path.exists():
            self._open()

    def _open(self) -> IO[str]:
        try:
            self._require()
            _move_aside(self._path, self._last_step)
            self._file = _open_at_line(self._path)
        except OSError as error:
            raise _unwritable(self._path, error) from None
        return self._file

    def write(self, record: Record) -> None:
        if (line := self._line_of(record) if self._line_of else record) is None:
            return
        # JSON has no NaN or infinity, so they become null.
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
        file = self._file or self._open()
        try:
            self._require()
            if not self._is_there():
                log.warning("%s was removed or replaced during the run: its next lines go to a new file there.", self._path)
                self.close()
                self._file = file = _open_at_line(self._path)
            file.write(json.dumps(finite) + "\n")
            file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def _is_there(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        # `write` has reported an error. Closing tries to flush again.
        with suppress(OSError):
            if self._file is not None:
                self._file.close()


def spike_line(config: Config, record: Record) -> Record | None:
    """Makes a line for run.dir/spikes.jsonl with the data to replay a step that was skipped or is a spike; None for another. It
    read the samples from first_sequence on, in the layout of Trainer.train_batch(step - 1).
    """
    if not (record.get("skipped") or record.get("loss_spike")):
        return None
    names = ("step", "skipped", "loss_spike", "loss", "grad_norm", "learning_rate")
    line = {name: record[name] for name in names if name in record}
    # By the record: the config may be of a time when the batch had not grown (run/batch_growth.py).
    sequences = int(record.get("batch_sequences", config.train.global_batch_sequences))
    first_sequence = int(record["tokens"]) // config.train.sequence_length - sequences
    return line | {"first_sequence": first_sequence, "sequences": sequences}


def open_sinks(
    config: Config, last_step: int, require: Callable[[], None] = unfenced, steps: Callable[[], int] | None = None
) -> list[Sink]:
    """Opens the sinks of a config, for a run that continues after `last_step`. The run directory must exist. `require` is
    called before each write that the next start reads, and `steps` at the end, where a batch that has grown has left less of
    train.steps.
    """
    metrics, spikes = (Path(config.run.dir) / name for name in ("metrics.jsonl", "spikes.jsonl"))
    files = JsonLines(metrics, last_step, require), JsonLines(spikes, last_step, require, partial(spike_line, config))
    # Behind them, because trackers read what metrics.jsonl holds.
    return [*files, Trackers(config, last_step, require, steps or (lambda: config.train.steps))]


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}): remove the cause and rerun the same command to resume.")


def _move_aside(path: Path, last_step: int) -> None:
    """Moves the lines behind the last one of a step up to `last_step` to a file of their own, also one that a crash cut short.
    A damaged line between others stays.
    """
    try:
        content = read_bytes(path, 16 * GIB) if path.exists() else b""
    except RefusedInput as error:
        raise ConfigError(f"{path} cannot be used ({error}): move it away.") from None
    kept = before_step(content, last_step + 1)
    if kept == len(content):
        return
    free = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(1))
    # Written before the original is cut: a kill in between leaves an extra copy, but loses no line.
    with next(aside for aside in free if not aside.exists()).open("xb") as file:
        file.write(content[kept:])
        file.flush()
        os.fsync(file.fileno())
    os.truncate(path, kept)


def _open_at_line(path: Path) -> IO[str]:
    """Opens a file to append lines, also if its last line has no end."""
    file = path.open("a+b")
    if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
        file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


ROUND_S = 1.0
"""Seconds between two looks at metrics.jsonl."""
RETRY_S = 30.0
"""Seconds until a tracker that failed is tried again."""


class Trackers:
    """All trackers of a run, as one sink. Arguments: as open_sinks'."""

    def __init__(self, config: Config, last_step: int, fence: Callable[[], None], steps: Callable[[], int]):
        folder = Path(config.run.dir)
        # Before lines are written over those that were moved aside, and for trackers too that this start does not use.
        for path in (folder / "trackers").glob("*.json"):
            Cursor(folder, path.stem, None, last_step, fence)
        self._threads = []
        for kind in kinds_of(config):
            cursor = Cursor(folder, kind.stem, kind.target(), last_step, fence)
            self._threads.append(Tracker(kind, cursor, steps))
        for thread in self._threads:
            thread.start()

    def write(self, record: Record) -> None:
        """Nothing: the line is in metrics.jsonl."""

    def close(self) -> None:
        """Lets each tracker send the rest, for at most PATIENCE_S."""
        until_s = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.closing.set()
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if not thread.complete:
                log.warning("%s lacks the last lines of %s: the next start sends them.", thread.name, thread.cursor.metrics)


class Tracker(threading.Thread):
    """The thread of one tracker.

    Args:
      steps: train.steps at the end, which a batch that has grown lowers.

    Attributes:
      complete: it has all lines of the run, which has ended.
    """

    def __init__(self, kind: Kind, cursor: Cursor, steps: Callable[[], int]):
        super().__init__(name=kind.name, daemon=True)
        self.kind, self.cursor, self.closing, self.complete = kind, cursor, threading.Event(), False
        self._steps, self._connected, self._warned = steps, False, False

    def run(self) -> None:
        while True:
            # Before the lines are read, so that the last round reads them all.
            closing = self.closing.is_set()
            pause_s = ROUND_S
            try:
                self._send_new()
                if closing:
                    self.complete = True
                    self.kind.close(ended=self.cursor.before(self._steps()) < self.cursor.sent)
            except Exception as error:
                pause_s = RETRY_S
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "%s takes no metrics (%s): training continues, and it is tried again with all lines of %s.",
                        *(self.name, reason_of(error), self.cursor.metrics),
                    )
            if closing:
                return
            self.closing.wait(pause_s)

    def _send_new(self) -> None:
        if not self._connected:
            try:
                self.cursor.id = self.cursor.id or self.kind.new_id()
                # That of the first line that it lacks, or of the next one to come.
                step = next((int(record["step"]) for record in self.cursor.read(1)[0]), self.cursor.last_step + 1)
                if (again := self.kind.sends_again) is not None:
                    self.cursor.sent = self.cursor.before(step if again == "step" else 0)
                self.kind.connect(self.cursor.id, step)
            finally:
                # Also where it fails: the next try continues the run that this one made.
                self.cursor.keep()
            self._connected = True
        while True:
            records, end = self.cursor.read(self.kind.batch_lines)
            if end == self.cursor.sent:
                return
            self.kind.send(records)
            self.cursor.sent = end
            self.cursor.keep()


class _Progress(NamedTuple):
    """A cursor's file."""

    target: str
    id: str | None
    sent: Whole


BEGINNING = _Progress("", None, 0)


class Cursor:
    """What of metrics.jsonl a tracker has, in run.dir/trackers/STEM.json. A damaged file is removed, with a warning. One that
    counts lines which metrics.jsonl has no more is corrected.

    Args:
      target: project, experiment or file. Another one than the kept one begins at the first line; None is the kept one.
      last_step: the one that this start continues after; metrics.jsonl ends there.
      fence: called before the file is written.

    Attributes:
      id: the tracker's own name of this run, to continue it; None where it needs none.
      sent: bytes of metrics.jsonl that it has.
    """

    def __init__(self, folder: Path, stem: str, target: str | None, last_step: int, fence: Callable[[], None]):
        self.metrics, self.last_step = folder / "metrics.jsonl", last_step
        self._path, self._fence = folder / "trackers" / f"{stem}.json", fence
        self._target, self.id, self.sent = self._kept() if self._path.exists() else BEGINNING
        if target not in (None, self._target):
            self._target, self.id, self.sent = target, None, 0
        if self.sent > (size := self._size()):
            self.sent = size
            self.keep()

    def _kept(self) -> _Progress:
        try:
            return checked(read_json(self._path, 2**16), _Progress)
        except RefusedInput:
            log.warning("%s is damaged: that tracker begins a new run and gets all lines.", self._path)
            self._path.unlink()
            return BEGINNING

    def keep(self) -> None:
        """Writes the file."""
        self._fence()
        self._path.parent.mkdir(exist_ok=True)
        replace_json(self._path, {"target": self._target, "id": self.id, "sent": self.sent})

    def read(self, most: int) -> tuple[list[Record], int]:
        """The records of up to `most` complete lines that it lacks, and the byte after them. What is null there is NaN."""
        # Removed or replaced during the run: the lines of the new file.
        start = self.sent if self.sent <= self._size() else 0
        try:
            with self.metrics.open("rb") as file:
                file.seek(start)
                lines = [line for line in itertools.islice(file, most) if line.endswith(b"\n")]
        except FileNotFoundError:
            return [], start
        parsed = [record for line in lines if (record := parse(line)) is not None]
        records = [{key: math.nan if x is None else x for key, x in one.items()} for one in parsed]
        return records, start + sum(map(len, lines))

    def before(self, step: int) -> int:
        """The byte up to `sent` at which the lines of `step` and later ones begin."""
        start = max(0, self.sent - 2**20)
        with suppress(FileNotFoundError), self.metrics.open("rb") as file:
            file.seek(start)
            content = file.read(self.sent - start)
            # The first line may be a part of one.
            part = (content.find(b"\n") + 1 or len(content)) if start else 0
            return start + part + before_step(content[part:], step)
        return self.sent

    def _size(self) -> int:
        try:
            return self.metrics.stat().st_size
        except FileNotFoundError:
            return 0
