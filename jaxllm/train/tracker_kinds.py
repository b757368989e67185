"""The kinds of tracker: TensorBoard, Weights & Biases, MLflow, gauges for Prometheus, and sinks of the user's own.

Each class connects when it is made, takes lines of metrics.jsonl and is closed. Any call may raise. trackers.py calls each in a
thread of its own.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from jaxllm.config import Config, ConfigError
from jaxllm.config.checks import without_passwords

Record = dict[str, float | int]
"""One line of metrics.jsonl: its step, and numbers by name."""

log = logging.getLogger(__name__)


class Sink(Protocol):
    """What takes a run's lines: a file, or a class of the user's own that log.sinks names."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Kind(Protocol):
    def send(self, records: Sequence[Record]) -> None: ...

    def close(self, ended: bool, report: Callable[[], str | None]) -> None:
        """`ended`: the run has done its last step. `report` makes the page of `jaxllm report`, or None if it cannot."""


class TensorBoard:
    """Writes event files. Steps from `purge_step` on, which an earlier start wrote, are dropped by TensorBoard's reader."""

    def __init__(self, folder: Path, config: Config, purge_step: int):
        writer = require("tensorboardX", "log.tensorboard=true", "tensorboard")
        # The name of a file ends in the second of its start: two starts in one second would share it.
        suffix = f".{time.time_ns()}"
        self._writer = writer.SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=suffix)
        self._writer.add_text("config", f"```yaml\n{recipe(config)}```", purge_step)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            for name, value in metrics_of(record):
                self._writer.add_scalar(name, value, record["step"], record.get("unix_s"))
        self._writer.flush()

    def close(self, ended: bool, report: Callable[[], str | None]) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run for all starts. A row has the key `step`, which is the x-axis of all charts.

    W&B drops a row whose own step is smaller than the last one's (github.com/wandb/wandb/issues/4482), so a step that is done
    again is a second row with the same `step`.
    """

    def __init__(self, config: Config, run_id: str, wait_s: float):
        wandb, run_dir = importlib.import_module("wandb"), Path(config.run.dir)
        # create_new: a run that a notebook has open is another one. Without finish_timeout, finish() waits for the network
        # for ever. A process ends only when init() has, which waits for 90 seconds by default.
        self._run = wandb.init(
            project=config.log.wandb_project,
            entity=config.log.wandb_entity,
            group=config.log.wandb_group,
            tags=list(config.log.wandb_tags) or None,
            name=run_dir.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            settings=wandb.Settings(reinit="create_new", init_timeout=wait_s, finish_timeout=wait_s),
        )
        self._run.config.update(config.model_dump(mode="json"), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log(dict(record))

    def close(self, ended: bool, report: Callable[[], str | None]) -> None:
        if (page := report()) is not None:
            path = Path(self._run.dir) / "report.html"
            path.write_text(page, encoding="utf-8")
            self._run.save(str(path), base_path=self._run.dir, policy="now")
        self._run.finish(exit_code=0 if ended else 1)


class MLflow:
    """One MLflow run for all starts. MLflow overwrites no value: a step that is done again has a second one with a later time.

    The client, not mlflow.start_run(), because that adds the command line and prints the server's address, with its password.
    """

    METRICS, PARAMS = 1000, 100
    """Most of a request (docs.databricks.com/api/experiments/v1/log-batch)."""
    VALUE = 6000
    """Most characters of a parameter, there and in mlflow/utils/validation.py. One that is longer would refuse all."""

    def __init__(self, config: Config, run_id: str):
        mlflow, self._entities = importlib.import_module("mlflow"), importlib.import_module("mlflow.entities")
        self._client, self._unix_s, self._id = mlflow.MlflowClient(), time.time(), run_id
        self._client.update_run(run_id, status="RUNNING")
        # Parameters are final: what a restart changes is in config.yaml alone.
        known = self._client.get_run(run_id).data.params
        flat = ((key, value) for key, value in _flat(config.model_dump(mode="json")) if key not in known)
        params = [self._entities.Param(key, str(value)[: self.VALUE]) for key, value in flat]
        for some in _parts(params, self.PARAMS):
            self._client.log_batch(run_id, params=some)
        self._store("config.yaml", recipe(config))

    @staticmethod
    def new_run(config: Config) -> str:
        """Makes a run in the experiment, which is made too if there is none, and returns its id."""
        client, name = importlib.import_module("mlflow").MlflowClient(), config.log.mlflow_experiment
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        return client.create_run(experiment, run_name=Path(config.run.dir).resolve().name).info.run_id

    def send(self, records: Sequence[Record]) -> None:
        metrics = []
        for record in records:
            # The line of an evaluation follows that of its step.
            self._unix_s = record.get("unix_s", self._unix_s)
            for name, value in metrics_of(record):
                key = re.sub(r"[^\w\-. /:]", "_", name)
                metrics.append(self._entities.Metric(key, value, int(self._unix_s * 1000), record["step"]))
        for some in _parts(metrics, self.METRICS):
            self._client.log_batch(self._id, metrics=some, synchronous=True)

    def close(self, ended: bool, report: Callable[[], str | None]) -> None:
        if (page := report()) is not None:
            self._store("report.html", page)
        status = "FINISHED" if ended else "KILLED"
        if without_passwords(self._client.tracking_uri) == self._client.tracking_uri:
            self._client.set_terminated(self._id, status=status)
        else:
            # set_terminated prints the address with the password.
            self._client.update_run(self._id, status=status)

    def _store(self, name: str, text: str) -> None:
        """Stores a file with the run. It may need a store and keys of its own, without which metrics are sent all the same."""
        try:
            self._client.log_text(self._id, text, name)
        except Exception as error:
            log.warning("MLflow does not store %s (%s): metrics are sent all the same.", name, reason_of(error))


class Gauges:
    """Writes the newest value of each metric to a file for the textfile collector of Prometheus's node exporter, atomically
    (github.com/prometheus/node_exporter, Textfile Collector): jaxllm_loss{run="/path/of/run.dir"} 2.5.

    The part of a name after a slash, such as the source of eval_loss/wiki, is the label `part`. So the number of series is that
    of the keys of metrics.jsonl, whatever the length of a run.
    """

    def __init__(self, config: Config):
        self._path, self._run = Path(str(config.log.prometheus_file)), str(Path(config.run.dir).resolve())
        self._newest: dict[str, float | int] = {}

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._newest |= record
        gauges: dict[str, list[str]] = {}
        for name, value in self._newest.items():
            metric, _, part = name.partition("/")
            labels = {"run": self._run} | ({"part": part} if part else {})
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            known = re.sub(r"\W", "_", f"jaxllm_{metric}", flags=re.ASCII)
            gauges.setdefault(known, []).append(f"{known}{{{shown}}} {_number(value)}")
        lines = []
        for metric, series in gauges.items():
            # The same help in all files of a host: the collector refuses two texts for one name.
            lines += [f"# HELP {metric} Newest value in metrics.jsonl.", f"# TYPE {metric} gauge", *series]
        # A name that does not end in .prom is not read.
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        aside.replace(self._path)

    def close(self, ended: bool, report: Callable[[], str | None]) -> None:
        pass


class Own:
    """A sink of the user's own: a class that is made with the config."""

    def __init__(self, name: str, config: Config):
        self._sink: Sink = own_class(name)(config)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._sink.write(record)

    def close(self, ended: bool, report: Callable[[], str | None]) -> None:
        self._sink.close()


def own_class(name: str) -> Callable[[Config], Sink]:
    """The class of log.sinks that module:Class names. ConfigError if it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"log.sinks={name} cannot be imported ({reason_of(error)}): put its module on PYTHONPATH, or correct the name."
        ) from None


def require(module: str, key: str, extra: str) -> Any:
    """Imports an optional package that a key of the config needs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{key} needs the package {module}: install it with pip install 'jaxllm[{extra}]'.") from None


def reason_of(error: BaseException) -> str:
    """The first line of an error, without passwords in URLs and not too long for a sentence."""
    text = str(error).strip() or type(error).__name__
    return without_passwords(text).splitlines()[0].rstrip(".")[:200]


def recipe(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def metrics_of(record: Record) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in record.items() if name != "step")


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """A number as Prometheus's text format has it, which spells infinity +Inf."""
    return str(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
