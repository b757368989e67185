"""Compares the README, CONTRIBUTING and docs/ with the code: links, files, tests, keys, commands, calls and messages that they
name exist, and the recipe cards agree with their script. Nothing is compiled or drawn."""

import ast
import functools
import importlib.util
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import scripts
import typer
import yaml

import jaxllm
from jaxllm.cli.app import app
from jaxllm.compile import plan
from jaxllm.config import Config, ConfigError, load_config, published_models
from jaxllm.run.hooks import Run

CHECKOUT = Path(__file__).parents[1]
ROOT_PAGES = [CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*ROOT_PAGES, *sorted((CHECKOUT / "docs").glob("*.md")), CHECKOUT / "benchmarks" / "RESULTS.md"]
FILE = re.compile(r"^(?:jaxllm|tests|launch|configs|benchmarks|docs|notebooks)/[\w./-]*(?:/|\.\w+)$")
KEY = re.compile(rf"^({'|'.join(Config.model_fields)})\.([a-z][a-z_0-9]*)(?!\w*\.(?:json|yaml|py))")
WRITTEN = ("--out", "--picture")
"""Options whose file a command makes."""
RECIPE_COMMANDS = ("train", "inspect", "estimate", "compile", "plan", "schedule")
ANY_RECIPE = {"model": {"name": "llama-3.2-1b"}, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 1024}}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))


# ------------------------------------------------------------------------------------------------------ reading Markdown


@functools.cache
def parts(page: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Splits a page into (prose, code as pairs of language and text). Indented code has the language ""."""
    prose: list[str] = []
    code: list[tuple[str, list[str]]] = []
    fenced, before = False, ""
    for line in page.read_text(encoding="utf-8").splitlines():
        indented, goes_on = line.startswith("    "), before.startswith("    ")
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                code.append((line[3:].strip() or "text", []))
        elif fenced:
            code[-1][1].append(line)
        elif indented and (goes_on or not before.strip()):
            if not goes_on:
                code.append(("", []))
            code[-1][1].append(line[4:])
        else:
            prose.append(line)
        before = "" if fenced else line
    return "\n".join(prose), tuple((language, "\n".join(lines)) for language, lines in code)


def spans(page: Path) -> list[str]:
    """Inline code, even if it is broken over two lines."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", parts(page)[0])]


def words(page: Path) -> set[str]:
    """Words of inline code and of code blocks, without files that a command makes."""
    found = set()
    for text in [*spans(page), *(line for _, block in parts(page)[1] for line in block.splitlines())]:
        before = ""
        for word in text.split():
            if before not in WRITTEN:
                found.add(word.strip("\"'(),:;[]{}"))
            before = word
    return found


