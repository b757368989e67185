"""Draws all pictures of the README, of docs/ and of benchmarks/RESULTS.md. Needs matplotlib and no GPU.

    python docs/pictures.py [NAME ...] [--into FOLDER]      such as zero or schedule-1f1b; default: all, into docs/

Pictures use the program's own results: executed schedule tables, the estimate, stored measurements.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import Config, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.data.packing import PACKINGS
from jaxllm.plan.data_ranks import StepsToLoss
from jaxllm.plan.estimate import estimate
from jaxllm.plan.pipeline_report import pipeline_report
from jaxllm.plan.search import SearchOptions, search
from jaxllm.plots.memory import candidates_figure, estimate_picture, over_figure
from jaxllm.plots.schedule import new_figure, save, schedule_figure, zigzag_picture

CHECKOUT = Path(__file__).resolve().parents[1]
GPU = GPUS["h100-80gb"]
AXES = ("pipe", "data", "context", "tensor")
HUES = ("#1f5fa6", "#d46a0d", "#2a8048", "#85409a", "#b8860b", "#5f6b76", "#a83240", "#2f8f9d")
_STRIDES = ("every eighth GPU", "every fourth", "every second", "neighbours")
_PIPELINE = ("parallel.pipe=4", "train.microbatch_sequences=1")


def llama_8b(**parallel: Any) -> Config:
    """Llama 3.1 8B in the setting of the README's estimate: S 8192, 1,024 sequences per step, one per microbatch."""
    train = {"steps": 100, "sequence_length": 8192, "global_batch_sequences": 1024, "microbatch_sequences": 1}
    return load_config({"model": {"name": "llama-3.1-8b"}, "parallel": parallel, "train": train})


def mesh_demo(*overrides: str) -> Config:
    return load_config(CHECKOUT / "configs" / "mesh-demo.yaml", overrides)


# ---------------------------------------------------------------------------------------------------------- the pictures


