"""The kinds of tracker: TensorBoard, Weights & Biases, MLflow, Trackio, gauges for Prometheus, and sinks of the user's own."""

import importlib
import json
import logging
import math
import os
import re
import secrets
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from jaxllm.config import Config, ConfigError
from jaxllm.run import advisor
from jaxllm.untrusted import one_line, without_passwords

PATIENCE_S = 60.0
"""Seconds that the end of a run waits for all trackers together."""

Record = dict[str, float | int]
"""One line of metrics.jsonl: its step, and numbers by name."""

log = logging.getLogger(__name__)


class Sink(Protocol):
    """What takes a run's lines: a file, or a class of the user's own that log.sinks names."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Kind:
    """What a tracker does in a way of its own. Any call may raise; all but `check` and `target` are made by its thread.

    Attributes:
      name: for messages.
      stem: name of its file in run.dir/trackers.
      package: (module, key of the config that needs it, extra of jaxllm).
      batch_lines: lines that it takes at once.
      sends_again: what a start sends again: all lines of the step that has some left to send, or the last ones of the file.
    """

    name: str
    stem: str
    package: tuple[str, str, str]
    batch_lines = 500
    sends_again: Literal["step", "lines"] | None = None

    def __init__(self, config: Config):
        self.config, self.folder = config, Path(config.run.dir).resolve()

    def check(self) -> None:
        """Raises ConfigError if it cannot work here."""
        self.library()

    def library(self) -> Any:
        """Its package."""
        module, key, extra = self.package
        try:
            return importlib.import_module(module)
        except ImportError:
            raise ConfigError(f"{key} needs the package {module}: install it with pip install 'jaxllm[{extra}]'.") from None

    def target(self) -> str:
        """Its project, experiment or file. Another one gets the whole run."""
        return ""

    def new_id(self) -> str | None:
        """The tracker's name of a new run, which it may make; None where it needs none."""
        return None

    def connect(self, run_id: Any, step: int) -> None:
        """Continues the run of that name with the lines of `step`. Called again after it raised."""

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self.write(record)

    def write(self, record: Record) -> None:
        """Sends one line, where `send` does not take all at once."""

    def close(self, ended: bool) -> None:
        """`ended`: the run has done its last step."""

    def recipe(self) -> str:
        return yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)

    def page(self) -> str | None:
        """That of `jaxllm report`; None if it cannot be made."""
        report = advisor.answers
        return None if report is None else report.report_page(self.config.run.dir)


PREFIXED = re.compile(r"^(eval|gpu|memory|predicted|programs|start)_")
THROUGHPUT = re.compile(r"(unix|data|compile|evaluate|save|step)_s|tokens_per_s_per_device|tflops_per_gpu|mfu")


def grouped(record: Record) -> Record:
    """A line without its step, by names whose part before the first slash is the chart's group: train/loss, eval/loss/wiki,
    memory/peak_bytes, throughput/mfu. What has a slash already, such as layer_grad_norm/0, keeps its name."""
    found = Record()
    for name, value in record.items():
        if "/" not in (named := PREFIXED.sub(r"\1/", name)):
            named = f"{'throughput' if THROUGHPUT.fullmatch(name) else 'train'}/{name}"
        found[named] = value
    found.pop("train/step", None)
    return found


