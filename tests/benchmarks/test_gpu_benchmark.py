"""benchmarks/gpu.py at its smallest: its figures agree with each other, and its cases are those that were published."""

import itertools
import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import outside
import pytest
import scripts

from jaxllm.config import load_config
from jaxllm.cost_model.flops import parameter_count, train_flops_per_token
from jaxllm.cost_model.hardware import GPUS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HAS_TORCH = bool(find_spec("torch") and find_spec("transformers"))


@pytest.fixture(scope="module")
def modules():
    names = ("subprocess_runner", "gpu", "gpu_cases", "gpu_predictions", "gpu_table")
    return SimpleNamespace(**{name: scripts.load(f"benchmarks/{name}.py") for name in names})


def run(*arguments) -> subprocess.CompletedProcess:
    environment = outside.environment(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_backend_optimization_level=0")
    command = [sys.executable, BENCHMARKS / "gpu.py", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The printed text."""
    file = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    finished = run("--dry-run", "--json", "--out", file)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout)


def by_kind(report, kind):
    return [row for row in report["rows"] if row["kind"] == kind]


def test_both_sides_agree_with_themselves_and_each_other(dry, modules):
    (ours,), theirs = by_kind(dry, "train"), by_kind(dry, "transformers")
    assert len(theirs) == HAS_TORCH
    config = load_config({"model": {}, "train": {"steps": 1}}, ours["options"]["overrides"])
    for row in (ours, *theirs):
        assert row["parameters"] == parameter_count(config.model)
        assert row["tokens_per_step"] == config.step_tokens == 4 * 32
        assert row["microbatch"] * row["microbatches"] == config.train.global_batch_sequences
        step_s = row["step_s"]
        assert 0 < step_s["lower_quartile"] <= step_s["median"] <= step_s["upper_quartile"]
        assert row["tokens_per_s"] * step_s["median"] == pytest.approx(row["tokens_per_step"])
        for name in ("causal", "full_square"):
            flops = train_flops_per_token(config.model, 32, causal=name == "causal")
            assert row[f"tflops_{name}"] == pytest.approx(row["tokens_per_s"] * flops / 1e12)
            assert row[f"mfu_{name}"] is None  # a CPU has no known peak
        # The initial loss is that of random guessing, and both sides read the same batch.
        assert row["first_loss"] == pytest.approx(math.log(256), abs=0.2)
    assert min(ours["compile_s"], ours["estimate_bytes"], ours["compiled_bytes"]) > 0
    rows = {row["name"]: row for row in dry["rows"]}
    for row in theirs:
        assert modules.gpu_table.ratio(row, rows) == pytest.approx(ours["tokens_per_s"] / row["tokens_per_s"])


def test_the_trace_says_where_the_time_goes(dry):
    seen = by_kind(dry, "train")[0]["trace"]
    by_kind_s = seen["by_kind_s"]
    assert 0 < seen["busy_s"] <= seen["span_s"] * (1 + 1e-9)
    assert sum(by_kind_s.values()) >= seen["busy_s"] * (1 - 1e-9)  # streams may run beside each other
    assert {"matmul", "optimizer"} <= by_kind_s.keys()
    assert seen["named"] > 0.5  # of XLA's own instructions some have no name
    assert sum(kernel["s"] for kernel in seen["longest"]) <= sum(by_kind_s.values()) * (1 + 1e-9)


def test_parts_and_ceilings(dry):
    (ceilings,), (parts,), (ring,) = (by_kind(dry, kind) for kind in ("ceilings", "parts", "ring"))
    assert ceilings["copy_bytes_per_s"] == max(ceilings["copies"].values()) > 0
    assert ceilings["matmul_flops"] == max(ceilings["matmuls"].values()) > 0
    model = load_config({"model": {}, "train": {"steps": 1}}, parts["options"]["overrides"]).model
    assert parts["tokens"] == 2 * 32
    assert parts["optimizer"]["bytes"] == 32 * parameter_count(model)
    of_layer = sum(one["count"] * one["flops"] for one in parts["matmuls"]) / parts["tokens"]
    head = parts["head_products"]["flops"] / parts["head_products"]["shape"][0]
    attention = 3 * parts["attention"]["forward_flops"] / parts["tokens"]
    assert 3 * (of_layer + head) + attention == train_flops_per_token(model, 32)
    assert min(ring["whole"]["forward_s"], ring["whole"]["forward_backward_s"]) > 0
    assert [played["ranks"] for played in ring["played"]] == [2]


# ------------------------------------------------------------------------------------------------------ nothing is measured


def test_the_plan_of_an_h200(modules):
    """Names are unique, configs are valid, the most important cases come first, and 8B has the most layers that fit."""
    gpu, capacity = modules.gpu, 120 * 2**30
    found = {"device": "NVIDIA H200", "capacity_bytes": capacity}
    cases = gpu.cases(found, dry=False)
    assert len({case.name for case in cases}) == len(cases)
    first = [case for case in cases if case.kind == "train"][:3]
    assert [case.about["model"] for case in first] == ["1B", "8B", "3B"]
    layers = gpu.layers_that_fit(found)
    assert 8 <= layers < 32
    kind = gpu.gpu_from_device_kind("NVIDIA H200")
    for count, fits in ((layers, True), (layers + 1, False)):
        of = gpu.overrides(gpu.about("8B", 8192, [f"model.num_layers={count}"]))
        estimate = gpu.estimate_memory(modules.gpu_cases.config_of(of, microbatch_sequences=1), kind)
        assert (estimate.peak_bytes <= gpu.FIT_SHARE * capacity) == fits
    for case in cases:
        config = modules.gpu_cases.config_of(case.options["overrides"])
        assert config.step_tokens == gpu.STEP_TOKENS
    sizes = [modules.gpu_cases.largest_microbatch(case.options["overrides"], capacity, kind, 4) for case in first]
    assert all(8 % b == 0 and b <= 4 for b in sizes)


@pytest.mark.parametrize("name", ["h100-80gb", "h200-141gb"])
def test_every_training_case_was_compiled_without_the_gpu(modules, name):
    """RESULTS.md has today's cases with the layers and the microbatch that gpu.py would choose, and all fit."""
    predictions = modules.gpu_predictions
    gpu = GPUS[name]
    _, _, rest = (BENCHMARKS / "RESULTS.md").read_text().partition(f"{gpu.name}, of which a step may take")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.partition("\n\n")[2].splitlines()[2:]]
    table = {row[0]: row[1:] for row in itertools.takewhile(lambda row: len(row) > 1, rows)}
    cases = dict(predictions.training_cases(gpu))
    assert table.keys() == cases.keys()
    for case, config in cases.items():
        layers, microbatch, compiled, *_ = table[case]
        assert (int(layers), int(microbatch)) == (config.model.num_layers, config.train.microbatch_sequences), case
        assert float(compiled) * predictions.GIB <= gpu.capacity_bytes, case


def test_a_step_at_the_ceilings_takes_all_of_them(modules):
    """Checks the share of the ceilings, the targets and the table for synthetic rows."""
    table = modules.gpu_table
    about = {"model": "1B", "sequence_length": 8192, "remat": "selective", "variant": ""}
    tokens, parameters, rate, copy = 65536, 10**9, 800e12, 4e12
    # 6 PFLOP of matmuls, 1 of causal attention at half the matmuls' speed.
    ideal_s = 6e15 / rate + 1e15 / (rate / 2) + (32 + 6) * parameters / copy
    quartiles = dict.fromkeys(("median", "lower_quartile", "upper_quartile"), ideal_s / 0.8)
    row = {"kind": "train", "about": about, "tokens_per_step": tokens, "parameters": parameters, "step_s": quartiles}
    row |= {"tokens_per_s": tokens / quartiles["median"], "layers": 16, "microbatch": 4, "microbatches": 2, "compile_s": 30.0}
    row |= {f"tflops_{name}": flops / quartiles["median"] / 1e12 for name, flops in (("causal", 7e15), ("full_square", 8e15))}
    row |= {f"mfu_{name}": row[f"tflops_{name}"] / 989 for name in ("causal", "full_square")}
    row |= dict.fromkeys(("in_use_bytes", "compiled_bytes", "estimate_bytes"), 2**36)
    part = {"kind": "parts", "about": about, "tokens": 32768, "head_s": {}, "head_flops": 1}
    part |= {
        "attention": {"kernel": "cudnn", "forward_flops": 1e12, "forward_s": 1 / 500, "forward_backward_s": 3e12 / (rate / 2)}
    }
    part |= {"norm": {"forward_s": 1, "forward_bytes": 3e12, "backward_s": 1, "backward_bytes": 3.2e12}}
    part |= {"optimizer": {"s": 1, "bytes": 3.9e12}, "matmuls": [], "head_products": None}
    theirs = {**row, "kind": "transformers", "about": {**about, "side": "flash"}, "tokens_per_s": row["tokens_per_s"] / 1.3}
    theirs |= {"checkpointing": False}
    played = [{"ranks": c, "forward_s": 1.0, "forward_backward_s": 1.05 / c} for c in (2, 4)]
    ring = {"kind": "ring", "about": {"model": "8B"}, "sequence_length": 32768, "kernel": "cudnn", "played": played}
    ring |= {"whole": {"forward_s": 1.0, "forward_backward_s": 1.0}}
    ceilings = {"kind": "ceilings", "device": "a GPU", "copy_bytes_per_s": copy, "matmul_flops": rate}
    ceilings |= {"copies": {"copy": copy}, "matmuls": {"8192": rate}}
    rows = {"ceilings": ceilings, "ours": row, "theirs": theirs, "ring": ring, "failed": {"kind": "train", "error": "no"}}
    assert table.ceiling_share({**row}, {**rows, "parts": part}) == pytest.approx(0.8)
    assert table.ceiling_share(row, {"ours": row}) is None
    met = {(verdict.target, verdict.of): verdict.met for verdict in table.verdicts(rows)}
    assert met["1.2 x transformers, compiled", "1B, S 8192"]
    assert met["a ring's blocks cost at most 10% more", "8B, S 32768, 4 ranks"]
    of_parts = {verdict.target.partition(",")[0]: verdict for verdict in table._part_verdicts({**rows, "parts": part})}
    assert {name: verdict.met for name, verdict in of_parts.items()} == {
        "optimizer": True,
        "norm forward": False,
        "norm backward": True,
    }
    text = table.text(rows)
    assert "| 1B, 16 layers, S 8,192 | selective | 4 x 2 |" in text
    assert "- failed: no" in text
    assert "+5.0% forward and backward" in text
