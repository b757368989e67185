"""Comparing compile reports: hand-made ones and a CPU's; other environments are scripts that run this interpreter."""

import dataclasses
import io
import json
import re
import shlex
import sys

import jax
import pytest
import scripts
import yaml
from rich.console import Console
from tiny import TINY

from jaxllm import cli
from jaxllm.compile.compare import ALL, compare, figures
from jaxllm.compile.compare_text import render_comparison
from jaxllm.compile.elsewhere import read_report, report_from_elsewhere
from jaxllm.compile.kernel_account import KernelAccount, KernelPart
from jaxllm.compile.overlap import Overlap
from jaxllm.compile.program import CollectiveRow
from jaxllm.compile.report import CompileReport
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.kernel_rates import kernel_rates

RECIPE = {**TINY, "data": {"source": "python_stdlib"}}
RATES = kernel_rates(GPUS["h100-80gb"], load_config(RECIPE).model)
GATHER = CollectiveRow("all-gather", ("data",), "bf16", True, True, True, 2, 64, 2**30, 2**30)
SCALAR = CollectiveRow("all-reduce", ("data", "tensor"), "f32", True, False, True, 1, 1, 4, 8)


def part(name, seconds, runs=10):
    return KernelPart(name, runs, 10**9, 0, seconds, 0.0, None)


def account(*parts):
    return KernelAccount(parts, sum(one.seconds for one in parts), 0.5, 0.4, RATES)


def exposed(kind, axes, seconds):
    return Overlap(kind, axes, 64, 2.0**30, 0.0, 0.0, 0.0, 0.5, seconds)


REPORT = CompileReport(
    gpu="h100-80gb",
    gpus=8,
    gpus_per_host=8,
    hosts_because="the largest divisor",
    mesh={"pipe": 1, "data": 8, "context": 1, "tensor": 1},
    attention="cudnn",
    argument_bytes=10 * 2**30,
    temp_bytes=20 * 2**30,
    output_bytes=10 * 2**30,
    alias_bytes=10 * 2**30,
    workspace_bytes=0,
    total_bytes=30 * 2**30,
    host_bytes=0,
    memory_bytes=80 * 2**30,
    capacity_bytes=72 * 2**30,
    fits=True,
    share_of_capacity=30 / 72,
    compile_s=10.0,
    trace_s=2.0,
    hlo_instructions=3000,
    hlo_bytes=10**6,
    executed_flops=10**15,
    attention_kernel_flops=0,
    compiled_flops=10**15,
    model_flops=9 * 10**14,
    near_rematerialisation=False,
    real_memory=None,
    collectives=(GATHER, SCALAR),
    largest_results=(),
    warnings=(),
    jax_version="0.10.2",
    overlap=(exposed("all-gather", ("data",), 0.01), exposed("all-reduce", ("data", "tensor"), 0.0)),
    exposed_transfers_s=0.01,
    kernels=account(part("matmuls", 0.9), part("norms", 0.05), part("transfers", 0.01)),
    packages=("jax-cuda13-plugin 0.10.2", "jaxllm 0.1.0 (code 0123456789)"),
)
WORSE = dataclasses.replace(
    REPORT,
    jax_version="0.12.0",
    temp_bytes=22 * 2**30,
    total_bytes=32 * 2**30,
    hlo_instructions=2900,
    compile_s=100.0,
    collectives=(dataclasses.replace(GATHER, behind_matmuls=False), dataclasses.replace(SCALAR, behind_matmuls=False)),
    overlap=(exposed("all-gather", ("data",), 0.04), exposed("all-reduce", ("data", "tensor"), 1e-6)),
    exposed_transfers_s=0.040001,
    kernels=account(part("matmuls", 0.9), part("norms", 0.04), part("copies", 0.02), part("transfers", 0.040001)),
    warnings=("Something is bare.",),
)


def text_of(comparison):
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    console.print(render_comparison(comparison))
    return console.file.getvalue()


def verdicts(comparison, verdict):
    return [change.name for change in comparison.changes if change.verdict == verdict]


# ------------------------------------------------------------------------------------------------------------ comparing


def test_a_report_against_itself_changes_nothing():
    found = compare(REPORT, REPORT, "other")
    assert {change.verdict for change in found.changes} == {"same"}
    assert all(change.before == change.after and change.relative == 0 for change in found.changes)
    text = text_of(found)
    assert "Worse: nothing" in text
    assert "Better: nothing" in text
    assert "%" not in text.replace("0.1% of the total", "")


