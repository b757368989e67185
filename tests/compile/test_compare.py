"""Comparing compile reports, hand-made ones and those of a CPU."""

import dataclasses
import io
import json

import jax
import pytest
import yaml
from compile_reports import RECIPE, REPORT, WORSE, exposed
from rich.console import Console

from jaxllm.cli import app as cli
from jaxllm.compile.compare import ALL, compare, figures, render_comparison
from jaxllm.config import ConfigError

NAMES = ("this command", "other")


def text_of(comparison):
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    console.print(render_comparison(comparison))
    return console.file.getvalue()


def verdicts(comparison, verdict):
    return [change.name for change in comparison.changes if change.verdict == verdict]


# ------------------------------------------------------------------------------------------------------------ comparing


def test_a_report_against_itself_changes_nothing():
    found = compare(REPORT, REPORT, NAMES)
    assert {change.verdict for change in found.changes} == {"same"}
    assert all(change.before == change.after and change.relative == 0 for change in found.changes)
    text = text_of(found)
    assert "Worse: nothing" in text
    assert "Better: nothing" in text
    assert "%" not in text.replace("0.1% of the total", "")


def test_what_got_worse_comes_first_and_the_most_first():
    """A scalar's all-reduce that lost its overlap does not matter, time to compile is noise, and new is more than any share."""
    found = compare(REPORT, WORSE, NAMES)
    assert verdicts(found, "worse") == [
        f"sent, not hidden: {ALL}",
        "sent, not hidden: all-gather over data",
        "time: copies",
        f"exposed: {ALL}",
        "exposed: all-gather over data",
        "kernel launches",
        "memory: temporaries",
        f"memory: {ALL}",
        f"time: {ALL}",
    ]
    assert verdicts(found, "better") == ["time: norms", "HLO instructions"]
    order = [change.verdict for change in found.changes]
    assert order == sorted(order, key=("worse", "better", "same").index)
    assert "exposed: all-reduce over data x tensor" in verdicts(found, "same")
    json.loads(json.dumps(found.to_json()), parse_constant=lambda constant: pytest.fail(constant))


def test_an_exchange_that_is_not_in_each_step_is_no_row_of_the_exposed_seconds():
    """They are the rows of their total."""
    exchange = dataclasses.replace(exposed("all-reduce", ("replica",), 5.0), every_steps=50)
    rounds = dataclasses.replace(REPORT, overlap=(exchange, *REPORT.overlap))
    by_name = figures(rounds)["exposed"].by_name
    assert by_name.pop(ALL) == sum(by_name.values()) == 0.01


def test_what_is_worse_in_one_direction_is_better_in_the_other():
    there, back = compare(REPORT, WORSE, NAMES), compare(WORSE, REPORT, NAMES)
    assert set(verdicts(there, "worse")) == set(verdicts(back, "better"))
    assert set(verdicts(there, "better")) == set(verdicts(back, "worse"))


def test_the_text_fits_80_columns_and_names_what_differs():
    other = dataclasses.replace(
        WORSE,
        fits=False,
        share_of_capacity=1.25,
        model_flops=10**15,
        attention="xla",
    )
    text = text_of(compare(REPORT, other, NAMES))
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in (
        "before: this command",
        "after: other",
        "different work",
        "attention xla after",
        "It DOES NOT FIT any more: 125.0% of what a step may take, 41.7% before",
        "New warnings\n  Something is bare.",
    ):
        assert words in text


@pytest.mark.parametrize("change", [{"gpu": "h200-141gb"}, {"gpus": 16}, {"gpus_per_host": 4}], ids=lambda one: next(iter(one)))
def test_steps_for_other_gpus_are_refused(change):
    other = dataclasses.replace(REPORT, **change)
    hosts = {"gpus": "2 hosts", "gpus_per_host": "2 hosts"}.get(next(iter(change)), "1 host")
    with pytest.raises(ConfigError) as refused:
        compare(REPORT, other, NAMES)
    assert str(refused.value) == (
        "One step is for 8 x h100-80gb (1 host of 8), and the other for "
        f"{other.gpus} x {other.gpu} ({hosts} of {other.gpus_per_host}): compare steps for the same GPUs."
    )


# ------------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "run": {"cpu_devices": jax.device_count()}}))
    return str(path)


def test_a_config_is_compared_with_another(recipe, capsys):
    """Times of CPUs are not known."""
    cli.compile_([recipe, "model.num_layers=1"], against=["train.seed=3"], as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert {change["verdict"] for change in values["comparison"]["changes"]} == {"same"}
    assert {change["unit"] for change in values["comparison"]["changes"]} == {"", "bytes", "FLOPs"}
    assert (values["comparison"]["before"], values["comparison"]["after"]) == ("this command", "train.seed=3")
    assert values["total_bytes"] == values["against"]["total_bytes"]


@pytest.mark.parametrize("other", ["XLA_FLAGS=--a=b", "before.json", "."])
def test_what_is_no_config_is_for_another_command(recipe, other):
    with pytest.raises(ConfigError, match=r"^--against takes another recipe or key=value: .* compares benchmarks/against\.py"):
        cli.compile_([recipe], against=[other])
