"""Processes that jaxllm starts take no module from the working directory, where a recipe or a text of others may be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.compile import confirm
from jaxllm.data.prepare import prepare
from jaxllm.run.exports import BESIDE_TRAINING

MODULES = ("multiprocessing", "yaml", "numpy", "pathlib", "threading", "jaxllm")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with modules that leave a mark, which is not on this process's path."""
    monkeypatch.chdir(tmp_path)
    # As of an installed script.
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *filter(None, sys.path)])
    for name in MODULES:
        Path(f"{name}.py").write_text(f"open('ran', 'a').write({name!r} + chr(10)); raise ImportError({name!r})")
    yield tmp_path
    assert not Path("ran").exists(), Path("ran").read_text()


def test_what_lies_there_would_be_imported(here):
    """Otherwise the tests below could not fail."""
    subprocess.run([sys.executable, "-c", "import multiprocessing"], capture_output=True)
    assert Path("ran").read_text() == "multiprocessing\n"
    Path("ran").unlink()


def test_workers_of_prepare(here):
    for name in "ab":
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(100)))
    found = prepare(["*.jsonl"], "out", tokenizer="bytes", workers=2, shard_bytes=1000, progress=False)
    assert found.documents == 200


def test_processes_that_compile(here):
    with confirm.processes(1) as start:
        assert start().submit(sum, [1, 2]).result() == 3


def test_exports_beside_training(here):
    ended = subprocess.run([*BESIDE_TRAINING, "--help"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Usage" in ended.stdout
