"""History of a run, read from metrics.jsonl and config.yaml in its directory. It needs no JAX and no other file, so it works on
any machine.

    history = read_run("runs/quickstart")
    history.column("loss"), history.smoothed_loss, history.times_s

A start that repeats steps leaves metrics-1.jsonl and so on behind. They contain the lost lines.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import AUTO, Config, ConfigError, load_config
from jaxllm.json_lines import read_lines
from jaxllm.plan.cost import HOUR_S
from jaxllm.untrusted import RefusedInput, read_yaml, reason_of

SMOOTH_SHARE = 0.02
"""Window of the smoothed loss, as a share of the run's steps."""
FEWEST_SMOOTHED = 5
TRAINING, DATA, EVALUATING, SAVING, COMPILING, STARTING, REDONE, DOWN = PARTS = (
    *("training", "waiting for data", "evaluating", "saving", "compiling", "starting", "steps done again", "between starts"),
)
_PHASES = {"data_s": DATA, "evaluate_s": EVALUATING, "save_s": SAVING, "compile_s": COMPILING}
"""Key of a metrics line -> the part that its seconds belong to."""
_START = {
    **{"start_import_s": "import", "start_meet_s": "meeting the other processes", "start_devices_s": "devices"},
    **{"start_dataset_s": "data", "start_initialize_s": "initial state", "start_restore_s": "restore"},
    **{"compile_s": "compilation", "data_s": "first batch", "evaluate_s": "evaluation", "start_step_s": "first step"},
    **{"start_other_s": "other"},
}
"""Key of the first line of a start -> the part of the start, in the order of the parts."""


