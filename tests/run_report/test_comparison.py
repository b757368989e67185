"""`jaxllm report RUN RUN ...`: the page's numbers are those of the runs, and it says which run came first."""

import json
import re

import numpy as np
import pytest
from stored_runs import BATCH, ONE, Tags, pictures, steps, timed, write_config, write_lines
from tiny import TINY
from typer.testing import CliRunner

from jaxllm.cli.app import app
from jaxllm.config import ConfigError, load_config
from jaxllm.run_report.comparison import LETTERS, compare, comparison_page
from jaxllm.run_report.history import read_run


@pytest.fixture
def run(tmp_path):
    """run(name, lines, *overrides) -> a run directory of TINY on one device."""

    def make(name, lines, *overrides):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        write_config(folder, load_config(TINY, [*ONE, f"run.dir={folder}", *overrides]))
        write_lines(folder / "metrics.jsonl", lines)
        return folder

    return make


@pytest.fixture
def pair(run):
    """Two runs with the same losses at the same steps. The second has twice the batch, and steps three times as fast. Both were
    restarted after step 20, the first an hour later."""
    small = [*steps(40), {"step": 20, "eval_loss": 4.5}, {"step": 40, "eval_loss": 3.5}]
    large = [*steps(40, 2 * BATCH), {"step": 40, "eval_loss": 3.75}]
    for lines, step_s, down_s in ((small, 3.0, 3600.0), (large, 1.0, 0.0)):
        for line in lines[:40]:
            line["unix_s"] = 1000 + line["step"] * step_s + (line["step"] > 20) * down_s
        for number in (0, 20):
            lines[number]["start_unix_s"] = lines[number]["unix_s"] - step_s
    batch = ("train.global_batch_sequences=16", "train.microbatch_sequences=8", "optimizer.learning_rate=0.001")
    return run("small", small), run("large", large, *batch)


def test_numbers_are_those_of_the_runs(pair):
    found = compare(pair).to_json()
    for one, folder, step_s, batch in zip(found["runs"], pair, (3.0, 1.0), (BATCH, 2 * BATCH), strict=True):
        history = read_run(folder)
        smoothed = history.smoothed_loss
        assert one["run"] == str(folder)
        assert (one["steps"], one["tokens"], one["batch_tokens"], one["restarts"]) == (40, 40 * batch, batch, 1)
        assert (one["loss"], one["least_loss"]) == (smoothed[-1], smoothed.min())
        assert one["eval_loss"] == history.evaluated()[1][-1]
        # Nothing was done again, so hours are the steps' own; the time between starts is none of them.
        np.testing.assert_allclose(history.hours, step_s * history.steps / 3600)
        assert one["hours"] == pytest.approx(history.busy_s / 3600)
        assert (one["steps_to_common_loss"], one["tokens_to_common_loss"]) == (40, 40 * batch)
        assert one["hours_to_common_loss"] == one["hours"]
    assert (found["runs"][0]["least_eval_loss"], found["runs"][1]["least_eval_loss"]) == (3.5, 3.75)
    assert found["runs"][1]["config"] == {
        **{"optimizer.learning_rate": 0.001, "train.global_batch_sequences": 16, "train.microbatch_sequences": 8},
    }
    assert found["runs"][0]["config"] == {
        **{"optimizer.learning_rate": 3e-4, "train.global_batch_sequences": 8, "train.microbatch_sequences": None},
    }
    assert found["common_loss"] == smoothed.min()
    assert (found["first_in_tokens"], found["first_in_hours"], found["warnings"]) == (["small"], ["large"], [])


def test_steps_done_again_take_hours(run):
    start = {"start_unix_s": 1000.0}
    before = timed(steps(6), *(1010.0 + 2 * k for k in range(6)), **start)
    after = timed(steps(4, first=5, tokens=4 * BATCH), *(1108.0 + 2 * k for k in range(4)), start_unix_s=1100.0)
    folder = run("again", [*before[:4], *after])
    write_lines(folder / "metrics-1.jsonl", before)
    history = read_run(folder)
    np.testing.assert_allclose(3600 * history.hours, [10, 12, 14, 16, 28, 30, 32, 34])
    assert history.hours[-1] == pytest.approx(history.busy_s / 3600)


