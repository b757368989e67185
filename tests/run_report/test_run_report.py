"""`jaxllm report`: times add up, hours follow from the noise scale and the step-time model, the page is one file."""

import dataclasses
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from stored_runs import BATCH, ONE, RATE, Tags, pictures, steps, timed, write_config, write_lines
from tiny import TINY
from typer.testing import CliRunner

from jaxllm.cli.app import app
from jaxllm.cluster import progress
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.noise_reading import wasted_share
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.plan.data_ranks import accumulations, over_data_ranks, steps_to_loss, verdict, with_ranks
from jaxllm.plan.quote import predicted_speed
from jaxllm.plan.sweep import PAYS
from jaxllm.run.memory_check import check_memory
from jaxllm.run.step_metrics import start_keys
from jaxllm.run_report.history import (
    COMPILING,
    DATA,
    DOWN,
    EVALUATING,
    PARTS,
    REDONE,
    SAVING,
    STARTING,
    TRAINING,
    read_run,
)
from jaxllm.run_report.page import page
from jaxllm.run_report.summary import COMPILED, ESTIMATE, IN_USE, duration, report_on
from jaxllm.run_report.svg import Curve, digits_of, even_ticks, line_chart, log_ticks, number, spread

H100 = GPUS["h100-80gb"]
BIG = {
    "model": {"name": "llama-3.2-1b"},
    "parallel": {"data": 8},
    "train": {"steps": 100, "sequence_length": 4096, "global_batch_sequences": 32, "microbatch_sequences": 1},
}
CPU = SimpleNamespace(device_kind="cpu", platform="cpu")


def mesh_of(device, size):
    return SimpleNamespace(size=size, devices=np.array([device] * size))


@pytest.fixture
def run(tmp_path):
    """run(lines, *overrides) -> a run directory of TINY on one device."""

    def make(lines, *overrides, base=None):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        write_config(folder, load_config(TINY, [*ONE, *overrides]) if base is None else load_config(base, overrides))
        write_lines(folder / "metrics.jsonl", lines)
        return folder

    return make


# -------------------------------------------------------------------------------------------------------------- the batch


def test_at_the_runs_own_batch_it_needs_the_runs_own_steps():
    batch, noise = np.array([64.0, 64, 128, 256, 256]), np.array([30.0, 90, 200, 1000, 3000])
    constant = steps_to_loss(np.full(7, 100.0), np.linspace(50, 5000, 7))
    assert constant.steps(100) == pytest.approx(7)
    assert constant.tokens(100) == pytest.approx(700)
    whole, parts = steps_to_loss(batch, noise), (steps_to_loss(batch[:2], noise[:2]), steps_to_loss(batch[2:], noise[2:]))
    assert whole.steps(77) == pytest.approx(sum(part.steps(77) for part in parts))


def test_the_limits_are_those_of_the_law():
    """McCandlish et al. 2018: (steps / least - 1) (tokens / least - 1) = 1, and both twice the least at the noise scale."""
    needed = steps_to_loss(np.full(50, 400.0), np.full(50, 1600.0))
    assert needed.least_tokens / needed.least_steps == pytest.approx(1600)
    for batch in (1.0, 400.0, 1600.0, 1e6):
        over = needed.steps(batch) / needed.least_steps - 1, needed.tokens(batch) / needed.least_tokens - 1
        assert over[0] * over[1] == pytest.approx(1)
        assert wasted_share(batch, 1600) == pytest.approx(1 - needed.least_tokens / needed.tokens(batch))
        # The statement of noise_reading.py about twice the batch.
        wasted = wasted_share(batch, 1600)
        assert needed.steps(2 * batch) == pytest.approx(needed.steps(batch) * (1 - (1 - wasted) / 2))
        assert needed.tokens(2 * batch) == pytest.approx(needed.tokens(batch) * (1 + wasted))
    assert needed.steps(1e12) == pytest.approx(needed.least_steps)
    assert needed.tokens(1e-6) == pytest.approx(needed.least_tokens)


