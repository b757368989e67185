"""Trackers get the lines of metrics.jsonl, which stay the truth: TensorBoard, W&B, MLflow, Prometheus, own sinks.

Each tracker has a thread of its own that reads the file, and keeps the byte up to which it has sent in run.dir/trackers. So
training never waits for a tracker. One that was away, or that the config names later, gets every line that it lacks, also from
a later start. A run that was killed continues the same W&B or MLflow run. A line may be sent twice, and none is left out.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.config import Config, ConfigError
from jaxllm.config.checks import without_passwords
from jaxllm.json_lines import parse
from jaxllm.train.tracker_kinds import (
    Gauges,
    Kind,
    MLflow,
    Own,
    Record,
    TensorBoard,
    WeightsAndBiases,
    own_class,
    reason_of,
    require,
)
from jaxllm.untrusted import RefusedInput, parse_json, read_bytes

ROUND_S = 1.0
"""Seconds between two looks at metrics.jsonl."""
RETRY_S = 30.0
"""Seconds until a tracker that failed is tried again."""
PATIENCE_S = 60.0
"""Seconds that the end of a run waits for all trackers together."""
BATCH_LINES = 500

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """What run.dir/trackers/NAME.json holds."""

    target: str
    """Project, experiment or file. Another one begins at the first line."""
    id: str | None = None
    """The tracker's own name of this run, to continue it; None where it needs none."""
    sent: int = 0
    """Bytes of metrics.jsonl that the tracker has."""


class Trackers:
    """All trackers of a run, as one sink."""

    def __init__(self, trackers: list[Tracker]):
        self._trackers = trackers
        for tracker in trackers:
            tracker.start()

    def write(self, record: Record) -> None:
        """Nothing: the line is in metrics.jsonl."""

    def close(self) -> None:
        """Lets each tracker send the rest, for at most PATIENCE_S."""
        until_s = time.monotonic() + PATIENCE_S
        for tracker in self._trackers:
            tracker.closing.set()
        for tracker in self._trackers:
            tracker.join(max(0.0, until_s - time.monotonic()))
            if not tracker.complete:
                log.warning("%s lacks the last lines of %s: the next start sends them.", tracker.name, tracker.metrics)


class Tracker(threading.Thread):
    """The thread of one tracker.

    Args:
      name: for messages.
      stem: name of its file in run.dir/trackers.
      target: see Progress.
      connect: makes it, and its run if progress.id is None; may change how far it is.
      fence: called before that file is written.
      last_step: train.steps, which a batch that has grown lowers.
      batch_lines: lines that it takes at once.

    Attributes:
      complete: it has all lines of the run, which has ended.
    """

    def __init__(
        self,
        name: str,
        stem: str,
        target: str,
        connect: Callable[[Progress], Kind],
        config: Config,
        fence: Callable[[], None],
        last_step: Callable[[], int],
        batch_lines: int = BATCH_LINES,
    ):
        super().__init__(name=name, daemon=True)
        folder = Path(config.run.dir)
        self.metrics, self.closing, self.complete = folder / "metrics.jsonl", threading.Event(), False
        self._path = folder / "trackers" / f"{stem}.json"
        self._connect, self._config, self._fence, self._batch_lines = connect, config, fence, batch_lines
        self._last_step = last_step
        self._progress, self._kind, self._warned = Progress(target), None, False
        if (kept := read_progress(self._path)) is not None and kept.target == target:
            self._progress = kept

    def run(self) -> None:
        while True:
            # Before the lines are read, so that the last round reads them all.
            closing = self.closing.is_set()
            pause_s = ROUND_S
            try:
                kind = self._send_new()
                if closing:
                    self.complete = True
                    sent = self._progress.sent
                    kind.close(rewound(self.metrics, sent, self._last_step()) < sent, self._report)
            except Exception as error:
                pause_s = RETRY_S
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "%s takes no metrics (%s): training continues, and it is tried again with all lines of %s.",
                        *(self.name, reason_of(error), self.metrics),
                    )
            if closing:
                return
            self.closing.wait(pause_s)

    def _send_new(self) -> Kind:
        if self._kind is None:
            try:
                self._kind = self._connect(self._progress)
            finally:
                # Also where it fails: the next try continues the run that this one made.
                self._keep()
        while True:
            records, end = read_from(self.metrics, self._progress.sent, self._batch_lines)
            if end == self._progress.sent:
                return self._kind
            self._kind.send(records)
            self._progress.sent = end
            self._keep()

    def _keep(self) -> None:
        self._fence()
        write_progress(self._path, self._progress)

    def _report(self) -> str | None:
        # The page needs the cost model and the planner, which nothing else here does.
        from jaxllm.run_report.page import page
        from jaxllm.run_report.summary import report_on

        try:
            return page(report_on(self._config.run.dir))
        except ConfigError:
            return None


def check(config: Config) -> None:
    """Refuses trackers that cannot work on this host, which may become that of process 0. It uses no device.

    Raises:
      ConfigError: a package is missing, W&B has no key, the folder of log.prometheus_file cannot be written, or one of
        log.sinks cannot be imported.
    """
    wanted = config.log
    if wanted.tensorboard:
        require("tensorboardX", "log.tensorboard=true", "tensorboard")
    if wanted.wandb_project:
        wandb = require("wandb", "log.wandb_project", "wandb")
        with_server = wandb.setup().settings.mode not in ("offline", "dryrun", "disabled")
        if with_server and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "log.wandb_project needs a key: run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline to upload later."
            )
    if wanted.mlflow_experiment:
        require("mlflow", "log.mlflow_experiment", "mlflow")
    if wanted.prometheus_file and not os.access(folder := Path(wanted.prometheus_file).parent, os.W_OK):
        raise ConfigError(f"log.prometheus_file={wanted.prometheus_file} cannot be written: create {folder} with write access.")
    for name in wanted.sinks:
        own_class(name)


