"""The README's first command, with the figures it promises."""

import re
import subprocess
import sys

import outside
import pytest

from jaxllm.config import config_folder


def quickstart(folder, *overrides) -> tuple[dict[str, float], str]:
    """(nats per byte: of bigrams, of trigrams and of the held-out text; output) of the quickstart's recipe."""
    command = [sys.executable, "-m", "jaxllm.cli", "train", "configs/quickstart.yaml", f"run.dir={folder}", *overrides]
    place = {"cwd": config_folder().parent, "env": outside.environment()}
    result = subprocess.run(command, capture_output=True, text=True, timeout=550, **place)
    assert result.returncode == 0, result.stderr
    patterns = {
        "bigrams": r"baseline: byte bigrams (\S+) nats per byte",
        "trigrams": r"baseline: byte trigrams (\S+) nats per byte",
        "held out": r"held-out loss (\S+) nats per byte \(\S+ bits\)",
    }
    return {name: float(re.search(pattern, result.stdout)[1]) for name, pattern in patterns.items()}, result.stdout


@pytest.mark.slow
def test_a_third_of_the_quickstart_learns_more_than_bigrams(tmp_path):
    figures, out = quickstart(tmp_path / "run", "train.steps=240")
    assert figures["trigrams"] < figures["held out"] < figures["bigrams"]
    assert "sample:\ndef " in out


@pytest.mark.nightly
def test_quickstart_learns_python(tmp_path):
    figures, _ = quickstart(tmp_path / "run")
    assert figures["held out"] < 1.85
    assert figures["held out"] < figures["trigrams"] < figures["bigrams"]