def test_without_a_network_doubling_pays_up_to_half_the_noise_scale():
    """Hours on d ranks are proportional to b + N / d; twice as many are 1.5 times as fast where d b <= N / 2."""
    config = load_config(TINY, ONE)
    for noise in (100.0, 1100.0, 9000.0):
        needed = steps_to_loss([BATCH] * 10, [noise] * 10)
        found = over_data_ranks(config, needed, tokens_per_s_per_device=RATE)
        assert found.stops_paying == next(d for d in (2**k for k in range(20)) if d * BATCH > noise / (1 / PAYS))
        own = found.rows[0]
        assert (own.data_ranks, own.gpus, own.microbatches, own.batch_tokens, own.fits) == (1, 1, 1, BATCH, None)
        assert own.hours * 3600 == pytest.approx(10 * BATCH / RATE)
    assert found.because.startswith(f"Doubling stops paying at {found.stops_paying} data ranks ({found.stops_paying} GPUs)")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel.tensor=2", "parallel.data=4"),
        ("parallel.pipe=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved"),
    ],
)
def test_hours_are_steps_times_what_the_model_predicts(overrides):
    config = load_config(BIG, overrides)
    needed = steps_to_loss([32 * 4096.0] * 1000, [2e6] * 1000)
    found = over_data_ranks(config, needed, gpu=H100)
    assert len(found.rows) > 3
    for fewer, more in pairwise(found.rows):
        assert more.data_ranks == 2 * fewer.data_ranks
        assert more.gpus == 2 * fewer.gpus
    for row in found.rows:
        tried = {}
        for M in accumulations(config):
            trial = with_ranks(config, row.data_ranks, M)
            assert trial.num_microbatches == M
            assert trial.devices == row.gpus
            assert M % (config.parallel.pipe if config.parallel.virtual_stages > 1 else 1) == 0
            per_host, _ = choose_gpus_per_host(row.gpus, None, H100.gpus_per_host)
            tried[M] = estimate_step_time(trial, H100, per_host).step_s
            tried[M] *= needed.steps(trial.step_tokens) / 3600
        assert row.hours == pytest.approx(min(tried.values()))
        assert row.hours == pytest.approx(tried[row.microbatches])
        assert row.gpu_hours == row.hours * row.gpus
        best = with_ranks(config, row.data_ranks, row.microbatches)
        assert row.fits == (estimate_memory(best, H100).peak_bytes <= H100.capacity_bytes)
    assert found.stops_paying == verdict(found.rows)[0]
    twice = over_data_ranks(config, needed, gpu=H100, slower=2.0)
    assert twice.rows[0].hours == pytest.approx(2 * found.rows[0].hours)


def test_zero_sets_no_limit_to_the_ranks():
    """Beyond 256 they are more than any dim of TINY."""
    config = load_config(TINY, [*ONE, "parallel.zero=1"])
    found = over_data_ranks(config, steps_to_loss([BATCH], [1e9]), tokens_per_s_per_device=RATE)
    assert [row.data_ranks for row in found.rows] == [2**power for power in range(14)]
    assert found.stops_paying is None
    assert found.because == "Every doubling pays, up to 8,192 data ranks (8,192 GPUs)."


def test_islands_stay_as_many():
    config = load_config(BIG, ["parallel.replica=2", "parallel.data=4"])
    found = over_data_ranks(config, steps_to_loss([1e5] * 9, [1e6] * 9), gpu=H100)
    assert [row.data_ranks for row in found.rows][:4] == [2, 4, 8, 16]
    for row in found.rows:
        trial = with_ranks(config, row.data_ranks, row.microbatches)
        assert (trial.parallel.replica, trial.devices) == (2, row.gpus)


def test_what_fits_nowhere_is_said():
    config = load_config(BIG, ["model.name=llama-3.1-405b", "parallel.zero=0", "parallel.remat=full"])
    found = over_data_ranks(config, steps_to_loss([1e5], [1e6]), gpu=H100)
    assert found.stops_paying is None
    assert found.because.startswith("Nothing fits, on up to 8,192 GPUs")


# ---------------------------------------------------------------------------------------------------------------- the run


def test_every_second_is_some_parts(run):
    """Six steps, of which four were saved; killed, and restarted after step 4, a minute and a half later."""
    start = {"start_unix_s": 1000.0, "compile_s": 6.0, "data_s": 1.0}
    before = timed(steps(6), 1010.0, 1012.0, 1014.0, 1017.5, 1019.5, 1021.5, **start)
    before[3] |= {"save_s": 1.5}
    again = {"start_unix_s": 1100.0, "compile_s": 4.0, "data_s": 1.0}
    after = timed(steps(4, first=5, tokens=4 * BATCH), 1108.0, 1110.0, 1112.0, 1114.0, **again)
    after[2] |= {"evaluate_s": 0.25}
    folder = run([*before[:4], *after])
    write_lines(folder / "metrics-1.jsonl", before)
    history = read_run(folder)
    assert history.times_s == pytest.approx(
        {
            **{TRAINING: 8.75, DATA: 5.0, EVALUATING: 0.25, SAVING: 1.5, COMPILING: 10.0},
            **{STARTING: 6.0, REDONE: 4.0, DOWN: 78.5},
        }
    )
    assert tuple(history.times_s) == PARTS
    assert sum(history.times_s.values()) == pytest.approx(1114 - 1000)
    assert history.busy_s == pytest.approx(1114 - 1000 - 78.5)
    assert (history.saves, history.restarts, len(history.lost)) == ([3], [4], 2)
    assert any("1 restart, after step 4; 2 steps had to be done again." in line for line in report_on(folder).lines())
    assert dict(report_on(folder).facts())["goodput"].startswith(f"{8.75 / 114:.1%} of the time")


