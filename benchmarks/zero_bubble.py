"""What a zero-bubble schedule would save in this executor, predicted, beside what interleaving saves. Nothing is compiled.

python benchmarks/zero_bubble.py [--write]                (a second; --write puts the table into benchmarks/RESULTS.md)

Zero-bubble schedules (Qi et al. 2023, "Zero Bubble Pipeline Parallelism") cut the backward pass of a unit, which is one
microbatch through one chunk of layers, in two: Bd makes the gradient that the stage before waits for, W the gradients of the
weights. W may wait, and fills ticks in which its stage would be idle.

Here all stages tick in lockstep, and a tick costs the sum of the kinds of work that any stage does in it. With P stages, V
chunks on each and M microbatches, forward and Bd take MV + P-1 ticks each, because stages wait for each other. W waits for no
other stage. If D units of each stage may wait, W takes MV + P-1 - D ticks, for D up to P-1. weight_ticks() finds them in the
table.

Times are those of the step-time model (jaxllm/cost_model/step_model.py). W is the matmuls for the gradients of weights, and the
addition of these to their sums. Left out are its launches and its gathers of sequences over tensor.

Until its W runs, a unit holds the inputs of its matmuls and the gradients of their outputs, in bfloat16, all of them split over
tensor. W then gathers sequences. Two of these gathers in each layer are new: today the backward pass gathers those gradients
once for both parts.

All stages run one program, so a unit goes through the ring of waiting units on every stage and in every tick. A copy into it
costs what the model counts for the ring of residuals. Inputs that the remat policy keeps are in that ring already.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markdown_sections import write_between

from jaxllm.config import Config, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import MEASURED
from jaxllm.cost_model.step_sizes import StepSizes
from jaxllm.pipeline_schedule import Schedule, make_schedule

GPU = GPUS["h100-80gb"]
GPUS_PER_HOST, GIB = 8, 2**30
RESULTS = Path(__file__).with_name("RESULTS.md")
P, TENSOR = 8, 8
CASES = (("full", 32), ("selective", 32), ("none", 32), ("selective", 8))
"""(remat, microbatches)."""
VIRTUAL_STAGES = (1, 2, 5, 10)
HEAD = (
    "| remat | M | V | s a step | interleaving saves | ticks of W, without and with | zero-bubble saves | less its copies "
    "| GiB of a waiting unit | of all slots | of P-1 waiting units | of these, not in free slots |"
)


def weight_ticks(schedule: Schedule, most_waiting: int) -> np.ndarray:
    """bool [ticks, stages]: the ticks in which each stage runs the W of its oldest waiting unit. The last tick may be after the
    schedule's own.

    Any tick with W costs the same, so the fewest are sought. W runs when a stage would otherwise keep more than `most_waiting`
    units after a tick, and then on every stage that has one. No later choice is possible, and a later tick finds more units
    waiting, so no other choice takes fewer ticks (the test compares it with all choices).
    """
    waiting = np.zeros(schedule.stages, int)
    rows: list[np.ndarray] = []
    for t in range(schedule.ticks):
        waiting += schedule.backward.valid[t]
        rows.append((waiting > 0) & (waiting.max() > most_waiting))
        waiting -= rows[-1]
    while waiting.any():
        rows.append(waiting > 0)
        waiting -= rows[-1]
    return np.array(rows)


def units_waiting(schedule: Schedule, weights: np.ndarray) -> np.ndarray:
    """int [ticks, stages]: units whose Bd has run and whose W has not, after each tick of the schedule."""
    return (schedule.backward.valid.astype(int) - weights[: schedule.ticks]).cumsum(axis=0)


def configured(remat: str, microbatches: int, virtual_stages: int) -> Config:
    """Llama 3.1 70B on 64 GPUs."""
    schedule = "interleaved" if virtual_stages > 1 else "1f1b"
    parallel = {"pipe": P, "tensor": TENSOR, "data": 1, "schedule": schedule, "virtual_stages": virtual_stages, "remat": remat}
    train = {"steps": 1, "sequence_length": 8192, "global_batch_sequences": microbatches, "microbatch_sequences": 1}
    model = {"name": "llama-3.1-70b", "attention": "cudnn"}
    return load_config({"model": model, "train": train, "parallel": parallel, "data": {"mask_documents": False}}).resolve(64)


class Case:
    """A step in which P-1 units of a stage may wait for their W. Seconds and bytes are those of one rank."""

    def __init__(self, config: Config):
        self.config = config
        name, V, M = config.parallel.schedule, config.parallel.virtual_stages, config.num_microbatches
        self.schedule = make_schedule(name, P, M, V)
        self.weights = weight_ticks(self.schedule, P - 1)
        self.weight_units = int(self.weights.any(axis=1).sum())
        """Ticks in which any stage runs W."""
        model, sizes, layers = StepModel(config, GPU, GPUS_PER_HOST, MEASURED), StepSizes(config, GPU), config.chunk_layers
        time = model.time()
        self.step_s, self.bubble_s = time.step_s, time.terms_s["bubble"]
        matmuls_s = sum(model.block_matmul_s(length, columns, model.rows) for columns, length in model.matmuls.values())
        self.weight_s = layers * (matmuls_s + model.gradient_sums_s())
        """Time of one chunk's W."""
        self.saved_s = (self.schedule.backward_units - self.weight_units) * self.weight_s
        """Time of a step, without copies."""

        u = sizes.units
        # Names of StepSizes.kept.
        inputs = {"attention_input": u["split"], "attention_output": u["query"], "mlp_input": u["split"]}
        inputs["mlp_products"] = u["mlp"]
        # Those of queries, keys, values, attention's projection, gate, up and down.
        gradients = u["query"] + 2 * u["key"] + u["split"] + 2 * u["mlp"] + u["split"]
        self.unit_bytes = layers * (sum(inputs.values()) + gradients)
        """What a unit holds until its W runs."""
        copied = gradients + sum(size for name, size in inputs.items() if name not in sizes.kept)
        self.copies_s = self.schedule.backward_units * layers * model.moved_s(2 * copied)
        """Time of a step."""
        self.slot_bytes = layers * sum(sizes.kept.values())
        """A slot of the ring of residuals."""

    @property
    def beyond_slots_bytes(self) -> float:
        """What a rank needs more than its slots, if waiting units may use those that its stage leaves free. The later a
        stage, the more of its units wait, and the fewer of its slots are in use."""
        held = self.schedule.live * self.slot_bytes + units_waiting(self.schedule, self.weights) * self.unit_bytes
        return max(0.0, held.max() - self.schedule.slots * self.slot_bytes)


