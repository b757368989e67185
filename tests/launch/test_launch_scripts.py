"""The shell scripts of launch/ and .ci/: their syntax, what they refuse, and what they decide before anything runs."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import outside
import pytest

CHECKOUT = Path(__file__).parents[2]
LIBRARY = CHECKOUT / "launch" / "environment.sh"
COMMANDS = [*sorted(set((CHECKOUT / "launch").glob("*.sh")) - {LIBRARY}), CHECKOUT / ".ci" / "run"]


def name(script: Path) -> str:
    return str(script.relative_to(CHECKOUT))


def bash(*arguments, cwd=CHECKOUT, **environment) -> subprocess.CompletedProcess:
    """Runs bash without standard input; JAXLLM_VENV=none unless the test sets it, so that nothing is ever installed."""
    return subprocess.run(
        ["bash", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "JAXLLM_VENV": "none", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def in_environment(commands: str, **options) -> subprocess.CompletedProcess:
    return bash("-c", f'. "{LIBRARY}"; {commands}', **options)


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path_with(tmp_path):
    """A PATH on which a program of this name and body comes first."""

    def make(program: str, body: str) -> str:
        executable(tmp_path / program, body)
        return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    return make


@pytest.mark.parametrize("script", [LIBRARY, *COMMANDS], ids=name)
def test_syntax(script):
    result = bash("-n", script)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("script", COMMANDS, ids=name)
def test_is_executable_and_stops_at_errors(script):
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text or '/environment.sh"' in text


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_finds_nothing():
    scripts = [script for script in (LIBRARY, *COMMANDS) if script.parent == LIBRARY.parent]
    result = subprocess.run(["shellcheck", "-x", *scripts], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_only_the_environment_and_the_test_script_install():
    installing = {name(script) for script in [LIBRARY, *COMMANDS] if "pip install" in script.read_text()}
    installing |= {name(script) for script in COMMANDS if "pip_install" in script.read_text()}
    assert installing == {"launch/environment.sh", "launch/test.sh"}


@pytest.mark.parametrize(
    ("script", "argument", "hint"),
    [
        ("quickstart.sh", "--fast", "section.key=value"),
        ("quickstart.sh", "train.steps", "section.key=value"),
        ("gpu_check.sh", "--fast", "--dry-run"),
        ("gpu_check.sh", "fast", "--dry-run"),
    ],
)
def test_unknown_argument_is_refused_in_a_sentence(script, argument, hint, tmp_path):
    result = bash(CHECKOUT / "launch" / script, argument, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    (sentence,) = result.stderr.splitlines()
    assert argument in sentence
    assert hint in sentence


def test_gpu_check_without_a_gpu_is_refused_in_a_sentence(path_with, tmp_path):
    out = tmp_path / "out"
    result = bash(CHECKOUT / "launch" / "gpu_check.sh", PATH=path_with("nvidia-smi", "exit 9"), OUT=str(out))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "--dry-run" in result.stderr
    assert not out.exists()


def test_wheels_are_installed_without_a_network_and_removed_at_the_end(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "packed_here-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("packed_here.py", "")
        wheel.writestr("packed_here-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: packed-here\nVersion: 1.0\n")
        wheel.writestr("packed_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("packed_here-1.0.dist-info/RECORD", "")
    commands = f'use_wheels "{wheels}"; echo "$venv"; "$python" -c "import packed_here; print(packed_here.__file__)"'
    result = in_environment(commands, PYTHON=sys.executable, JAXLLM_VENV=str(tmp_path / "venv"))
    assert result.returncode == 0, result.stderr
    venv, file = result.stdout.splitlines()
    assert venv == "none"
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("script", "arguments", "hint"),
    [
        ("pack_wheels.sh", [], "FOLDER"),
        ("pack_wheels.sh", ["wheels", "latest"], "latest"),
        ("gpu_check.sh", ["--dry-run"], "launch/pack_wheels.sh"),
    ],
)
def test_wheels_that_cannot_be_are_refused_in_a_sentence(script, arguments, hint, tmp_path):
    environment = {"WHEELS": str(tmp_path), "OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    result = bash(CHECKOUT / "launch" / script, *arguments, cwd=tmp_path, **environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert hint in result.stderr


def test_gpu_check_finds_all_tests_that_need_a_gpu():
    """It collects one folder: the others import packages that a machine with JAX alone lacks."""
    mark = "mark." + "gpu"
    marked = {file.parent.name for file in (CHECKOUT / "tests").rglob("*.py") if mark in file.read_text(encoding="utf-8")}
    assert marked == {"gpu"}


def test_python_that_is_none_is_refused(tmp_path):
    old = executable(tmp_path / "old-python", "exit 1")
    for python in (old, tmp_path / "missing"):
        result = in_environment("prepare_environment", PYTHON=str(python), JAXLLM_VENV=str(tmp_path / "venv"))
        assert result.returncode == 2
        assert f"PYTHON={python} is not a Python 3.11 or newer" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_gets_the_newest_python_that_can_make_one(tmp_path):
    """3.13 of pyenv before 3.12 of the PATH; not one without ensurepip; what is in use stays the first of the PATH."""
    path, roots = tmp_path / "bin", tmp_path / "pyenv"
    path.mkdir()

    def interpreter(file: Path, version: str, ensurepip: bool = True) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        script = f'case "$2" in *print*) echo {version} ;; *ensurepip*) exit {int(not ensurepip)} ;; esac'
        return executable(file, script)

    def found(name: str) -> str:
        return in_environment(name, PATH=f"{path}:/usr/bin:/bin", PYENV_ROOT=str(roots), PYTHON="").stdout.strip()

    in_use = interpreter(path / "python3", "3.11")
    interpreter(path / "python3.13", "3.13", ensurepip=False)
    on_path = interpreter(path / "python3.12", "3.12")
    assert found("newest_python") == str(on_path)
    managed = interpreter(roots / "versions" / "3.13.1" / "bin" / "python3", "3.13")
    assert found("newest_python") == str(managed)
    assert found("find_python") == str(in_use)


def test_python_without_venv_module_is_refused(tmp_path):
    # Accepts the version check and fails at everything else.
    bare = executable(tmp_path / "bare-python", 'case "$2" in *version_info*) exit 0 ;; *) exit 1 ;; esac')
    result = in_environment("prepare_environment", PYTHON=str(bare), JAXLLM_VENV=str(tmp_path / "venv"))
    assert result.returncode == 2
    assert "python3-venv" in result.stderr


@pytest.mark.parametrize(
    ("nvidia_smi", "extra"),
    [
        ('echo "| NVIDIA-SMI 550.90.07   Driver Version: 550.90.07   CUDA Version: 12.4 |"', "cuda12"),
        ('echo "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |"', "cuda13"),
        ('echo "| NVIDIA-SMI 610.57.04   KMD Version: 610.57.04   CUDA UMD Version: 13.3 |"', "cuda13"),
        ('echo "a driver too old to say"', "cuda12"),
        ("exit 9", ""),
    ],
)
def test_cuda_extra_follows_the_driver(path_with, nvidia_smi, extra):
    result = in_environment("cuda_extra", PATH=path_with("nvidia-smi", nvidia_smi))
    assert (result.returncode, result.stdout.strip()) == (0, extra)


def test_installs_only_what_is_new(tmp_path, path_with):
    """A stand-in for Python logs pip's arguments."""
    venv, log = tmp_path / "venv", tmp_path / "log"
    (venv / "bin").mkdir(parents=True)
    executable(venv / "bin" / "python", f'[ "$2" = pip ] && echo "$@" >>"{log}"; exit 0')
    options = {"JAXLLM_VENV": str(venv), "PATH": path_with("nvidia-smi", "exit 9")}

    def installed(*extras: str) -> list[str]:
        log.write_text("")
        result = in_environment(f"prepare_environment {' '.join(extras)}", **options)
        assert result.returncode == 0, result.stderr
        return [line.split()[-1] for line in log.read_text().splitlines()]

    assert installed("test") == [".[test]"]
    assert installed("test") == []
    assert installed() == []
    assert installed("test", "reference") == [".[reference]"]
    assert installed("reference") == []
    # A changed pyproject.toml: the stamp contains its checksum.
    (stamp,) = (path for path in venv.iterdir() if path.is_file())
    stamp.write_text(stamp.read_text().replace("[", "0["))
    assert installed("test") == [".[test]"]