def test_memory_is_that_of_the_last_start(run):
    """The last start may have another mesh."""
    lines = steps(6)
    for place, size in ((0, 9), (2, 5), (4, 7)):
        lines[place] |= {"memory_compiled_bytes": size} | ({} if place == 4 else {"start_unix_s": 1000.0 + place})
    assert report_on(run(lines)).memory_bytes[COMPILED] == 7


def test_a_run_without_times_says_so(run):
    report = report_on(run(steps(4)))
    assert report.history.times_s == {}
    assert report.to_json()["times_s"] == {}
    assert "Where the time went is not known: this run's lines have no times." in report.notes()


def test_what_a_crash_left_is_read(run):
    folder = run([*steps(3), steps(1, first=4, tokens=3 * BATCH)[0] | {"loss": None, "skipped": 1}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "eval_loss": 4.5}\n\n[1]\n{"loss": 3}\n{"step": 5, "tok')
    history = read_run(folder)
    assert history.steps.tolist() == [1, 2, 3, 4]
    assert np.isnan(history.column("loss")[3])
    assert history.smoothed_loss[3] == pytest.approx(history.column("loss")[:3].mean())
    assert [values.tolist() for values in history.evaluated()] == [[2 * BATCH], [4.5]]
    report = report_on(folder)
    assert "1 step skipped: its gradients were not used." in report.notes()
    json.dumps(report.to_json(), allow_nan=False)
    page(report)


def test_its_texts_need_not_be_here(run):
    folder = run(steps(2))
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["data"] |= {"source": "files", "paths": ["/nowhere/at/all/*.txt"], "tokenizer": "/nowhere/tokenizer"}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    assert report_on(folder).history.config.train.sequence_length == 16


def test_a_ramp_is_read_as_it_ran(run):
    schedule = f"train.batch_schedule=[[{4 * BATCH}, 16]]"
    lines = [*steps(4), *steps(4, 2 * BATCH, 5, 4 * BATCH, tokens_per_s_per_device=700.0)]
    noise = [100.0, None, None, 300.0, None, None, None, 500.0]
    for line, measured in zip(lines, noise, strict=True):
        line |= {} if measured is None else {"noise_scale_tokens": measured}
    report = report_on(run(lines, schedule, "train.microbatch_sequences=8"))
    history = report.history
    assert history.batch_tokens.tolist() == [BATCH] * 4 + [2 * BATCH] * 4
    assert history.noise_tokens.tolist() == [100, 100, 100, 300, 300, 300, 300, 500]
    assert report.history.tokens_per_s_per_device == 700
    expected = steps_to_loss(history.batch_tokens, history.noise_tokens)
    assert report.needed == expected
    assert report.over_ranks.rows[0].steps == pytest.approx(expected.steps(BATCH))


def test_hours_are_counted_to_the_loss_that_is_asked_for(run):
    folder = run(steps(400, noise_scale_tokens=1100.0))
    whole, report = report_on(folder), report_on(folder, loss=2.0)
    assert whole.reached_at == 399
    assert whole.target_loss == pytest.approx(whole.history.smoothed_loss[-1])
    smoothed = report.history.smoothed_loss
    assert smoothed[report.reached_at] <= 2 < smoothed[report.reached_at - 1]
    assert report.needed.steps(BATCH) == pytest.approx(report.reached_at + 1)
    assert report.over_ranks.stops_paying == 8
    assert report.to_json()["reached_at_step"] == report.reached_at + 1


def test_the_noise_scales_interval_gives_one_of_ranks(run):
    lines = steps(20, noise_scale_tokens=1100.0, noise_scale_low=550.0, noise_scale_high=2200.0)
    report = report_on(run(lines))
    assert [found.stops_paying for found in report.by_interval] == [4, 16]
    assert "It would be 4 at the lower end and 16 at the upper end of the noise scale's interval." in report.verdict()
    assert (
        "At the end: gradient noise scale 1.1k tokens (550 to 2.2k): of a step of 128 tokens 10% (5.5% to 19%) is wasted"
        in (" ".join(report.notes()))
    )
    open_above = report_on(run(steps(20, noise_scale_tokens=1100.0, noise_scale_low=550.0, noise_scale_high=None)))
    assert [found.stops_paying for found in open_above.by_interval] == [4]
    assert "It would be 4 at the lower end of the noise scale's interval." in open_above.verdict()
    assert "gradient noise scale above 550 tokens: of a step of 128 tokens at most 19% is wasted" in " ".join(
        open_above.notes()
    )
    unknown = report_on(run(steps(20, noise_scale_tokens=1100.0, noise_scale_low=0.0, noise_scale_high=None)))
    assert unknown.by_interval == ()
    assert "The noise scale has no interval, so this may be far off: measure it over more steps." in unknown.verdict()
    assert "about 1.1k tokens: too few or too noisy estimates to read it" in " ".join(unknown.notes())


def test_without_a_noise_scale_it_says_what_to_set(run):
    assert report_on(run(steps(5))).verdict() == [
        "The effect of more data ranks is not known: the noise scale was not measured; set log.noise_scale_every."
    ]
    below = report_on(run(steps(5, noise_scale_tokens=-3.0)))
    assert "never above 0" in below.why_not
    assert below.over_ranks is None
    assert "stops paying" not in page(below)


def test_dilocos_islands_are_under_another_law(run):
    overrides = ("parallel.replica=2", "train.diloco_steps=2", "train.diloco_after_steps=1")
    report = report_on(run(steps(4, noise_scale_tokens=1100.0), *overrides))
    assert "with DiLoCo, replicas step independently" in report.why_not
    assert report.noise == (1100.0, BATCH / 2)


def test_predictions_are_held_against_the_run_where_it_ran_on_such_gpus(run):
    config = load_config(BIG)
    predicted = estimate_step_time(config, H100, 8)
    logged = {"device_peak_flops": H100.dense_flops["bfloat16"], "noise_scale_tokens": 2e6, "memory_peak_bytes": 2**34}
    lines = steps(50, config.step_tokens, tokens_per_s_per_device=predicted.tokens_per_s_per_gpu / 1.25, **logged)
    folder = run(lines, base=BIG)
    report = report_on(folder, gpu="h100-80gb")
    assert report.slower == pytest.approx(1.25)
    assert "multiplied by 1.25" in " ".join(report.verdict())
    own = next(row for row in report.over_ranks.rows if row.data_ranks == 8)
    trial = with_ranks(config, 8, own.microbatches)
    assert own.step_s == pytest.approx(1.25 * estimate_step_time(trial, H100, 8).step_s)
    assert report.mfu == pytest.approx(predicted.tflops_per_gpu * 1e12 / 1.25 / H100.dense_flops["bfloat16"])
    assert report.memory_bytes == {ESTIMATE: estimate_memory(config, H100).peak_bytes, IN_USE: 2**34}
    elsewhere = report_on(folder, gpu="a100-80gb")
    assert elsewhere.slower is None
    assert "this run was not on such GPUs" in " ".join(elsewhere.verdict())


@pytest.mark.parametrize(("off", "words"), [(-0.095, "-9.5%, inside the range"), (-0.3, "-30.0%, outside the range")])
def test_the_report_says_how_far_off_the_prediction_was(run, off, words):
    """The keys are those that a start writes on a GPU that it knows."""
    config = load_config(BIG)
    device = SimpleNamespace(device_kind=H100.device_kind, platform="gpu", memory_stats=lambda: None)
    start = SimpleNamespace(memory_fit=check_memory(config, device), absent_hosts=0)
    trainer = SimpleNamespace(mesh=mesh_of(device, 8), start=start, config=config)
    speed = predicted_speed(config, H100, 8)
    lines = steps(50, config.step_tokens, tokens_per_s_per_device=(1 + off) * speed.expected)
    lines[0] |= start_keys(trainer)
    assert lines[0]["device_peak_flops"] == H100.dense_flops["bfloat16"]
    report = report_on(run(lines, base=BIG))
    assert report.predicted_speed == speed
    line = f"{speed.text(' tokens/s/GPU', 0)}, measured {(1 + off) * speed.expected:,.0f}: {words}"
    assert dict(report.facts())["predicted"] == line
    assert report.to_json()["predicted_tokens_per_s_per_device"] == dataclasses.asdict(speed)


def test_without_a_prediction_or_its_batch_nothing_is_said_of_it(run):
    assert "predicted" not in dict(report_on(run(steps(4, devices=1))).facts())
    keys = {f"predicted_tokens_per_s_per_device{end}": 1e3 for end in ("", "_low", "_high")}
    assert "predicted" in dict(report_on(run(steps(4, **keys))).facts())
    ramp = run(steps(2, **keys), "train.batch_schedule=[[256, 16]]")
    assert report_on(ramp).to_json()["predicted_tokens_per_s_per_device"] is None


# --------------------------------------------------------------------------------------------------------------- the page


def test_the_page_is_one_file_that_asks_for_nothing(run, tmp_path):
    start = {"start_unix_s": 1000.0, "compile_s": 6.0, "memory_compiled_bytes": 3 * 2**30, "devices": 1}
    measured = {"noise_scale_tokens": 1100.0, "noise_scale_low": 900.0, "noise_scale_high": 1300.0}
    lines = timed(steps(1500, **measured), *(1010.0 + 2 * k for k in range(1500)), **start)
    lines[700] |= {"save_s": 1.0, "loss_spike": 1, "skipped": 1, "loss": None}
    folder = run([*lines, {"step": 1000, "eval_loss": 1.5}]).rename(tmp_path / 'a <b> & "c"')
    text = page(report_on(folder))
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"@import|url\(", text)
    assert tags.attributes == {}
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "a &lt;b&gt; &amp; &quot;c&quot;" in text
    titles = [svg.find("{*}title").text for svg in pictures(text)]
    assert titles[:5] == ["Loss", "Learning rate", "Batch and noise scale", "Gradient norm", "Speed"]
    assert titles[5] == "Memory (not logged: in use)"
    assert titles[6] == "From the first start to the last step"
    assert [title.split(" to ")[0] for title in titles[7:]] == ["Hours", "GPU-hours"]
    assert "nan" not in text.lower()
    # The page stays small for a run of any length.
    assert len(text) < 400_000


def test_the_command_writes_the_page_and_prints_json_alone(run, tmp_path):
    folder = run(steps(20, noise_scale_tokens=1100.0))
    result = CliRunner().invoke(app, ["report", str(folder), "--json"], catch_exceptions=False)
    found = json.loads(result.output)
    assert found["data_ranks"]["stops_paying"] == 8
    assert found["data_ranks"]["rows"][0].keys() >= {"data_ranks", "gpus", "batch_tokens", "hours", "gpu_hours", "fits"}
    assert not (folder / "report.html").exists()
    result = CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False)
    assert "Doubling stops paying at 8 data ranks (8 GPUs)" in result.output
    assert result.output.endswith(f"page {folder / 'report.html'}\n")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    out = tmp_path / "other.html"
    CliRunner().invoke(app, ["report", str(folder), "--out", str(out), "--gpu", "h100-80gb"], catch_exceptions=False)
    assert "h100-80gb" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere is not a run directory, because it has no metrics.jsonl: give the run's run.dir."),
        (["RUN", "--loss", "0.5"], "--loss=0.5 was not reached: the least smoothed loss of RUN is 4"),
        (["RUN", "--gpu", "h101"], "There is no GPU h101"),
        (["RUN", "--out", "/proc/nowhere.html"], "--out=/proc/nowhere.html cannot be written"),
    ],
)
def test_mistakes_end_in_one_sentence(run, arguments, sentence):
    folder = str(run(steps(20, noise_scale_tokens=1100.0)))
    result = CliRunner().invoke(app, ["report", *(folder if word == "RUN" else word for word in arguments)])
    assert isinstance(result.exception, ConfigError)
    assert sentence.replace("RUN", folder) in str(result.exception)


