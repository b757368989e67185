"""The README's first command, with the figures it promises."""

import re
import subprocess
import sys

import outside
import pytest

from jaxllm.config import config_folder


@pytest.mark.slow
def test_quickstart_learns_python(tmp_path):
    command = [sys.executable, "-m", "jaxllm.cli", "train", "configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"]
    place = {"cwd": config_folder().parent, "env": outside.environment()}
    result = subprocess.run(command, capture_output=True, text=True, timeout=550, **place)
    assert result.returncode == 0, result.stderr
    figures = {
        name: float(re.search(pattern, result.stdout)[1])
        for name, pattern in {
            "bigrams": r"baseline: byte bigrams (\S+) nats per byte",
            "trigrams": r"baseline: byte trigrams (\S+) nats per byte",
            "held out": r"held-out loss (\S+) nats per byte \(\S+ bits\)",
        }.items()
    }
    assert figures["held out"] < 1.85
    assert figures["held out"] < figures["trigrams"] < figures["bigrams"]
    assert "sample:\ndef " in result.stdout
