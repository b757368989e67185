"""The order of hooks, and a feature of one page that no file of the package knows."""

import json

import jax
import pytest

from jaxllm.run.hooks import Run
from jaxllm.run.loop import fit


def weight_norms(run: Run) -> None:
    """Writes the norm of the weights into metrics.jsonl, and stops the run when it is above 1000."""

    @jax.jit
    def norm(params):
        return jax.numpy.sqrt(sum((x.astype("float32") ** 2).sum() for x in jax.tree.leaves(params)))

    def write(moment) -> None:
        found = float(norm(run.trainer.state.params))
        run.write({"step": moment.step, "weight_norm": found})
        if found > 1000:
            run.stop("a weight norm above 1000")

    run.every(3, write)


def test_a_feature_that_no_file_of_the_package_knows(tiny_config, tmp_path):
    config = tiny_config("run.cpu_devices=8", "parallel.data=8", "train.steps=7", f"run.dir={tmp_path}")
    trainer = fit(config, hooks=[weight_norms])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["weight_norm"]) for line in lines if "weight_norm" in line]
    assert [step for step, _ in found] == [3, 6]
    assert all(0 < norm < 1000 for _, norm in found)
    plain = fit(tiny_config("run.cpu_devices=8", "parallel.data=8", "train.steps=7", f"run.dir={tmp_path / 'plain'}"))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), trainer.state, plain.state))


def test_the_order_of_events_and_of_what_is_due(tiny_config, tmp_path):
    """As the docstring of run/hooks.py gives it: metrics one step late, and a complete state where something is due."""
    seen = []

    def spy(run: Run) -> None:
        assert run.first == 0
        run.on("before", lambda: seen.append(("before", run.trainer.step)))
        run.on("begun", lambda moment: seen.append(("begun", moment.step, moment.last)))
        run.on("record", lambda record: seen.append(("record", record["step"])))
        run.every(2, lambda moment: seen.append(("due", moment.step, int(run.trainer.state.step))))
        run.when(lambda moment: run.is_due("save", moment), lambda moment: seen.append(("after save", moment.step)))
        run.on("trained", lambda: seen.append("trained"))
        run.on("ended", lambda: seen.append("ended"))

    fit(tiny_config("train.steps=3", f"run.dir={tmp_path}"), hooks=[spy])
    assert seen == [
        *(("before", 0), ("begun", 1, False)),
        *(("before", 1), ("record", 1), ("begun", 2, False), ("record", 2), ("due", 2, 2)),
        *(("before", 2), ("begun", 3, True), ("record", 3), ("after save", 3)),
        *("trained", "ended"),
    ]


@pytest.mark.parametrize(
    ("register", "last"),
    [
        (lambda run, stop: run.when(lambda moment: moment.step == 2, lambda _: stop()), 2),
        (lambda run, stop: run.on("begun", lambda moment: moment.step == 2 and stop()), 2),
        # The metrics of step 2 come while step 3 runs.
        (lambda run, stop: run.on("record", lambda record: record["step"] == 2 and stop()), 3),
        (lambda run, stop: run.on("before", lambda: run.trainer.step == 2 and stop()), 3),
    ],
    ids=["when", "begun", "record", "before"],
)
def test_a_hook_stops_the_run_which_saves_and_resumes(register, last, tiny_config, tmp_path):
    config = tiny_config("train.steps=6", f"run.dir={tmp_path}")
    trainer = fit(config, hooks=[lambda run: register(run, lambda: run.stop("a hook"))])
    assert (trainer.step, trainer.stopped_by) == (last, "a hook")
    assert (tmp_path / "checkpoints" / str(last)).is_dir()
    starts = []
    assert fit(config, hooks=[lambda run: starts.append(run.first)]).step == 6
    assert starts == [last]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_after_the_last_step_a_hook_stops_nothing(tiny_config, tmp_path):
    stops = lambda run: run.when(lambda moment: moment.last, lambda _: run.stop("a hook"))  # noqa: E731
    trainer = fit(tiny_config("train.steps=2", f"run.dir={tmp_path}"), hooks=[stops])
    assert (trainer.step, trainer.stopped_by) == (2, None)


def test_a_hook_of_no_steps_is_refused(tiny_config, tmp_path):
    with pytest.raises(ValueError, match=r"^run\.every\(0, \.\.\.\): give a number of steps of at least 1\.$"):
        fit(tiny_config(f"run.dir={tmp_path}"), hooks=[lambda run: run.every(0, print)])
