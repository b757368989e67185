"""Loss over seconds of the quickstart on 1, 2 and 4 CPU devices, a core for each device as far as there are cores.

python benchmarks/loss_over_seconds.py RESULTS.jsonl      trains what it lacks; ten minutes on two idle cores
python benchmarks/loss_over_seconds.py RESULTS.jsonl --table [--picture FILE.png]

Points are means of ten steps, without compilation. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.json_lines import read_lines
from jaxllm.plots.schedule import BLUE, GREEN, ORANGE, new_figure, save

CHECKOUT = Path(__file__).resolve().parents[1]
DEVICES = (1, 2, 4)
MEAN_OF = 10


def train(devices: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:devices]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sizes = (f"run.cpu_devices={devices}", f"run.dir={run}", "train.eval_every_steps=null", "log.sample_tokens=0")
        command = [sys.executable, "-m", "jaxllm.cli", "train", "configs/quickstart.yaml", *sizes, "log.baselines=false"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run(["taskset", "-c", ",".join(map(str, cores)), *command], cwd=CHECKOUT, env=environment, check=True)
        records = [record for _, record in read_lines(run / "metrics.jsonl")]
    steps = [record for record in records if "loss" in record]
    (held_out,) = (record["eval_loss"] for record in records if "eval_loss" in record)
    seconds, losses = np.cumsum([step["step_s"] for step in steps]), np.array([step["loss"] for step in steps])
    means = losses[: len(losses) // MEAN_OF * MEAN_OF].reshape(-1, MEAN_OF).mean(axis=1)
    ends = seconds[MEAN_OF - 1 :: MEAN_OF]
    points = [[round(float(second), 2), round(float(loss), 4)] for second, loss in zip(ends, means, strict=True)]
    return {"devices": devices, "cores": len(cores), "held_out": held_out, "points": points}


def read(path: Path) -> list[dict[str, Any]]:
    """Stored runs, by their number of devices."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sorted(map(json.loads, lines), key=lambda run: run["devices"])


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: seconds to losses, and the largest distance between losses of the same step."""
    first = np.array(runs[0]["points"])[:, 1]
    rows = ["| devices | cores | seconds to 2.5 | to 2.0 | 720 steps | held-out loss | farthest from one device's curve |"]
    rows.append("|---|---|---|---|---|---|---|")
    for run in runs:
        seconds, losses = np.array(run["points"]).T
        to = [f"{min(seconds[losses <= target], default=np.inf):.0f}" for target in (2.5, 2.0)]
        apart = np.abs(losses - first).max()
        cells = [run["devices"], run["cores"], *to, f"{seconds[-1]:.0f}", f"{run['held_out']:.3f}", f"{apart:.3f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def picture(runs: list[dict[str, Any]], path: str) -> None:
    """Training loss over steps and over seconds."""
    figure = new_figure(8.4, 3.2, dpi=150)
    over_steps, over_seconds = figure.subplots(1, 2, sharey=True)
    for run, color, dashes in zip(runs, (BLUE, ORANGE, GREEN), ((), (6, 2), (2, 2)), strict=True):
        seconds, losses = np.array(run["points"]).T
        devices, cores = run["devices"], run["cores"]
        label = f"{devices} device{'s' * (devices > 1)}, {cores} core{'s' * (cores > 1)}"
        for axes, x in ((over_steps, MEAN_OF * np.arange(1, 1 + len(losses))), (over_seconds, seconds)):
            axes.plot(x, losses, color=color, linewidth=1.2, dashes=dashes, label=label)
    over_steps.set_xlabel("steps", fontsize=9)
    over_seconds.set_xlabel("seconds", fontsize=9)
    over_steps.set_ylabel("training loss, nats per byte", fontsize=9)
    over_seconds.legend(fontsize=8, frameon=False)
    for axes in (over_steps, over_seconds):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--picture", metavar="FILE.png")
    options = parser.parse_args()
    runs = read(options.results)
    for devices in () if options.table else DEVICES:
        if devices not in {run["devices"] for run in runs}:
            run = train(devices)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
    runs = read(options.results)
    print(table(runs))
    if options.picture:
        picture(runs, options.picture)


if __name__ == "__main__":
    main()
