"""Metrics sinks: metrics.jsonl always, trackers on request (trackers.py)."""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.config import Config, ConfigError
from jaxllm.data.loader import SampleStream
from jaxllm.json_lines import before_step
from jaxllm.run.tracker_kinds import Record, Sink
from jaxllm.run.trackers import Trackers
from jaxllm.untrusted import GIB, RefusedInput, read_bytes

log = logging.getLogger(__name__)


def data_keys(config: Config, stream: SampleStream, step: int) -> Record:
    """What a step read: batch and length where a schedule changes them, and the epochs of each of several sources."""
    phase, found = config.phase_at(step - 1), {}
    if config.train.batch_schedule or config.train.batch_grows_to:
        found["batch_sequences"] = phase.sequences
    if (length := config.length_of(phase)) is not None:
        found["sequence_length"] = length
    if len(stream.sources) > 1:
        epochs = stream.epochs(config.sequences_before(step))
        found |= {f"epochs/{name}": count for name, count in epochs.items()}
    return found


class JsonLines:
    """Writes one JSON object per line and flushes it. A resumed run appends to the lines up to `last_step`.

    Lines of later steps, which will run again, move to a file beside it: metrics-1.jsonl and so on. If the file disappears, the
    next line begins it again, with a warning.

    Args:
      require: called before anything is written; RunDirLock.require where the run holds the directory.
    """

    def __init__(self, path: Path, last_step: int, require: Callable[[], None] = unfenced):
        self._path, self._require = path, require
        try:
            self._require()
            _move_aside(path, last_step)
            self._file = _open_at_line(path)
        except OSError as error:
            raise _unwritable(path, error) from None

    def write(self, record: Record) -> None:
        # JSON has no NaN or infinity, so they become null.
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        try:
            self._require()
            if not self._is_there():
                log.warning("%s was removed or replaced during the run: its next lines go to a new file there.", self._path)
                self.close()
                self._file = _open_at_line(self._path)
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        # `write` has reported an error. Closing tries to flush again.
        with suppress(OSError):
            self._file.close()


def spike_line(config: Config, record: Mapping[str, float]) -> dict[str, float] | None:
    """Makes a line for run.dir/spikes.jsonl with the data to replay a step; None for a usual step. The step read the samples
    from first_sequence on, in the layout of Trainer.train_batch(step - 1).
    """
    if not (record.get("skipped") or record.get("loss_spike")):
        return None
    names = ("step", "skipped", "loss_spike", "loss", "grad_norm", "learning_rate")
    line = {name: record[name] for name in names if name in record}
    # By the record: the config may be of a time when the batch had not grown (run/batch_growth.py).
    sequences = int(record.get("batch_sequences", config.train.global_batch_sequences))
    first_sequence = int(record["tokens"]) // config.train.sequence_length - sequences
    return line | {"first_sequence": first_sequence, "sequences": sequences}


class Spikes:
    """Writes the steps that were skipped or are spikes, with their samples, to a file beside metrics.jsonl. The first such
    step creates it.
    """

    def __init__(self, path: Path, config: Config, last_step: int, require: Callable[[], None] = unfenced):
        self._open = partial(JsonLines, path, last_step, require)
        self._config, self._lines = config, None if not path.exists() else self._open()

    def write(self, record: Record) -> None:
        line = spike_line(self._config, record)
        if line is not None:
            self._lines = self._lines or self._open()
            self._lines.write(line)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def open_sinks(
    config: Config, last_step: int, require: Callable[[], None] = unfenced, steps: Callable[[], int] | None = None
) -> list[Sink]:
    """Opens the sinks of a config, for a run that continues after `last_step`. The run directory must exist. `require` is
    called before each write that the next start reads, and `steps` at the end, where a batch that has grown has left less of
    train.steps.
    """
    folder = Path(config.run.dir)
    files = [
        JsonLines(folder / "metrics.jsonl", last_step, require),
        Spikes(folder / "spikes.jsonl", config, last_step, require),
    ]
    # Behind them, because trackers read what metrics.jsonl holds.
    return [*files, Trackers(config, last_step, require, steps)]


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
