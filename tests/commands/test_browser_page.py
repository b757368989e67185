"""The planner's page (docs/browser): what its worker answers is what the command prints, to the last digit, also in a browser
whose network is cut off; and what its buttons and its link do."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlencode

import headless
import pytest
import scripts
import yaml
from test_project_files import pinned, plain
from typer.testing import CliRunner

from jaxllm.cli.app import app
from jaxllm.config import Config, layer_stack, load_config, published_models
from jaxllm.cost_model.hardware import GPUS

SETTINGS = ("train.steps=1000", "model.name=llama-3.2-1b", "train.sequence_length=4096", "train.global_batch_sequences=8")
ASKED = {"settings": [*SETTINGS, "train.microbatch_sequences=1"], "gpu": "a100-80gb", "gpus": "2", "gpus_per_host": ""}
IMPORTED = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
"""What packages.zip holds, beside PyYAML and jaxllm."""


@pytest.fixture(scope="module")
def planner():
    return scripts.load("docs/browser/planner.py")


@pytest.fixture(autouse=True)
def _as_without_jax(monkeypatch):
    """A page has no JAX, and takes the newest XLA for granted."""
    monkeypatch.setattr(layer_stack, "has_older_xla", lambda: False)


def ask(planner, kind, asked=ASKED, **changes):
    return json.loads(planner.answer(kind, json.dumps({**asked, **changes})))


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@pytest.fixture
def recipe(planner, tmp_path):
    """The config that the page gives, as a file."""
    path = tmp_path / "recipe.yaml"
    path.write_text(ask(planner, "estimate")["recipe"], encoding="utf-8")
    return str(path)


def test_answers_are_those_of_the_commands_for_the_config_that_the_page_gives(planner, recipe):
    on = ("--gpu", ASKED["gpu"], "--gpus", ASKED["gpus"])
    assert ask(planner, "estimate")["json"] == command("estimate", recipe, *on)
    for objective in ("speed", "microbatch"):
        wish = ("--compile", "0", "--objective", objective)
        assert ask(planner, "plan", objective=objective)["json"] == command("plan", recipe, *on, *wish)


def test_a_row_of_the_plan_gives_its_candidate(planner):
    found = ask(planner, "plan")
    best = json.loads(found["json"])["candidates"]
    for row, candidate in zip(found["rows"], best, strict=False):
        used = {"settings": [*ASKED["settings"], *row["settings"]], "gpus": row["gpus"]}
        estimate = json.loads(ask(planner, "estimate", **used)["json"])
        assert (estimate["peak_bytes"], estimate["step_s"]) == (candidate["estimate_bytes"], candidate["step_s"])


def test_sizes_of_a_named_model_make_the_same_model(planner):
    named = ask(planner, "estimate")
    own = [f"{key}={value}" for key, value in named["sizes"].items()]
    settings = [*own, *(setting for setting in ASKED["settings"] if not setting.startswith("model."))]
    assert ask(planner, "estimate", settings=settings)["json"] == named["json"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gpus": "eight"}, "--gpus=eight is not valid: it should be a whole number from 1 to 1,048,576."),
        ({"gpus_per_host": "3"}, r".*--gpus-per-host.*"),
        ({"gpu": "h100"}, "There is no GPU h100: did you mean h100-80gb.*"),
        ({"settings": [*SETTINGS, "train.sequence_length=x"]}, "train.sequence_length=x is not valid: .*"),
        ({"settings": [*SETTINGS, "nonsense"]}, "Cannot read the override .*"),
        ({"settings": [*SETTINGS, "model.name=llama-3.1-405b"], "gpus": "1"}, None),
    ],
)
def test_mistakes_are_one_sentence(planner, changes, sentence):
    if sentence is not None:
        assert re.fullmatch(sentence, ask(planner, "estimate", **changes)["error"])
    else:
        assert ask(planner, "estimate", **changes)["fits"] is False
        assert ask(planner, "plan", **changes)["error"].startswith("Nothing fits on 1 x a100-80gb")


def test_the_worker_imports_only_what_the_page_has():
    script = textwrap.dedent("""
        import json, sys
        before = {*sys.modules}
        sys.path.insert(0, sys.argv[1])
        import planner
        for kind in ("estimate", "plan"):
            assert "error" not in json.loads(planner.answer(kind, sys.argv[2])), kind
        files = {name: str(getattr(sys.modules[name], "__file__", "")) for name in sys.modules.keys() - before}
        print(*(name.partition(".")[0] for name, file in files.items() if "site-packages" in file))
    """)
    folder = scripts.CHECKOUT / "docs" / "browser"
    found = subprocess.run(
        [sys.executable, "-c", script, str(folder), json.dumps(ASKED)], check=True, capture_output=True, text=True
    )
    assert {*found.stdout.split()} - {"jaxllm", "yaml", "_yaml"} <= IMPORTED


def test_the_page_has_the_packages_of_ci():
    lines = (scripts.CHECKOUT / "docs" / "browser" / "packages.txt").read_text().splitlines()
    pins = pinned()
    for line in lines:
        if not line.startswith("#"):
            name, version = re.match(r"([\w-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}$", line).groups()
            assert str(pins[plain(name)].specifier) == f"=={version}", (
                "take the version of constraints/ci.txt, and its wheel's hash"
            )


def test_fields_of_the_page_are_keys_of_a_config():
    page = (scripts.CHECKOUT / "docs" / "browser" / "index.html").read_text(encoding="utf-8")
    for section, key in re.findall(r'name="(\w+)\.(\w+)"', page):
        assert key in Config.model_fields[section].annotation.model_fields
    assert [*re.findall(r'for="([\w-]+)"', page)] == [*dict.fromkeys(re.findall(r'for="([\w-]+)"', page))]
    for label in re.findall(r'for="([\w-]+)"', page):
        assert f'id="{label}"' in page


# ----------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page, built."""
    builder = scripts.load("docs/browser/build_page.py")
    try:
        return builder.build(tmp_path_factory.mktemp("page"), builder.CACHE).parent
    except builder.NotFetchedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tab(folder):
    if headless.program() is None:
        scripts.load("tests/launch/real_launches.py").require(chromium="chromium")
    with headless.page(folder) as found:
        yield found


