"""benchmarks/gpu.py at its smallest: its figures agree with each other, and its cases are those that were published."""

import itertools
import json
import math
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import nvml
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
    names = ("subprocess_runner", "gpu", "gpu_cases", "gpu_power", "gpu_predictions", "gpu_table")
    for kind in ("pretend", "grouped", "limit", "real_run", "peers"):
        scripts.load(f"benchmarks/gpu_{kind}.py")
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
    assert "parts" not in seen  # a CPU runs other kernels than the account's


def test_attention_alone_agrees_with_float32(dry):
    (row,) = by_kind(dry, "attention")
    assert [(one["way"], one["documents"]) for one in row["attention"]] == [("causal", 1), ("packed", 2), ("halves", 2)]
    for one in row["attention"]:
        assert 0 < max(one["errors"].values()) < 0.01


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


# ------------------------------------------------------------------------------------------------- processes of made-up cases

PLAYED = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    do, tell = case["options"], lambda **figures: print(json.dumps({"name": case["name"], **figures}), flush=True)
    tell(microbatch=do.get("at_most", 4), process=os.getpid())
    if do.get("crash"):
        sys.exit("The driver fell over.")
    time.sleep(do.get("takes_s", 0))
    if do.get("at_most", 4) > do.get("fits", 4):
        print(ran_out, file=sys.stderr, flush=True)
        tell(error=ran_out)
    else:
        tell(tokens_per_s=1.0, tflops_full_square=1.0, timed=[time.time(), time.time()])
    print(json.dumps({"ready": True}), flush=True)