def test_a_run_without_steps_or_config_is_refused(run):
    folder = run([{"step": 0, "eval_loss": 5.0}])
    with pytest.raises(ConfigError, match="has no step yet: try again when the first step is done"):
        report_on(folder)
    (folder / "config.yaml").write_text("a: [")
    write_lines(folder / "metrics.jsonl", steps(1))
    with pytest.raises(ConfigError, match="cannot be read as a config"):
        report_on(folder)
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"it has no config\.yaml"):
        report_on(folder)


def test_charts_break_at_gaps_and_hold_every_point():
    y = np.array([1.0, 2.0, np.nan, 4.0, 3.0])
    assert line_chart("", [Curve("", np.arange(5.0), y)], x_label="", y_label="").count('stroke-width="1.5"') == 2
    values = np.random.default_rng(0).normal(size=5000)
    line = spread("", np.arange(5000.0), values)
    assert len(line.x) == len(line.y) == 600
    assert (line.low.min(), line.high.max()) == (values.min(), values.max())
    assert ((line.low <= line.y) & (line.y <= line.high)).all()
    empty = line_chart("", [Curve("", np.array([]), np.array([]))], x_label="tokens", y_label="", y_log=True)
    assert ElementTree.fromstring(empty).tag.endswith("svg")


def test_numbers_and_ticks_are_round():
    assert [number(x) for x in (0, 1.5e6, 3e-4, 999_600, 12_345, 2e-5)] == ["0", "1.5M", "0.0003", "1M", "12.3k", "2e-05"]
    assert even_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert log_ticks(1, 1e6) == pytest.approx([1, 100, 10_000, 1_000_000])
    assert log_ticks(3, 40) == pytest.approx([5, 10, 20])
    assert len({number(tick, digits_of(even_ticks(1.661, 1.669))) for tick in even_ticks(1.661, 1.669)}) > 3
    times_s = {0.0123: "12.3 ms", 4.1: "4.1 s", 210: "3.5 min", 7.2 * 3600: "7.2 h", 50 * 3600: "2.1 days"}
    assert [duration(seconds) for seconds in times_s] == list(times_s.values())