class TensorBoard(Kind):
    """Writes event files. Steps from purge_step on, which an earlier start wrote, are dropped by TensorBoard's reader."""

    name, stem = "TensorBoard", "tensorboard"
    package = ("tensorboardX", "log.tensorboard=true", "tensorboard")

    # The reader drops whole steps.
    sends_again = "step"

    def connect(self, run_id: Any, step: int) -> None:
        # The name of a file ends in the second of its start: two starts in one second would share it.
        suffix = f".{time.time_ns()}"
        self._writer = self.library().SummaryWriter(str(self.folder / "tensorboard"), purge_step=step, filename_suffix=suffix)
        # Markdown shows what is indented as it is, whatever it holds.
        self._writer.add_text("config", textwrap.indent(self.recipe(), "    "), step)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            for name, value in grouped(record).items():
                self._writer.add_scalar(name, value, record["step"], record.get("unix_s"))
        self._writer.flush()

    def close(self, ended: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Kind):
    """One W&B run for all starts. A row has the key `step`, which is the x-axis of all charts.

    W&B drops a row whose own step is smaller than the last one's (github.com/wandb/wandb/issues/4482), so a step that is done
    again is a second row with the same `step`.
    """

    name, stem = "W&B", "wandb"
    package = ("wandb", "log.wandb_project", "wandb")

    def check(self) -> None:
        wandb = self.library()
        with_server = wandb.setup().settings.mode not in ("offline", "dryrun", "disabled")
        if with_server and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "log.wandb_project needs a key: run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline to upload later."
            )

    def target(self) -> str:
        return f"{self.config.log.wandb_entity or ''}/{self.config.log.wandb_project}"

    def new_id(self) -> str:
        return secrets.token_hex(4)

    def connect(self, run_id: Any, step: int) -> None:
        wandb, wanted = self.library(), self.config.log
        # create_new: a run that a notebook has open is another one. Without finish_timeout, finish() waits for the network
        # for ever. A process ends only when init() has, which waits for 90 seconds by default.
        wait_s = PATIENCE_S / 2
        self._run = wandb.init(
            project=wanted.wandb_project,
            entity=wanted.wandb_entity,
            group=wanted.wandb_group,
            tags=list(wanted.wandb_tags) or None,
            name=one_line(self.folder.name),
            id=run_id,
            resume="allow",
            dir=self.config.run.dir,
            settings=wandb.Settings(reinit="create_new", init_timeout=wait_s, finish_timeout=wait_s),
        )
        self._run.config.update(self.config.model_dump(mode="json"), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log({"step": record["step"], **grouped(record)})

    def close(self, ended: bool) -> None:
        if (page := self.page()) is not None:
            path = Path(self._run.dir) / "report.html"
            path.write_text(page, encoding="utf-8")
            self._run.save(str(path), base_path=self._run.dir, policy="now")
        self._run.finish(exit_code=0 if ended else 1)


class MLflow(Kind):
    """One MLflow run for all starts. MLflow overwrites no value: a step that is done again has a second one with a later time.

    The client, not mlflow.start_run(), because that adds the command line and prints the server's address, with its password.
    """

    name, stem = "MLflow", "mlflow"
    package = ("mlflow", "log.mlflow_experiment", "mlflow")
    METRICS, PARAMS = 1000, 100
    """Most of a request (docs.databricks.com/api/experiments/v1/log-batch)."""
    VALUE = 6000
    """Most characters of a parameter, there and in mlflow/utils/validation.py. One that is longer would refuse all."""

    def target(self) -> str:
        return f"{without_passwords(self.library().get_tracking_uri())} {self.config.log.mlflow_experiment}"

    def new_id(self) -> str:
        """That of a new run in the experiment, which is made too if there is none."""
        client, name = self.library().MlflowClient(), self.config.log.mlflow_experiment
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        return client.create_run(experiment, run_name=one_line(self.folder.name)).info.run_id

    def connect(self, run_id: Any, step: int) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._client, self._unix_s, self._id = self.library().MlflowClient(), time.time(), run_id
        self._client.update_run(self._id, status="RUNNING")
        # Parameters are final: what a restart changes is in config.yaml alone.
        known = self._client.get_run(self._id).data.params
        flat = ((key, value) for key, value in _flat(self.config.model_dump(mode="json")) if key not in known)
        params = [self._entities.Param(key, str(value)[: self.VALUE]) for key, value in flat]
        for some in _parts(params, self.PARAMS):
            self._client.log_batch(self._id, params=some)
        self._store("config.yaml", self.recipe())

    def send(self, records: Sequence[Record]) -> None:
        metrics = []
        for record in records:
            # The line of an evaluation follows that of its step.
            self._unix_s = record.get("unix_s", self._unix_s)
            for name, value in grouped(record).items():
                key = re.sub(r"[^\w\-. /:]", "_", name)
                metrics.append(self._entities.Metric(key, value, int(self._unix_s * 1000), record["step"]))
        for some in _parts(metrics, self.METRICS):
            self._client.log_batch(self._id, metrics=some, synchronous=True)

    def close(self, ended: bool) -> None:
        if (page := self.page()) is not None:
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


class Trackio(Kind):
    """One Trackio run for all starts. Trackio overwrites no row: a step that is done again is a second row of that step."""

    name, stem = "Trackio", "trackio"
    package = ("trackio", "log.trackio_project", "trackio")

    def target(self) -> str:
        return str(self.config.log.trackio_project)

    def new_id(self) -> str:
        # Trackio knows a run by its name alone, and two folders may have one name.
        return f"{one_line(self.folder.name)}-{secrets.token_hex(2)}"

    def connect(self, run_id: Any, step: int) -> None:
        # metrics.jsonl has what its monitors of GPU and CPU would add, and a notebook its own display.
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        recipe = self.config.model_dump(mode="json")
        self._run = self.library().init(self.target(), run_id, config=recipe, resume="allow", **quiet)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log(grouped(record), step=record["step"])
        # `log` queues, and Trackio's thread writes twice a second. Lines that are lost with it must not count as sent.
        time.sleep(2)

    def close(self, ended: bool) -> None:
        self._run.finish()


class Gauges(Kind):
    """Writes the newest value of each metric to a file for the textfile collector of Prometheus's node exporter, atomically
    (github.com/prometheus/node_exporter, Textfile Collector): jaxllm_loss{run="/path/of/run.dir"} 2.5. What follows a slash in
    a name, as in eval_loss/wiki, is the label `part`.
    """

    name, stem = "log.prometheus_file", "prometheus"
    # A start's first lines lack values such as that of the last evaluation.
    sends_again = "lines"

    def __init__(self, config: Config):
        super().__init__(config)
        self._path, self._newest = Path(str(config.log.prometheus_file)), Record()

    def check(self) -> None:
        if not os.access(folder := self._path.parent, os.W_OK):
            raise ConfigError(f"log.prometheus_file={self._path} cannot be written: create {folder} with write access.")

    def target(self) -> str:
        return str(self.config.log.prometheus_file)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._newest |= record
        found: dict[str, list[str]] = {}
        for name, value in self._newest.items():
            metric, _, part = name.partition("/")
            labels = {"run": str(self.folder)} | ({"part": part} if part else {})
            shown = ",".join(f"{key}={json.dumps(one_line(text), ensure_ascii=False)}" for key, text in labels.items())
            known = re.sub(r"\W", "_", f"jaxllm_{metric}", flags=re.ASCII)
            # The same help in all files of a host: the collector refuses two texts for one name.
            help_lines = [f"# HELP {known} Newest value in metrics.jsonl.", f"# TYPE {known} gauge"]
            found.setdefault(known, help_lines).append(f"{known}{{{shown}}} {_number(value)}")
        # A name that does not end in .prom is not read.
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        aside.write_text("".join(f"{line}\n" for lines in found.values() for line in lines), encoding="utf-8")
        aside.replace(self._path)


class Own(Kind):
    """A sink of the user's own: a class that is made with the config."""

    # So that after an error no line comes twice.
    batch_lines = 1

    def __init__(self, config: Config, sink: str):
        super().__init__(config)
        self.name, self.stem, self._named = f"log.sinks={sink}", sink.replace(":", "."), sink

    def library(self) -> Callable[[Config], Sink]:
        name = self._named
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise ConfigError(
                f"log.sinks={name} cannot be imported ({reason_of(error)}): put its module on PYTHONPATH, or correct the name."
            ) from None

    def connect(self, run_id: Any, step: int) -> None:
        self._sink = self.library()(self.config)

    def write(self, record: Record) -> None:
        self._sink.write(record)

    def close(self, ended: bool) -> None:
        self._sink.close()


def reason_of(error: BaseException) -> str:
    """The first line of an error, without passwords in URLs and not too long for a sentence."""
    text = str(error).strip() or type(error).__name__
    return one_line(without_passwords(text).splitlines()[0].rstrip(".")[:200])


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def _number(value: float) -> str:
    """A number as Prometheus's text format has it, which spells infinity +Inf."""
    return str(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def kinds_of(config: Config) -> list[Kind]:
    """Those that the config wants, not yet connected."""
    wanted = config.log
    named = {
        TensorBoard: wanted.tensorboard,
        WeightsAndBiases: wanted.wandb_project,
        MLflow: wanted.mlflow_experiment,
        Trackio: wanted.trackio_project,
        Gauges: wanted.prometheus_file,
    }
    # Each sink once, because its file of progress has its name.
    return [*(kind(config) for kind, value in named.items() if value), *(Own(config, x) for x in dict.fromkeys(wanted.sinks))]