def row(case: Case, plain_s: float) -> str:
    """A Markdown row. `plain_s` is the step without virtual stages."""
    parallel, step_s = case.config.parallel, case.step_s
    cells = [str(parallel.remat), str(case.config.num_microbatches), str(parallel.virtual_stages), f"{step_s:.2f}"]
    cells += [f"{1 - step_s / plain_s:.1%}" if parallel.virtual_stages > 1 else ""]
    cells += [f"{case.schedule.backward_units}, {case.weight_units}"]
    cells += [f"{case.saved_s / step_s:.1%}", f"{(case.saved_s - case.copies_s) / step_s:.1%}"]
    sizes = (case.schedule.slots * case.slot_bytes, (P - 1) * case.unit_bytes, case.beyond_slots_bytes)
    return f"| {' | '.join([*cells, f'{case.unit_bytes / GIB:.2f}', *(f'{size / GIB:.1f}' for size in sizes)])} |"


def table() -> str:
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for remat, microbatches in CASES:
        cases = [Case(configured(remat, microbatches, V)) for V in VIRTUAL_STAGES]
        lines += [row(case, cases[0].step_s) for case in cases]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    found = table()
    if parser.parse_args(arguments).write:
        write_between(RESULTS, "zero-bubble", found)
    print(found)


if __name__ == "__main__":
    main()