def mesh(path: Path) -> None:
    """Two hosts of eight GPUs as a mesh of 2 x 2 x 2 x 2, a panel per axis. GPUs of one colour form a group of that axis."""
    ranks = np.arange(16).reshape(2, 2, 2, 2)
    figure = new_figure(9.6, 2.9, dpi=150)
    figure.suptitle(
        "16 GPUs in 2 hosts as pipe 2 x data 2 x context 2 x tensor 2: who talks to whom", fontsize=10, x=0.01, ha="left"
    )
    for number, (axis, panel) in enumerate(zip(AXES, figure.subplots(2, 2).flat, strict=True)):
        for color, group in zip(HUES, np.moveaxis(ranks, number, -1).reshape(-1, 2).tolist(), strict=True):
            for gpu in group:
                # A gap between hosts.
                left = gpu + 0.7 * (gpu // 8)
                panel.add_patch(_rectangle(left, 0, 0.86, 0.86, color))
                panel.text(left + 0.43, 0.43, gpu, ha="center", va="center", color="white", fontsize=8)
        for host in (0, 1):
            panel.text(8.7 * host + 3.93, -0.28, f"host {host}", ha="center", va="top", fontsize=8)
        panel.set(xlim=(-0.3, 16.9), ylim=(-0.75, 1.1))
        panel.set_title(f"{axis}: {_STRIDES[number]}", fontsize=9, loc="left")
        panel.axis("off")
    save(figure, path)


def zero(path: Path) -> None:
    """Bytes per device on 8 H100s for Llama 3.1 8B at each ZeRO level, by the estimate."""
    points = [(level, _terms(llama_8b(zero=level).resolve(8))) for level in (0, 1, 2, 3)]
    title = "llama-3.1-8b on 8 x h100-80gb, data 8, S 8192, remat selective"
    save(over_figure(points, x_label="parallel.zero", capacity_bytes=GPU.capacity_bytes, title=title), path)


def remat(path: Path) -> None:
    """Bytes per device with ZeRO 3 for each remat policy."""
    policies = ("none", "selective", "offload", "full")
    points = [(policy, _terms(llama_8b(zero=3, remat=policy).resolve(8))) for policy in policies]
    title = "llama-3.1-8b on 8 x h100-80gb, data 8, ZeRO 3, S 8192"
    save(over_figure(points, x_label="parallel.remat", capacity_bytes=GPU.capacity_bytes, title=title), path)


def memory(path: Path) -> None:
    """The README's estimate as a function of the sequence length."""
    estimate_picture(estimate(llama_8b(tensor=2, zero=1), gpu="h100-80gb", gpus=64), path, "sequence")


def plan(path: Path) -> None:
    """Configurations of Llama 3.1 8B that fit on 64 H100s, by the estimates: the fastest and those looked at on the way."""
    found = search(llama_8b(), GPU, 64, options=SearchOptions(best=300))
    title = f"llama-3.1-8b on 64 x h100-80gb: {len(found.candidates):,} of {found.configurations:,} configurations"
    candidates = [candidate.to_json() for candidate in found.candidates]
    save(candidates_figure(candidates, capacity_bytes=found.capacity_bytes, title=title), path)


def batch(path: Path) -> None:
    """Steps and tokens to a loss as a function of the batch, by the law of the noise scale."""
    needed, over_noise = StepsToLoss(1.0, 1.0), np.logspace(-1.5, 1.5, 200)
    figure = new_figure(8.4, 3.4, dpi=150)
    axes = figure.add_subplot()
    axes.loglog(over_noise, needed.steps(over_noise), color=HUES[0], label="steps, over the least")
    axes.loglog(over_noise, needed.tokens(over_noise), color=HUES[1], label="tokens, over the least")
    axes.axvline(1, color="black", linewidth=1, linestyle=(0, (4, 3)), label="batch = noise scale: twice both")
    axes.set_xlabel("batch over gradient noise scale, both in tokens", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    save(figure, path)


def packing(path: Path) -> None:
    """Twelve documents in sequences of 16 tokens, by both packings."""
    lengths = np.array([9, 5, 14, 3, 7, 11, 4, 12, 6, 2, 8, 13])
    order = np.arange(len(lengths))
    figure = new_figure(9.6, 2.9, dpi=150)
    for (name, make), panel in zip(PACKINGS.items(), figure.subplots(1, 2), strict=True):
        packed = make(lengths, order, 16)
        for sample in range(packed.num_samples):
            left = 0
            for document, start, stop in zip(*(part.tolist() for part in packed.pieces(sample)), strict=True):
                color = HUES[document % len(HUES)]
                # Pale for a part of a cut document.
                paleness = 0.45 if stop - start < lengths[document] else 1.0
                panel.add_patch(_rectangle(left, sample - 0.4, stop - start, 0.8, color, paleness))
                text = {"color": "white" if paleness == 1.0 else "black", "fontsize": 7}
                panel.text(left + (stop - start) / 2, sample, document, ha="center", va="center", **text)
                left += stop - start
        panel.set(xlim=(0, 16), ylim=(packed.num_samples - 0.3, -0.7), yticks=range(packed.num_samples))
        meaning = {"concat": "cut where a sequence is full (pale)", "best_fit": "none cut that fits, some room left"}[name]
        panel.set_title(f"{name}: {meaning}", fontsize=9, loc="left")
        panel.set_xlabel("tokens", fontsize=8)
        panel.set_ylabel("sequence", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def schedule_1f1b(path: Path) -> None:
    _schedule(mesh_demo(*_PIPELINE), path)


def schedule_interleaved(path: Path) -> None:
    more = ("parallel.schedule=interleaved", "parallel.virtual_stages=2", "model.num_layers=8")
    _schedule(mesh_demo(*_PIPELINE, *more), path)


def zigzag(path: Path) -> None:
    zigzag_picture(4, path)


def memory_accuracy(path: Path) -> None:
    _by_script(path, "memory_accuracy.py")


def batch_study(path: Path) -> None:
    _by_script(path, "batch_study.py", "benchmarks/batch_study.jsonl", "--table")


def loss_over_seconds(path: Path) -> None:
    _by_script(path, "loss_over_seconds.py", "benchmarks/loss_over_seconds.jsonl", "--table")


def _by_script(path: Path, script: str, *arguments: str) -> None:
    """A picture of stored measurements, drawn by the script under benchmarks/ that made them."""
    command = [sys.executable, f"benchmarks/{script}", *arguments, "--picture", str(path.resolve())]
    subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)


def _schedule(config: Config, path: Path) -> None:
    report = pipeline_report(config)
    save(schedule_figure(report.schedule, slot_bytes=report.slot_bytes), path)


def _terms(config: Config) -> Mapping[str, int]:
    return estimate_memory(config, GPU).peak_stage.terms_bytes


def _rectangle(left: float, bottom: float, width: float, height: float, color: str, alpha: float = 1.0) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, bottom), width, height, facecolor=color, edgecolor="white", linewidth=0.8, alpha=alpha)


PICTURES: dict[str, Callable[[Path], None]] = {
    "mesh": mesh,
    "zero": zero,
    "remat": remat,
    "memory": memory,
    "memory_accuracy": memory_accuracy,
    "plan": plan,
    "batch": batch,
    "batch_study": batch_study,
    "loss_over_seconds": loss_over_seconds,
    "packing": packing,
    "schedule-1f1b": schedule_1f1b,
    "schedule-interleaved": schedule_interleaved,
    "zigzag": zigzag,
}
"""Name of the .png -> function that draws it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--into", type=Path, default=CHECKOUT / "docs", metavar="FOLDER")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in PICTURES]:
        parser.error(f"there is no picture {unknown[0]}: choose from {', '.join(PICTURES)}")
    for name in options.names or PICTURES:
        PICTURES[name](options.into / f"{name}.png")
        print(options.into / f"{name}.png")


if __name__ == "__main__":
    main()