def test_what_got_worse_comes_first_and_the_most_first():
    """A scalar's all-reduce that lost its overlap does not matter, time to compile is noise, and new is more than any share."""
    found = compare(REPORT, WORSE, "new")
    assert verdicts(found, "worse") == [
        f"sent, not hidden: {ALL}",
        "sent, not hidden: all-gather over data",
        "time: copies",
        f"exposed: {ALL}",
        "exposed: all-gather over data",
        "kernel launches",
        "memory: temporaries",
        f"memory: {ALL}",
        f"time: {ALL}",
    ]
    assert verdicts(found, "better") == ["time: norms", "HLO instructions"]
    order = [change.verdict for change in found.changes]
    assert order == sorted(order, key=("worse", "better", "same").index)
    assert "exposed: all-reduce over data x tensor" in verdicts(found, "same")
    json.loads(json.dumps(found.to_json()), parse_constant=lambda constant: pytest.fail(constant))


def test_an_exchange_that_is_not_in_each_step_is_no_row_of_the_exposed_seconds():
    """They are the rows of their total."""
    exchange = dataclasses.replace(exposed("all-reduce", ("replica",), 5.0), every_steps=50)
    rounds = dataclasses.replace(REPORT, overlap=(exchange, *REPORT.overlap))
    by_name = figures(rounds)["exposed"].by_name
    assert by_name.pop(ALL) == sum(by_name.values()) == 0.01


def test_what_is_worse_in_one_direction_is_better_in_the_other():
    there, back = compare(REPORT, WORSE, "new"), compare(REPORT, dataclasses.replace(WORSE, jax_version="0.10.1"), "old")
    assert back.names == ("old", "this command")
    assert set(verdicts(there, "worse")) == set(verdicts(back, "better"))
    assert set(verdicts(there, "better")) == set(verdicts(back, "worse"))


@pytest.mark.parametrize(
    ("version", "is_earlier", "first", "because"),
    [
        ("0.10.2", False, "this command", "it is the step without --against"),
        ("0.10.2", True, "other", "it is the earlier report"),
        ("0.12.0", True, "this command", "it has the older JAX"),
        ("0.10.2.1", False, "this command", "it has the older JAX"),
        ("0.9.12", False, "other", "it has the older JAX"),
    ],
)
def test_the_baseline_is_the_older_jax(version, is_earlier, first, because):
    found = compare(REPORT, dataclasses.replace(REPORT, jax_version=version), "other", is_earlier=is_earlier)
    assert (found.names[0], found.because) == (first, because)
    assert f"The baseline is {first}: {because}." in text_of(found)


def test_the_text_fits_80_columns_and_names_what_differs():
    other = dataclasses.replace(
        WORSE,
        fits=False,
        share_of_capacity=1.25,
        model_flops=10**15,
        attention="xla",
        packages=("jax-cuda13-plugin 0.12.0", "jaxllm 0.2.0 (code abcdef0123)"),
        xla_flags="--xla_gpu_autotune_level=0",
    )
    text = text_of(compare(REPORT, other, "/somewhere/new"))
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in (
        "JAX 0.10.2, jax-cuda13-plugin 0.10.2, jaxllm 0.1.0 (code 0123456789)",
        "JAX 0.12.0, jax-cuda13-plugin 0.12.0, jaxllm 0.2.0 (code abcdef0123)",
        "with --xla_gpu_autotune_level=0",
        "Different code of jaxllm",
        "different work",
        "attention xla after",
        "It DOES NOT FIT any more: 125.0% of what a step may take, 41.7% before",
        "New warnings\n  Something is bare.",
    ):
        assert words in text


@pytest.mark.parametrize("change", [{"gpu": "h200-141gb"}, {"gpus": 16}, {"gpus_per_host": 4}], ids=lambda one: next(iter(one)))
def test_steps_for_other_gpus_are_refused(change):
    other = dataclasses.replace(REPORT, **change)
    hosts = {"gpus": "2 hosts", "gpus_per_host": "2 hosts"}.get(next(iter(change)), "1 host")
    with pytest.raises(ConfigError) as refused:
        compare(REPORT, other, "other")
    assert str(refused.value) == (
        "This step is for 8 x h100-80gb (1 host of 8), and the other for "
        f"{other.gpus} x {other.gpu} ({hosts} of {other.gpus_per_host}): --against compares steps for the same GPUs."
    )


