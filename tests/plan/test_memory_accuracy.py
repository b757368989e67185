"""benchmarks/memory_accuracy.py: its draws, how it resumes, its sums; and the bounds that it must keep."""

import argparse
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import scripts

from jaxllm.config import ConfigError
from jaxllm.plan.hardware import find_gpu
from jaxllm.plan.megatron import megatron_memory_by_stage
from jaxllm.plan.space import choice_in, choices_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEED = 7


@pytest.fixture(scope="module")
def accuracy():
    return scripts.load("benchmarks/memory_accuracy.py")


@pytest.fixture(scope="module")
def cases(accuracy):
    """All draws of a run, by a fixed formula, so that these tests do not change with the tuned one."""
    return accuracy.draw(SEED, accuracy.COUNT, accuracy.ESTIMATES["megatron"])


# ----------------------------------------------------------------------------------------------------------------- draws


def test_a_draw_is_of_its_seed_and_index_alone(accuracy, cases):
    megatron = accuracy.ESTIMATES["megatron"]
    again = [accuracy.draw_case(SEED, index, megatron) for index in (0, 1, 17, 459)]
    assert again == [cases[index] for index in (0, 1, 17, 459)]
    assert [case.hash for case in again] == [cases[index].hash for index in (0, 1, 17, 459)]
    other = accuracy.draw(SEED + 1, 40, megatron)
    assert sum(a.hash == b.hash for a, b in zip(other, cases, strict=False)) == 0


def test_as_many_as_the_published_study_and_enough_near_capacity(accuracy, cases):
    assert len(cases) == accuracy.COUNT >= 454
    near = [case for case in cases if case.wanted == "near"]
    assert len(near) >= 150
    for case in cases:
        gpu = find_gpu(case.gpu)
        share = accuracy.ESTIMATES["megatron"](case.config, gpu).peak_bytes / gpu.capacity_bytes
        assert 0.85 <= share <= 1.15 if case.wanted == "near" else 0.02 <= share <= 2.5


def test_what_the_estimate_refuses_is_not_drawn(accuracy):
    def refuses_zero(config, gpu):
        if config.parallel.zero:
            raise ConfigError("No.")
        return accuracy.ESTIMATES["megatron"](config, gpu)

    drawn = accuracy.draw(SEED, 30, refuses_zero)
    assert {case.knobs["zero"] for case in drawn} == {0}


def test_few_draws_are_alike(cases):
    assert len({case.hash for case in cases}) >= 0.98 * len(cases)


def test_every_draw_is_the_planners(accuracy, cases):
    assert all(accuracy.belongs(case) for case in cases)
    # Also checked against the complete list of choices, where it is short.
    short = [case for case in cases if case.gpus <= 8][:12]
    for case in short:
        assert choice_in(case.config) in list(choices_of(case.config, case.gpus)), case


def test_what_the_planner_leaves_out_does_not_belong(accuracy, cases):
    case = next(case for case in cases if case.gpus == 16 and case.knobs["pipe"] == 1)

    def changed(**knobs):
        return accuracy.Case(case.index, case.wanted, case.gpu, case.gpus, {**case.knobs, **knobs})

    batch = {"global_batch_sequences": 48, "microbatch_sequences": 1, "sequence_length": 8192}
    assert accuracy.belongs(changed(data=16, context=1, tensor=1, **batch))
    assert not accuracy.belongs(changed(data=1, context=1, tensor=16, **batch))  # beyond a host
    assert not accuracy.belongs(changed(data=1, context=16, tensor=1, zero=1, **batch))
    assert not accuracy.belongs(changed(data=16, context=1, tensor=1, **{**batch, "microbatch_sequences": 2}))


