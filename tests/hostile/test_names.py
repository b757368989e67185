"""Names that come from elsewhere write no line, no markup and no control character, whatever they are shown by."""

import io
import logging
import re
import textwrap
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Group
from rich.progress import BarColumn
from rich.text import Text
from tiny import TINY

from jaxllm.cli.errors import ending_in_one_sentence, in_one_line
from jaxllm.cli.options import print_lines, print_report, tell
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.display import preformatted, table
from jaxllm.run.console import Console
from jaxllm.run.tracker_kinds import Gauges, Kind, TensorBoard, reason_of
from jaxllm.run_report.page import document, paragraphs
from jaxllm.run_report.svg import Curve, line_chart
from jaxllm.terminal import bar, console, print_sentence, terminal_table

NAMES = {
    "clears the screen": "a\x1b[2J\x1b]0;title\x07b",
    "begins its line again": "a\rjaxllm: all is well",
    "a line": "a\njaxllm: all is well",
    "a line of Unicode": "a\u2028jaxllm: all\x85is well",
    "turns its direction": "a\u202elxet\u2066b",
    "not UTF-8": "a\udcffb",
    "HTML": 'a<script>b</script>"onload="c',
    "rich's markup": "a[/red][bold]b",
    "the end of a block of Markdown": "a\n```\n<b>b</b>",
    "the end of a label": 'a"} 1\njaxllm_loss{run="b',
}
MARKUP = re.compile(r"<(script|b)>|[^&\\]\"onload")


def is_clean(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def ended(error: BaseException) -> None:
    with pytest.raises(SystemExit), ending_in_one_sentence():
        raise error


def logged(name: str) -> None:
    handler = logging.StreamHandler()
    handler.addFilter(in_one_line)
    handler.handle(logging.LogRecord("jaxllm", logging.WARNING, "", 1, "%s is damaged", (name,), None))


def lines_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(lines=lambda: iter([f"folder {name}"]))


TERMINAL = {
    "a run": lambda name: Console(1).say(name),
    "lines": lambda name: print_lines([name]),
    "a report's lines": lambda name: print_report(lines_of(name), False),
    "a line beside": tell,
    "a sentence": print_sentence,
    "a refusal": lambda name: ended(ConfigError(f"{name} cannot be read: move it away.")),
    "a system's error": lambda name: ended(FileNotFoundError(2, "No such file", name)),
    "a log": logged,
    "the reason of a library": lambda name: print(reason_of(OSError(name.replace("\n", " ")))),
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("shows", TERMINAL.values(), ids=TERMINAL)
def test_one_line_on_a_terminal(shows, name, capfd):
    shows(name)
    said = "".join(capfd.readouterr())
    assert is_clean(said)
    assert said.count("\n") == 1
    assert "a" in said


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_defect_has_a_traceback_and_no_control_character(name, capsys):
    ended(RuntimeError(name))
    assert is_clean(capsys.readouterr().err)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_what_rich_draws(name):
    """Colours are rich's own; of a name nothing is taken for markup."""
    file = io.StringIO()
    screen = console(file=file, width=200, force_terminal=True, color_system=None)
    screen.print(Group(Text(name), terminal_table([(name, name)])))
    assert is_clean(file.getvalue())
    file.truncate(0)
    with bar(BarColumn(), on=screen) as shown:
        shown.add_task(name, total=1)
    assert is_clean(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", file.getvalue().lstrip("\0")))
    if "[" in name and name.isprintable():
        assert name in file.getvalue()


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_pages_and_views_of_a_notebook(name):
    curves = [Curve(f"{name} {n}", *2 * ([float("nan")],)) for n in range(0)]
    chart = line_chart(name, curves, x_label=name, y_label=name)
    for page in (document("runs", [*paragraphs([name]), chart]), table([(name, name)], (name, name)), preformatted(name)):
        assert is_clean(page)
        assert not MARKUP.search(page)
        page.encode()


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_label_of_prometheus(name, tmp_path):
    config = load_config(TINY, [f"log.prometheus_file={tmp_path / 'x.prom'}", "data.source=python_stdlib"])
    gauges = Gauges(config)
    gauges.folder = name
    gauges.send([{"step": 1, f"eval_loss/{name}": 2.5}])
    lines = (tmp_path / "x.prom").read_text(encoding="utf-8").splitlines()
    assert all(line.isprintable() for line in lines)
    assert len([line for line in lines if not line.startswith("#")]) == 2
    assert all(re.fullmatch(r'jaxllm_\w+\{(\w+="([^"\\]|\\.)*",?)+\} \S+', line) for line in lines if line[0] != "#")


def test_the_recipe_in_tensorboard_is_no_markup(monkeypatch):
    """All of it is indented by four spaces, which Markdown shows as it is."""
    recipe, said = yaml.safe_dump({"run": {"dir": NAMES["the end of a block of Markdown"]}}), []
    writer = SimpleNamespace(add_text=lambda name, text, step: said.append(text))
    monkeypatch.setattr(Kind, "recipe", lambda self: recipe)
    monkeypatch.setattr(Kind, "library", lambda self: SimpleNamespace(SummaryWriter=lambda *_, **__: writer))
    TensorBoard(load_config(TINY, ["data.source=python_stdlib"])).connect(None, 1)
    assert textwrap.dedent(said[0]) == recipe
    assert all(line.startswith("    ") for line in said[0].splitlines() if line.strip())


@pytest.mark.parametrize("key", ["run.dir", "log.wandb_tags", "data.mixture", "model.name"])
def test_a_config_takes_no_name_that_writes_lines(key):
    for name in NAMES.values():
        section, field = key.split(".")
        wrong = {"log.wandb_tags": [name], "data.mixture": [{"name": name}]}.get(key, name)
        with pytest.raises(ConfigError) as refused:
            load_config({**TINY, section: {**TINY.get(section, {}), field: wrong}}, ["train.stpes=1"])
        assert ("holds the character" in str(refused.value)) == (not name.isprintable())


def test_a_prompt_has_lines_and_a_path_any_script():
    given = ['log.sample_prompt="a\\nb"', "run.dir=\u30e2\u30c7\u30eb\u3000\u00e9"]
    assert load_config(TINY, [*given, "data.source=python_stdlib"]).log.sample_prompt == "a\nb"


def test_a_gpu_has_a_name_of_one_line(tmp_path):
    file = tmp_path / "a\nrun: {dir: elsewhere}.yaml"
    file.write_text("like: h100-80gb\n")
    assert find_gpu(str(file)).name == "a\\nrun: {dir: elsewhere}"
    file.write_text('like: h100-80gb\nname: "a\\nb"\n')
    with pytest.raises(ConfigError, match="it should be text on one line"):
        find_gpu(str(file))
