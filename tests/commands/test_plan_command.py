"""`jaxllm plan` for a user: its winner trains, its JSON keeps the contract, mistakes give one sentence."""

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import yaml
from tiny import SMALL_MODEL
from typer.testing import CliRunner

import jaxllm
from jaxllm.cli.app import app
from jaxllm.compile import confirm as confirm_module
from jaxllm.compile import plan as plan_command
from jaxllm.compile.aot import can_compile_for_gpus
from jaxllm.compile.confirm import InlineExecutor, compiler, processes
from jaxllm.compile.overlap import total
from jaxllm.compile.plan import outcome, plan
from jaxllm.config import ConfigError, config_folder, load_config
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import FIT_SHARE, GPUS
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.plan import fastest_remat
from jaxllm.plan.plan_result import TIE_SHARE
from jaxllm.plan.plan_result import recipe as recipe_of
from jaxllm.plan.search import SearchOptions, search

RECIPE = {
    "model": {"name": "llama-3.2-1b", "rope_theta": 10000.0},
    "parallel": {"zero": 2, "context_method": "ring"},
    "optimizer": {"learning_rate": 2.0e-4, "warmup_tokens": 1000},
    "train": {"steps": 10, "sequence_length": 4096, "global_batch_sequences": 16},
    "run": {"dir": "runs/planned", "cpu_devices": 8},
}
CANDIDATE_KEYS = {
    *("pipe", "data", "context", "tensor", "zero", "microbatch_sequences", "schedule", "virtual_stages", "remat"),
    *("estimate_bytes", "compiled_bytes", "tokens_per_s_per_gpu", "tflops_per_gpu", "step_s", "exposed_communication_share"),
    *("predicted_step_s", "predicted_transfers_s", "scheduled_transfers_s", "sent_s", "offload_state"),
}
SMALL = {
    "model": SMALL_MODEL,
    "train": {"steps": 2, "sequence_length": 512, "global_batch_sequences": 16},
}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return str(path)


def run(*arguments):
    """Runs the command in this process, because importing JAX takes longer than planning."""
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=True)