def test_every_value_of_every_axis_is_drawn(accuracy, cases):
    drawn = {knob: {str(case.knobs[knob]) for case in cases} for knob in accuracy.KNOBS}
    text = lambda values: {str(value) for value in values}  # noqa: E731
    assert drawn["model"] == set(accuracy.MODELS)
    assert {case.gpu for case in cases} == set(accuracy.GPU_NAMES)
    assert {case.gpus for case in cases} == set(accuracy.GPU_COUNTS)
    assert drawn["sequence_length"] == text(accuracy.SEQUENCE_LENGTHS)
    assert {"2048", "131072"} <= drawn["sequence_length"]
    assert drawn["zero"] == text(range(4))
    assert drawn["schedule"] == {"gpipe", "1f1b", "interleaved"}
    assert drawn["remat"] == text([*accuracy.REMATS, *accuracy.MAPPINGS])
    assert drawn["offload_state"] == {"none", "optimizer", "optimizer_and_master"}
    assert drawn["context_method"] == {"auto", "ring", "all_gather"}
    assert drawn["mask_documents"] == {"True", "False"}
    for axis in ("pipe", "context", "tensor", "data"):
        assert text([1, 2, 4, 8]) <= drawn[axis]
    models = Counter(case.knobs["model"] for case in cases)
    assert max(models.values()) - min(models.values()) <= 1


# ------------------------------------------------------------------------------------------------- tables and their resumption


class FakeWorker:
    """Reports every estimate as 2% too small, and records its calls."""

    asked: list[int]
    stopped = False

    def compile(self, case):
        self.asked.append(case.index)
        total = round(megatron_memory_by_stage(case.config).peak_bytes * 1.02)
        report = {"argument_bytes": total - 7, "temp_bytes": 7, "output_bytes": 5, "alias_bytes": 5, "total_bytes": total}
        return {**report, "host_bytes": 0, "attention": "cudnn", "compile_s": 1.5, "versions": "jax 0"}

    def stop(self):
        pass

    def close(self):
        pass


@pytest.fixture
def asked(accuracy, monkeypatch):
    """The indices that were compiled, in order; nothing is compiled in fact."""
    FakeWorker.asked = []
    monkeypatch.setattr(accuracy, "Worker", FakeWorker)
    return FakeWorker.asked


@pytest.fixture
def command(accuracy, asked, monkeypatch, tmp_path, capsys):
    """command(arguments...) -> the summary of a run on a table of 12."""
    table = tmp_path / "table.csv"

    def call(*arguments: str) -> dict:
        fixed = [
            "--table",
            str(table),
            "--seed",
            str(SEED),
            "--count",
            "12",
            "--workers",
            "1",
            "--estimate",
            "megatron",
            "--json",
        ]
        monkeypatch.setattr(sys, "argv", ["memory_accuracy.py", *fixed, *arguments])
        accuracy.main()
        return json.loads(capsys.readouterr().out)

    call.table = table
    return call


def test_a_run_goes_on_where_it_stopped(command, asked):
    assert command("--limit", "5")["configurations"] == 5
    assert asked == [0, 1, 2, 3, 4]
    assert command("--limit", "3")["configurations"] == 8
    summary = command()
    assert asked == list(range(12))
    assert summary["configurations"] == 12
    assert summary["median_error_percent"] == pytest.approx(100 - 100 / 1.02, abs=1e-6)
    before = command.table.read_bytes()
    assert command()["configurations"] == 12
    assert len(asked) == 12
    assert command.table.read_bytes() == before


def test_a_row_says_all_of_its_case(accuracy, command, cases):
    command()
    rows = accuracy.read_table(command.table)
    assert [accuracy.case_of(row) for row in rows] == cases[:12]
    for row, case in zip(rows, cases, strict=False):
        assert (row["seed"], row["hash"], row["capacity_bytes"]) == (SEED, case.hash, find_gpu(case.gpu).capacity_bytes)
        peak = megatron_memory_by_stage(case.config).peak_stage
        assert (row["estimate_stage"], row["estimate_terms_bytes"]) == (peak.stage, peak.terms_bytes)
        assert sum(row["estimate_terms_bytes"].values()) == row["estimate_bytes"]
        assert row["total_bytes"] == row["argument_bytes"] + row["temp_bytes"] + row["output_bytes"] - row["alias_bytes"]
        assert row["microbatches"] == case.config.num_microbatches


def test_a_line_cut_short_is_compiled_again(command, asked):
    command("--limit", "4")
    whole = command.table.read_text()
    command.table.write_text(whole[: len(whole.rstrip()) - 40])
    command("--limit", "1")
    assert asked == [0, 1, 2, 3, 3]
    assert command.table.read_text() == whole