EDGES = [0.0, 1.0, 1 + 2**-52, 123.4, -1.0, 1e16, 1e16 + 2, 1e308, -1e308, 5e-324, np.nan, np.inf, -np.inf]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("y_log", [False, True])
def test_any_numbers_of_a_file_can_be_drawn(y_log):
    random = np.random.default_rng(0)
    for count in (0, 1, 2, 5, 700):
        for _ in range(60):
            few = [*random.choice(EDGES, 3), 10 ** random.uniform(-320, 308)]
            x, y = random.choice(few, (2, count))
            drawn = line_chart("t", [spread("a", x, y)], x_label="x", y_label="y", y_log=y_log, usual=0.9)
            assert not re.search(r"nan|inf", ElementTree.tostring(ElementTree.fromstring(drawn), "unicode")), (x, y)


# --------------------------------------------------------------------------------------------------------- from a real run


def test_phases_add_up_and_the_watchdogs_seconds_are_left_alone():
    before = progress.totals()
    with progress.phase("save"):
        time.sleep(0.02)
        inside = progress.totals()["save"] - before["save"]
        with progress.phase("data"):
            time.sleep(0.01)
            left_s = time.monotonic()
        assert progress.now().seconds <= time.monotonic() - left_s
    with progress.phase("evaluate"):
        time.sleep(0.02)
        progress.totals()
        assert progress.now().seconds >= 0.02
    spent = {name: seconds - before[name] for name, seconds in progress.totals().items()}
    assert spent["save"] >= inside >= 0.02
    assert spent["data"] >= 0.01
    assert spent["evaluate"] >= 0.02
    assert spent["compile"] == 0


