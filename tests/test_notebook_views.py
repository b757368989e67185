"""Notebook views of a config, a mesh, a model, a plan and a running run; and tables on 80 columns without colours."""

import builtins
import io
import re
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console as RichConsole
from rich.console import Group
from rich.text import Text
from tiny import TINY

import jaxllm
from jaxllm import api, config, notebook
from jaxllm.compile.inspect import Report, inspect_config
from jaxllm.compile.plan import plan
from jaxllm.compile.report import CompileReport
from jaxllm.compile.text import in_columns
from jaxllm.config import load_config
from jaxllm.display import table
from jaxllm.model.llama import Llama
from jaxllm.plan.estimate import estimate
from jaxllm.plan.plan_result import Plan
from jaxllm.plan.search_text import WIDTH, render
from jaxllm.run.console import Console

LARGE = {
    "model": {"name": "llama-3.1-8b"},
    "train": {"steps": 10, "sequence_length": 8192, "global_batch_sequences": 1024},
}


@pytest.fixture(scope="module")
def found():
    """A plan from estimates only, with pipelines among its candidates."""
    return plan(load_config(LARGE, ["parallel.pipe=4"]), gpu="h100-80gb", gpus=32, keep=["pipe", "zero", "remat"])


def test_a_config_shows_a_recipe_of_what_differs(tiny_config):
    config = tiny_config("parallel.tensor=2")
    shown = repr(config)
    assert load_config(yaml.safe_load(shown)) == config
    assert "learning_rate" not in shown
    assert max(map(len, shown.splitlines())) <= 80 or "paths" in shown
    assert "tensor: 2" in config._repr_html_()


def test_html_is_escaped():
    assert "<td" in table([["a<b", "two\nlines"]])
    assert "a&lt;b" in table([["a<b"]])
    assert "two<br>lines" in table([["two\nlines"]])


def test_a_mesh_shows_where_each_device_is():
    grid = np.array(jax.devices()[:8]).reshape(1, 4, 1, 2)
    shown = notebook.mesh_html(Mesh(grid, ("pipe", "data", "context", "tensor")))
    assert "8 cpu devices, slow network to fast: pipe 1 x data 4 x context 1 x tensor 2" in shown
    rows = [re.findall(r">([^<]*)</td>", row) for row in re.findall(r"<tr .*?>(.*?)</tr>", shown)]
    assert rows[1:] == [["data 0", "0", "1"], ["data 1", "2", "3"], ["data 2", "4", "5"], ["data 3", "6", "7"]]
    one = notebook.mesh_html(Mesh(grid[:, :1, :, :1], ("pipe", "data", "context", "tensor")))
    assert "1 cpu device, " in one


def test_a_kernel_learns_how_to_show_a_mesh(monkeypatch):
    known = {}

    class Formatter:
        for_type = staticmethod(known.__setitem__)

        @staticmethod
        def for_type_by_name(module, name, function):
            known[module, name] = function

    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": Formatter}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    notebook.register()
    assert known == {
        Mesh: notebook.mesh_html,
        (Plan.__module__, Plan.__qualname__): notebook.plan_html,
        (Report.__module__, Report.__qualname__): notebook.report_html,
        (CompileReport.__module__, CompileReport.__qualname__): notebook.report_html,
        (api.Trainer.__module__, api.Trainer.__qualname__): notebook.trainer_html,
    }


def test_a_model_shows_every_parameter_by_its_dims():
    model = Llama(load_config(TINY, ["data.source=python_stdlib"]).model, rngs=nnx.Rngs(0))
    assert repr(model) == str(model) == "<Llama of 34,976 parameters in 2 layers>"
    shown = model._repr_html_()
    assert shown.count("<tr ") == 1 + len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert "layers 2 x embed 32 x heads 4 x head_dim 8" in shown


def test_a_plan_shows_a_line_alone_and_a_table_in_a_notebook(found):
    assert repr(found).startswith(
        f"<Plan for 32 x h100-80gb: {len(found.candidates):,} configurations fit; the best <pipe 4 x "
    )
    assert "\n" not in repr(found)
    shown = notebook.plan_html(found)
    assert shown.count("tokens/s") >= 1
    assert f"{found.candidates[0].tokens_per_s_per_gpu:,.0f}" in shown