def test_failed_installation_is_not_remembered(tmp_path, path_with):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    executable(venv / "bin" / "python", '[ "$2" = pip ] && exit 1; exit 0')
    options = {"JAXLLM_VENV": str(venv), "PATH": path_with("nvidia-smi", "exit 9")}
    for _ in range(2):
        result = in_environment("prepare_environment", **options)
        assert result.returncode == 1
        assert "JAXLLM_VENV=none" in result.stderr


def test_checks_all_run_and_the_first_failure_counts():
    checks = "run_check one three; run_check two false; run_check last true"
    result = in_environment(f"three() {{ return 3; }}; {checks}; closing_summary")
    assert result.returncode == 3
    summary = result.stdout.split("jaxllm: summary\n")[1].splitlines()
    assert [line.split()[0] for line in summary] == ["one", "two", "last"]
    assert summary[0].endswith("FAILED, exit code 3")
    assert summary[2].endswith("ok")
    assert in_environment("run_check one true; closing_summary").returncode == 0


@pytest.mark.parametrize(
    ("command", "verdict"),
    [
        ("jaxllm train tiny.yaml", "yes"),
        ("jaxllm data prepare a.txt", "yes"),
        ("python train.py", "yes"),
        ("jaxllm doctor", "no"),
        ("jaxllm eval train", "no"),
        ("jaxllm", "no"),
    ],
)
def test_only_what_can_resume_is_started_again(command, verdict):
    assert in_environment(f"if can_resume {command}; then echo yes; else echo no; fi").stdout == f"{verdict}\n"