def test_the_parts_of_a_start_add_up_to_all_of_it(run, monkeypatch):
    from jaxllm.run import step_metrics

    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time=lambda: 1000 + now_s)
    monkeypatch.setattr(progress, "_total_s", dict.fromkeys(progress.PHASES, 0.0))
    for module, name, value in ((progress, "time", clock), (step_metrics, "time", clock), (progress, "_since_s", now_s)):
        monkeypatch.setattr(module, name, value)
    timer = step_metrics.RunTimer(import_s=0.5)
    start, programs = SimpleNamespace(memory_fit=None, absent_hosts=0), SimpleNamespace(step_bytes=0)
    trainer = SimpleNamespace(programs=programs, mesh=mesh_of(CPU, 1), start=start, config=load_config(TINY, ONE))
    lines = []
    for _ in range(2):
        for power, phase in enumerate(progress.PHASES):
            if phase not in ("meet", "save", "finish"):
                with progress.phase(phase):
                    now_s += 2**power
        lines.append(timer.record_keys(trainer))
    parts_s = {key: value for key, value in lines[0].items() if key.endswith("_s") and not key.endswith("unix_s")}
    assert sum(parts_s.values()) == lines[0]["unix_s"] - lines[0]["start_unix_s"] + 0.5
    # Nothing met: a part that took no time has no key.
    assert {"start_import_s", "start_restore_s"} < set(parts_s)
    assert "start_meet_s" not in parts_s
    assert not any(key.startswith("start_") for key in lines[1])

    restart = {**lines[0], "start_import_s": 2.0, "start_unix_s": 9002.0, "unix_s": 9102.0}
    logged = [*steps(2), *steps(1, first=3, tokens=2 * BATCH)]
    report = report_on(run([line | of for line, of in zip(logged, [*lines, restart], strict=True)]))
    assert sum(report.history.last_start_s.values()) == sum(parts_s.values()) - 0.5 + 2.0
    assert report.to_json()["last_start_s"]["restore"] == parts_s["start_restore_s"]
    assert "restore 32.0 s" in dict(report.facts())["last start"]
    # What the second start's imports took is no time between starts.
    assert report.history.times_s[DOWN] == 9000 - lines[1]["unix_s"]
    older = report_on(run([lines[0] | logged[0], {"start_unix_s": 9000.0, "unix_s": 9001.0} | logged[1]]))
    assert older.history.last_start_s == {}
    assert "last start" not in dict(older.facts())