@functools.cache
def named_tests(path: Path) -> frozenset[str]:
    names = (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


@functools.cache
def all_tests() -> frozenset[str]:
    files = list((CHECKOUT / "tests").rglob("test_*.py"))
    return frozenset().union(*map(named_tests, files), (path.stem for path in files))


def commands(page: Path) -> list[tuple[list[str], str]]:
    """(words after `jaxllm`, the first line of output) for every command in a code block, also after a launcher."""
    found = []
    for language, block in parts(page)[1]:
        if language in ("python", "yaml"):
            continue
        lines = block.replace("\\\n", " ").splitlines()
        for line, below in zip(lines, [*lines[1:], ""], strict=True):
            launched = r"(?:(?:bash|sbatch) .*?)??(?:\S+=\S+ )*"
            if match := re.match(rf"(?:\$ )?{launched}\bjaxllm ([a-z].*)$", line):
                found.append((shlex.split(match[1], comments=True), below))
    return found


def command_named(arguments: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the rest of the words."""
    command, rest = typer.main.get_command(app), list(arguments)
    while rest and hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return command, rest


def shown_files(page: Path) -> dict[str, dict]:
    """Recipes that a page shows with `$ cat NAME.yaml`."""
    found = {}
    for _, block in parts(page)[1]:
        for name, text in re.findall(r"^\$ cat (\S+\.yaml)\n((?:(?!\$ ).+\n?)+)", block, re.MULTILINE):
            found[name] = yaml.safe_load(text)
    return found


def recipe_for(name: str, page: Path) -> dict:
    """The content of a command's config file. For a file that does not exist here (a placeholder, an output), any recipe."""
    path = CHECKOUT / name
    if name.endswith("-best.yaml") and not path.exists():
        path = CHECKOUT / name.replace("-best", "")
    if path.is_file():
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    else:
        values = shown_files(page).get(name, ANY_RECIPE)
    values = {section: dict(keys) for section, keys in values.items()}
    if values["model"].get("name", "llama-3.2-1b") not in published_models():
        values["model"]["name"] = "llama-3.2-1b"
    if values.get("data", {}).get("source") in ("files", "chat", "preferences"):
        values["data"], values["train"] = {}, values["train"] | {"loss": "cross_entropy"}
    return values


# -------------------------------------------------------------------------------------------------------------- the tests


def test_reading_markdown(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Head\n\nSee `a\nb`.\n\n    $ cat x.yaml\n    model: {name: y}\n    $ jaxllm train x.yaml \\\n        train.steps=2\n"
        "    bash launch/ssh.sh hosts jaxllm doctor\n\n```python\nimport jaxllm\n```\n- item\n    no code\n"
    )
    prose, code = parts(page)
    assert [language for language, _ in code] == ["", "python"]
    assert "no code" in prose
    assert spans(page) == ["a b"]
    assert shown_files(page) == {"x.yaml": {"model": {"name": "y"}}}
    assert [arguments for arguments, _ in commands(page)] == [["train", "x.yaml", "train.steps=2"], ["doctor"]]


@pages
def test_links_lead_somewhere(page):
    slug = scripts.load("docs/recipes.py").slug
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", parts(page)[0]):
        path, _, anchor = link.partition("#")
        if re.match(r"https?:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(link)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", parts(target)[0], re.MULTILINE)
            wrong += [link] * (anchor not in [slug(heading.replace("`", "")) for heading in headings])
    assert wrong == []


@pages
def test_files_and_tests_that_are_named_exist(page):
    wrong = []
    for word in words(page):
        path, _, test = word.partition("::")
        if FILE.match(path) and not path.endswith("-best.yaml"):
            missing = not (CHECKOUT / path).exists() or (test and test.partition("[")[0] not in named_tests(CHECKOUT / path))
            wrong += [word] * bool(missing)
        elif re.fullmatch(r"test_\w+", word):
            wrong += [word] * (word not in all_tests())
    assert sorted(wrong) == []


@pages
def test_names_are_in_the_file_beside_them(page):
    """Pages name functions in this form: `name` and `other` in `jaxllm/room/module.py`."""
    wrong = []
    named = re.findall(r"(?:`([\w.]+)` and )?`([\w.]+)` in `(jaxllm/[\w/]+\.py)`", " ".join(parts(page)[0].split()))
    for *names, path in named:
        source = (CHECKOUT / path).read_text(encoding="utf-8")
        wrong += [f"{name} in {path}" for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", source)]
    assert wrong == []


@pages
def test_keys_that_are_named_exist(page):
    wrong = []
    for span in spans(page):
        if match := KEY.match(span):
            section, key = match.groups()
            # `run` is also what a hook registers with.
            of_hooks = section == "run" and (hasattr(Run, key) or key in Run.__dataclass_fields__)
            wrong += [span] * (key not in Config.model_fields[section].annotation.model_fields and not of_hooks)
    assert wrong == []


@pages
def test_commands_parse(page):
    for arguments, below in commands(page):
        command, rest = command_named(arguments)
        context = command.make_context(command.name, rest)
        if arguments[0] not in RECIPE_COMMANDS:
            continue
        recipe = context.params["recipe"]
        (name,) = (word for word in recipe if "=" not in word)
        overrides = [word for word in recipe if "=" in word]
        if below.startswith("jaxllm: "):
            with pytest.raises(ConfigError, match=re.escape(below.removeprefix("jaxllm: "))):
                load_config(recipe_for(name, page), overrides)
            continue
        config = load_config(recipe_for(name, page), overrides)
        devices = context.params.get("gpus") or config.run.cpu_devices
        # For a recipe that does not exist yet, only the question is tested.
        if devices is not None and arguments[0] != "plan" and not name.endswith("-best.yaml"):
            config.resolve(devices)


@pages
def test_commands_in_the_text_know_their_options(page):
    for span in spans(page):
        if match := re.match(r"jaxllm (?=[a-z])([^=]*)$", span):
            command, rest = command_named(match[1].split())
            options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            options |= {"--help"}
            assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options, span


@pages
def test_python_calls_what_is_there(page):
    for language, block in parts(page)[1]:
        if language != "python":
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxllm":
                assert node.attr in jaxllm.__all__
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("jaxllm."):
                name = ast.unparse(node.func).removeprefix("jaxllm.")
                function = plan.plan if name == "plan" else getattr(jaxllm, name)
                keywords = {keyword.arg: None for keyword in node.keywords}
                inspect.signature(function).bind(*[None] * len(node.args), **keywords)


def recipes_shown(page):
    shown = (yaml.safe_load(block) for language, block in parts(page)[1] if language == "yaml")
    return [values for values in shown if {"model", "train"} <= values.keys()]


@pages
def test_recipes_that_are_shown_load(page):
    for values in recipes_shown(page):
        assert load_config(values).model_fields_set == values.keys()


def test_recipes_are_shown():
    assert any(recipes_shown(page) for page in PAGES)


def test_every_picture_is_drawn_by_the_one_command():
    pictures = scripts.load("docs/pictures.py").PICTURES
    assert {path.stem for path in (CHECKOUT / "docs").glob("*.png")} == set(pictures)
    shown = {Path(path).stem for page in PAGES for path in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", parts(page)[0])}
    assert shown == set(pictures)


@pytest.mark.slow
@pytest.mark.parametrize("name", scripts.load("docs/pictures.py").PICTURES)
def test_a_picture_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    scripts.load("docs/pictures.py").PICTURES[name](tmp_path / f"{name}.png")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_every_page_is_in_the_contents():
    folder = CHECKOUT / "docs"
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in folder.glob("*.md")} - {"README.md"}
    for name in listed - {"comparison.md", "recipes.md", "troubleshooting.md"}:
        text = (folder / name).read_text(encoding="utf-8")
        assert "\n## Where it lives\n" in text, name
        assert "\n## How it is tested\n" in text, name


def test_the_readme_is_a_front_door():
    """At most 150 lines. Its top says that no step has run on several GPUs, and it links the other pages."""
    lines = (CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert any("No step has run on several GPUs" in line for line in lines[:12])
    linked = set(re.findall(r"\]\(docs/(\w[\w-]*\.md)", "\n".join(lines)))
    assert {"README.md", "composition.md", "figures.md", "comparison.md", "troubleshooting.md"} <= linked


def test_every_cell_of_what_composes_names_its_test():
    """The table of letters, and the list of their tests."""
    section = parts(CHECKOUT / "docs" / "composition.md")[0].split("\n## The table\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")]
    legend = {row[0]: row[1] for row in rows if re.fullmatch(r"[A-Za-z]", row[0])}
    assert all(re.fullmatch(r"`tests/\S+::test_\w+`", test) for test in legend.values())
    cells = [cell for row in rows if len(row) == 7 and row[0] for cell in row[1:]]
    assert [cell for cell in cells if not re.fullmatch(r"–?|(refused: )?[A-Za-z]( [A-Za-z])*", cell)] == []
    assert set(re.findall(r"\b[A-Za-z]\b", " ".join(cells))) == legend.keys()


# ----------------------------------------------------------------------------------------------------------------- recipes


def test_cards_say_what_their_script_keeps():
    recipes = scripts.load("docs/recipes.py")
    assert recipes.page() == recipes.PAGE.read_text(encoding="utf-8")
    for card in recipes.CARDS:
        answer = CHECKOUT / card.answer
        # Figures for another question, or without their recipe, do not belong to this card.
        assert card.kept.exists() == answer.exists() == recipes.is_current(card), f"run python docs/recipes.py {card.name}"
        question = load_config(CHECKOUT / card.question)
        if answer.exists():
            best = load_config(answer)
            assert best.resolve(card.gpus) == best
            assert best.model == question.model
            assert best.train.global_batch_sequences == question.train.global_batch_sequences


def test_a_card_shows_its_figures(tmp_path, monkeypatch):
    recipes = scripts.load("docs/recipes.py")
    card = recipes.CARDS[0]
    candidate = {"pipe": 2, "data": 4, "context": 1, "tensor": 1, "zero": 1, "microbatch_sequences": 1, "remat": "full"}
    candidate |= {"schedule": "interleaved", "virtual_stages": 2, "estimate_bytes": 2**30, "tokens_per_s_per_gpu": 1234.0}
    candidate |= {"tflops_per_gpu": 56.0, "exposed_communication_share": 0.25}
    line = {"asynchronous": True, "behind_matmuls": True, "sent_bytes": 3}
    compiled = dict.fromkeys(recipes.COMPILED) | {"total_bytes": 3 * 2**29, "host_bytes": 0, "share_of_capacity": 0.5}
    compiled |= {"fits": True, "warnings": ["much"], "collectives": [line, line | {"asynchronous": False, "sent_bytes": 1}]}
    planned = dict.fromkeys(recipes.PLANNED, 0) | {"candidates": [candidate] * 5, "unconfirmed_because": None}
    planned |= {"cost": {"days": 2.0, "gpu_hours": 384.0}}
    planned |= {"tokens_per_s_per_gpu_range": [1000.0, 1500.0], "extrapolated": ["long", "wide"]}
    monkeypatch.setattr(recipes, "CHECKOUT", tmp_path)
    (tmp_path / card.question).parent.mkdir(parents=True)
    for one in recipes.CARDS:
        (tmp_path / one.question).write_text("model: {}\n")
    (tmp_path / card.answer).write_text("old")

    def answered(command):
        if command == card.plan:
            assert not (tmp_path / card.answer).exists()
            (tmp_path / card.answer).write_text(f"# planned    {command} --json\n")
        return (planned if command == card.plan else compiled), 1.5

    monkeypatch.setattr(recipes, "_json_of", answered)
    recipes.run(card)
    assert (tmp_path / card.answer).read_text() == f"# planned    {card.plan}\n"
    page = recipes.page()
    assert "pipe 2, data 4; ZeRO 1, microbatch 1, interleaved x 2, remat full" in page
    assert "| memory by XLA | 1.5 GiB, 50% of what a step may take: fits |" in page
    assert "| bytes sent behind matmuls | 75% |" in page
    assert "1,234 tokens/s/GPU" in page
    assert "| range for four of five runs | 1,000 to 1,500 tokens/s/GPU; extrapolated: long; wide |" in page
    assert page.count("Not planned yet") == len(recipes.CARDS) - 1
    (tmp_path / card.question).write_text("model: {name: other}\n")
    assert not recipes.is_current(card)


# ---------------------------------------------------------------------------------------------------------------- messages


def texts_of(node: ast.AST) -> str:
    """Pattern for the words of a text in order, with anything between them."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(map(texts_of, ast.iter_child_nodes(node)))


@pytest.fixture(scope="module")
def messages():
    """Every text in jaxllm's source."""
    nodes = (node for path in (CHECKOUT / "jaxllm").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return [texts_of(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]


def test_messages_are_those_of_the_code(messages):
    page = CHECKOUT / "docs" / "troubleshooting.md"
    listing = page.read_text(encoding="utf-8").partition("\n## Without a message\n")[0]
    cells = re.findall(r"^\| (`.+?`) \| ", listing, re.MULTILINE)
    listed = [message for cell in cells for _, message in re.findall(r"(`+)(.+?)\1(?!`)", cell)]
    assert len(listed) > 100
    # A name that the code inserts from a constant is a gap too.
    gap = r"…|JAXLLM_\w+"
    wrong = []
    for message in listed:
        pieces = [piece.strip(" ") for piece in re.split(gap, message)]
        pattern = re.compile(".*".join(re.escape(piece) for piece in pieces if piece), re.DOTALL)
        wrong += [message] * (not any(map(pattern.search, messages)))
    assert wrong == []


@pytest.mark.parametrize("notebook", sorted((CHECKOUT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_a_notebook_imports_is_there(notebook):
    """Quickly, for the notebooks that only the nightly run executes."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxllm"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), alias.name


def test_the_table_of_the_house_is_todays():
    """If it fails: python docs/architecture.py --write"""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- house: begin -->\n")[2].partition("\n<!-- house: end -->")[0]
    assert shown == scripts.load("docs/architecture.py").table()
