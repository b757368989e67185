"""A run as its user sees it: metrics, evaluation, resuming, one trace."""

import json
import math
import os
import re
import signal
from contextlib import closing

import jax
import numpy as np
import pytest
from run_files import records
from tiny import TINY

import jaxllm
from jaxllm.checkpoint.run_lock import hold_run_dir
from jaxllm.config import ConfigError
from jaxllm.json_lines import read_lines
from jaxllm.notebook import trainer_html
from jaxllm.run.evaluation import has_evaluation
from jaxllm.run.loop import fit
from jaxllm.run.metrics import JsonLines
from jaxllm.run.saving import rate_note
from jaxllm.run.signals import SignalHandler
from jaxllm.run.step_metrics import Watch

EIGHT = ("run.cpu_devices=8", "parallel.data=8", "checkpoint.every_steps=2", "train.eval_every_steps=2")


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory):
    """(trainer, run folder) of one uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return fit(tiny_config(*EIGHT, f"run.dir={folder}")), folder


def test_metrics_hold_what_the_contract_names(finished):
    _, folder = finished
    steps = [r for r in records(folder) if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert [r["tokens"] for r in steps] == [128, 256, 384, 512]
    for r in steps:
        assert set(r) >= {"step", "tokens", "loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s_per_device"}
        assert r["step_s"] * r["tokens_per_s_per_device"] * 8 == pytest.approx(128)
        # There is no peak to compare a CPU with.
        assert not {"mfu", "tflops_per_gpu"} & set(r)
        assert all(math.isfinite(value) for value in r.values())
    evaluations = [r for r in records(folder) if "eval_loss" in r]
    assert [r["step"] for r in evaluations] == [2, 4]
    assert set(evaluations[0]) == {"step", "eval_loss"}
    assert steps[0]["loss"] == pytest.approx(np.log(256), abs=0.1)


def test_the_step_is_traced_once(finished):
    assert finished[0].programs.traces == 1


def test_the_config_of_a_run_is_kept_and_loads(finished):
    trainer, folder = finished
    assert jaxllm.load_config(folder / "config.yaml") == trainer.config


def test_resuming_equals_never_stopping(tiny_config, tmp_path):
    """4 steps = 2 + restore + 2, bit for bit: parameters, moments and metrics. Stopped by a shorter train.steps with the same
    schedule, so that both halves see the same learning rates.
    """
    flat = ("optimizer.schedule=constant", f"run.dir={tmp_path / 'halves'}")
    whole = fit(tiny_config(*EIGHT, *flat[:1], f"run.dir={tmp_path / 'whole'}"))
    fit(tiny_config(*EIGHT, *flat, "train.steps=2"))
    resumed = fit(tiny_config(*EIGHT, *flat))
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    losses = [[r["loss"] for r in records(tmp_path / name) if "loss" in r] for name in ("halves", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.slow
def test_a_mixture_goes_on_with_the_same_samples_on_another_mesh(text_file, tmp_path):
    """Two packed sources, saved on data 8 with ZeRO 3, resumed on data 2 x tensor 4 with ZeRO 1."""
    (tmp_path / "other.txt").write_text("some other text, over and over; " * 40)
    parts = (("words", text_file, 3), ("other", tmp_path / "other.txt", 1))
    mixture = [{"name": name, "source": "files", "paths": [str(path)], "weight": weight} for name, path, weight in parts]
    config = TINY | {"data": {"mixture": mixture, "packing": "best_fit", "held_out_fraction": 0.1}}
    flat = ("run.cpu_devices=8", "optimizer.schedule=constant", "checkpoint.every_steps=2")
    first, second = ("parallel.data=8", "parallel.zero=3"), ("parallel.data=2", "parallel.tensor=4", "parallel.zero=1")

    def run(name, *overrides):
        return fit(jaxllm.load_config(config, [*flat, *overrides, f"run.dir={tmp_path / name}"]))

    run("whole", *first)
    run("halves", *first, "train.steps=2")
    resumed = run("halves", *second)
    whole, halves = (records(tmp_path / name) for name in ("whole", "halves"))
    steps = [[r for r in lines if "loss" in r] for lines in (whole, halves)]
    assert [r["step"] for r in steps[1]] == [1, 2, 3, 4]
    np.testing.assert_allclose(*([r["loss"] for r in lines] for lines in steps), rtol=1e-6)
    assert steps[0][-1]["epochs/words"] == steps[1][-1]["epochs/words"] == pytest.approx(32 * 0.75 / words_samples(resumed))
    assert set(whole[-1]) == {"step", "eval_loss", "eval_loss/words", "eval_loss/other"}


def words_samples(trainer):
    return trainer.stream.sources[0].packing.num_samples


def test_a_finished_run_trains_no_further(finished, tiny_config, capsys):
    _, folder = finished
    before = len(records(folder))
    again = fit(tiny_config(*EIGHT, f"run.dir={folder}"))
    assert again.step == 4
    assert again.programs.compile_s is None
    assert "nothing to train: train.steps=4" in capsys.readouterr().out
    assert len(records(folder)) == before


def test_steps_yields_every_step_and_stops_at_will(tiny_config):
    trainer = jaxllm.Trainer(tiny_config("run.cpu_devices=8"))
    assert [m["step"] for m in trainer.steps(3)] == [1, 2, 3]
    for metrics in trainer.steps(5):
        if metrics["step"] == 4:
            break
    assert trainer.step == int(trainer.state.step) == 5
    assert repr(trainer) == "<Trainer at step 5 of 4, on 8 devices>"
    trainer.close()


def test_an_implicit_transfer_in_a_step_is_an_error(tiny_config, monkeypatch):
    """conftest.py guards every step of every test."""
    trainer = jaxllm.Trainer(tiny_config())
    monkeypatch.setattr(trainer.batches, "take", lambda step: jax.device_get(trainer.train_batch(step)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        trainer.advance()


def test_ctrl_c_leaves_a_whole_step_and_loses_no_sample(finished, tiny_config):
    """An interrupt inside the call that donates the old state, and one after a batch has left the queue: the following losses
    are those of an uninterrupted run."""
    _, folder = finished
    trainer = jaxllm.Trainer(tiny_config(*EIGHT))
    losses = {}

    def train(count):
        for metrics in trainer.steps(count):
            losses[metrics["step"]] = metrics["loss"]

    train(1)
    ((program, compiled),) = trainer.programs._programs.items()

    def disturbed(state, batch):
        signal.raise_signal(signal.SIGINT)
        return compiled(state, batch)

    trainer.programs._programs[program] = disturbed
    with pytest.raises(KeyboardInterrupt):
        train(1)
    trainer.programs._programs[program] = compiled
    assert trainer.step == int(trainer.state.step) == 2
    reader = trainer.batches._batches

    def losing():
        yield from ()
        next(reader)
        raise KeyboardInterrupt

    trainer.batches._batches = losing()
    with pytest.raises(KeyboardInterrupt):
        train(1)
    reader.close()
    assert trainer.step == 2
    train(2)
    trainer.close()
    assert losses == {r["step"]: r["loss"] for r in records(folder) if "loss" in r}


def test_a_run_is_exported_and_converted_in_python(finished, tmp_path):
    trainer, folder = finished
    jaxllm.export(folder, tmp_path / "hf", "hf", step=None, adapters=())
    # 0 is a step like another, and no option that was not given.
    with pytest.raises(ConfigError, match=r"step 0|--step=0"):
        jaxllm.export(folder, tmp_path / "x", "hf", step=0)
    with pytest.raises(
        ConfigError, match=r"--max-position has no effect on what is written as jaxllm: leave it out, or write hf"
    ):
        jaxllm.export(folder, tmp_path / "x", "jaxllm", max_position=9)
    jaxllm.convert(tmp_path / "hf", tmp_path / "ours")
    ours = jaxllm.load_model(tmp_path / "ours", "float32")
    np.testing.assert_array_equal(ours.head_matrix()[:256], trainer.model.head_matrix()[:256])


def test_a_notebook_shows_a_trainers_step_and_its_header(finished):
    shown = trainer_html(finished[0])
    assert shown.startswith("<pre")
    assert "step 4 of 4\n8 cpu devices; mesh pipe 1, data 8" in shown


def test_held_out_loss_is_per_byte_over_all_held_out_bytes(finished):
    trainer, _ = finished
    found = trainer.evaluate()
    (source,) = trainer.data.sources
    text = source.text(source.held_out).astype(np.int32)
    assert found.tokens == source.held_out_tokens - 1 == len(text) - 1
    S, targets = trainer.config.train.sequence_length, len(text) - 1
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(text, (0, S)), S)[:targets:S]
    logits = np.asarray(jax.jit(lambda model, ids: model(ids))(trainer.model, windows)).reshape(-1, 256)[:targets]
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    assert found.by_source == {"files": found.loss}
    assert found.loss == pytest.approx(-log_p[np.arange(targets), text[1:]].mean(), rel=1e-5)


def test_evaluating_nothing_is_refused(tiny_config):
    trainer = jaxllm.Trainer(tiny_config("run.cpu_devices=8", "data.held_out_fraction=0.0"))
    with pytest.raises(ConfigError, match=r"Nothing is held out .* set data.held_out_fraction above 0"):
        trainer.evaluate()


def test_the_learning_rate_is_the_one_logged(finished):
    _, folder = finished
    rates = [r["learning_rate"] for r in records(folder) if "loss" in r]
    progress = np.arange(1, 5) / 4
    np.testing.assert_allclose(rates, 3e-4 * (0.1 + 0.45 * (1 + np.cos(np.pi * progress))), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("model.hidden_size=64", "holds a run with model.hidden_size=32, not 64: resume with that value, or choose another"),
        ("train.seed=1", "holds a run with train.seed=0, not 1"),
        ("data.packing=best_fit", "holds a run with data.packing=concat, not best_fit"),
        ("train.global_batch_sequences=16", "holds a run with train.global_batch_sequences=8, not 16"),
    ],
)
def test_a_run_goes_on_only_as_the_same_run(finished, tiny_config, change, sentence):
    _, folder = finished
    before = (folder / "config.yaml").read_text(), (folder / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        fit(tiny_config(*EIGHT, f"run.dir={folder}", change))
    assert before == ((folder / "config.yaml").read_text(), (folder / "metrics.jsonl").read_text())


def test_metrics_after_a_crash_hold_each_step_once(tmp_path):
    """Steps after the checkpoint run again. Their first lines are moved aside, including a truncated one."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, 0)
    for step in (1, 2, 3):
        sink.write({"step": step, "loss": float("nan") if step == 2 else 1.0})
    sink.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    sink = JsonLines(path, 2)
    sink.write({"step": 3, "loss": 2.0})
    sink.close()
    assert records(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0}]
    assert (tmp_path / "metrics-1.jsonl").read_text() == '{"step": 3, "loss": 1.0}\n{"step": 4, "lo'


