"""The formulas of docs/memory-formulas.md are those of the code: each is Python, and is evaluated here."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxllm.config import Config, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.megatron import activation_bytes, megatron_memory
from jaxllm.cost_model.memory import Step

PAGE = (Path(__file__).parents[2] / "docs" / "memory-formulas.md").read_text(encoding="utf-8")
SYMBOLS = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
LAYOUTS: dict[str, dict[str, Any]] = {
    "8B on one": {},
    "8B on one, none": {"remat": "none"},
    "8B, tensor 2": {"data": 4, "tensor": 2},
    "8B, tensor 2, none": {"data": 4, "tensor": 2, "remat": "none"},
    "8B, ZeRO 0": {"data": 4, "zero": 0, "remat": "full"},
    "8B, ZeRO 2": {"data": 8, "zero": 2, "remat": "none"},
    "8B, ZeRO 3": {"data": 8, "zero": 3},
    "8B, context": {"data": 2, "context": 4, "remat": "full"},
    "8B, offload": {"data": 2, "remat": "offload"},
    "8B, pipe": {"pipe": 4, "data": 2, "tensor": 2, "M": 16},
    "8B, pipe, few microbatches": {"pipe": 4, "data": 2, "M": 2, "zero": 2, "remat": "full"},
    "8B, pipe, ZeRO 3": {"pipe": 2, "data": 4, "zero": 3},
    "8B, interleaved": {"pipe": 2, "data": 2, "virtual_stages": 2, "schedule": "interleaved"},
    "8B, interleaved, context": {"pipe": 2, "context": 4, "virtual_stages": 2, "schedule": "interleaved", "remat": "full"},
    "70B, all axes": {"name": "llama-3.1-70b", "pipe": 4, "data": 2, "context": 2, "tensor": 4, "remat": "none", "M": 16},
    "1B, tied": {"name": "llama-3.2-1b", "data": 2, "tensor": 2, "b": 4},
    "1B, tied, pipe": {"name": "llama-3.2-1b", "data": 2, "pipe": 2, "b": 2},
}


class Row(NamedTuple):
    term: str
    rule: str
    own: str
    when: str
    code: str


def table(marker: str, names: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows under a marker, with code in place of cells of code. An empty first or last cell is the one above."""
    lines = PAGE.partition(f"<!-- {marker} -->\n")[2].partition("<!-- end -->")[0].splitlines()[2:]
    rows: list[dict[str, str]] = []
    for line in lines:
        cells = [cell.strip().strip("`") for cell in line[1:-1].split("|")]
        row = dict(zip(names, cells, strict=True))
        for name in (names[0], names[-1]):
            row[name] = row[name] or rows[-1][name]
        rows.append(row)
    return rows


TERMS = [Row(**row) for row in table("terms", Row._fields)]
ACTIVATIONS = table("activations", ("policy", "when", "formula", "code"))


def config_of(layout: dict[str, Any]) -> Config:
    parallel = dict(layout)
    name, b, microbatches = parallel.pop("name", "llama-3.1-8b"), parallel.pop("b", 1), parallel.pop("M", 8)
    train = {"steps": 1, "sequence_length": 8192, "microbatch_sequences": b}
    train["global_batch_sequences"] = b * microbatches * parallel.get("data", 1)
    ranks = math.prod(parallel.get(axis, 1) for axis in ("pipe", "data", "context", "tensor"))
    return load_config({"model": {"name": name}, "parallel": parallel, "train": train}).resolve(ranks)


def names_of(config: Config) -> dict[str, Any]:
    """What the formulas and the cells of code may name."""
    model, parallel, train = config.model, config.parallel, config.train
    step = Step(config, GPUS["h100-80gb"])
    names = {"D": model.hidden_size, "F": model.intermediate_size, "N": model.num_heads, "K": model.num_kv_heads}
    names |= {"H": model.head_dim, "L": model.num_layers, "V": model.vocab_size, "E": 1 if model.tie_embeddings else 2}
    names |= {"S": train.sequence_length, "b": config.microbatch_sequences, "M": config.num_microbatches}
    names |= {"p": parallel.pipe, "d": parallel.data, "c": parallel.context, "t": parallel.tensor, "z": parallel.zero}
    names |= {"v": parallel.virtual_stages, "C": train.loss_chunk_tokens, "own": step.has_own_layers}
    names |= {"step": step, "config": config, "activation_bytes": activation_bytes}
    exec(SYMBOLS, names)
    return names


def value(expression: str, names: dict[str, Any]) -> float:
    return eval(expression, dict(names))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_formula_is_its_function(layout):
    config = config_of(LAYOUTS[layout])
    names = names_of(config)
    used = 0
    for row in ACTIVATIONS:
        policy, _, place = row["policy"].partition("`")
        if policy not in (config.parallel.remat, "Megatron-LM, ") or (row["when"] and not value(row["when"], names)):
            continue
        found = value(row["formula"], names)
        assert found == pytest.approx(value(row["code"], names), rel=1e-9), row
        if not place.startswith(", on"):
            names["a_rule" if policy.startswith("Megatron") else "a"] = found
            used += 1
    assert used == 2
    stage = megatron_memory(config).stages[0].terms_bytes
    for row in TERMS:
        if row.rule:
            assert value(row.rule, names) == pytest.approx(stage[row.term.partition(":")[0]], rel=1e-9, abs=1), row
        if not row.when or value(row.when, names):
            assert value(row.own, names) == pytest.approx(value(row.code, names), rel=1e-9), row


@pytest.mark.parametrize("row", range(len(TERMS)))
def test_every_line_is_of_some_layout_and_no_two_of_the_same(row):
    row = TERMS[row]
    others = [other.when for other in TERMS if other.term == row.term and other is not row]
    of_layouts = [names_of(config_of(layout)) for layout in LAYOUTS.values()]
    there = [names for names in of_layouts if not row.when or value(row.when, names)]
    assert there
    assert not any(value(when, names) for names in there for when in others)


def test_every_policy_is_in_a_layout():
    shown = {row["policy"].partition("`")[0] for row in ACTIVATIONS} - {"Megatron-LM, "}
    assert shown == {config_of(layout).parallel.remat for layout in LAYOUTS.values()}
    assert {names_of(config_of(layout))["own"] for layout in LAYOUTS.values() if layout.get("remat") == "none"} == {True, False}


def test_the_rule_s_terms_are_all_there():
    shown = {row.term.partition(":")[0] for row in TERMS if row.rule}
    assert shown == megatron_memory(config_of({})).stages[0].terms_bytes.keys()