# -------------------------------------------------------------------------------------------------------- stored reports


def test_the_report_that_was_stored_is_read_back(tmp_path):
    """Also with keys that only another version knows, and from the JSON of a comparison."""
    file = tmp_path / "stored.json"
    for values in (REPORT.to_json(), {**REPORT.to_json(), "against": WORSE.to_json(), "comparison": {}, "later": [1]}):
        file.write_text(json.dumps(values))
        assert read_report(file) == REPORT
    older = {key: value for key, value in REPORT.to_json().items() if key not in ("packages", "xla_flags")}
    file.write_text(json.dumps(older))
    assert read_report(file) == dataclasses.replace(REPORT, packages=(), xla_flags="")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        ("{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ("[]", "it is []: it should be a dictionary or an instance of CompileReport"),
        ('{"gpu": "h100-80gb"}', "it has no gpus"),
        (json.dumps({**REPORT.to_json(), "total_bytes": "many"}), "total_bytes is many: it should be a valid integer"),
        (json.dumps({**REPORT.to_json(), "total_bytes": 10**400}), "a number is too large"),
    ],
    ids=["no file", "no JSON", "a list", "another JSON", "a wrong type", "a huge number"],
)
def test_what_is_no_report_is_refused(tmp_path, monkeypatch, content, reason):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "other.json").write_text(content)
    with pytest.raises(ConfigError) as refused:
        report_from_elsewhere(["other.json"], [])
    beginning, found, end = str(refused.value).partition(reason)
    assert (beginning, found) == ("other.json is no report of a compiled step (", reason)
    assert end.endswith("): name a file that this version of `jaxllm compile --json` can have written.")


# ---------------------------------------------------------------------------------------------------- other environments