def test_the_first_sentence_says_who_came_first(pair, run):
    (sentence,) = compare(pair).sentences()
    assert sentence == (
        "Every run reached a training loss of 3.4131 (smoothed): in tokens small first (5.12k), then large (10.2k); in hours "
        "large first (0.01111 h), then small (0.03333 h)."
    )
    (earlier,) = compare(pair, loss=4.0).sentences()
    at = int(np.flatnonzero(read_run(pair[0]).smoothed_loss <= 4.0)[0]) + 1
    assert f"a training loss of 4.0000 (smoothed): in tokens small first ({at * BATCH / 1e3:.3g}k)" in earlier
    longer = run("longer", steps(60))
    (sentence,) = compare([*pair, longer], loss=3.0).sentences()
    assert sentence.startswith("1 of 3 runs reached a training loss of 3.0000 (smoothed): in tokens longer first (")
    assert sentence.endswith("). In hours it is not known, because lines of longer have no times.")
    (sentence,) = compare([*pair, longer]).sentences()
    assert "in tokens small and longer first (5.12k), then large (10.2k). In hours it is not known" in sentence
    nothing = run("nothing", [line | {"loss": None} for line in steps(3)])
    assert compare([*pair, nothing]).common_loss is None
    assert list(compare([*pair, nothing]).sentences()) == []


@pytest.mark.parametrize(
    ("overrides", "warning", "comparable"),
    [
        (
            ("data.source=files", f"data.paths=[{__file__}]"),
            "The losses are not comparable if the texts or tokenizers are not the same, and the runs differ in data.source and "
            "data.paths.",
            False,
        ),
        (
            ("data.held_out_fraction=0.2",),
            "The held-out losses are of different texts: the runs differ in data.held_out_fraction.",
            True,
        ),
        (
            ("train.sequence_length=32",),
            "Tokens do not see the same context, which changes the loss: the runs differ in train.sequence_length.",
            True,
        ),
    ],
)
def test_losses_that_cannot_be_compared_are_not(run, overrides, warning, comparable):
    runs = [run("one", steps(9)), run("other", steps(9), *overrides)]
    found = compare(runs)
    assert list(found.warnings()) == [warning]
    assert f"<h1>2 runs compared</h1>\n<p>{warning}</p>" in comparison_page(found)
    assert (found.common_loss is not None) == comparable
    assert compare(runs, loss=4.9).common_loss == 4.9


def test_another_tokenizer_is_told(run):
    """The tokenizers need not be here."""
    runs = [run("one", steps(9)), run("other", steps(9))]
    config = runs[1] / "config.yaml"
    config.write_text(config.read_text().replace("tokenizer: null", "tokenizer: /nowhere/tokenizer"))
    found = compare(runs)
    assert found.differing == {"data.tokenizer": [None, "/nowhere/tokenizer"]}
    assert found.common_loss is None
    # A run of a version without a key had its default.
    config.write_text(config.read_text().replace("tokenizer: /nowhere/tokenizer", "").replace("  z_loss_weight: 0.0\n", ""))
    assert compare(runs).differing == {}


# --------------------------------------------------------------------------------------------------------------- the page


def places(svg, color):
    """[points, 2]: of the curve of a colour in a chart, on the page."""
    found = [path.get("d") for path in svg.findall("{*}path") if path.get("stroke") == color and path.get("stroke-width")]
    assert len(found) == 1
    return np.array([point.split() for point in found[0].removeprefix("M").split("L")], float)