@dataclass(frozen=True)
class History:
    folder: Path
    config: Config
    """The config of the last start, without the paths of its data and without its log."""
    lines: tuple[Mapping[str, Any], ...]
    """Metrics lines of steps, ascending, one per step."""
    evaluations: tuple[Mapping[str, Any], ...]
    lost: tuple[Mapping[str, Any], ...]
    """Lines of steps that were repeated after a restart."""
    written: Mapping[str, Any]
    """config.yaml as the last start wrote it: section -> key -> value."""

    def column(self, key: str) -> np.ndarray:
        """One float for each line; not-a-number for a line without the key."""
        return np.array([line.get(key) for line in self.lines], float)

    @cached_property
    def steps(self) -> np.ndarray:
        return self.column("step")

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens consumed by the end of each step."""
        return self.column("tokens")

    @cached_property
    def batch_tokens(self) -> np.ndarray:
        """Tokens of each step's batch."""
        return np.diff(self.tokens, prepend=0.0) / np.diff(self.steps, prepend=0.0)

    @cached_property
    def smoothed_loss(self) -> np.ndarray:
        """Mean over the last SMOOTH_SHARE of the run's steps, or over the steps so far. Steps without a finite loss are left
        out."""
        loss = self.column("loss")
        window = max(FEWEST_SMOOTHED, math.ceil(SMOOTH_SHARE * len(loss)))
        finite = np.isfinite(loss)
        sums, counts = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(finite, loss, 0.0), finite))
        first = np.maximum(np.arange(len(loss)) + 1 - window, 0)
        sums, counts = (x[1:] - x[first] for x in (sums, counts))
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    @property
    def devices(self) -> int:
        """Number of devices in the last start that logged it, else the size of the config's mesh."""
        logged = self.last("devices")
        return self.config.devices if logged is None else int(logged)

    @property
    def saves(self) -> list[int]:
        """Steps after which training waited for a save. The save at the end is not in any line."""
        return [line["step"] - 1 for line in self.lines if line.get("save_s")]

    @property
    def restarts(self) -> list[int]:
        """Steps after which a later start resumed."""
        return [line["step"] - 1 for line in self.lines[1:] if "start_unix_s" in line]

    @cached_property
    def _firsts(self) -> list[int]:
        """Numbers of the lines with which starts begin."""
        return [number for number, line in enumerate(self.lines) if "start_unix_s" in line]

    @property
    def starts(self) -> list[tuple[Mapping[str, Any], ...]]:
        """The lines of each start that has some left, in order. The first has what is known of the start."""
        return [self.lines[first:end] for first, end in itertools.pairwise([*self._firsts, len(self.lines)])]

    @cached_property
    def tokens_per_s_per_device(self) -> float | None:
        """The median over the last half of the steps with the last batch size; None if none is known."""
        batch, rates = self.batch_tokens, self.column("tokens_per_s_per_device")
        rates = rates[np.isclose(batch, batch[-1]) & np.isfinite(rates)]
        # The first step after a start is not typical.
        rates = rates[len(rates) // 2 :]
        return float(np.median(rates)) if rates.size and np.median(rates) > 0 else None

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """What both reports have of a run at its end; None for what is not known. Losses are in nats per token, the training
        loss smoothed."""
        evaluated, noise = self.evaluated()[1], self.noise_tokens
        return {
            "steps": int(self.steps[-1]),
            "tokens": int(self.tokens[-1]),
            "devices": self.devices,
            "loss": finite(self.smoothed_loss[-1]),
            "eval_loss": finite(evaluated[-1]) if evaluated.size else None,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "restarts": len(self.restarts),
            "noise_scale_tokens": None if noise is None else finite(noise[-1]),
            "batch_tokens": finite(self.batch_tokens[-1]),
        }

    def reached(self, loss: float | None) -> int | None:
        """Index of the first line with a smoothed loss at or below `loss`; None if there is none."""
        there = [] if loss is None else np.flatnonzero(self.smoothed_loss <= loss)
        return int(there[0]) if len(there) else None

    def last(self, key: str) -> float | None:
        """The last finite value of a key."""
        return next((line[key] for line in reversed(self.lines) if line.get(key) is not None), None)

    def most(self, key: str) -> float | None:
        """The largest value since the last start; earlier starts may have used another mesh."""
        values = self.column(key)[self._firsts[-1] if self._firsts else 0 :]
        return float(np.nanmax(values)) if np.isfinite(values).any() else None

    def evaluated(self, over: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, held-out loss) of each evaluation; or with `over`, a value of each line, that value in place of tokens."""
        points = [(line["step"], line["eval_loss"]) for line in self.evaluations]
        steps, losses = np.array(points, float).reshape(-1, 2).T
        return np.interp(steps, self.steps, self.tokens if over is None else over), losses

    # ---------------------------------------------------------------------------------------------------------------- time

    @cached_property
    def _timed(self) -> list[tuple[Mapping[str, Any], float, float]]:
        """(line, seconds between two starts before it, other seconds since the line before) of each line with a time, in order
        of time."""
        found = []
        before_s: float | None = None
        for line in sorted((line for line in (*self.lines, *self.lost) if "unix_s" in line), key=lambda line: line["unix_s"]):
            began_s = line.get("start_unix_s")
            if began_s is not None:
                began_s -= line.get("start_import_s") or 0.0
            down_s = 0.0 if began_s is None or before_s is None else max(0.0, began_s - before_s)
            # A first line without the start time of its start gives no duration.
            gap_s = max(0.0, line["unix_s"] - next((s for s in (began_s, before_s) if s is not None), line["unix_s"]))
            before_s = line["unix_s"]
            found.append((line, down_s, gap_s))
        return found

    @cached_property
    def times_s(self) -> dict[str, float]:
        """Seconds by PARTS, from the first start to the last line; {} if lines have no times. The final evaluation and the
        final save come after the last line and are not included."""
        lost = {id(line) for line in self.lost}
        spent = dict.fromkeys(PARTS, 0.0)
        for line, down_s, gap_s in self._timed:
            spent[DOWN] += down_s
            if id(line) in lost:
                spent[REDONE] += gap_s
                continue
            for key, part in _PHASES.items():
                spent[part] += line.get(key) or 0.0
                gap_s -= line.get(key) or 0.0
            spent[STARTING if "start_unix_s" in line else TRAINING] += max(0.0, gap_s)
        return spent if self._timed else {}

    @cached_property
    def hours(self) -> np.ndarray:
        """Hours from the first start to each line, without the time between starts; not-a-number for a line without a time."""
        ends = np.cumsum([gap_s for _, _, gap_s in self._timed]) / HOUR_S
        at = {id(line): end for (line, _, _), end in zip(self._timed, ends, strict=True)}
        return np.array([at.get(id(line), math.nan) for line in self.lines])

    @property
    def last_start_s(self) -> dict[str, float]:
        """Seconds of the last start by part, from its imports to its first line; {} if they were not logged."""
        line = next((line for line in reversed(self.lines) if "start_unix_s" in line), {})
        if "start_other_s" not in line:
            return {}
        return {part: line[key] for key, part in _START.items() if line.get(key) is not None}

    @property
    def busy_s(self) -> float | None:
        """All time except that between starts."""
        return sum(self.times_s.values()) - self.times_s[DOWN] if self.times_s else None

    # --------------------------------------------------------------------------------------------------------- noise scale

    @cached_property
    def noise_tokens(self) -> np.ndarray | None:
        """The last measured noise scale at each step; steps before the first measurement use the first. None: there is no value
        above 0."""
        values = positive(self.column("noise_scale_tokens"))
        there = np.flatnonzero(np.isfinite(values))
        last = np.searchsorted(there, np.arange(len(values)), side="right") - 1
        return values[there[np.maximum(last, 0)]] if there.size else None

    @property
    def noise_factors(self) -> tuple[float | None, float | None]:
        """(low, high): the ends of the last interval, as ratios to the noise scale. None: not logged, or no such end."""
        measured = positive(self.column("noise_scale_tokens"))
        if not (known := np.flatnonzero(np.isfinite(measured))).size:
            return None, None
        low, high = (positive(self.column(f"noise_scale_{end}"))[known[-1]] / measured[known[-1]] for end in ("low", "high"))
        return finite(float(low)), finite(float(high))


def read_run(folder: str | Path) -> History:
    """Reads a run directory.

    Raises:
      ConfigError: the folder is not a run directory, or has no completed step.
    """
    folder = Path(folder)
    metrics = folder / "metrics.jsonl"
    for path in (metrics, folder / "config.yaml"):
        if not path.is_file():
            raise ConfigError(f"{folder} is not a run directory, because it has no {path.name}: give the run's run.dir.")
    kept = list(read_lines(metrics))
    by_step = {line["step"]: line for _, line in kept if line.keys() >= {"loss", "tokens"}}
    if not by_step:
        raise ConfigError(f"{metrics} has no step yet: try again when the first step is done.")
    seen = {text for text, _ in kept}
    lost: dict[bytes, Mapping[str, Any]] = {}
    # Those of older versions have all lines of their time, including those that were kept.
    for path in sorted(folder.glob("metrics-*.jsonl")):
        lost |= {text: line for text, line in read_lines(path) if text not in seen and line.keys() >= {"loss", "tokens"}}
    written = _read_config(folder / "config.yaml")
    return History(
        folder,
        _config_of(written, by_step),
        tuple(by_step[step] for step in sorted(by_step)),
        tuple(line for _, line in kept if "eval_loss" in line),
        tuple(lost.values()),
        written,
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        values = read_yaml(path)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{path} cannot be read as a config ({reason_of(error)}): get it from a copy of the run.") from None
    if not isinstance(values, dict) or not all(isinstance(section, dict | None) for section in values.values()):
        raise ConfigError(f"{path} holds no sections: it is not the config of a run.")
    return values


def _config_of(written: Mapping[str, Any], by_step: Mapping[int, Mapping[str, Any]]) -> Config:
    """The run's shape, mesh and batch. The training texts need not be present, and the log settings are dropped."""
    data = written.get("data") or {}
    kept = {key: data[key] for key in ("packing", "mask_documents", "held_out_fraction") if key in data}
    # A placeholder: the tokenizer `bytes` would require a vocabulary of 256.
    values = {name: section for name, section in written.items() if name != "log"} | {"data": {"tokenizer": "not read", **kept}}
    # What was to come does not matter, and would need log settings.
    values["train"] = {**(written.get("train") or {}), "batch_grows_to": None}
    config = load_config(values)
    if config.parallel.data == AUTO:
        logged = [int(line["devices"]) for line in by_step.values() if line.get("devices")]
        others = config.parallel.model_copy(update={"data": 1})
        config = config.resolve(logged[-1] if logged else config.model_copy(update={"parallel": others}).devices)
    return config


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def positive(values: np.ndarray) -> np.ndarray:
    """Replaces every value that is not finite and above 0 by not-a-number."""
    return np.where(np.isfinite(values) & (np.nan_to_num(values) > 0), values, np.nan)
