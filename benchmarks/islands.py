"""Held-out loss and bytes between replicas: data parallelism, and DiLoCo in 32, 8 and 4 bits.

python benchmarks/islands.py ROWS.jsonl [--replicas 4] [--rounds 50] [--bits 32 8 4] [--fragments 1] [--overlap 0]
                                        [--steps 2000]             trains on CPUs; resumes
python benchmarks/islands.py ROWS.jsonl --table                    prints the rows as Markdown

The model of tests/train/test_diloco.py::test_four_replicas_learn_as_well_as_one reads the Python standard library. All runs see
the same tokens. A fifth of the steps comes before the first round, and counts in the losses but not in the bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxllm.config import load_config
from jaxllm.cost_model.replicas import exchange_of

MODEL = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 192, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
RECIPE: dict[str, Any] = {
    "model": {**MODEL, "compute_dtype": "float32"},
    "train": {"sequence_length": 64, "global_batch_sequences": 32, "eval_batches": 100},
    "optimizer": {"learning_rate": 4e-3, "warmup_tokens": 100_000},
    "data": {"source": "python_stdlib"},
    "log": {"baselines": False},
    "parallel": {"data": 1},
}
KEYS = {"replicas": 1, "steps": 1, "round": 1, "bits": 1, "fragments": 1, "overlap": 0}
"""What makes a row the run of a case, and what rows have that lack it."""


def cases(replicas: int, steps: int, rounds: list[int], each: tuple[list[int], ...]) -> Iterator[dict[str, Any]]:
    """The runs; round 0 is data parallelism on one device, whose numbers are those of any.

    Args:
      each: bits, numbers of fragments, and 1 for an exchange beside the next step or 0, of the runs in rounds.
    """
    for length in (0, *rounds):
        for chosen in itertools.product(*each) if length else [(32, 1, 0)]:
            of_rounds = dict(zip(("bits", "fragments", "overlap"), chosen, strict=True))
            yield {"replicas": replicas, "steps": steps, "round": length, **of_rounds}


def overrides(case: dict[str, Any]) -> list[str]:
    length, steps = case["round"], case["steps"]
    given = [f"train.steps={steps}", f"run.cpu_devices={case['replicas'] if length else 1}"]
    if length:
        given += [f"parallel.replica={case['replicas']}", f"train.diloco_steps={length}", f"train.diloco_bits={case['bits']}"]
        given += [f"train.diloco_after_steps={steps // 5}", f"train.diloco_fragments={case['fragments']}"]
        given += [f"train.diloco_overlap={'true' if case['overlap'] else 'false'}"]
    return given


def sent_bytes(case: dict[str, Any]) -> float:
    """Bytes that a replica sends per step, in the rounds; tests hold the count against compiled programs."""
    given = overrides(case)
    if not case["round"]:
        given.append(f"parallel.replica={case['replicas']}")
    exchange = exchange_of(load_config(RECIPE, given).resolve(case["replicas"]))
    assert exchange is not None, "there are several replicas"
    return exchange.sent_bytes / exchange.steps


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a row the run of a case; older rows are of one fragment, or without overlap."""
    return tuple(row.get(name, default) for name, default in KEYS.items())


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """Trains in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(yaml.safe_dump(RECIPE))
        command = [sys.executable, "-m", "jaxllm.cli", "train", str(recipe), f"run.dir={folder}/run", *overrides(case)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return {**case, "eval_loss": lines[-1]["eval_loss"], "sent_bytes_per_step": sent_bytes(case)}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| replicas | steps | H | bits | fragments | overlap | held-out loss | to data parallelism | bytes a step | fewer |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        base = next(r for r in rows if r["round"] == 0 and (r["replicas"], r["steps"]) == (row["replicas"], row["steps"]))
        worse, fewer = row["eval_loss"] / base["eval_loss"] - 1, base["sent_bytes_per_step"] / row["sent_bytes_per_step"]
        name = row["round"] or "data parallel"
        yield (
            f"| {row['replicas']} | {row['steps']:,} | {name} | {row['bits']} | {row.get('fragments', 1)} | "
            f"{'yes' if row.get('overlap') else 'no'} | "
            f"{row['eval_loss']:.4f} | {100 * worse:+.1f}% | {row['sent_bytes_per_step']:,.0f} | {fewer:,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4])
    parser.add_argument("--rounds", type=int, nargs="+", default=[50])
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8, 4])
    parser.add_argument("--fragments", type=int, nargs="+", default=[1])
    parser.add_argument("--overlap", type=int, nargs="+", choices=(0, 1), default=[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()] if given.rows.exists() else []
    if given.table:
        print("\n".join(table(rows)))
        return
    done = {key(row) for row in rows}
    for replicas in given.replicas:
        for case in cases(replicas, given.steps, given.rounds, (given.bits, given.fragments, given.overlap)):
            if key(case) not in done:
                row = json.dumps(trained(case))
                with given.rows.open("a") as file:
                    file.write(f"{row}\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