def cli(*arguments):
    command = [sys.executable, "-m", "jaxllm.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=config_folder().parent, timeout=300)


def test_json_keeps_the_contract(recipe):
    result = run(recipe, "--gpu", "h100-80gb", "--gpus", "16", "--compile", "0", "--tokens", "1.5T", "--price", "2.5", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    gpu = GPUS["h100-80gb"]
    assert (values["gpu"], values["gpus"], values["gpus_per_host"]) == ("h100-80gb", 16, 8)
    assert values["capacity_bytes"] == gpu.capacity_bytes
    candidates = values["candidates"]
    assert len(candidates) == values["candidates_that_fit"] > 0
    speeds = [one["tokens_per_s_per_gpu"] for one in candidates]
    # But for ties.
    assert all(later <= sooner / (1 - TIE_SHARE) for sooner, later in itertools.combinations(speeds, 2))
    assert values["without_host"] is None or values["without_host"]["host_bytes"] == 0
    # Rounding costs layers of 1B's width half of what their matmuls gain.
    assert 1.05 < values["with_fp8"]["tokens_per_s_per_gpu"] / speeds[0] < 1.2
    flops = train_flops_per_token(load_config(recipe).model, 4096)
    for one in candidates:
        assert set(one) >= CANDIDATE_KEYS
        assert one["pipe"] * one["data"] * one["context"] * one["tensor"] == 16
        assert one["estimate_bytes"] <= FIT_SHARE * gpu.capacity_bytes
        assert one["compiled_bytes"] is one["scheduled_transfers_s"] is None
        assert one["step_s"] == one["predicted_step_s"] > one["predicted_transfers_s"]
        assert one["tflops_per_gpu"] == pytest.approx(one["tokens_per_s_per_gpu"] * flops / 1e12)
    assert {"unit", "reason", "count", "example"} == set(values["rejected"][0])
    cost, days = values["cost"], values["quote"]["days"]
    assert days["low"] < days["expected"] < days["high"]
    assert days["expected"] == pytest.approx(cost["days"])
    assert values["quote"]["money"]["expected"] == pytest.approx(2.5 * cost["gpu_hours"])
    assert values["quote"]["goodput"] is None
    assert cost["days"] == pytest.approx(1.5e12 / (16 * speeds[0]) / 86400)
    assert cost["gpu_hours"] == pytest.approx(cost["days"] * 24 * 16)
    assert cost["energy_kwh"] == pytest.approx(cost["gpu_hours"] * 0.7 * cost["overhead"])


def test_the_winner_is_a_recipe_that_keeps_the_rest(recipe, tmp_path):
    out = tmp_path / "best.yaml"
    result = run(recipe, "optimizer.beta2=0.98", "--gpus", "16", "--compile", "0", "--keep", "pipe", "--out", str(out))
    assert result.exit_code == 0, result.output
    written, given = load_config(out), load_config(recipe, ["optimizer.beta2=0.98"])
    found = plan(given, gpus=16, keep=["pipe"])
    assert written == found.best
    assert found.best.resolve(16) == found.best
    for section in ("model", "data", "optimizer", "checkpoint", "log"):
        assert getattr(written, section) == getattr(given, section)
    assert written.train == given.train.model_copy(update={"microbatch_sequences": found.best.microbatch_sequences})
    assert written.parallel.context_method == "ring"
    # The CPU devices were only for a small test.
    assert written.run == given.run.model_copy(update={"cpu_devices": None})
    heading = [line for line in out.read_text().splitlines() if line.startswith("#")]
    assert str(found.candidates[0].choice) in heading[0]
    assert any(f"jaxllm train {out}" in line for line in heading)
    assert any("16 x h100-80gb, 2 hosts of 8" in line for line in heading)
    # Sizes that follow from the name are left out, except for changed ones.
    assert set(yaml.safe_load(out.read_text())["model"]) == {"name", "rope_theta"}


def test_an_existing_file_is_not_overwritten(recipe, tmp_path):
    out = tmp_path / "best.yaml"
    out.write_text("mine")
    result = cli(recipe, "--gpus", "16", "--compile", "0", "--out", str(out))
    assert result.returncode == 2
    assert result.stderr == f"jaxllm: --out={out} exists already, and a plan never overwrites a file: choose another file.\n"
    assert result.stdout == ""
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "h100"], "There is no GPU h100: did you mean h100-80gb?"),
        (["--price", "2"], "--price counts only with --tokens: add it, or leave --price out."),
        (["--tokens", "1T", "--mtbf-hours", "0.5"], "such a run does not get ahead"),
        (["--objective", "cheap"], "--objective=cheap is not one of the choices: use speed, gpus, sequence, microbatch."),
        (["--sweep", "hosts"], "--sweep=hosts cannot be swept: use --sweep gpus."),
        (["--tokens", "many"], "--tokens=many is not a number of tokens"),
        (["--keep", "tensr"], "--keep=tensr is not a searched setting: did you mean tensor?"),
        (["--compile", "-1"], "--compile=-1 is not valid"),
        (["--gpus", "0"], "--gpus=0 is not valid"),
        (["--gpus-per-host", "5"], "--gpus-per-host=5 does not divide the 16 GPUs"),
        (["parallel.tensor=16", "--gpus", "8", "--keep", "tensor"], "--keep leaves no configuration of 8 GPUs"),
        (["--tokens", "1,5T"], "--tokens=1,5T is not a number of tokens"),
        (["--out", "/nowhere/best.yaml"], "--out=/nowhere/best.yaml: the folder /nowhere does not exist"),
    ],
)
def test_mistakes_are_one_sentence(recipe, arguments, sentence):
    result = run(recipe, "--gpus", "16", "--compile", "0", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(("option", "value"), [("--rows", "-3"), ("--host-gib-per-gpu", "-1")])
def test_less_than_nothing_is_refused(recipe, option, value):
    result = run(recipe, "--gpus", "16", "--compile", "0", option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert result.stdout == ""


def test_what_cannot_fit_says_what_would(recipe):
    result = cli(recipe, "model.name=llama-3-70b", "--gpus", "2", "--compile", "0", "--keep", "pipe")
    assert result.returncode == 2
    replaced, refused = result.stderr.splitlines()
    assert replaced.endswith("model.name=llama-3-70b replaces rope_theta of the recipe.")
    assert refused.startswith("jaxllm: Nothing fits on 2 x h100-80gb: of those ")
    assert result.stderr.count("\n") == 2
    # Its suggestion fits.
    words = result.stderr.rsplit(": use ", 1)[1].rstrip(".\n").split(" or ")
    for change in words:
        key, value = change.split("=")
        gpus, overrides = (int(value), []) if key == "--gpus" else (2, [change])
        found = plan(load_config(recipe, ["model.name=llama-3-70b", *overrides]), gpus=gpus, keep=["pipe"])
        assert found.candidates


def test_the_table_shows_candidates_and_reasons(recipe):
    keep = ["--keep", "pipe", "--keep", "zero"]
    terms = ["--tokens", "1T", "--mtbf-hours", "50000", "--restart-minutes", "5", "--checkpoint-gb-per-s", "2"]
    result = run(recipe, "--gpus", "16", "--compile", "0", *keep, "--rows", "3", "--sweep", "gpus", *terms)
    assert result.exit_code == 0, result.output
    found = plan(load_config(recipe), gpus=16, keep=["pipe", "zero"])
    rows = [line.split() for line in result.stdout.splitlines()]
    table = [row for row in rows if row and row[0] in ("1", "2", "3") and len(row) > 10]
    best = found.candidates[0]
    mesh = best.choice.mesh
    assert [int(word) for word in table[0][1:7]] == [
        *dataclasses.astuple(mesh),
        best.choice.zero,
        best.choice.microbatch_sequences,
    ]
    assert f"{len(found.candidates) - 3:,} more that fit" in result.stdout
    for line in found.rejected:
        assert f"{line.count:,}" in result.stdout
    assert "1T tokens: " in result.stdout
    assert "checkpoint.every_minutes=" in result.stdout
    for heading in ("efficiency", "exposed", "ring", "tree", "hierarchical", "days"):
        assert heading in result.stdout
    assert "pay in time" in result.stdout


def test_ctrl_c_prints_the_best_so_far(recipe, monkeypatch, tmp_path):
    real, calls = estimate_memory, []

    def stopped(config, gpu=None):
        calls.append(config)
        if len(calls) == 300:
            raise KeyboardInterrupt
        return real(config, gpu)

    monkeypatch.setattr(fastest_remat, "estimate_memory", stopped)
    out = tmp_path / "best.yaml"
    result = run(recipe, "--gpus", "16", "--compile", "8", "--json", "--out", str(out))
    assert result.exit_code == 130
    assert "interrupted; this is the best so far" in result.stderr
    values = json.loads(result.stdout)
    assert values["interrupted"] is True
    assert 0 < values["candidates_that_fit"] < 300
    assert load_config(out).parallel.tensor == values["candidates"][0]["tensor"]


def test_ctrl_c_in_the_search_with_fp8_leaves_the_plan(recipe, monkeypatch):
    real = estimate_memory

    def stopped(config, gpu=None):
        if config.model.multiplies_fp8:
            raise KeyboardInterrupt
        return real(config, gpu)

    monkeypatch.setattr(fastest_remat, "estimate_memory", stopped)
    result = run(recipe, "--gpus", "4", "--compile", "8", "--json")
    assert result.exit_code == 130
    values = json.loads(result.stdout)
    assert (values["interrupted"], values["with_fp8"], values["confirmed"]) == (True, None, 0)
    assert values["candidates"]


KEEP = ["--keep", "schedule", "--keep", "zero", "--keep", "remat"]


def test_ctrl_c_in_the_sweep_leaves_the_plan_whole(recipe, monkeypatch):
    real = estimate_memory

    def stopped(config, gpu=None):
        if config.devices == 4:
            raise KeyboardInterrupt
        return real(config, gpu)

    monkeypatch.setattr(fastest_remat, "estimate_memory", stopped)
    arguments = [recipe, "--gpus", "16", "--compile", "0", "--sweep", "gpus", *KEEP]
    result = run(*arguments, "--json")
    assert result.exit_code == 130
    values = json.loads(result.stdout)
    assert values["interrupted"] is False
    assert values["sweep"]["interrupted"] is True
    assert [row["gpus"] for row in values["sweep"]["rows"]] == [1, 2]
    assert result.stderr == "jaxllm: interrupted; the plan is complete, the sweep is not.\n"
    text = run(*arguments).stdout
    assert "INTERRUPTED: the best so far" not in text
    assert "INTERRUPTED: the last number of GPUs was not looked at to its end" in text


def test_a_sweep_has_the_plan_itself_and_goes_as_far_as_the_gpus(recipe, monkeypatch):
    """Also if the smallest sufficient number of GPUs is below the present one, and compiling has rejected the fastest
    candidate."""
    monkeypatch.setattr("jaxllm.compile.aot.can_compile_for_gpus", lambda: True)
    monkeypatch.setattr(plan_command, "processes", lambda _: contextlib.nullcontext(InlineExecutor))
    compiled = []

    class Report:
        total_bytes = 1
        host_bytes = 0
        exposed_transfers_s = None

    def report(*arguments, **_):
        compiled.append(arguments)
        return type("Large", (Report,), {"total_bytes": 10**15}) if len(compiled) == 1 else Report

    monkeypatch.setattr("jaxllm.compile.report.compile_report", report)
    config = load_config(recipe)
    for objective, gpus in (("gpus", 12), ("microbatch", 4)):
        compiled.clear()
        keep = ("schedule", "remat")
        found = outcome(config, gpus=gpus, compile=1, objective=objective, sweep="gpus", keep=keep)
        assert len(compiled) == 2
        (row,) = (row for row in found.sweep.rows if row.gpus == found.plan.gpus)
        assert row.best.config == found.plan.best
        assert found.sweep.rows[-1].gpus == gpus
        assert (found.plan.gpus < gpus) is (objective == "gpus")
        if objective == "microbatch":
            for row in found.sweep.rows[:-1]:
                alike = search(config, GPUS["h100-80gb"], row.gpus, options=SearchOptions(keep=keep, largest_microbatch=True))
                assert row.best == alike.candidates[0]


@pytest.mark.parametrize(
    ("objective", "line"),
    [("speed", "The fastest of all that fit"), ("gpus", "The fewest GPUs, up to 4, on which anything fits")],
)
def test_the_objective_is_told(recipe, objective, line):
    result = run(recipe, "--gpus", "4", "--compile", "0", "--objective", objective, *KEEP)
    assert line in result.stdout


def test_an_upper_limit_of_gpus_need_not_be_whole_hosts(recipe):
    """--gpus-per-host=8 does not divide 50, and the fewest GPUs are fewer."""
    found = outcome(load_config(recipe), gpus=50, gpus_per_host=8, objective="gpus")
    assert found.plan.gpus < 50


def test_ctrl_c_before_anything_fits_says_so(recipe, monkeypatch):
    def stopped(config, gpu=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(fastest_remat, "estimate_memory", stopped)
    result = run(recipe, "--gpus", "16")
    assert result.exit_code == 130
    assert "interrupted before any config that fits was found" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("objective", ["gpus", "sequence", "microbatch"])
def test_objectives(recipe, objective):
    config = load_config(recipe, ["train.global_batch_sequences=8"])
    found = plan(config, "a100-40gb", 8, objective=objective, keep=["schedule", "zero"])
    limit = FIT_SHARE * found.capacity_bytes
    assert all(one.estimate_bytes <= limit for one in found.candidates)
    if objective == "gpus":
        assert found.gpus < 8
        assert (
            not search(
                config, GPUS["a100-40gb"], max(1, found.gpus // 2), options=SearchOptions(keep=["schedule", "zero"])
            ).candidates
            or found.gpus == 1
        )
    elif objective == "sequence":
        length = found.config.train.sequence_length
        assert length > config.train.sequence_length
        longer = config.model_copy(update={"train": config.train.model_copy(update={"sequence_length": length + 1024})})
        assert not search(longer, GPUS["a100-40gb"], 8, options=SearchOptions(keep=["schedule", "zero"])).candidates
    else:
        speed = search(config, GPUS["a100-40gb"], 8, options=SearchOptions(keep=["schedule", "zero"]))
        assert found.best.microbatch_sequences == max(one.config.microbatch_sequences for one in speed.candidates)


# -------------------------------------------------------------------------------------------------------------- the API


def test_plan_is_a_function_and_a_package():
    code = (
        "import sys, jaxllm\n"
        "config = jaxllm.load_config({'model': {'name': 'smollm2-135m'}, 'train': {'steps': 1, 'sequence_length': 2048,"
        " 'global_batch_sequences': 16}})\n"
        "found = jaxllm.plan(config, gpu='h100-80gb', gpus=8, compile=0)\n"
        "again = jaxllm.plan(config, gpu='h100-80gb', gpus=8)\n"
        "import jaxllm.cost_model.flops as flops\n"
        "assert found == again and found.best == found.candidates[0].config\n"
        "assert flops.__name__ == 'jaxllm.cost_model.flops'\n"
        "assert 'jax' not in sys.modules, 'planning by estimates alone needs no JAX'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=config_folder().parent)
    assert result.returncode == 0, result.stderr
    assert callable(jaxllm.plan)


def test_the_package_lists_what_it_has_once():
    names = dir(jaxllm)
    assert len(set(names)) == len(names)
    assert set(jaxllm.__all__) <= set(names)
    assert all(callable(getattr(jaxllm, name)) for name in jaxllm.__all__)


def test_the_recipe_of_a_config_is_the_config():
    for overrides in (["model.tie_embeddings=false"], ["parallel.remat={query: keep}"], ["log.profile_steps=[2, 3]"]):
        config = load_config(RECIPE, overrides)
        assert load_config(recipe_of(config)) == config


# ------------------------------------------------------------------------------------------------------------ compiling


def test_without_the_packages_the_plan_is_unconfirmed_and_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr("jaxllm.compile.aot.can_compile_for_gpus", lambda: False)
    found = plan(load_config(SMALL), gpus=8, compile=2)
    assert found.candidates
    assert found.confirmed == 0
    assert "pip install 'jaxllm[aot]'" in found.unconfirmed_because


def test_a_compiler_travels_to_another_process(monkeypatch, tmp_path):
    """And so do the figures that it returns, of what compile_report says of the plan's GPUs."""
    asked = []

    class Report:
        total_bytes, host_bytes, exposed_transfers_s, more = 3, 2, 0.5, threading.Lock()

    def report(*arguments, **options):
        asked.append((arguments, options))
        return Report

    monkeypatch.setattr("jaxllm.compile.report.compile_report", report)
    found = plan(load_config(SMALL), gpus=8)
    compile_candidate = pickle.loads(pickle.dumps(compiler(found, tmp_path)))
    figures = pickle.loads(pickle.dumps(compile_candidate(found.best)))
    assert vars(figures) == {"total_bytes": 3, "host_bytes": 2, "exposed_transfers_s": 0.5}
    assert asked == [((found.best, found.gpu, 8, 8), {"cache": tmp_path})]
    assert pickle.loads(pickle.dumps(found.best)) == found.best


def test_compilations_run_in_other_processes_which_end_with_the_plan():
    started = time.perf_counter()
    with processes(2) as start:
        pool = start()
        assert pool.submit(os.getpid).result() != os.getpid()
        busy = pool.submit(os.getpid).result()
        pool.submit(time.sleep, 600)
        pool.submit(time.sleep, 600)
    assert time.perf_counter() - started < 60
    for _ in range(100):
        try:
            os.kill(busy, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"process {busy} is still running")


def test_where_no_process_starts_it_compiles_here(monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(confirm_module, "ProcessPoolExecutor", refuse)
    with processes(2) as start:
        executor = start()
        assert isinstance(executor, InlineExecutor)
        assert executor.submit(os.getpid).result() == os.getpid()
    assert "no processes could be started (no more processes)" in caplog.text


def test_what_compiles_above_the_capacity_is_rejected(monkeypatch):
    """With invented compile figures: every candidate that the estimate ranks first is too large."""
    monkeypatch.setattr("jaxllm.compile.aot.can_compile_for_gpus", lambda: True)
    monkeypatch.setattr(plan_command, "processes", lambda _: contextlib.nullcontext(InlineExecutor))

    class Report:
        total_bytes = 10**15
        host_bytes = 0
        exposed_transfers_s = None

    monkeypatch.setattr("jaxllm.compile.report.compile_report", lambda *_, **__: Report)
    config = load_config(SMALL)
    found = plan(config, gpus=8, compile=2)
    assert found.confirmed == 0
    assert found.rejected[-1].reason == "compiled above capacity"
    assert found.rejected[-1].count == 6


@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_the_best_is_compiled(tmp_path):
    """With the real compiler, in a process of its own: its bytes and transfers equal those of `jaxllm compile`."""
    from jaxllm.compile.report import compile_report

    keep = ["pipe", "context", "tensor", "remat", "schedule"]
    found = plan(load_config(SMALL), gpus=2, compile=1, keep=keep, cache=tmp_path)
    assert found.confirmed == 1
    assert found.unconfirmed_because is None
    report = compile_report(found.best, GPUS["h100-80gb"], 2, cache=tmp_path)
    assert report.cached
    best = found.candidates[0]
    assert report.total_bytes == best.compiled_bytes
    assert report.exposed_transfers_s == best.scheduled_transfers_s == pytest.approx(total(report.overlap).exposed_s)
    assert best.step_s == pytest.approx(best.predicted.step_s - best.predicted.transfers_s + report.exposed_transfers_s)
    assert found.candidates[1].compiled_bytes is None
