"""The wheel: its contents, and that it runs without a checkout."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import outside
import pytest
from run_files import steps_of

import jaxllm
from jaxllm.config import ConfigError, config_folder, load_config

ROOT = Path(__file__).parent.parent


def test_a_recipe_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = load_config(config_folder() / "quickstart.yaml")
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        assert load_config(name) == theirs
    with pytest.raises(ConfigError, match=r"There is no config file elsewhere/quickstart\.yaml"):
        load_config("elsewhere/quickstart.yaml")
    # A file in the working directory comes first.
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("train: {steps: 1}")
    with pytest.raises(ConfigError, match="The section model is missing"):
        load_config("configs/quickstart.yaml")


def test_the_version_stands_in_one_place_and_in_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "jaxllm/__init__.py"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == jaxllm.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the checkout without a network."""
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling: pip install 'jaxllm[test]'")
    folder = tmp_path_factory.mktemp("dist")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), *options, "--wheel-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_recipes_alone(wheel):
    assert wheel.name == f"jaxllm-{jaxllm.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if not re.match(r"jaxllm-[^/]*\.dist-info/", name)}
    tracked = subprocess.run(["git", "ls-files", "jaxllm", "configs"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        files = tracked.stdout.splitlines()
        assert {
            name.replace("configs/", "jaxllm/configs/", 1) if name.startswith("configs/") else name for name in files
        } <= packed
    assert all(name.startswith("jaxllm/") for name in packed)
    assert not any("__pycache__" in name for name in packed)


@pytest.mark.slow
def test_the_wheel_trains_the_quickstart_outside_the_checkout(wheel, tmp_path):
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "-q", "--target", str(home)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=120)
    # Before any editable jaxllm of this environment.
    place = {
        "cwd": work,
        "env": outside.environment(PYTHONPATH=str(home)),
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }
    code = "import jaxllm, jaxllm.config; print(jaxllm.__file__); print(jaxllm.config.config_folder())"
    where = subprocess.run([sys.executable, "-c", code], **place).stdout.split()
    assert where == [str(home / "jaxllm" / "__init__.py"), str(home / "jaxllm" / "configs")]
    version = subprocess.run([sys.executable, str(home / "bin" / "jaxllm"), "--version"], **place)
    assert version.stdout == f"jaxllm {jaxllm.__version__}\n", version.stderr
    sizes = ["model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=16", "model.num_heads=2"]
    short = ["train.steps=2", "train.sequence_length=16", "log.sample_tokens=0", "log.baselines=false"]
    unheld = ["data.held_out_fraction=0.0", "train.eval_every_steps=null"]
    command = ["train", "configs/quickstart.yaml", *sizes, *short, *unheld]
    run = subprocess.run([sys.executable, "-m", "jaxllm.cli", *command], **place)
    assert run.returncode == 0, run.stderr
    assert [line["step"] for line in steps_of(work / "runs" / "quickstart")] == [1, 2]