def test_curves_are_the_runs_lines(pair):
    """Both curves of a chart are the same straight map of (axis, loss), to a tenth of a unit."""
    histories = [read_run(folder) for folder in pair]
    charts = {svg.find("{*}title").text: [] for svg in pictures(comparison_page(compare(pair))) if len(svg) > 1}
    for svg in pictures(comparison_page(compare(pair))):
        if len(svg) > 1:
            charts[svg.find("{*}title").text].append(svg)
    assert {title: len(svgs) for title, svgs in charts.items()} == {
        **{"Training loss, smoothed (nats per token)": 3, "Held-out loss (nats per token)": 3, "Batch (tokens of a step)": 1},
        "Speed (tokens/s/device)": 1,
    }
    for svg, axis in zip(charts["Training loss, smoothed (nats per token)"], ("tokens", "steps", "hours"), strict=True):
        drawn = np.concatenate([places(svg, color) for color in ("#1f5ea6", "#d46b0d")])
        logged = np.concatenate([np.stack([getattr(one, axis), one.smoothed_loss], -1) for one in histories])
        # The highest points are cut off, so that one spike does not flatten the rest.
        inside = logged[:, 1] < np.quantile(histories[0].smoothed_loss, 0.95)
        for values, at in zip(logged[inside].T, drawn[inside].T, strict=True):
            slope, start = np.polyfit(values, at, 1)
            np.testing.assert_allclose(at, slope * values + start, atol=0.11)


def test_twelve_runs_are_told_apart_in_print(run):
    names = [f"run {number}" for number in range(11)] + ["<b> & co"]
    found = compare([run(name, steps(9)) for name in names])
    text = comparison_page(found)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe", "object"}
    assert tags.attributes == {}
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@media print" in text
    lines = re.findall(r'stroke="(#\w+)" stroke-width="2" stroke-dasharray="([^"]*)"', text)
    assert len(set(lines)) == len(lines) == 12
    assert re.findall(r"</svg><b>(\w)</b>", text) == list(LETTERS)
    assert "<b>L</b> &lt;b&gt; &amp; co</li>" in text
    for svg in pictures(text):
        if len(svg) > 1:
            labels = [(one.text, one.get("x"), one.get("y")) for one in svg.findall("{*}text") if one.get("class") == "end"]
            assert sorted(label for label, *_ in labels) == list(LETTERS)
            assert len({(x, y) for _, x, y in labels}) == 12
            assert all(20 < float(y) < 240 for *_, y in labels)
    # Six runs in a table, so that a printed page has room.
    assert text.count("<table") == 2
    rows = dict(found.table())
    assert f"<td>{rows['lowest loss'][0]}</td>" in text
    assert rows["lowest loss"][0] == f"{found.runs[0].history.smoothed_loss.min():.4f}"


def test_the_command_compares_several_runs(pair, tmp_path):
    words = ["report", *map(str, pair)]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).output)
    assert found == compare(pair).to_json()
    assert not (pair[0] / "comparison.html").exists()
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.output.startswith("Every run reached a training loss of 3.4131")
    assert result.output.endswith(f"page {pair[0] / 'comparison.html'}\n")
    assert (pair[0] / "comparison.html").read_text() == comparison_page(compare(pair))
    assert not (pair[0] / "report.html").exists()


def test_runs_of_one_name_are_called_by_their_paths(run, tmp_path):
    runs = [run("a/run", steps(9)), run("b/run", steps(9)), run("c", steps(9))]
    assert [one.name for one in compare(runs).runs] == [str(runs[0]), str(runs[1]), "c"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["SMALL", "nowhere"], "nowhere is not a run directory, because it has no metrics.jsonl: give the run's run.dir."),
        (["SMALL", "LARGE", "SMALL/"], "SMALL and SMALL/ are the same run: give each run once."),
        (["SMALL", "LARGE", "--loss", "0.5"], "--loss=0.5 was reached by none of these runs: the least smoothed loss is 3.41"),
        (["SMALL", "LARGE", "--gpu", "h100-80gb"], "--gpu and --gpus-per-host predict more data ranks of one run"),
        (["SMALL"] * 13, "13 runs are too many to tell apart in a chart: give at most 12."),
    ],
)
def test_mistakes_end_in_one_sentence(pair, arguments, sentence):
    small, large = map(str, pair)
    filled = [word.replace("SMALL", small).replace("LARGE", large) for word in arguments]
    result = CliRunner().invoke(app, ["report", *filled])
    assert isinstance(result.exception, ConfigError)
    assert sentence.replace("SMALL", small) in str(result.exception)