def test_a_spoiled_line_in_the_middle_is_not_passed_over(command):
    command("--limit", "3")
    lines = command.table.read_text().splitlines()
    command.table.write_text("\n".join([*lines[:2], lines[2].replace("llama", "", 1)[:60], lines[3]]) + "\n")
    with pytest.raises(SystemExit, match=r"a line that is no row of this table \(index 1\)"):
        command()


def test_a_changed_draw_is_told_and_kept_until_asked(accuracy, command, asked):
    command()
    rows = accuracy.read_table(command.table)
    rows[4] = {**rows[4], "hash": "0" * 12}
    accuracy.write_table(command.table, rows)
    messages = []
    accuracy.compile_more(accuracy.read_table(command.table), _options(command.table, redo=None), messages.append)
    assert any("1 rows hold what today's draw has otherwise" in line for line in messages)
    assert len(asked) == 12
    accuracy.compile_more(accuracy.read_table(command.table), _options(command.table, redo="changed"), messages.append)
    assert asked[12:] == [4]
    assert accuracy.read_table(command.table)[4]["hash"] != "0" * 12


def test_what_failed_is_kept_until_asked(command, asked, monkeypatch):
    real = FakeWorker.compile
    monkeypatch.setattr(FakeWorker, "compile", lambda self, case: {"error": "No."} if case.index == 3 else real(self, case))
    summary = command()
    assert (summary["configurations"], summary["failed"]) == (11, 1)
    assert summary["errors"][0].endswith(": No.")
    monkeypatch.setattr(FakeWorker, "compile", real)
    assert command()["failed"] == 1
    assert command("--redo", "errors")["failed"] == 0
    assert asked[-1] == 3


def test_rescoring_makes_the_estimates_anew_and_compiles_nothing(accuracy, command, asked):
    command()
    before = command.table.read_bytes()
    rows = accuracy.read_table(command.table)
    accuracy.write_table(command.table, [{**row, "estimate_bytes": 1, "estimate_terms_bytes": {}} for row in rows])
    assert command.table.read_bytes() != before
    command("--rescore")
    assert command.table.read_bytes() == before
    assert len(asked) == 12


def test_a_subset_is_quick_and_even(accuracy, command, asked):
    command()
    rows = accuracy.read_table(command.table)
    times = itertools.cycle([4.0, 30.0])
    rows = [{**row, "compile_s": next(times)} for row in rows]
    chosen = accuracy.subset(rows, 4)
    assert len({row["index"] for row in chosen}) == 4
    assert {row["compile_s"] for row in chosen} == {4.0}
    assert {row["model"] for row in chosen} == {row["model"] for row in rows if row["compile_s"] == 4.0}
    assert accuracy.subset(rows[::-1], 4) == chosen
    assert accuracy.subset([], 4) == []
    with pytest.raises(SystemExit, match="has nothing to choose from: compile first"):
        accuracy.compile_subset([], _options(command.table, redo=None), print)
    assert command("--subset", "2")["configurations"] == 2
    assert len(asked) == 14


def _options(table: Path, redo: str | None) -> argparse.Namespace:
    return argparse.Namespace(table=table, seed=SEED, count=12, limit=None, workers=1, redo=redo, estimate="megatron", subset=2)


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    index = json.loads(line)["index"]
    if index == 1:
        print("the reason", file=sys.stderr, flush=True)
        os.abort()
    if index == 2:
        time.sleep(60)
    print(json.dumps({"pid": os.getpid(), "flags": os.environ.get("XLA_FLAGS", "")}), flush=True)