def test_an_estimate_and_a_report_show_what_the_commands_print(found):
    small = estimate(found.best, gpu="h100-80gb", gpus=32)
    assert repr(small).startswith("<Estimate for 32 x h100-80gb: ")
    assert "Bytes on one device" in small._repr_html_()
    report = inspect_config(load_config(TINY, ["data.source=python_stdlib"]), gpus=8)
    assert repr(report) == "<Report of 34,976 parameters on pipe 1 x data 8 x context 1 x tensor 1>"
    assert "On each device with ZeRO 1" in notebook.report_html(report)


def test_what_a_notebook_shows_of_a_report_is_one_output(monkeypatch):
    """Rich detects the kernel's shell by its class name, and displays there what it would print."""
    shell, displayed = type("ZMQInteractiveShell", (), {})(), []
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=displayed.append))
    assert "bold" in in_columns(Group(Text("bold", style="bold")))
    assert displayed == []


@pytest.mark.parametrize("width", [80, WIDTH])
def test_the_tables_of_a_plan_take_no_more_columns_than_there_are(found, width):
    file = io.StringIO()
    RichConsole(file=file, width=width, highlight=False, markup=False).print(render(found, rows=30, width=width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    # Nothing is cut off: the figures of the best candidate are complete.
    (best, *_) = found.candidates
    figures = (f"{best.tokens_per_s_per_gpu:,.0f}", f"{best.estimate_bytes / 2**30:.1f}", str(best.choice.remat))
    assert any(all(figure in line for figure in figures) for line in lines), lines


def test_colours_are_off_when_asked(found):
    file = io.StringIO()
    console = RichConsole(file=file, width=80, force_terminal=True, _environ={"NO_COLOR": "1", "TERM": "xterm-256color"})
    console.print(render(found, width=80))
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|9[0-7]|38|48)[;m]", file.getvalue())


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1", "TERM": "xterm-256color"}], ids=str)
def test_a_run_on_a_terminal_has_no_more_than_it_can_show(monkeypatch, capsys, variables):
    """A terminal that cannot move its cursor gets complete lines; one without colours gets the bar, on 80 columns too."""
    file = io.StringIO()
    screen = RichConsole(file=file, width=80, force_terminal=True, highlight=False, soft_wrap=True, _environ=variables)
    monkeypatch.setattr("jaxllm.run.console.console", lambda **_: screen)
    with Console(total_steps=72000) as console:
        for step in (12000, 12050):
            console.step(
                {"step": step, "tokens": 10 * step, "loss": 1.0, "tokens_per_s_per_device": 5e4, "mfu": 0.45}, due=True
            )
    if variables["TERM"] == "dumb":
        assert file.getvalue() == ""
        assert [line[:10] for line in capsys.readouterr().out.splitlines()] == ["step 12000", "step 12050"]
    else:
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
        assert "MFU 45.0%" in shown
        assert "(causal)" in shown
        assert re.search(r"━\S* +(\d+:\d\d|-+:--)", shown)
        assert "…" not in shown
        assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|9[0-7]|38|48)[;m]", file.getvalue())


def test_a_run_in_a_notebook_shows_one_line_that_changes(monkeypatch, capsys):
    shown = []
    handle = SimpleNamespace(update=lambda content, raw: shown.append(content))

    def display(content, raw, display_id):
        shown.append(content)
        return handle

    shell = SimpleNamespace(kernel=True)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with Console(total_steps=3) as console:
        for step in (1, 2, 3):
            console.step({"step": step, "tokens": 10 * step, "loss": 1.0, "tokens_per_s_per_device": 5.0}, due=True)
        console.say("done")
    assert capsys.readouterr().out == "done\n"
    assert shown[0]["text/plain"] == "step 1/3  tokens 10  loss 1.0000  5 tokens/s/device"
    assert '<progress value="3" max="3">' in shown[-1]["text/html"]
    with Console(total_steps=3, main=False) as console:
        console.step({"step": 1, "tokens": 10, "loss": 1.0, "tokens_per_s_per_device": 5.0}, due=True)
    assert capsys.readouterr().out == ""


def test_the_front_door_gives_what_the_modules_hold():
    for name in set(jaxllm.__all__) - {"plan"}:
        assert getattr(jaxllm, name).__module__.startswith("jaxllm.")
        for room in (config, api):
            assert getattr(room, name, getattr(jaxllm, name)) is getattr(jaxllm, name)
    # Nothing that it imports for itself.
    assert set(dir(jaxllm)) == {*jaxllm.__all__, "__version__"}
    # The function has the name of a package, too.
    assert callable(jaxllm.plan)
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        jaxllm.fitt  # noqa: B018
