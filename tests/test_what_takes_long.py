"""What takes long says how far it is: on a terminal, in a notebook, in a log; and what has no end in sight, that it lasts."""

import io
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console as RichConsole

from jaxllm import terminal
from jaxllm.cluster import progress
from jaxllm.config import ConfigError
from jaxllm.run import console as console_module
from jaxllm.run import evaluation
from jaxllm.run.console import Console, what_lasts


@pytest.fixture
def clock(monkeypatch):
    """clock.now_s is the time that the terminal sees."""
    found = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def test_a_log_has_a_line_every_ten_seconds_and_none_of_what_is_shorter(clock):
    said = []
    show = terminal.in_lines_of_a_log(said.append)
    for done in range(10):
        show("short", done, 9)
        clock.now_s += 1
    assert said == []
    for done in range(0, 101):
        show("long", done, 100, "4 shards")
        clock.now_s += 4
    # The first line comes at 12 s, when 3 of 100 are done.
    assert said[0] == "long 3%, 6:28 left  4 shards"
    assert len(said) == 33
    assert said[-1] == "long 99%, 0:04 left  4 shards"


def test_what_was_not_begun_has_no_time_left(clock):
    said = []
    show = terminal.in_lines_of_a_log(said.append)
    show("one", 2, 4)
    clock.now_s += 11
    show("one", 2, 4)
    assert said == ["one 50%"]


def test_bytes_of_all_threads_are_counted(clock, capfd):
    with terminal.bytes_bar("from s3://\x1b[2Jbucket", 4000) as advance:
        advance(0)
        clock.now_s += 20
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(advance, [1] * 1000))
        clock.now_s += 20
        advance(1000)
    out, err = capfd.readouterr()
    assert out == ""
    assert "\x1b" not in err
    assert err.splitlines()[-1].endswith("bucket 50%, 0:40 left")


def test_a_terminal_has_one_line_that_goes(monkeypatch):
    file = io.StringIO()
    variables = {"TERM": "xterm-256color", "NO_COLOR": "1"}
    screen = RichConsole(file=file, width=80, force_terminal=True, highlight=False, _environ=variables)
    monkeypatch.setattr(terminal, "console", lambda **_: screen)
    with terminal.progress_shown() as show:
        show("meshes", 1, 4)
        show("configurations", 30, 40, "so far")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "configurations  so far" in shown
    assert "75%" in shown
    with terminal.progress_shown(visible=False) as show:
        before = file.getvalue()
        show("meshes", 1, 4)
    assert file.getvalue() == before


def test_what_has_no_end_in_sight_is_said_again_and_again(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "QUIET_S", 0.01)
    asked, twice = [], threading.Event()

    def what():
        asked.append(None)
        if len(asked) > 3:
            twice.set()
        return "restore, 20 s so far" if len(asked) == 2 else None

    with terminal.saying(what):
        assert twice.wait(30)
    assert capsys.readouterr().err == "jaxllm: restore, 20 s so far\n"


def test_a_phase_that_lasts_is_told_and_a_step_is_not(monkeypatch):
    now_s = progress.time.monotonic()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    for phase, told in (("restore", "restore{}, 10 s so far"), ("step", None)):
        with progress.phase(phase):
            now_s += 9.0
            assert what_lasts() is None
            now_s += 1.0
            seen = what_lasts()
        step = progress.now().step
        assert seen == (told and told.format(f" after step {step}" if step else ""))


@pytest.mark.parametrize("main", [True, False])
def test_a_run_says_how_far_its_evaluation_is(clock, capsys, main):
    with Console(total_steps=10, main=main) as console:
        for done in range(1, 6):
            console.progress("evaluation", done, 5)
            clock.now_s += 11
    said = ["evaluation 40%, 0:33 left", "evaluation 60%, 0:22 left", "evaluation 80%, 0:11 left"]
    assert capsys.readouterr().out.splitlines() == (said if main else [])