@pytest.fixture(scope="module")
def trained(tiny_config, tmp_path_factory):
    """A run directory after four steps, and two more by a second start."""
    from jaxllm.run.loop import fit

    folder = tmp_path_factory.mktemp("runs") / "trained"
    eight = ("run.cpu_devices=8", "parallel.data=8", "checkpoint.every_steps=2", "optimizer.schedule=constant")
    for count in (4, 6):
        fit(tiny_config(*eight, f"train.steps={count}", "train.eval_every_steps=2", f"run.dir={folder}"))
    return folder


def test_a_runs_lines_tell_where_its_time_and_memory_went(trained):
    history = read_run(trained)
    assert history.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert (history.restarts, history.devices) == ([4], 8)
    assert 2 in history.saves
    assert history.last("memory_compiled_bytes") > 0
    # CPUs do not report memory in use, and their capacity is not known.
    assert history.most("memory_peak_bytes") is history.last("memory_capacity_bytes") is None
    unix_s = history.column("unix_s")
    assert (np.diff(unix_s) > 0).all()
    assert np.isfinite(history.column("data_s")).all()
    times = history.times_s
    assert sum(times.values()) == pytest.approx(unix_s[-1] - history.column("start_unix_s")[0])
    assert min(times[part] for part in (TRAINING, DATA, SAVING, EVALUATING, COMPILING, STARTING)) > 0
    assert times[REDONE] == 0
    starts = [line for line in history.lines if "start_unix_s" in line]
    always = {f"start_{part}_s" for part in ("devices", "dataset", "initialize", "step", "other")}
    assert [set(line) & (always | {"start_restore_s"}) for line in starts] == [always, always | {"start_restore_s"}]
    assert len([line for line in history.lines if always & set(line)]) == len(starts)
    # Two clocks, read one after the other.
    assert sum(history.last_start_s.values()) == pytest.approx(starts[1]["unix_s"] - starts[1]["start_unix_s"], abs=1)


def test_a_real_run_has_its_page(trained):
    report = report_on(trained)
    assert report.history.config.parallel.data == 8
    assert len(pictures(page(report))) == 7
    assert report.to_json()["eval_loss"] > 0


def test_gpus_say_what_was_in_use(monkeypatch):
    from jaxllm.run import step_metrics

    def device(platform, **stats):
        return SimpleNamespace(platform=platform, memory_stats=lambda: stats or None)

    devices = [
        device("gpu", peak_bytes_in_use=5, bytes_in_use=4),
        device("gpu", peak_bytes_in_use=7),
        device("gpu"),
        device("cpu"),
    ]
    monkeypatch.setattr(step_metrics.jax, "local_devices", lambda: devices)
    assert step_metrics.memory_in_use() == {"memory_bytes": 4, "memory_peak_bytes": 7}
    devices[:2] = []
    assert step_metrics.memory_in_use() == {}


