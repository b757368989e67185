"""The bytes and verdicts of docs/estimate.md are those of its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from jaxllm.cli.app import app
from jaxllm.config import load_config
from jaxllm.cost_model.flops import parameter_count
from jaxllm.cost_model.hardware import GPUS

PAGE = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^    \$ (.+)\n((?:(?:    (?!\$ ).*)?\n)*)", PAGE, re.MULTILINE)
"""(command, what the page shows below it, indented)."""
FILES = {command.removeprefix("cat "): shown for command, shown in BLOCKS if command.startswith("cat ")}
ESTIMATES = [(command, shown) for command, shown in BLOCKS if re.search(r"^    +total ", shown, re.MULTILINE)]


def printed(command: str, folder: Path) -> list[str]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    words = [str(folder / word) if word in FILES else word for word in shlex.split(command)[1:]]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_page_has_examples():
    assert len(ESTIMATES) == 3


@pytest.mark.parametrize(("command", "shown"), ESTIMATES, ids=[shlex.split(command)[2] for command, _ in ESTIMATES])
def test_bytes_and_verdict(command, shown, tmp_path):
    """Each line before the speeds, in order."""
    lines = [line.removeprefix("    ") for line in shown.partition("Speed, predicted")[0].splitlines()]
    wanted = [line for line in lines if line.strip() not in ("", "...")]
    assert any("of the" in line for line in wanted)
    answer = iter(printed(command, tmp_path))
    assert [line for line in wanted if line not in answer] == []


def test_what_the_host_s_memory_changes(tmp_path):
    answer = "\n".join(printed("jaxllm estimate 70b.yaml --gpu a100-80gb --gpus 8", tmp_path))
    assert "parallel.offload_state=optimizer_and_master (50.1 GiB and 98.6 GiB on the host" in answer
    assert "it takes 50.1 GiB of each GPU, and 98.6 GiB of host memory for each" in " ".join(PAGE.split())


def test_the_parameters_that_a_host_holds():
    held = 8 * GPUS["a100-80gb"].capacity_bytes / 18
    assert f"hold {held / 1e9:.1f} billion of them" in PAGE
    sizes = [parameter_count(load_config(yaml.safe_load(FILES[name])).model) for name in ("20b.yaml", "70b.yaml")]
    assert 20e9 < sizes[0] < 21e9 < held < sizes[1]
