"""Metrics sinks: metrics.jsonl always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.config import Config, ConfigError
from jaxllm.train.json_lines import parse
from jaxllm.train.step_watch import spike_line
from jaxllm.untrusted import GIB, RefusedInput, read_bytes

Record = dict[str, float | int]

log = logging.getLogger(__name__)


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


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


class TensorBoard:
    def __init__(self, folder: Path):
        writer = _require("tensorboardX", "log.tensorboard=true", "tensorboard")
        self._writer = writer.SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, config: Config):
        wandb = _require("wandb", "log.wandb_project", "wandb")
        self._run = wandb.init(project=project, config=config.model_dump(), dir=config.run.dir, name=Path(config.run.dir).name)

    def write(self, record: Record) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def open_sinks(config: Config, last_step: int, require: Callable[[], None] = unfenced) -> list[Sink]:
    """Opens the sinks of a config, for a run that continues after `last_step`. The run directory must exist. `require` is
    called before its metrics.jsonl is written.

    Raises:
      ConfigError: a package is missing.
    """
    folder = Path(config.run.dir)
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if config.log.wandb_project:
        sinks.append(WeightsAndBiases(config.log.wandb_project, config))
    # Opened last, so that a missing package changes no file.
    sinks.append(JsonLines(folder / "metrics.jsonl", last_step, require))
    return [*sinks, Spikes(folder / "spikes.jsonl", config, last_step, require)]


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
    kept = len(content)
    for line in reversed(content.splitlines(keepends=True)):
        if (record := parse(line)) is not None and record["step"] <= last_step:
            break
        kept -= len(line)
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


def _require(module: str, key: str, extra: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{key} needs the package {module}: install it with pip install 'jaxllm[{extra}]'.") from None
