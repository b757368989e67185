"""benchmarks/against.py and jax_versions.py: stored reports by hand; other environments are scripts."""

import dataclasses
import json
import re
import shlex
import sys

import jax
import pytest
import scripts
import yaml
from compile_reports import RECIPE, REPORT, WORSE

from jaxllm.config import ConfigError

against = scripts.load("benchmarks/against.py")


@pytest.mark.parametrize(
    ("version", "other", "first", "because"),
    [
        ("0.10.2", "folder", "this environment", "it is the step of this environment"),
        ("0.10.2", "stored.json", "stored.json", "it is the earlier report"),
        ("0.12.0", "stored.json", "this environment", "it has the older JAX"),
        ("0.10.2.1", "folder", "this environment", "it has the older JAX"),
        ("0.9.12", "folder", "folder", "it has the older JAX"),
    ],
)
def test_the_baseline_is_the_older_jax(version, other, first, because):
    pairs, reason = against.ordered(REPORT, dataclasses.replace(REPORT, jax_version=version), other)
    assert (pairs[0][0], reason) == (first, because)


def test_what_compiled_each_step_is_named():
    packages = ("jax-cuda13-plugin 0.12.0", "jaxllm 0.2.0 (code abcdef0123)")
    other = dataclasses.replace(WORSE, packages=packages, xla_flags="--xla_gpu_autotune_level=0")
    assert list(against.made_by([("this environment", REPORT), ("new", other)])) == [
        "this environment: JAX 0.10.2, jax-cuda13-plugin 0.10.2, jaxllm 0.1.0 (code 0123456789)",
        "new: JAX 0.12.0, jax-cuda13-plugin 0.12.0, jaxllm 0.2.0 (code abcdef0123)",
        "  with --xla_gpu_autotune_level=0",
        "Different code of jaxllm: it too may have changed the step, the times and the counts.",
    ]


# -------------------------------------------------------------------------------------------------------- stored reports


def test_the_report_that_was_stored_is_read_back(tmp_path):
    """Also with keys that only another version knows, and from the JSON of a comparison."""
    file = tmp_path / "stored.json"
    for values in (REPORT.to_json(), {**REPORT.to_json(), "against": WORSE.to_json(), "comparison": {}, "later": [1]}):
        file.write_text(json.dumps(values))
        assert against.read_report(file) == REPORT
    older = {key: value for key, value in REPORT.to_json().items() if key not in ("packages", "xla_flags")}
    file.write_text(json.dumps(older))
    assert against.read_report(file) == dataclasses.replace(REPORT, packages=(), xla_flags="")


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
        against.report_of("other.json", [])
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


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (None, "has no bin/python: name the folder of a virtual environment."),
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
        against.report_of(folder, [])
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_flags_that_xla_does_not_know_are_refused():
    with pytest.raises(ConfigError, match=r"^XLA_FLAGS has --xla_gpu_no_such, which this JAX .* does not know: remove it\.$"):
        against.report_of("XLA_FLAGS=--xla_gpu_no_such=true", [])
    with pytest.raises(ConfigError, match=r"^XLA_FLAGS has fast, which is no flag: "):
        against.report_of("XLA_FLAGS=fast", [])


def test_another_environment_gets_this_package_and_the_same_arguments(tmp_path):
    """Its Python notes what it was asked, and prints a stored report."""
    (tmp_path / "stored.json").write_text(json.dumps(WORSE.to_json()))
    places = {name: shlex.quote(str(tmp_path / name)) for name in ("asked", "stored.json")}
    folder = environment(tmp_path / "other", f'printf "%s\\n" "$@" > {places["asked"]}; cat {places["stored.json"]}')
    assert against.report_of(folder, ["a.yaml", "--gpu=h100-80gb"]) == WORSE
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-4:] == ["compile", "a.yaml", "--gpu=h100-80gb", "--json"]
    assert asked[-5] == sys.modules["jaxllm"].__file__


def test_flags_reach_a_process_of_their_own(tmp_path, capsys, monkeypatch):
    """This Python is a script that notes its flags and prints a stored report."""
    places = {name: shlex.quote(str(tmp_path / name)) for name in ("flags", "stored.json")}
    (tmp_path / "stored.json").write_text(json.dumps(REPORT.to_json()))
    script = f'echo "$XLA_FLAGS" >> {places["flags"]}; cat {places["stored.json"]}'
    monkeypatch.setattr(sys, "executable", f"{environment(tmp_path / 'this', script)}/bin/python")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    against.main(["XLA_FLAGS=--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false", "a.yaml"])
    with_them = "--xla_dump_to=here --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    assert (tmp_path / "flags").read_text().splitlines() == [with_them, "--xla_dump_to=here"]
    assert "Worse: nothing" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_step_by_this_interpreter_elsewhere_is_the_same(tmp_path, capsys):
    """The complete way, for CPUs: the other environment runs this interpreter. Times of CPUs are not known."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "run": {"cpu_devices": jax.device_count()}}))
    folder = environment(tmp_path / "other", f'exec {shlex.quote(sys.executable)} "$@"')
    against.main([folder, str(recipe), "model.num_layers=1", "--json"])
    values = json.loads(capsys.readouterr().out)
    assert {change["verdict"] for change in values["comparison"]["changes"]} == {"same"}
    assert {change["unit"] for change in values["comparison"]["changes"]} == {"", "bytes", "FLOPs"}
    assert (values["comparison"]["before"], values["comparison"]["after"]) == ("this environment", folder)


def test_steps_for_other_gpus_are_refused(tmp_path, monkeypatch):
    for name, report in (("stored.json", REPORT), ("other.json", dataclasses.replace(REPORT, gpus=16))):
        (tmp_path / name).write_text(json.dumps(report.to_json()))
    script = f"cat {shlex.quote(str(tmp_path / 'stored.json'))}"
    monkeypatch.setattr(sys, "executable", f"{environment(tmp_path / 'this', script)}/bin/python")
    with pytest.raises(SystemExit, match="One step is for 16 x h100-80gb"):
        against.main([str(tmp_path / "other.json"), "a.yaml"])


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