def test_metrics_with_damaged_lines_are_kept_and_read(tiny_config, tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = b'{"step": 1, "loss": 1.0}\n\xff odd\n[2]\n{"step": "x"}\n' + b"[" * 2000 + b"\n" + b'{"step": 200}\n'
    path.write_bytes(before + b'{"step": 2, "loss": "x", "grad_norm": 1, "eval_loss": 1}\n{"step": 3, "loss": 1.0}')
    with closing(JsonLines(path, 3)) as sink:
        sink.write({"step": 4, "loss": 2.0})
    assert path.read_bytes().startswith(before)
    assert [record["step"] for _, record in read_lines(path)] == [1, 200, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert [has_evaluation(path, step) for step in (2, 3)] == [True, False]
    Watch(tiny_config()).recall(path)


def test_a_restart_copies_only_the_lines_that_run_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start in range(1, 4):
        with closing(JsonLines(path, 10 * start)) as sink:
            for step in range(10 * start + 1, 10 * start + 13):
                sink.write({"step": step})
    assert [record["step"] for _, record in read_lines(path)] == list(range(11, 43))
    for number, first in ((1, 21), (2, 31)):
        lines = (tmp_path / f"metrics-{number}.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [first, first + 1]


def test_metrics_that_disappear_during_a_run_go_on_in_a_new_file(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with closing(JsonLines(path, 0)) as sink:
        sink.write({"step": 1})
        path.unlink()
        sink.write({"step": 2})
        path.rename(tmp_path / "taken")
        sink.write({"step": 3})
        sink.write({"step": 4})
    assert (records(tmp_path, "taken"), records(tmp_path)) == ([{"step": 2}], [{"step": 3}, {"step": 4}])
    assert caplog.messages == [f"{path} was removed or replaced during the run: its next lines go to a new file there."] * 2


def test_a_run_that_is_made_longer_says_that_its_learning_rate_rises(tiny_config):
    """A schedule ends at train.steps. Cut short, constant or made a little longer, it does not rise."""

    def note(steps, *more, planned=6):
        schedule = ("optimizer.learning_rate=1e-3", "optimizer.warmup_tokens=0", *more)
        return rate_note(planned, tiny_config(f"train.steps={steps}", *schedule), 6)

    assert note(12, "optimizer.schedule=cosine") == (
        "the learning rate rises from 0.0001 to 0.00043: optimizer.schedule=cosine ended at step 6, and now ends at 12. To "
        "train on without it, start a run from these weights (train.init_from)"
    )
    assert note(12, "optimizer.schedule=constant") == ""
    assert note(6, "optimizer.schedule=cosine") == note(7, "optimizer.schedule=cosine", planned=12) == ""


def test_a_profile_is_written(tiny_config, tmp_path):
    fit(tiny_config("run.cpu_devices=8", f"run.dir={tmp_path}", "log.profile_steps=[2, 3]", "data.held_out_fraction=0.0"))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_run_that_ends_in_its_warm_up_says_so(tiny_config, tmp_path, capsys):
    fit(tiny_config(*EIGHT, f"run.dir={tmp_path}", "train.steps=1", "optimizer.warmup_tokens=256"))
    assert "note: the run ends during its warm-up of 256 tokens" in capsys.readouterr().out
    assert records(tmp_path)[0]["learning_rate"] == pytest.approx(3e-4 / 2)


def test_a_pipeline_says_what_it_costs(tiny_config, tmp_path, capsys):
    """Idle share, with the batch that reduces it; identity layers; names in parallel.remat that do not occur here."""
    pipeline = ("parallel.pipe=2", "model.num_layers=3", "train.microbatch_sequences=1", "data.held_out_fraction=0")
    remat = "parallel.remat={attention_lse: keep, attention_output: keep}"
    fit(tiny_config("run.cpu_devices=8", *pipeline, remat, f"run.dir={tmp_path}", "train.steps=1"))
    printed = capsys.readouterr().out
    assert "pipeline 1f1b, 2 stages of 2 layers; idle 33.3% of a step" in printed
    assert "note: 1 identity layer pads the last stage: computed, never changed" in printed
    assert "10 microbatches (such as train.global_batch_sequences=40) reduce that below 10%" in printed
    assert "remat attention_lse keep, attention_output keep;" in printed
    assert "note: plain XLA attention has no attention_lse, attention_output: it is recomputed" in printed


# ---------------------------------------------------------------------------------------------------- one run, and its ends


def test_a_second_run_in_the_same_directory_is_refused(tiny_config, tmp_path):
    with hold_run_dir(tmp_path), pytest.raises(ConfigError, match=rf"^run.dir={tmp_path} is in use by pid {os.getpid()} on "):
        fit(tiny_config(*EIGHT, f"run.dir={tmp_path}"))
    # Released at its end: the same directory is free.
    with hold_run_dir(tmp_path):
        pass


@pytest.mark.slow
def test_a_signal_during_an_evaluation_saves_and_stops(tiny_config, tmp_path, monkeypatch, capsys):
    """Only the evaluation looks for the signal here: between steps nothing does, and no save is due at step 2 of 4."""
    monkeypatch.setattr(SignalHandler, "begin", lambda self: None)
    monkeypatch.setattr(SignalHandler, "agreed_signal", lambda self: "SIGTERM")
    trainer = fit(tiny_config("run.cpu_devices=8", "parallel.data=8", "train.eval_every_steps=2", f"run.dir={tmp_path}"))
    assert trainer.step == 2
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert not any("eval_loss" in r for r in records(tmp_path))
    assert "stopped at step 2 by SIGTERM; saved; rerun the same command to resume" in capsys.readouterr().out


def test_an_evaluation_that_the_end_of_a_run_lost_is_made_up_for(finished, tiny_config):
    """Killed between the last save and the last evaluation: the next start evaluates, and only once."""
    _, folder = finished
    path, lines = folder / "metrics.jsonl", records(folder)
    path.write_text("".join(json.dumps(r) + "\n" for r in lines if not ("eval_loss" in r and r["step"] == 4)))
    for _ in range(2):
        fit(tiny_config(*EIGHT, f"run.dir={folder}"))
        assert [r for r in records(folder) if "eval_loss" in r][-1] == pytest.approx(lines[-1])
        assert len(records(folder)) == len(lines)


def test_metrics_that_cannot_be_written_stop_the_run_with_the_reason(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", 0)
    sink.close()
    sink._is_there = lambda: True
    with open("/dev/full", "w") as sink._file:
        with pytest.raises(ConfigError, match=r"metrics.jsonl cannot be written \(No space left on device\): remove the cause"):
            sink.write({"step": 1})
        sink.close()
