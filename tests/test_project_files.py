"""Files around the code: the page of keys, constraints, workflows, hooks and citation agree with the code and each other."""

import re
import tomllib
from pathlib import Path

import pytest
import scripts
import yaml
from packaging.requirements import Requirement

import jaxllm

CHECKOUT = Path(__file__).parents[1]
WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))
CI_EXTRAS = ("test", "gguf", "parquet", "smollm2", "stores", "types", "reference", "notebook", "aot", "trackers", "lm-eval")
"""Packages that launch/test.sh --all installs."""
FREE = {"nvidia-cudnn-cu13"}
"""PyTorch's CUDA builds require their own versions."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def pinned(python: str = "3.13") -> dict[str, Requirement]:
    lines = (CHECKOUT / "constraints" / "ci.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return {plain(one.name): one for one in requirements if holds(one, python)}


def holds(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


def test_the_page_of_keys_is_that_of_the_schema():
    reference = scripts.load("docs/config_reference.py")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python docs/config_reference.py"


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_constraints_pin_what_ci_installs(python):
    wanted = project()["dependencies"] + [line for extra in CI_EXTRAS for line in project()["optional-dependencies"][extra]]
    here = [one for one in map(Requirement, wanted) if holds(one, python)]
    pins = pinned(python)
    assert {plain(one.name) for one in here} - {"jaxllm"} - FREE <= pins.keys()
    for one in here:
        if pin := pins.get(plain(one.name)):
            (version,) = pin.specifier
            assert one.specifier.contains(version.version), f"{pin} is not {one}"
    for pin in pins.values():
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{pin}: one version, without a local one"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_is_there(path):
    workflow = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as true.
    assert workflow.keys() >= {"name", True, "permissions", "jobs"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(step["uses"].startswith("actions/") for step in steps if "uses" in step)
    for run in (step["run"] for step in steps if "run" in step):
        for script in re.findall(r"bash (\S+)", run):
            assert (CHECKOUT / script).is_file()
        for extra in re.findall(r"\.\[(\w+)\]", run):
            assert extra in project()["optional-dependencies"]


def test_hooks_have_the_versions_of_ci():
    (local,) = yaml.safe_load((CHECKOUT / ".pre-commit-config.yaml").read_text())["repos"]
    requirements = [Requirement(line) for hook in local["hooks"] for line in hook.get("additional_dependencies", ())]
    assert all(re.fullmatch(r"==[\w.]+", str(requirement.specifier)) for requirement in requirements)
    pins = pinned()
    for requirement in requirements:
        if plain(requirement.name) in pins:
            assert requirement.specifier == pins[plain(requirement.name)].specifier


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert citation["version"] == jaxllm.__version__
    assert citation["license"] == project()["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project()["authors"]]
