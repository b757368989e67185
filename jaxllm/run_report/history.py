"""What a run directory tells of its run: metrics.jsonl and config.yaml, read again. No JAX and no other file, so that a run can
be looked at on any machine.

    history = read_run("runs/quickstart")
    history.column("loss"), history.smoothed_loss, history.times_s

metrics-1.jsonl and so on, which a start leaves behind that does steps again, tell what was lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxllm.config import AUTO, Config, ConfigError, load_config
from jaxllm.config.errors import why_not_yaml

SMOOTH_SHARE = 0.02
"""Of the run's steps, the window of the smoothed loss."""
FEWEST_SMOOTHED = 5
TRAINING, DATA, EVALUATING, SAVING, COMPILING, STARTING, REDONE, DOWN = PARTS = (
    *("training", "waiting for data", "evaluating", "saving", "compiling", "starting", "steps done again", "between starts"),
)
_PHASES = {"data_s": DATA, "evaluate_s": EVALUATING, "save_s": SAVING, "compile_s": COMPILING}
"""Key of a line -> what it is seconds of."""


@dataclass(frozen=True)
class History:
    folder: Path
    config: Config
    """As it ran last, without its data's paths and its log."""
    lines: tuple[Mapping[str, Any], ...]
    """Of steps, ascending, each step once."""
    evaluations: tuple[Mapping[str, Any], ...]
    lost: tuple[Mapping[str, Any], ...]
    """Lines of steps that were done again after a restart."""

    def column(self, key: str) -> np.ndarray:
        """One float for each line; not-a-number where it has none."""
        return np.array([_float(line.get(key)) for line in self.lines])

    @cached_property
    def steps(self) -> np.ndarray:
        return self.column("step")

    @cached_property
    def tokens(self) -> np.ndarray:
        """Consumed by the end of each step."""
        return self.column("tokens")

    @cached_property
    def batch_tokens(self) -> np.ndarray:
        """Of each step."""
        return np.diff(self.tokens, prepend=0.0) / np.diff(self.steps, prepend=0.0)

    @cached_property
    def smoothed_loss(self) -> np.ndarray:
        """The mean of the last SMOOTH_SHARE of the run's steps, or of those there are; steps without a finite loss left out."""
        loss = self.column("loss")
        window = max(FEWEST_SMOOTHED, math.ceil(SMOOTH_SHARE * len(loss)))
        finite = np.isfinite(loss)
        sums, counts = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(finite, loss, 0.0), finite))
        first = np.maximum(np.arange(len(loss)) + 1 - window, 0)
        sums, counts = (x[1:] - x[first] for x in (sums, counts))
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    @property
    def devices(self) -> int:
        """Of the last start that told, else of the config's mesh."""
        told = self.last("devices")
        return self.config.devices if told is None else int(told)

    @property
    def saves(self) -> list[int]:
        """Steps after which training waited for a save; the one at the end is no line's."""
        return [int(line["step"]) - 1 for line in self.lines if line.get("save_s")]

    @property
    def restarts(self) -> list[int]:
        """Steps after which a later start went on."""
        return [int(line["step"]) - 1 for line in self.lines[1:] if "start_unix_s" in line]

    def last(self, key: str) -> float | None:
        """The last finite value of a key."""
        return next((line[key] for line in reversed(self.lines) if math.isfinite(_float(line.get(key)))), None)

    def most(self, key: str) -> float | None:
        """Since the last start: that may have another mesh."""
        starts = [number for number, line in enumerate(self.lines) if "start_unix_s" in line]
        values = self.column(key)[starts[-1] if starts else 0 :]
        return float(np.nanmax(values)) if np.isfinite(values).any() else None

    def evaluated(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, held-out loss) of each evaluation."""
        found = [(_float(line["step"]), _float(line["eval_loss"])) for line in self.evaluations]
        steps, losses = np.array(found).reshape(-1, 2).T
        return np.interp(steps, self.steps, self.tokens), losses

    # ---------------------------------------------------------------------------------------------------------------- time

    @cached_property
    def times_s(self) -> dict[str, float]:
        """Seconds by PARTS, from the first start to the last line; {} where lines have no times. The evaluation and the save at
        the end come after the last line, and are not in it."""
        timed = sorted((line for line in (*self.lines, *self.lost) if "unix_s" in line), key=lambda line: line["unix_s"])
        lost = {id(line) for line in self.lost}
        spent = dict.fromkeys(PARTS, 0.0)
        before_s: float | None = None
        for line in timed:
            began_s = line.get("start_unix_s")
            if began_s is not None and before_s is not None:
                spent[DOWN] += max(0.0, began_s - before_s)
            # A first line that does not tell when its start began tells nothing.
            gap_s = max(0.0, line["unix_s"] - next((s for s in (began_s, before_s) if s is not None), line["unix_s"]))
            before_s = line["unix_s"]
            if id(line) in lost:
                spent[REDONE] += gap_s
                continue
            for key, part in _PHASES.items():
                spent[part] += line.get(key, 0.0)
                gap_s -= line.get(key, 0.0)
            spent[TRAINING if began_s is None else STARTING] += max(0.0, gap_s)
        return spent if timed else {}

    @property
    def busy_s(self) -> float | None:
        """All of it but what lies between starts."""
        return sum(self.times_s.values()) - self.times_s[DOWN] if self.times_s else None

    # --------------------------------------------------------------------------------------------------------- noise scale

    @cached_property
    def noise_tokens(self) -> np.ndarray | None:
        """The noise scale at each step, as it was measured last, and before the first measure as at that. None: never, or never
        above 0."""
        values = _positive(self.column("noise_scale_tokens"))
        return _carry(values) if np.isfinite(values).any() else None

    @property
    def noise_factors(self) -> tuple[float | None, float | None]:
        """(low, high) of the last interval round the noise scale, as parts of it. None: not told, or no such end."""
        measured = _positive(self.column("noise_scale_tokens"))
        ends = []
        for end in ("low", "high"):
            ratios = _positive(self.column(f"noise_scale_{end}")) / measured
            known = np.flatnonzero(np.isfinite(measured))
            ends.append(float(ratios[known[-1]]) if known.size and np.isfinite(ratios[known[-1]]) else None)
        return ends[0], ends[1]


def read_run(folder: str | Path) -> History:
    """A run directory.

    Raises:
      ConfigError: it is none, or no step of it is done.
    """
    folder = Path(folder)
    metrics = folder / "metrics.jsonl"
    for path in (metrics, folder / "config.yaml"):
        if not path.is_file():
            raise ConfigError(f"{folder} is no run directory, for it has no {path.name}: give what run.dir was.")
    kept = list(_read(metrics))
    by_step = {line["step"]: line for _, line in kept if "loss" in line}
    if not by_step:
        raise ConfigError(f"{metrics} has no step yet: look again when the first is done.")
    seen = {text for text, _ in kept}
    lost: dict[str, Mapping[str, Any]] = {}
    # Each holds all lines of its time, those kept too.
    for path in sorted(folder.glob("metrics-*.jsonl")):
        lost |= {text: line for text, line in _read(path) if text not in seen and "loss" in line}
    return History(
        folder,
        _read_config(folder / "config.yaml", by_step),
        tuple(by_step[step] for step in sorted(by_step)),
        tuple(line for _, line in kept if "eval_loss" in line),
        tuple(lost.values()),
    )


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(text, object) of each line; one that a crash cut short is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): remove the cause.") from None
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield line, found


def _read_config(path: Path, by_step: Mapping[int, Mapping[str, Any]]) -> Config:
    """What the run's shape, mesh and batch were. Its texts need not be here, and its log is of no interest."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or why_not_yaml(error)
        raise ConfigError(f"{path} cannot be read as a config ({reason}): get it from a copy of the run.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no sections: it is not the config of a run.")
    data = values.get("data") or {}
    kept = {key: data[key] for key in ("packing", "mask_documents", "held_out_fraction") if key in data}
    # Any tokenizer: bytes would ask for a vocabulary of 256.
    values["data"] = {"tokenizer": "not read", **kept}
    values.pop("log", None)
    config = load_config(values)
    if config.parallel.data == AUTO:
        told = [line["devices"] for line in by_step.values() if "devices" in line]
        others = config.parallel.model_copy(update={"data": 1})
        config = config.resolve(told[-1] if told else config.model_copy(update={"parallel": others}).devices)
    return config


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _positive(values: np.ndarray) -> np.ndarray:
    """Not-a-number for all others."""
    return np.where(np.isfinite(values) & (np.nan_to_num(values) > 0), values, np.nan)


def _carry(values: np.ndarray) -> np.ndarray:
    """What is missing filled with what came last before it; at the beginning with the first there is."""
    there = np.flatnonzero(np.isfinite(values))
    return values[there[np.maximum(np.searchsorted(there, np.arange(len(values)), side="right") - 1, 0)]]