ANSWER = """new Promise((resolve) => {
  window.apart ??= new Worker("worker.js", {type: "module"});
  window.apart.onmessage = ({data}) => { if (data.result || data.failed) resolve(data); };
  window.apart.postMessage({id: 0, kind: %s, request: %s});
})"""


def in_browser(tab, kind, asked):
    """What a worker of the page answers."""
    return tab.value(ANSWER % (json.dumps(kind), json.dumps(asked)))["result"]


TYPED = """(() => { const field = document.querySelector('[name="%s"]'); planner.estimate = null; field.value = %s;
  field.dispatchEvent(new Event("input", {bubbles: true})); })()"""


def typed(tab, name, value):
    tab.value(TYPED % (name, json.dumps(value)))
    return tab.until("window.planner.estimate")


def cases():
    """Every model, the kinds of GPU in turn."""
    kinds = list(GPUS)
    for number, name in enumerate(published_models()):
        settings = ["train.steps=1", f"model.name={name}", "train.sequence_length=8192", "train.global_batch_sequences=256"]
        layout = [f"parallel.tensor={(1, 4)[number % 2]}", "parallel.zero=3", "train.microbatch_sequences=1"]
        yield {"settings": settings + layout, "gpu": kinds[number % len(kinds)], "gpus": "64", "gpus_per_host": ""}


@pytest.mark.slow
def test_the_build_can_be_repeated(folder, tmp_path):
    builder = scripts.load("docs/browser/build_page.py")
    again = builder.build(tmp_path, builder.CACHE).parent
    one, other = ({path.relative_to(top): path.read_bytes() for path in top.rglob("*.*")} for top in (folder, again))
    assert one == other
    assert sum(map(len, one.values())) < 20 * 2**20


@pytest.mark.slow
def test_a_browser_answers_as_the_commands_do(tab, planner):
    tab.open()
    plans = [
        ["train.steps=1", f"model.name={name}", "train.sequence_length=8192", "train.global_batch_sequences=16"]
        for name in ("llama-3.2-3b", "llama-3.1-70b")
    ]
    gpus = {"gpu": "h100-80gb", "gpus": "16", "gpus_per_host": ""}
    plans = [{"settings": settings, **gpus} for settings in plans]
    for kind, asked in [*(("estimate", case) for case in cases()), *(("plan", case) for case in plans)]:
        assert in_browser(tab, kind, asked) == ask(planner, kind, asked)