"""


def test_a_worker_that_dies_or_hangs_is_replaced(accuracy, monkeypatch):
    monkeypatch.setattr(accuracy.Worker, "command", (sys.executable, "-c", WORKER))
    monkeypatch.setattr(accuracy, "COMPILE_LIMIT_S", 3)
    monkeypatch.setattr(accuracy, "FRESH_WORKER_AFTER", 2)
    worker = accuracy.Worker()
    answers = [worker.compile(accuracy.Case(index, "any", "", 1, {})) for index in (0, 0, 0, 1, 0, 2, 0)]
    worker.close()
    pids = [answer.get("pid") for answer in answers]
    assert pids[0] == pids[1] != pids[2]
    assert "ended with -6" in answers[3]["error"]
    assert answers[3]["error"].endswith("the reason")
    assert "ended with -9" in answers[5]["error"]
    assert len({pids[i] for i in (0, 2, 4, 6)}) == 4
    # Only its own flag, for any environment of the caller.
    assert answers[0]["flags"].startswith("--xla_gpu_kernel_cache_file=")
    assert " " not in answers[0]["flags"]


def test_an_interrupted_run_keeps_its_rows_and_ends_its_workers(accuracy, cases, monkeypatch):
    monkeypatch.setattr(accuracy.Worker, "command", (sys.executable, "-c", WORKER))
    started = []
    start = accuracy.Worker._start
    monkeypatch.setattr(accuracy.Worker, "_start", lambda self: (start(self), started.append(self.process)))
    answers = accuracy.compile_all([cases[0], cases[2], cases[3]], workers=2)
    assert next(answers)[0].index in (0, 3)
    answers.close()
    assert started
    assert all(process.poll() is not None for process in started)


# --------------------------------------------------------------------------------------------------------------- arithmetic

CAPACITY = 1000


def fabricated(estimate: int, total: int, **knobs):
    row = {
        "estimate_bytes": estimate,
        "total_bytes": total,
        "capacity_bytes": CAPACITY,
        "error": "",
        "compile_s": 2.0,
        "index": 0,
    }
    mesh = {"pipe": 1, "data": 1, "context": 1, "tensor": 1, "zero": 1, "schedule": "1f1b", "remat": "full"}
    rest = {
        "model": "llama-3-8b",
        "gpu": "a100-40gb",
        "gpus": 1,
        "offload_state": "none",
        "mask_documents": True,
        "attention": "cudnn",
        "estimate_moment": "loss",
    }
    return {**row, **mesh, **rest, "sequence_length": 2048, "microbatch_sequences": 1, **knobs}


def test_errors_are_of_what_xla_says(accuracy):
    rows = [fabricated(*pair) for pair in [(100, 100), (102, 100), (96, 100), (108, 100), (89, 100)]]
    summary = accuracy.figures(rows)
    assert summary["median_error_percent"] == pytest.approx(4)
    assert summary["p95_error_percent"] == pytest.approx(8 + 0.8 * 3)
    assert summary["mean_signed_error_percent"] == pytest.approx(-1)
    assert summary["worst_underestimate_percent"] == pytest.approx(11)
    assert summary["worst_overestimate_percent"] == pytest.approx(8)
    assert summary["underestimated_by_more_than_10_percent"] == 1


# (estimate, XLA's bytes): near capacity, equal verdict at 95% of it, a false promise
VERDICTS = {
    (500, 500): (False, True, False),
    (950, 950): (True, True, False),
    (951, 950): (True, False, False),
    (950, 951): (True, False, False),
    (950, 1000): (True, False, False),
    (950, 1001): (True, False, True),
    (951, 1001): (True, True, False),
    (840, 850): (True, True, False),
    (840, 849): (False, True, False),
    (1151, 1150): (True, True, False),
    (1160, 1151): (False, True, False),
    (700, 1300): (False, False, True),
}


@pytest.mark.parametrize("pair", VERDICTS)
def test_verdicts(accuracy, pair):
    row = fabricated(*pair)
    assert (accuracy.is_near(row), accuracy.agrees(row), accuracy.is_false_promise(row)) == VERDICTS[pair]


def test_the_summary_counts_verdicts(accuracy):
    summary = accuracy.summary([fabricated(*pair) for pair in VERDICTS])
    near, agree, promise = zip(*VERDICTS.values(), strict=True)
    assert summary["configurations"] == len(VERDICTS)
    assert summary["near_capacity"] == sum(near)
    assert summary["verdict_agreement"] == pytest.approx(sum(agree) / len(agree))
    among = [a for a, n in zip(agree, near, strict=True) if n]
    assert summary["verdict_agreement_near_capacity"] == pytest.approx(sum(among) / len(among))
    assert summary["called_safe_and_above_capacity"] == sum(promise)


def test_the_summary_is_broken_down(accuracy):
    rows = [
        fabricated(100, 100, zero=0),
        fabricated(110, 100, zero=3, pipe=2, remat={"query": "keep"}, tensor=8),
        fabricated(120, 100, zero=3, pipe=4, schedule="gpipe", tensor=16),
        fabricated(1, 1, zero=2) | {"error": "No.", "total_bytes": ""},
    ]
    summary = accuracy.summary(rows)
    assert (summary["configurations"], summary["failed"]) == (3, 1)
    by = {column: {value: f["median_error_percent"] for value, f in summary["by"][column].items()} for column in summary["by"]}
    assert by["zero"] == {"0": pytest.approx(0), "3": pytest.approx(15)}
    assert by["schedule"] == {"1f1b": pytest.approx(10), "gpipe": pytest.approx(20), "no pipeline": pytest.approx(0)}
    assert by["remat"] == {"full": pytest.approx(10), "mapping": pytest.approx(10)}
    assert list(by["tensor"]) == ["1", "8", "16"]
    for column, values in summary["by"].items():
        assert sum(f["configurations"] for f in values.values()) == 3, column
    assert summary["compile_s"] == {"total": 6, "median": 2, "most": 2}
    text = "\n".join(accuracy.lines(summary))
    assert "3 configurations compiled" in text
    assert "1 failed" in text
    assert "| zero | 3 | 2 | 15.00 |" in text


def test_no_rows_no_figures(accuracy):
    summary = accuracy.summary([])
    assert (summary["configurations"], summary["median_error_percent"], summary["verdict_agreement"]) == (0, None, None)
    assert list(accuracy.lines(summary)) == ["0 configurations compiled, 0 near capacity; 0 failed"]


def test_the_picture_shows_every_compiled_row(accuracy, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [fabricated(100 * n, 101 * n, model=model) for n, model in enumerate(accuracy.MODELS * 2, start=1)]
    rows.append({**rows[0], "error": "No.", "total_bytes": ""})
    accuracy.picture(rows, tmp_path / "scatter.svg")
    assert (tmp_path / "scatter.svg").read_text().count("<use ") >= 2 * 6
    with pytest.raises(ConfigError, match=r"let it end in \.png or \.svg"):
        accuracy.picture(rows, tmp_path / "scatter.txt")


# ------------------------------------------------------------------------------------------------------------------- bounds


TABLES = ("memory_calibration.csv", "memory_accuracy.csv")
"""Steps from which the estimate was made (seed 456), and steps not used before (SEED)."""


@pytest.fixture(scope="module", params=TABLES)
def table(accuracy, request):
    rows = accuracy.read_table(BENCHMARKS / request.param)
    if not rows:
        pytest.skip(f"{request.param} has not been made: python benchmarks/memory_accuracy.py")
    return rows


def require_bounds(summary):
    assert summary["errors"] == []
    assert summary["median_error_percent"] <= 3
    assert summary["p95_error_percent"] <= 8
    assert summary["underestimated_by_more_than_10_percent"] == 0
    assert summary["called_safe_and_above_capacity"] == 0


def test_the_stored_estimates_are_todays(accuracy, table):
    """If this fails: python benchmarks/memory_accuracy.py --rescore [--table benchmarks/memory_calibration.csv]"""
    stale = [
        row["index"] for row in table if accuracy.estimated(accuracy.case_of(row))["estimate_bytes"] != row["estimate_bytes"]
    ]
    assert stale == []


def test_the_estimate_on_the_whole_table(accuracy, table):
    assert all(accuracy.belongs(accuracy.case_of(row)) for row in table)
    (seed,) = {row["seed"] for row in table}
    summary = accuracy.summary(table)
    require_bounds(summary)
    assert summary["configurations"] >= (454 if seed == accuracy.SEED else 150)
    assert summary["near_capacity"] >= (150 if seed == accuracy.SEED else 60)
    assert summary["verdict_agreement"] >= 0.97
    assert summary["verdict_agreement_near_capacity"] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_estimate_against_twenty_steps_compiled_now(accuracy, tmp_path):
    from jaxllm.aot import can_compile_for_gpus

    if not can_compile_for_gpus():
        pytest.skip("compiling for GPUs needs the extra aot")
    newest = next(table for name in reversed(TABLES) if (table := accuracy.read_table(BENCHMARKS / name)))
    cases = [accuracy.case_of(row) for row in accuracy.subset(newest, 20)]
    accuracy.run(cases, tmp_path / "subset.csv", workers=2)
    summary = accuracy.summary(accuracy.read_table(tmp_path / "subset.csv"))
    assert summary["configurations"] == 20
    require_bounds(summary)
