"""The notebooks: complete files without traces of one machine, and each runs from a clean kernel."""

import importlib.util
import json
from pathlib import Path

import pytest
import scripts
from tiny import TINY

from jaxllm.compile.aot import can_compile_for_gpus

FOLDER = Path(__file__).parent.parent / "notebooks"
LORA = "05_fine_tune_with_lora"
MANY = "06_why_many_gpus"
NOTEBOOKS = ("01_train_on_one_host", "02_plan_a_cluster", "03_bring_a_model", "04_how_it_works", LORA, MANY)
COMPILES = "02_plan_a_cluster"
NIGHTLY = (COMPILES, "03_bring_a_model", LORA, MANY)
"""Notebooks whose content the tests of plans, of conversion, of adapters and of noise scales cover, in less time."""
LARGEST_BYTES = 400_000


libraries_warn = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
"""Jupyter's client leaves sockets to the garbage collector."""


@pytest.fixture(scope="module")
def runner():
    return scripts.load("notebooks/run.py")


def kept(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def require(*modules):
    """Skips without the extra notebook. Imports nothing, because the kernel, another process, imports IPython."""
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        pytest.skip(f"needs the extra notebook: {', '.join(missing)}")


def test_these_are_all():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_kept_is_small_whole_and_nobodys(name):
    path, notebook = FOLDER / f"{name}.ipynb", kept(name)
    assert path.stat().st_size <= LARGEST_BYTES
    assert notebook["nbformat"] == 4
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    outputs = [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    said = json.dumps(outputs)
    for place in ("/home/", "/root/", "/tmp/", str(FOLDER.parent)):
        assert place not in said


def test_stale_outputs_are_seen_by_their_kind(runner):
    def notebook(*outputs):
        return {"cells": [{"cell_type": "markdown"}, {"cell_type": "code", "outputs": list(outputs)}]}

    line = {"output_type": "stream", "name": "stdout", "text": "loss 1"}
    picture = {"output_type": "display_data", "data": {"image/png": "", "text/plain": ""}}
    assert runner.differences(notebook(line, picture), notebook(line | {"text": "loss 2"}, picture)) == []
    assert runner.differences(notebook(line), notebook(line, picture)) == [
        "code cell 1 keeps ['stdout'], and puts out ['stdout', 'display_data image/png text/plain']"
    ]
    assert runner.hidden("at /tmp/tmpab_1/kept") == "at TEMPORARY/kept"
    with pytest.raises(ValueError, match="show less of it"):
        runner.hidden("x" * 30_000)


@libraries_warn
@pytest.mark.notebook
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in NOTEBOOKS]
)
def test_it_runs_from_a_clean_kernel_and_puts_out_what_it_keeps(name, runner, monkeypatch):
    require("nbclient", "ipykernel", "matplotlib")
    if name == LORA:
        require("gguf", "peft", "transformers")
    if name == COMPILES and not can_compile_for_gpus():
        pytest.skip("compiling for GPUs needs the extra aot")
    # The compiler flags of conftest.py make programs slow, and set another number of devices.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert runner.differences(kept(name), runner.execute(name)) == []


@libraries_warn
@pytest.mark.notebook
def test_the_stop_button_saves_the_run_and_keeps_the_session(runner, text_file, tmp_path, monkeypatch):
    """In a real kernel the cell ends as if the run were over, and leaves a usable trainer."""
    require("jupyter_client", "ipykernel")
    from jupyter_client import manager

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    recipe = TINY | {"data": {"source": "files", "paths": [str(text_file)], "held_out_fraction": 0.0}}
    recipe["train"] = TINY["train"] | {"steps": 1_000_000}
    recipe["run"] = {"cpu_devices": 1, "dir": str(tmp_path / "run")}
    kernel, client = manager.start_new_kernel(kernel_name="python3", env=runner.environment(), cwd=str(tmp_path))
    said: list[str] = []

    def hear(message):
        content = message["content"]
        said.append(content.get("text", "") or content.get("data", {}).get("text/plain", ""))
        if message["msg_type"] == "update_display_data" and not any("pressed" in line for line in said):
            said.append("pressed")
            kernel.interrupt_kernel()

    def run(code):
        said.clear()
        reply = client.execute_interactive(code, output_hook=hear, timeout=300)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(said)

    try:
        assert "by SIGINT; saved; rerun the same command to resume" in run(
            f"import jaxllm\ntrainer = jaxllm.fit(jaxllm.load_config({recipe!r}))"
        )
        assert "SIGINT True" in run("print(trainer.stopped_by, trainer.step == int(trainer.state.step) > 0)")
        assert "[1, 2]" in run("before = trainer.step; print([one['step'] - before for one in trainer.steps(2)])")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