@pytest.mark.slow
def test_the_page_shows_what_it_was_asked_and_its_link_holds_it(tab, planner):
    tab.open("#" + urlencode({"model.name": "qwen3-1.7b", "gpus": "2", "train.global_batch_sequences": "8", "plan": "1"}))
    tab.until("window.planner?.plan && window.planner.estimate")
    settings = ["train.steps=1000", "model.name=qwen3-1.7b", "train.sequence_length=8192", "train.global_batch_sequences=8"]
    layout = ["parallel.tensor=2", "parallel.zero=1", "parallel.remat=selective", "train.microbatch_sequences=1"]
    same = {"settings": settings + layout, "gpu": "h100-80gb", "gpus": "2", "gpus_per_host": ""}
    estimate, plan = ask(planner, "estimate", same), ask(planner, "plan", same)
    assert tab.value("planner.estimate.json") == estimate["json"]
    assert tab.value("planner.plan.json") == plan["json"]
    shown = tab.value("[...document.querySelectorAll('#memory g')].map((row) => [row.dataset.name, +row.dataset.value])")
    assert dict(shown) == {part["name"]: part["value"] for part in estimate["bytes"]}
    rows = tab.value(
        "[...document.querySelectorAll('#best tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    wanted = [[row["layout"], row["memory"], row["tokens"], row["tflops"]] for row in plan["rows"]]
    assert [cells[1:5] for cells in rows] == wanted
    assert tab.value("document.getElementById('recipe').textContent") == estimate["recipe"]

    # A row of the plan becomes the layout, and the config that the page gives.
    tab.value("planner.estimate = null, document.querySelector('#best tbody button').click()")
    tab.until("window.planner.estimate")
    best = json.loads(plan["json"])["candidates"][0]
    assert json.loads(tab.value("planner.estimate.json"))["step_s"] == best["step_s"]
    link = tab.value("location.hash")
    before = tab.value("[planner.estimate.json, planner.estimate.recipe]")
    assert load_config(yaml.safe_load(before[1])).microbatch_sequences == best["microbatch_sequences"]
    assert tab.value("document.getElementById('stale').hidden")
    tab.open(link)
    tab.until("window.planner?.estimate")
    assert tab.value("[planner.estimate.json, planner.estimate.recipe]") == before
    tab.until("window.planner.plan")
    typed(tab, "gpus", "8")
    assert not tab.value("document.getElementById('stale').hidden")
    assert "plan" not in tab.value("location.hash")


@pytest.mark.slow
def test_the_page_is_used_by_keyboard_and_never_waits(tab):
    tab.open()
    tab.until("window.planner?.estimate")
    found = typed(tab, "train.sequence_length", "many")
    assert tab.value("document.querySelector('[aria-invalid]').name") == "train.sequence_length"
    assert tab.value("document.getElementById('complaint').textContent") == found["error"]
    typed(tab, "train.sequence_length", "4096")
    assert tab.value("document.querySelectorAll('[aria-invalid], .complaint').length") == 0

    reached = set()
    for _ in range(40):
        for kind in ("keyDown", "keyUp"):
            tab.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(tab.value("document.activeElement.id"))
    assert {"model", "gpu", "gpus", "sequence_length", "batch", "other", "copy-link", "objective", "run-plan"} <= reached

    # Estimates go on during a plan, and a plan can be stopped.
    tab.value("document.getElementById('run-plan').click()")
    tab.until("document.getElementById('progress-text').textContent.includes(' of ')")
    assert typed(tab, "train.sequence_length", "2048")["fits"]
    assert tab.value("planner.plan") is None
    tab.value("document.getElementById('stop-plan').click()")
    assert tab.value("document.getElementById('plan-said').textContent") == "Stopped."

    # A link from elsewhere, with what this page's lists have not.
    tab.open("#" + urlencode({"gpu": "h20-96gb", "parallel.remat": "{query: keep}"}))
    assert "h20-96gb" in tab.until("window.planner?.estimate")["error"]
    assert not typed(tab, "gpu", "a100-80gb").get("error")
    assert "query: keep" in tab.value("planner.estimate.recipe")

    # Own sizes start from the model that was chosen.
    before = typed(tab, "train.sequence_length", "1024")["json"]
    assert typed(tab, "model.name", "")["json"] == before


@pytest.mark.slow
def test_the_page_loads_nothing_but_its_own_files(tab, folder):
    if not tab.server.served:
        tab.open()
        tab.until("window.planner?.estimate")
    own = {f"/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}
    assert set(tab.server.served) == (own | {"/"}) - {"/index.html"}
    # A browser's own calls of its maker, refused like all others.
    assert [host for host in tab.server.refused if not re.search(r"\bgoogle(apis)?\.com\b", host)] == []
    assert tab.said == []
