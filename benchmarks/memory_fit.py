"""Fits the multiples of jaxllm/plan/memory.py (WORKING_SET) to steps that XLA compiled.

python benchmarks/memory_fit.py            prints the table, and how far the estimate is off with it: on the steps it is fitted
                                           to, and on each fifth of them when fitted to the others

memory_calibration.jsonl has a line for each: a configuration drawn at random, compiled with JAX 0.10.2 for H100s of unlimited
memory, and XLA's bytes; eight of Llama 3.1 405B are those that `jaxllm plan` compiled, to 0.1 GiB. Everything else of the
estimate follows from shapes; only the working set of one layer is fitted, under a loss that outliers do not rule and drawn
towards PRIOR, as rows are few for some kinds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from jaxllm.config import Config, load_config
from jaxllm.plan import memory

ROWS = Path(__file__).with_name("memory_calibration.jsonl")
PRIOR = {"mlp": 4, "whole": 3, "split": 4, "query": 8, "layer": 3}
"""By what listings of XLA's live buffers showed for a few steps."""
PULL = 0.03
"""A multiple off its prior by its whole size costs what an error of so much of a step's memory does."""
SCALE = 0.02


def calibration() -> Iterator[tuple[Config, dict[str, Any]]]:
    """(config, row), row with argument_bytes and temp_bytes."""
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        recipe = {
            "model": {"name": row["model"]},
            "parallel": row["parallel"],
            "train": {"steps": 1, **row["train"]},
            "data": {"mask_documents": row["mask_documents"]},
        }
        parallel = row["parallel"]
        devices = parallel["pipe"] * parallel["data"] * parallel["context"] * parallel["tensor"]
        yield load_config(recipe).resolve(devices), row


Cases = list[tuple[Config, dict[str, Any]]]


def fit(cases: Cases) -> dict[str, float]:
    memory.WORKING_SET = defaultdict(float)
    steps = [memory.Step(config) for config, _ in cases]
    moments = [{name: sum(held.values()) for name, held in step.moments().items()} for step in steps]
    names = sorted({name for step in steps for name in step.working_units()})
    units = np.array([[step.working_units().get(name, 0) for name in names] for step in steps])
    backward = np.array([found.pop("backward") for found in moments])
    others = np.array([max(found.values(), default=0) for found in moments])
    temp = np.array([row["temp_bytes"] for _, row in cases])
    total = temp + np.array([row["argument_bytes"] for _, row in cases])
    prior = np.array([prior_of(name) for name in names], float)

    def residuals(multiples: np.ndarray) -> np.ndarray:
        error = (np.maximum(backward + units @ multiples, others) - temp) / total
        return np.concatenate([error / SCALE, PULL / SCALE * (multiples - prior) / prior])

    found = least_squares(residuals, prior, bounds=(0, np.inf), loss="soft_l1").x
    return dict(zip(names, found.round(1).tolist(), strict=True))


def errors(cases: Cases) -> np.ndarray:
    """Of the estimate, relative to XLA's total."""
    total = np.array([row["argument_bytes"] + row["temp_bytes"] for _, row in cases])
    return np.array([memory.estimate_memory(config).peak_bytes for config, _ in cases]) / total - 1


def prior_of(name: str) -> float:
    return PRIOR[name.split(": ")[1]]


def held_out(cases: Cases, parts: int = 5) -> np.ndarray:
    """Errors on each part, of a fit to the others; kinds that are in no other part keep their prior."""
    every = [name for config, _ in cases for name in memory.Step(config).working_units()]
    found = np.zeros(len(cases))
    for part in range(parts):
        others = fit([case for number, case in enumerate(cases) if number % parts != part])
        memory.WORKING_SET = {name: prior_of(name) for name in every} | others
        found[part::parts] = errors(cases[part::parts])
    return found


def told(found: np.ndarray) -> str:
    size = np.abs(found)
    middle, far = np.median(size), np.percentile(size, 95)
    return f"median error {middle:.1%}, 95th percentile {far:.1%}, from {found.min():+.1%} to {found.max():+.1%}"


def main() -> None:
    cases = list(calibration())
    print(f"{len(cases)} steps, held out: {told(held_out(cases))}")
    memory.WORKING_SET = fit(cases)
    print(f"{len(cases)} steps, fitted:   {told(errors(cases))}")
    print(json.dumps(memory.WORKING_SET, indent=4))


if __name__ == "__main__":
    main()