def test_a_steps_line_has_its_time_and_what_share_of_the_peak_that_is(monkeypatch):
    """On a GPU; a CPU has no peak, and a GPU that is not known none that can be compared with."""
    from jaxllm.run import step_metrics

    config = load_config(BIG)
    values = {"loss": np.float32(2), "grad_norm": np.float32(1), "skipped": np.float32(0)}

    def line(kind, platform):
        clock = iter([10.0, 12.0])
        monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: next(clock))
        metrics = step_metrics.StepMetrics(config)
        metrics.starts()
        device = SimpleNamespace(device_kind=kind, platform=platform)
        return metrics.read(step_metrics.Pending(1, values), config, mesh_of(device, 8))

    known, unknown, cpu = line(H100.device_kind, "gpu"), line("NVIDIA X1", "gpu"), line("cpu", "cpu")
    rate = config.step_tokens / 2.0 / 8
    for one in (known, unknown, cpu):
        assert (one["step_s"], one["tokens_per_s_per_device"]) == (2.0, rate)
    flops = rate * train_flops_per_token(config.model, 4096)
    assert known["tflops_per_gpu"] == unknown["tflops_per_gpu"] == pytest.approx(flops / 1e12)
    assert known["mfu"] == pytest.approx(flops / H100.dense_flops["bfloat16"])
    assert known.keys() - cpu.keys() == {"tflops_per_gpu", "mfu"}
    assert known.keys() - unknown.keys() == {"mfu"}


def test_gpus_are_asked_where_a_line_is_shown(monkeypatch):
    """CPU devices never, and by no other process than the one that writes."""
    from jaxllm.machine import gpus
    from jaxllm.run import messages, step_metrics

    start, programs = SimpleNamespace(memory_fit=None, absent_hosts=0), SimpleNamespace(step_bytes=0)
    config = load_config(TINY, [*ONE, "log.every_steps=3", "train.steps=5"])
    metrics = SimpleNamespace(watch=SimpleNamespace(recall=lambda _: None))
    trainer = SimpleNamespace(programs=programs, mesh=mesh_of(CPU, 1), start=start, config=config, metrics=metrics)
    monkeypatch.setattr(gpus, "load", lambda devices: {"gpu_power_w": 700.0})
    monkeypatch.setattr(messages, "open_sinks", lambda *_: [])
    for platform, is_main, asked in (("gpu", True, [1, 3, 5]), ("gpu", False, []), ("cpu", True, [])):
        monkeypatch.setattr(messages.distributed, "is_main_process", lambda is_main=is_main: is_main)
        device = SimpleNamespace(platform=platform, memory_stats=lambda: None)
        monkeypatch.setattr(step_metrics.jax, "local_devices", lambda device=device: [device])
        hooks, written = {}, []
        console = SimpleNamespace(step=lambda *_: None)
        run = SimpleNamespace(trainer=trainer, console=console, timer=step_metrics.RunTimer(), first=0, require=None)
        messages.register(SimpleNamespace(**vars(run), folder=Path(), on=hooks.__setitem__, write=written.append))
        for step in range(1, 6):
            hooks["record"]({"step": step, "skipped": 0, "loss_spike": 0})
        assert [line["step"] for line in written if "gpu_power_w" in line] == asked


def test_programs_that_take_more_are_told_of():
    from jaxllm.run.step_metrics import RunTimer

    timer, start = RunTimer(), SimpleNamespace(memory_fit=None, absent_hosts=0)
    # The last one is of the programs of a larger batch, which know none of before.
    programs = [SimpleNamespace(step_bytes=size) for size in (5, 5, 7, 7, 6)]
    common = {"mesh": mesh_of(CPU, 8), "start": start, "config": load_config(TINY, ONE)}
    trainers = [SimpleNamespace(programs=now, **common) for now in programs]
    lines = [timer.record_keys(trainer) for trainer in trainers]
    assert [line.get("memory_compiled_bytes") for line in lines] == [5, None, 7, None, None]
    assert [line.get("devices") for line in lines] == [8, None, None, None, None]


def test_starts_without_some_hosts_are_named(run):
    """With their share of the devices and what a step takes there."""
    lines = [{"step": n, "loss": 2.0, "tokens": 64.0 * n, "unix_s": 1000.0 + n} for n in range(1, 13)]
    for line in lines[4:8]:
        line["unix_s"] += 0.5 * (line["step"] - 5)
    for place, more in ((0, {"devices": 8}), (4, {"devices": 6, "absent_hosts": 1}), (8, {"devices": 8})):
        lines[place] |= {"start_unix_s": lines[place]["unix_s"] - 0.1, **more}
    notes = list(report_on(run(lines)).notes())
    assert "Steps 5 to 8: without 1 host, on 6 of 8 devices, 1.50 times as long a step." in notes
    assert sum("without" in note for note in notes) == 1