def trackers_of(
    config: Config, last_step: int, fence: Callable[[], None] = unfenced, steps: Callable[[], int] | None = None
) -> list[Tracker]:
    """The trackers of a run that continues after `last_step`. Its metrics.jsonl ends there. `steps` is train.steps, as it is at
    the end."""
    wanted, folder = config.log, Path(config.run.dir)
    found: list[Tracker] = []
    # Before lines are written over those that were moved aside, and for trackers too that this start does not use.
    for path in (folder / "trackers").glob("*.json"):
        if (kept := read_progress(path)) is not None and kept.sent > (size := size_of(folder / "metrics.jsonl")):
            fence()
            write_progress(path, replace(kept, sent=size))

    def add(name: str, stem: str, target: str, connect: Callable[[Progress], Kind], batch_lines: int = BATCH_LINES) -> None:
        last = steps or (lambda: config.train.steps)
        found.append(Tracker(name, stem, target, connect, config, fence, last, batch_lines))

    def tensorboard(progress: Progress) -> Kind:
        records, _ = read_from(folder / "metrics.jsonl", progress.sent, 1)
        step = int(records[0]["step"]) if records else last_step + 1
        # The reader drops whole steps, so the step whose lines were sent in part is sent again.
        progress.sent = rewound(folder / "metrics.jsonl", progress.sent, step)
        return TensorBoard(folder / "tensorboard", config, step)

    def gauges(progress: Progress) -> Kind:
        # The last lines again: a start's first lines lack values such as that of the last evaluation.
        progress.sent = rewound(folder / "metrics.jsonl", progress.sent, 0)
        return Gauges(config)

    def wandb(progress: Progress) -> Kind:
        progress.id = progress.id or secrets.token_hex(4)
        return WeightsAndBiases(config, progress.id, PATIENCE_S / 2)

    def mlflow(progress: Progress) -> Kind:
        progress.id = progress.id or MLflow.new_run(config)
        return MLflow(config, progress.id)

    if wanted.tensorboard:
        add("TensorBoard", "tensorboard", "", tensorboard)
    if wanted.wandb_project:
        target = f"{wanted.wandb_entity or ''}/{wanted.wandb_project}"
        add("W&B", "wandb", target, wandb)
    if wanted.mlflow_experiment:
        address = without_passwords(require("mlflow", "log.mlflow_experiment", "mlflow").get_tracking_uri())
        add("MLflow", "mlflow", f"{address} {wanted.mlflow_experiment}", mlflow)
    if wanted.prometheus_file:
        add("log.prometheus_file", "prometheus", wanted.prometheus_file, gauges)
    # Each once, because its file of progress has its name.
    for name in dict.fromkeys(wanted.sinks):
        # One line at a time, so that after an error no line comes twice.
        add(f"log.sinks={name}", name.replace(":", "."), "", lambda _, name=name: Own(name, config), batch_lines=1)
    return found


def read_progress(path: Path) -> Progress | None:
    """How far a tracker got. None: there is no such file. One that is damaged is removed, with a warning."""
    try:
        found = parse_json(read_bytes(path, 2**16)) if path.exists() else None
        if found is None:
            return None
        progress = Progress(found["target"], found["id"], found["sent"])
        types = isinstance(progress.target, str), isinstance(progress.id, str | None), isinstance(progress.sent, int)
        if all(types) and progress.sent >= 0:
            return progress
    except (RefusedInput, KeyError, TypeError):
        pass
    log.warning("%s is damaged: that tracker begins a new run and gets all lines.", path)
    path.unlink()
    return None


def write_progress(path: Path, progress: Progress) -> None:
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(".new")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(asdict(progress), file)
        file.flush()
        # Else a host that loses its power may leave an empty file, and the run would begin again there.
        os.fsync(file.fileno())
    aside.replace(path)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def read_from(path: Path, start: int, most: int) -> tuple[list[Record], int]:
    """The records of up to `most` complete lines from byte `start` on, and the byte after them. What is null there is NaN."""
    # Removed or replaced during the run: the lines of the new file.
    start = start if start <= size_of(path) else 0
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = [line for line in itertools.islice(file, most) if line.endswith(b"\n")]
    except FileNotFoundError:
        return [], start
    records = [record for line in lines if (record := parse(line)) is not None]
    return [_numbers(record) for record in records], start + sum(map(len, lines))


def rewound(path: Path, end: int, step: int) -> int:
    """The byte before `end` at which the lines of `step` and later ones begin."""
    start = max(0, end - 2**20)
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(start)
        # The first line may be a part of one.
        for line in reversed(file.read(end - start).splitlines(keepends=True)[1 if start else 0 :]):
            if (record := parse(line)) is not None and record["step"] < step:
                break
            end -= len(line)
    return end


def _numbers(record: dict[str, Any]) -> Record:
    known = {name: math.nan if value is None else value for name, value in record.items()}
    return {name: value for name, value in known.items() if isinstance(value, int | float)}