def environment(folder, script):
    """The folder of an environment whose Python is this shell script."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(folder)


def test_words_that_are_a_recipe_or_its_keys_are_no_place(tmp_path):
    assert report_from_elsewhere([], []) is None
    assert report_from_elsewhere(["parallel.remat=full", f"data.paths=[{tmp_path}]"], []) is None
    assert report_from_elsewhere(["quickstart", "train.seed=3"], []) is None


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (None, "has no bin/python: name the folder of a virtual environment, or a recipe."),
        (
            "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'jax'\" >&2; exit 1",
            "this step: ModuleNotFoundError: No module named 'jax'; pip install 'jaxllm[aot]' there.",
        ),
        ("echo 'jaxllm: There is no GPU h1: name another.' >&2; exit 2", "this step: There is no GPU h1: name another."),
        ("exit 3", "bin/python does not compile this step: exit code 3"),
        ("echo hello", "bin/python printed no report of the step (not JSON"),
    ],
    ids=["no Python", "no package", "a sentence", "nothing said", "no report"],
)
def test_an_environment_that_does_not_compile_is_one_sentence(tmp_path, script, sentence):
    folder = str(tmp_path) if script is None else environment(tmp_path / "other", script)
    with pytest.raises(ConfigError) as refused:
        report_from_elsewhere([folder], [])
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_flags_that_xla_does_not_know_are_refused():
    with pytest.raises(ConfigError, match=r"^XLA_FLAGS has --xla_gpu_no_such, which this JAX .* does not know: remove it\.$"):
        report_from_elsewhere(["XLA_FLAGS=--xla_gpu_no_such=true"], [])
    with pytest.raises(ConfigError, match=r"^XLA_FLAGS has fast, which is no flag: "):
        report_from_elsewhere(["XLA_FLAGS=fast"], [])
    with pytest.raises(ConfigError) as refused:
        report_from_elsewhere(["XLA_FLAGS=--xla_gpu_autotune_level=0", "parallel.zero=1"], [])
    assert str(refused.value) == (
        "--against was given 2 words: an environment, a report or XLA_FLAGS=... stands alone, and all flags in one pair of "
        "quotes."
    )


def test_another_environment_gets_this_package_and_the_same_arguments(tmp_path, monkeypatch):
    """Its Python notes what it was asked, and prints a stored report."""
    (tmp_path / "stored.json").write_text(json.dumps(WORSE.to_json()))
    places = {name: shlex.quote(str(tmp_path / name)) for name in ("asked", "stored.json")}
    folder = environment(tmp_path / "other", f'printf "%s\\n" "$@" > {places["asked"]}; cat {places["stored.json"]}')
    assert report_from_elsewhere([folder], ["a.yaml", "--gpu=h100-80gb"]) == WORSE
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-4:] == ["compile", "a.yaml", "--gpu=h100-80gb", "--json"]
    assert asked[-5] == sys.modules["jaxllm"].__file__


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "run": {"cpu_devices": jax.device_count()}}))
    return str(path)


def test_the_same_step_by_this_interpreter_elsewhere_is_the_same(recipe, tmp_path, capsys):
    """The complete way, for CPUs: the other environment runs this interpreter. Times of CPUs are not known."""
    folder = environment(tmp_path / "other", f'exec {shlex.quote(sys.executable)} "$@"')
    cli.compile_([recipe, "model.num_layers=1"], against=[folder], as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert {change["verdict"] for change in values["comparison"]["changes"]} == {"same"}
    assert {change["unit"] for change in values["comparison"]["changes"]} == {"", "bytes", "FLOPs"}
    assert (values["comparison"]["before"], values["comparison"]["after"]) == ("this command", folder)
    for key in ("packages", "jax_version", "total_bytes", "collectives"):
        assert values[key] == values["against"][key]


def test_flags_reach_a_process_of_their_own(recipe, tmp_path, capsys, monkeypatch):
    """This Python is a script that notes its flags and prints a stored report."""
    places = {name: shlex.quote(str(tmp_path / name)) for name in ("flags", "stored.json")}
    (tmp_path / "stored.json").write_text(json.dumps(REPORT.to_json()))
    script = f'printf "%s" "$XLA_FLAGS" > {places["flags"]}; cat {places["stored.json"]}'
    monkeypatch.setattr(sys, "executable", f"{environment(tmp_path / 'this', script)}/bin/python")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    monkeypatch.setattr("jaxllm.compile.report.compile_report", lambda *_, **__: REPORT)
    cli.compile_([recipe], against=["XLA_FLAGS=--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"])
    assert (tmp_path / "flags").read_text() == (
        "--xla_dump_to=here --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    )
    assert "Worse: nothing" in capsys.readouterr().out


def test_a_stored_report_is_compared_by_the_command_line(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxllm.compile.report.compile_report", lambda *_, **__: REPORT)
    (tmp_path / "stored.json").write_text(json.dumps(dataclasses.replace(WORSE, jax_version="0.10.2").to_json()))
    words = [str(tmp_path / "stored.json")]
    cli.compile_([recipe], against=words)
    text = capsys.readouterr().out
    assert "it is the earlier report." in " ".join(text.split())
    assert "time: norms" in text.partition("Worse")[2].partition("Better")[0]
    cli.compile_([recipe], against=words, kernels=True)
    assert "\nThe other\n" in capsys.readouterr().out
    (tmp_path / "stored.json").write_text(json.dumps(dataclasses.replace(WORSE, gpus=16).to_json()))
    for kernels in (False, True):
        with pytest.raises(ConfigError, match=r"This step is for 8 x h100-80gb"):
            cli.compile_([recipe], against=words, kernels=kernels)


# ------------------------------------------------------------------------------------------------------ versions of JAX


def test_the_table_of_versions_is_that_of_the_stored_figures():
    """And a figure that grew by more than 1% is named, of a version that is not stored against the newest that is."""
    script = scripts.load("benchmarks/jax_versions.py")
    stored = json.loads(script.STORED.read_text())
    table = "\n".join(script.table(stored))
    assert f"<!-- jax-versions: begin -->\n{table}\n<!-- jax-versions: end -->" in script.PAGE.read_text()
    assert list(script.grown(stored, stored)) == []
    newest = list(stored)[-1]
    title, values = next(iter(stored[newest].items()))
    larger = {**stored[newest], title: {**values, "bytes": 2 * values["bytes"], "exposed_s": 1.005 * values["exposed_s"]}}
    (sentence,) = script.grown({"9.9": larger}, stored)
    assert re.fullmatch(rf"JAX 9\.9, {title}: memory .* GiB, stored for {re.escape(newest)} .* GiB\.", sentence)