"""


@pytest.fixture
def play(modules, monkeypatch, tmp_path):
    """Runs cases of (name, kind, options) in processes that only say what a case says; returns the runner."""
    script = tmp_path / "played.py"
    script.write_text(f"ran_out = {modules.subprocess_runner.OUT_OF_MEMORY!r}\n{PLAYED}")
    monkeypatch.setattr(modules.gpu, "CASES", script)
    monkeypatch.setattr(modules.gpu, "EXPECTED_S", dict.fromkeys(modules.gpu.EXPECTED_S, 1))
    monkeypatch.setattr(modules.gpu, "KILLED_S", 0)

    def run(*cases, seconds=60, **options):
        runner = modules.gpu.Runner(tmp_path / "gpu.jsonl", [], time.monotonic() + seconds, **options)
        as_case = lambda case: case if isinstance(case, modules.gpu.Case) else modules.gpu.Case(*case)  # noqa: E731
        runner.run(map(as_case, cases))
        return runner

    return run


def test_cases_of_jaxllm_share_a_process_and_pytorchs_do_not(play):
    kinds = {"a": "train", "b": "ring", "c": "transformers", "d": "transformers", "e": "train"}
    rows = play(*((name, kind, {}) for name, kind in kinds.items())).rows
    assert list(rows) == list(kinds)
    of = {name: row["process"] for name, row in rows.items()}
    assert of["a"] == of["b"]
    assert len({of[name] for name in "acde"}) == 4


def test_a_crash_costs_one_row_and_too_large_a_microbatch_none(play, tmp_path):
    cases = [("a", "train", {}), ("b", "train", {"fits": 3}), ("c", "ring", {"crash": True}), ("d", "train", {})]
    rows = play(*cases).rows
    assert list(rows) == ["a", "b", "c", "d"]
    assert "fell over" in rows["c"]["error"]  # not the memory that b ran out of before
    assert all("error" not in rows[name] for name in "abd")
    assert rows["a"]["process"] == rows["b"]["process"] == rows["c"]["process"] != rows["d"]["process"]
    assert (rows["b"]["microbatch"], rows["b"]["ran_out_at"], rows["b"]["options"]) == (3, 4, {"fits": 3})
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines if "begun" not in line] == ["a", "b", "c", "d"]
    assert play(*cases).rows == rows  # nothing is measured again


def test_no_case_begins_or_goes_on_without_time(play):
    """By its kind `b` would take 1 s, when 0.6 s are left; `c` is cut off by the end."""
    runner = play(("a", "train", {"takes_s": 0.4}), ("b", "ring", {}), ("c", "train", {"takes_s": 30}), seconds=1.3)
    assert list(runner.rows) == ["a"]
    assert runner.left == ["b", "c"]


def test_every_kind_has_a_function_and_a_duration(modules):
    """An unknown kind would cost its row on the day."""
    assert modules.gpu.EXPECTED_S.keys() == {*modules.gpu_cases.KINDS, *modules.gpu_cases.ELSEWHERE}
    assert all(callable(modules.gpu_cases.measure(kind)) for kind in modules.gpu.EXPECTED_S)


def test_what_depends_on_a_case_without_time_is_left_for_the_next_run(play, modules):
    runner = play(modules.gpu.Case("b", "pretend", after="a"))
    assert (runner.rows, runner.left) == ({}, ["b"])


def test_figures_of_a_case_that_the_end_cuts_off_are_kept_and_count_for_nothing(play, tmp_path):
    runner = play(("a", "train", {"takes_s": 30}), seconds=1.3)
    assert (runner.rows, runner.left) == ({}, ["a"])
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines[-1]["begun"] == "cut off by the end"
    assert lines[-1]["microbatch"] == 4


def test_a_prediction_is_written_before_its_case_begins(play, modules, tmp_path):
    case = modules.gpu.Case("a", "train", {"crash": True}, predicted={"tokens_per_s": 7})
    play(case)
    begun, row = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert "begun" in begun
    assert "process" not in begun
    assert begun["predicted"] == row["predicted"] == {"tokens_per_s": 7}
    assert "fell over" in row["error"]


def test_what_depends_on_a_failed_case_is_left_out(play, modules):
    after = modules.gpu.Case("b", "pretend", after="a")
    rows = play(("a", "pretend", {"crash": True}), after, ("c", "train", {})).rows
    assert rows["b"]["error"] == "Left out: 'a' has no figures."
    assert "error" not in rows["c"]


def test_rows_of_earlier_days_count_for_their_kind_of_gpu_alone(play, modules, tmp_path):
    """However they were measured, but only for the same work."""
    H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    old = [("a", {"steps": 3}, H100), ("b", {}, H200), ("c", {"overrides": ["x=1"]}, H100)]
    lines = [{"name": name, "kind": "train", "options": options, "device": device} for name, options, device in old]
    known = tmp_path / "known.jsonl"
    known.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runner = modules.gpu.Runner(tmp_path / "gpu.jsonl", [known], time.monotonic() + 60, device=H100)
    cases = [modules.gpu.Case(name, "train", {"steps": 5, "traced": True}) for name in "abc"]
    assert [case.name for case in cases if runner.is_done(case)] == ["a"]


def test_power_and_clocks_are_means_over_the_timed_steps(modules, tmp_path):
    file, begin = tmp_path / "power.csv", 1000.0
    lines = ["999.9,130.0,1980,0", "1000.1,700.0,1400,1", "1000.35,690.0,1600,0", "1000.6,69"]
    file.write_text("\n".join(lines))
    assert modules.gpu_power.means(file, begin, begin + 1) == {"power_w": 695, "sm_mhz": 1500, "power_capped": 0.5}
    assert modules.gpu_power.means(file, begin + 10, begin + 11) == {}
    assert modules.gpu_power.means(tmp_path / "none.csv", begin, begin + 1) == {}


def test_the_gpu_of_a_benchmark_is_sampled(modules, monkeypatch, tmp_path):
    """The first of CUDA_VISIBLE_DEVICES, by index or UUID. Without a driver there is no file."""
    load = {"PowerUsage": 650_000, "ClockInfo": 1500, "CurrentClocksEventReasons": 0x5}
    file, power = tmp_path / "power.csv", modules.gpu_power
    monkeypatch.setattr(power, "PERIOD_S", 0.01)
    nvml.install(monkeypatch, nvml.gpu("GPU-a"), nvml.gpu("GPU-b", **load))
    for visible in ("1,0", "GPU-b"):
        file.unlink(missing_ok=True)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert power.kind_of_gpu() == "NVIDIA H200"
        begin = time.time()
        with power.sampling(file):
            time.sleep(0.1)
        assert power.means(file, begin, time.time()) == {"power_w": 650, "sm_mhz": 1500, "power_capped": 1}
    nvml.install(monkeypatch, driver=None)
    with power.sampling(tmp_path / "none.csv"):
        pass
    assert power.kind_of_gpu() is None
    assert not (tmp_path / "none.csv").exists()


# ------------------------------------------------------------------------------------------------------ nothing is measured


def test_the_plan_of_an_h200(modules):
    """Names are unique, configs are valid, and the most important cases come first."""
    cases = modules.gpu.cases({"device": "NVIDIA H200", "capacity_bytes": 120 * 2**30}, dry=False)
    assert len({case.name for case in cases}) == len(cases)
    assert [case.about["model"] for case in cases if case.kind == "train"][:3] == ["1B", "8B", "3B"]
    for case in cases:
        if case.kind == "attention":
            assert {B * S for B, S, *_ in case.options["shapes"]} == {8192, 32768}
            continue
        assert modules.gpu_cases.config_of(case.options["overrides"]).step_tokens == modules.gpu.STEP_TOKENS


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
    tokens, parameters, rate, copy = 65536, 10**9, 800e12, 4e12
    # 6 PFLOP of matmuls, 1 of causal attention at half the matmuls' speed.
    step_s = (6e15 / rate + 1e15 / (rate / 2) + (32 + 6) * parameters / copy) / 0.8
    about = {"model": "1B", "sequence_length": 8192}
    row = {"kind": "train", "about": about, "tokens_per_step": tokens, "parameters": parameters, "step_s": {"median": step_s}}
    row |= {"tokens_per_s": tokens / step_s, "tflops_causal": 7e3 / step_s, "tflops_full_square": 8e3 / step_s}
    attention = {"forward_flops": 1e12, "forward_backward_s": 3e12 / (rate / 2)}
    ceilings = {"kind": "ceilings", "copy_bytes_per_s": copy, "matmul_flops": rate}
    rows = {"ceilings": ceilings, "parts": {"kind": "parts", "about": about, "attention": attention}}
    assert modules.gpu_table.ceiling_share(row, rows) == pytest.approx(0.8)
    assert modules.gpu_table.ceiling_share(row, {"ours": row}) is None
