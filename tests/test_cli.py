"""The command line as its user sees it: real processes, exit codes, one sentence."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import jaxllm
from jaxllm.cli.app import app
from jaxllm.cli.errors import ending_in_one_sentence
from jaxllm.cli.options import load, print_lines
from jaxllm.config import config_folder, load_config, published_models
from jaxllm.config.named import as_named

ROOT = config_folder().parent


def run(*arguments, **options):
    command = [sys.executable, "-m", "jaxllm.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, **options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "configs/quickstart.yaml", "train.stpes=3"], "Unknown key train.stpes: did you mean train.steps?"),
        (["train", "train.steps=3"], "One config file is needed and none was given"),
        (["train", "a.yaml", "train.steps", "b.yaml"], "3 were given: a.yaml, train.steps, b.yaml"),
        (["train", "configs/quickstrat.yaml"], "There is no config file configs/quickstrat.yaml: did you mean"),
        (["train", "configs/quickstart.yaml", "run.cpu_devices=3", "parallel.data=2"], "is 2 devices, but there are 3"),
        (["train", "configs/quickstart.yaml", "run.dir=/proc/nowhere"], "cannot be written: choose another"),
        (["schedule", "configs/mesh-demo.yaml"], "parallel.pipe=1 has no pipeline: set parallel.pipe"),
    ],
)
def test_mistakes_end_in_one_sentence_and_code_2(arguments, sentence):
    result = run(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().count("\n") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the disk that is full is Linux's /dev/full")
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["flushed", "in the buffer"])
def test_output_on_a_full_disk_ends_in_one_sentence_and_code_2(more):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "jaxllm.cli", "estimate", "quickstart", "--gpus", "2", *more]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=300, env=environment)
        both = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, timeout=300, env=environment)
    assert (result.returncode, both.returncode) == (2, 2)
    assert result.stderr == "jaxllm: No space left on device for what it prints or writes: make room there.\n"


def commands(command, path=()):
    """(command, its words) of all commands and groups below one."""
    yield command, path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


ALL_COMMANDS = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize(("command", "path"), ALL_COMMANDS, ids=[" ".join(path) or "jaxllm" for _, path in ALL_COMMANDS])
def test_help_fits_80_columns_and_ends_with_an_example_that_parses(command, path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with command.make_context(" ".join(("jaxllm", *path)), [], resilient_parsing=True) as context:
        lines = command.get_help(context).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].strip().endswith(".") or lines[3].strip().endswith(".")
    # A group's list shortens no sentence, and no option or argument shows a Python type as its value.
    assert [line for line in lines if re.search(r"[a-z:,]\.\.\.$|<\w+", line)] == []
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("    jaxllm ")]
    assert examples or hasattr(command, "commands")
    for words in examples:
        found = next(other for other, name in ALL_COMMANDS if name and list(name) == words[: len(name)])
        if words[-1] != "--help":
            rest = words[: words.index(">")] if ">" in words else words
            name = next(name for other, name in ALL_COMMANDS if other is found)
            recipe = found.make_context("jaxllm", rest[len(name) :]).params.get("recipe")
            assert not recipe or load(recipe)


def dispatch(words):
    with ending_in_one_sentence(), typer.main.get_command(app).make_context("jaxllm", list(words)) as context:
        context.command.invoke(context)
    sys.exit(0)


def ending(capsys, *words):
    """(exit code, standard output, standard error) of a command line, in this process."""
    with pytest.raises(SystemExit) as end:
        dispatch(words)
    return end.value.code, *capsys.readouterr()


@pytest.mark.parametrize("path", [path for _, path in ALL_COMMANDS], ids=" ".join)
def test_h_is_help(path, capsys):
    short, long = ending(capsys, *path, "-h"), ending(capsys, *path, "--help")
    assert short == long
    assert short[0] == 0
    assert "-h, --help" in short[1]


FORMS = {
    "train quickstart --train.steps=3 --model.num_layers 2": ["quickstart", "train.steps=3", "model.num_layers=2"],
    "estimate --train.z_loss_weight -1 --gpus 2 quickstart": ["train.z_loss_weight=-1", "quickstart"],
    "doctor --gpu h100-80gb --parallel.tensor=2": ["parallel.tensor=2"],
    "train quickstart -- --train.steps=3": ["quickstart", "--train.steps=3"],
    "train quickstart +train.steps=3": ["quickstart", "+train.steps=3"],
}


@pytest.mark.parametrize("line", FORMS)
def test_overrides_may_be_written_with_dashes(line):
    words = line.split()
    command = next(command for command, path in ALL_COMMANDS if path == (words[0],))
    # Older versions of typer make a tuple of it.
    assert list(command.make_context("jaxllm", words[1:]).params["recipe"]) == FORMS[line]


def test_the_value_of_an_option_is_no_override():
    command = next(command for command, path in ALL_COMMANDS if path == ("generate",))
    words = ["--model", "x", "--prompt", "--train.steps=2", "--parallel.tensor=2"]
    given = command.make_context("jaxllm", words).params
    assert [*given["prompt"], *given["overrides"]] == ["--train.steps=2", "parallel.tensor=2"]


OTHERS = "and overrides are written section.key=value"


@pytest.mark.parametrize(
    ("line", "sentence"),
    {
        "train quickstart --steps 2": f"No such option --steps, {OTHERS}: did you mean train.steps?",
        "train --config quickstart": f"No such option --config, {OTHERS}: the recipe is named without an option, as in `jaxllm "
        "train quickstart`.",
        "plan quickstart --micro-batch-size=2": f"No such option --micro-batch-size, {OTHERS}: did you mean "
        "train.microbatch_sequences?",
        "train quickstart --train.stpes=3": "Unknown key train.stpes: did you mean train.steps?",
        "train quickstart --train.steps": "--train.steps needs a value: write train.steps=VALUE.",
        "estimate quickstart --parallel.zero --gpus 8": "--parallel.zero needs a value: write parallel.zero=VALUE.",
        "train quickstart --stpes": "No such option: --stpes: see `jaxllm train --help`.",
        # Only where overrides are taken.
        "report runs --train.steps=3": "No such option: --train.steps: see `jaxllm report --help`.",
    }.items(),
)
def test_a_wrong_option_ends_in_one_sentence(line, sentence, capsys):
    code, _, error = ending(capsys, *line.split())
    assert code == 2
    assert error.startswith("jaxllm: ")
    assert error.endswith(f"{sentence}\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", published_models())
def test_a_models_name_is_a_config_of_its_size(name, capfd):
    config = load([name, "train.steps=7"], or_model=True)
    assert config.model == as_named(name)
    tokens = config.step_tokens
    assert tokens == 2**24 if "405b" in name else 2**22 if "70b" in name or "72b" in name or "32b" in name else 2**20
    train = config.train
    assert capfd.readouterr().err == (
        f"jaxllm: {name} is a model and no recipe, so this takes train.steps=7 train.sequence_length={train.sequence_length} "
        f"train.global_batch_sequences={train.global_batch_sequences} train.microbatch_sequences=1; other keys may follow the "
        f"name.\n"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    {
        "estimate llama-3.1-8b --gpu h100-80gb --gpus 8 train.sequence_length=4096": "524,288 tokens a step: 16 microbatches",
        "estimate llama-3.1-8b --for generate --gpus 1": "llama-3.1-8b to generate on 1 GPU",
        "estimate llama-3.1-8b --gpu h100-80gb --gpus 8 --tokens 1T": "GPU-hours",
        "plan smollm2-135m --compile 0 --gpus 1 --rows 1": "configurations",
        "inspect smollm2-135m": "134,515,008 parameters",
    }.items(),
)
def test_commands_that_plan_take_a_models_name(line, expected, capsys):
    code, out, _ = ending(capsys, *line.split())
    assert code == 0
    assert expected in out


def test_a_file_of_a_models_name_is_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("llama-3.1-8b").write_text((config_folder() / "quickstart.yaml").read_text())
    assert load(["llama-3.1-8b"], or_model=True) == load_config("quickstart")


def test_training_takes_no_models_name(capsys):
    code, _, error = ending(capsys, "train", "llama-3.1-8b")
    assert code == 2
    assert error.endswith("that is the shape of a model, so set model.name=llama-3.1-8b in a recipe.\n")


@pytest.mark.parametrize(
    ("line", "completed"),
    {
        "jaxllm tr": ["train"],
        "jaxllm train qu": ["quickstart"],
        "jaxllm train llama-3.1": [],
        "jaxllm estimate llama-3.1": ["llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b"],
        "jaxllm train quickstart train.st": ["train.steps="],
        "jaxllm plan --gp": ["--gpu", "--gpus", "--gpus-per-host"],
    }.items(),
)
def test_a_shell_completes_commands_recipes_models_and_keys(line, completed):
    environment = {"_JAXLLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    result = run(env={**os.environ, **environment})
    assert result.returncode == 0
    assert result.stdout.split() == completed


def test_long_lines_break_between_words_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    lines = ["short", "  " + "many words " * 20]
    print_lines(lines)
    assert capsys.readouterr().out == "\n".join([*lines, ""])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    print_lines(lines)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "short"
    assert rest[0].startswith("  many")
    assert all(len(line) <= 40 and line.split()[-1] in ("many", "words") for line in rest)
    assert all(line.startswith("    many") or line.startswith("    words") for line in rest[1:])


def test_overrides_may_stand_anywhere():
    result = run("train", "train.stpes=3", "configs/quickstart.yaml")
    assert result.returncode == 2
    assert "did you mean train.steps?" in result.stderr


def test_the_version_is_the_package_s():
    assert run("--version").stdout == f"jaxllm {jaxllm.__version__}\n"


def test_schema_prints_json_alone():
    result = run("schema")
    assert result.returncode == 0
    assert "model" in json.loads(result.stdout)["properties"]


def test_schedule_draws_a_picture_and_prints_json_alone(tmp_path):
    pytest.importorskip("matplotlib")
    overrides = ["parallel.pipe=4", "train.microbatch_sequences=1"]
    result = run("schedule", "configs/mesh-demo.yaml", *overrides, "--out", str(tmp_path / "timeline.png"), "--json")
    assert result.returncode == 0, result.stderr
    # Eight CPU devices of mesh-demo are four stages of two data ranks, which share 16 sequences.
    numbers = {"microbatches": 8, "data": 2, "ticks": 15, "slots": 8, "most_live_slots": [8, 6, 4, 2]}
    assert numbers.items() <= json.loads(result.stdout).items()
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_importing_is_quick_and_starts_nothing():
    code = "import jaxllm, sys; assert 'jax' not in sys.modules and 'pydantic' not in sys.modules"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert time.perf_counter() - started < 1.0


def test_an_estimate_imports_neither_jax_nor_what_trains():
    code = """if True:
        import sys
        from jaxllm.cli.app import main
        sys.argv = ["jaxllm", "estimate", "quickstart", "--gpu", "h100-80gb", "--gpus", "8"]
        try:
            main()
        except SystemExit as end:
            assert end.code == 0
        unwanted = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "tokenizers", "numpy", "rich"}
        assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_a_run_in_a_log_file_prints_plain_lines(tmp_path, text_file):
    """Output to a file: no escape codes, the lines that the quickstart promises, the held-out loss after the baselines."""
    sizes = ["model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=16", "model.num_heads=2"]
    data = ["data.source=files", f"data.paths=[{text_file}]"]
    small = ["train.steps=2", "train.sequence_length=16", "optimizer.warmup_tokens=0", "log.every_steps=1"]
    result = run("train", "configs/quickstart.yaml", *sizes, *data, *small, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    losses = [i for i, line in enumerate(lines) if line.startswith("held-out loss ")]
    baselines = [i for i, line in enumerate(lines) if line.startswith("baseline: ")]
    assert len(losses) == 1
    assert len(baselines) == 2
    assert max(baselines) < losses[0]
    assert re.fullmatch(r"held-out loss \d\.\d{3} nats per byte \(\d\.\d{3} bits\)", lines[losses[0]])
    assert sum(line.startswith("step ") for line in lines) == 2
    assert any(line == f"run directory {tmp_path / 'run'}" for line in lines)
    # The command also knows how long its imports took.
    first, second = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:2])
    assert first["start_import_s"] > 0
    assert "start_restore_s" not in first
    assert not any(key.startswith("start_") for key in second)