def test_variables_for_other_hosts():
    given = {"JAXLLM_ATTEMPT": "1", "XLA_FLAGS": "a b", "JAX_COORDINATOR_ADDRESS": "h0:29500"}
    of_one = dict.fromkeys(("JAXLLM_PROCESS_ID", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAXLLM_BEAT_FD", "HOME_OF_MINE"), "0")
    names = in_environment("forwarded_variables", **given, **of_one).stdout.split()
    assert given.keys() <= set(names)
    assert not {*of_one, "JAXLLM_VENV", "PATH"} & set(names)


def test_works_from_any_folder(tmp_path):
    result = in_environment('pwd; absolute a/b; absolute /c; echo "$venv"', cwd=tmp_path, JAXLLM_VENV="here")
    assert result.stdout.splitlines() == [str(CHECKOUT), f"{tmp_path}/a/b", "/c", f"{tmp_path}/here"]


def test_none_uses_the_current_python():
    result = in_environment('prepare_environment test; echo "$python"; echo "$PYTHONPATH"', PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    python, path = result.stdout.splitlines()
    assert python == sys.executable
    assert path.split(":")[0] == str(CHECKOUT)


@pytest.mark.slow
def test_gpu_check_goes_through_its_motions_on_a_cpu(tmp_path):
    environment = outside.environment(JAXLLM_VENV="none", PYTHON=sys.executable, OUT=str(tmp_path))
    command = ["bash", str(CHECKOUT / "launch" / "gpu_check.sh"), "--dry-run"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    log = (tmp_path / "gpu_check.log").read_text()
    assert "tests/gpu/test_cudnn_attention.py" in log
    results = re.findall(r"^  (\S.*?) +\d+ s  (.*)$", log, re.MULTILINE)
    assert results == [(part, "ok") for part in ("benchmarks/gpu.py", "memory in use", "gpu tests, collected")]


@pytest.mark.slow
def test_gpu_check_tries_the_first_block_on_a_cpu(tmp_path):
    """The second is tests/benchmarks/test_gpu_real_run.py and steps like those of the whole benchmark."""
    environment = outside.environment(JAXLLM_VENV="none", PYTHON=sys.executable, OUT=str(tmp_path))
    command = ["bash", str(CHECKOUT / "launch" / "gpu_check.sh"), "--dry-run", "1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    log = (tmp_path / "gpu_check.log").read_text()
    assert re.findall(r"^  (\S.*?) +\d+ s  (.*)$", log, re.MULTILINE) == [("block 1", "ok")]
    assert "| pretend 8, 8B, ZeRO 3 |" in log
    assert "| tiny, wgrad |" in log
    # Nothing of a trial may be taken for a row of a GPU.
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_launch_makes_a_secret_unless_one_is_given():
    words = "share_secret; env | grep ^JAXLLM_SECRET"
    made = [in_environment(words).stdout for _ in range(2)]
    assert all(re.fullmatch("JAXLLM_SECRET=[0-9a-f]{64}\n", one) for one in made)
    assert made[0] != made[1]
    for given in ({"JAXLLM_SECRET": "mine"}, {"JAXLLM_SECRET_FILE": "/mine"}):
        ((name, value),) = given.items()
        assert in_environment(words, **given).stdout == f"{name}={value}\n"
    for script in ("local_cluster.sh", "mpi.sh", "ssh.sh"):
        assert "\nshare_secret\n" in (CHECKOUT / "launch" / script).read_text()