def test_a_runs_bar_and_a_notebooks_line_show_it_too(monkeypatch):
    screen = RichConsole(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm-256color"})
    monkeypatch.setattr(console_module, "console", lambda **_: screen)
    with Console(total_steps=10) as console:
        console.progress("evaluation", 7, 1200)
    assert "evaluation 7/1,200" in screen.file.getvalue()
    shown = []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=True)))
    display = SimpleNamespace(display=lambda content, **_: shown.append(content["text/plain"]))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with Console(total_steps=10) as console:
        console.progress("evaluation", 7, 1200)
    assert shown == ["evaluation 7/1,200"]


@pytest.fixture
def evaluated(monkeypatch):
    """evaluated(sources, **options): an evaluation whose sample k has the loss k of one token, two samples in a batch."""
    batches = []

    def score(trainer, number, source, samples):
        batches.append((number, samples.tolist()))
        samples = samples[samples < source.packing.num_samples]
        return np.float32(samples.sum()), np.int32(len(samples)), 0

    def run(sizes, stages=1, microbatches=5, eval_batches=None, **options):
        batches.clear()
        sources = [SimpleNamespace(name=f"s{n}", packing=SimpleNamespace(num_samples=size)) for n, size in enumerate(sizes)]
        parallel, train = SimpleNamespace(pipe=stages), SimpleNamespace(loss="cross_entropy", eval_batches=eval_batches)
        config = SimpleNamespace(parallel=parallel, train=train, microbatch_rows=2, num_microbatches=microbatches)
        trainer = SimpleNamespace(config=config, mesh=None, data=SimpleNamespace(held_out=sources))
        return evaluation.evaluate(trainer, **options), [*batches]

    monkeypatch.setattr(evaluation, "_text", score)
    monkeypatch.setattr(evaluation.jax, "set_mesh", lambda mesh: nullcontext())
    return run


def test_an_evaluation_shows_each_batch_of_all_and_counts_the_last_one(evaluated):
    shown = []
    found, batches = evaluated([5, 2], show=lambda *call: shown.append(call))
    assert batches == [(0, [0, 1]), (0, [2, 3]), (0, [4, 5]), (1, [0, 1])]
    assert shown == [("evaluation", n, 4) for n in (1, 2, 3, 4)]
    assert (found.loss, found.tokens, found.by_source) == (11 / 7, 7, {"s0": 2.0, "s1": 0.5})
    shown.clear()
    found, batches = evaluated([5, 2], max_batches=1, show=lambda *call: shown.append(call))
    assert (found.loss, [call[1:] for call in shown]) == (0.5, [(1, 2), (2, 2)])


def test_batches_of_a_pipeline_are_scored_together_and_no_more_samples_than_are_asked_for(evaluated):
    """Two stages, two samples in a microbatch, four microbatches at a time: a batch of train.eval_batches has four samples."""
    _, batches = evaluated([99], stages=2, max_batches=3)
    assert batches == [(0, [*range(8)]), (0, [*range(8, 12), 99, 99, 99, 99])]
    assert evaluated([10], stages=2)[0].tokens == evaluated([10])[0].tokens == 10


@pytest.mark.parametrize(("pipe", "microbatches", "together"), [(1, 64, 1), (4, 2, 4), (4, 10, 8), (4, 64, 16), (2, 2, 2)])
def test_an_evaluation_scores_as_many_microbatches_as_keep_a_pipeline_busy(evaluated, pipe, microbatches, together):
    assert len(evaluated([99], stages=pipe, microbatches=microbatches)[1][0][1]) == 2 * together
    # No more than an evaluation during the run asks for.
    assert len(evaluated([99], stages=pipe, microbatches=microbatches, eval_batches=1)[1][0][1]) == 2 * pipe


def test_an_evaluation_ends_where_it_is_told_to(evaluated):
    asked = []
    found, batches = evaluated([6], stop=lambda: asked.append(None) or len(asked) == 2)
    assert (found, len(batches)) == (None, 2)
    with pytest.raises(ConfigError, match="Nothing is held out to evaluate on"):
        evaluated([0])
