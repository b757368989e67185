"""Where the numbers go: metrics.jsonl always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Protocol

from jaxllm.config import Config, ConfigError

Record = dict[str, float | int]


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One object per line, flushed, appended to what an earlier start of the run wrote."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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


def open_sinks(config: Config) -> list[Sink]:
    """The sinks a config asks for; the run directory must exist. Raises ConfigError where a package is missing."""
    folder = Path(config.run.dir)
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if config.log.wandb_project:
        sinks.append(WeightsAndBiases(config.log.wandb_project, config))
    return sinks


def _require(module: str, key: str, extra: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{key} needs the package {module}: install it with pip install 'jaxllm[{extra}]'.") from None
