"""A host with a DiLoCo replica is lost inside a round: the others train on as fewer replicas, and take it back."""

import re
import shutil

import jax
import numpy as np
import pytest
from faulty_runs import START_S, Run, supervised
from run_files import records, saved_state

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

ROUND = 9
"""Steps. A checkpoint each second step is inside a round, but for each 18th."""
HOSTS = "127.0.0.1,127.0.0.2,127.0.0.3"
COMMON = (
    *("parallel.data=1", f"train.diloco_steps={ROUND}", "train.global_batch_sequences=12", "train.microbatch_sequences=2"),
    *("checkpoint.keep=1000", "launch.least_hosts=2", "launch.wait_s=50"),
)


def line_of(launch, rank, pattern):
    """The first line of the process's output that matches; None if there is none."""
    return next(filter(None, (re.fullmatch(pattern, line) for line in launch[rank].out.lines)), None)


def test_a_replica_whose_host_is_gone_is_trained_without_and_taken_back(text_file, tmp_path):
    """Until then all is as if someone had resumed the checkpoint with one replica less, bit for bit. The second of three hosts
    is lost, so the third one trains the second replica of the checkpoint."""
    run, by_hand = Run(tmp_path, text_file), Run(tmp_path, text_file, "by-hand")
    started = {"under": supervised(restarts=5), "fault": "short second wait", "JAXLLM_HOSTS": HOSTS}
    with run.launch(*COMMON, "parallel.replica=3", "train.steps=100000", count=3) as launch:
        launch.start_all(**started)
        launch.wait_until_it_trains()
        launch.lose(1)
        resumed = rf"resumed from step (\d+) in {re.escape(str(run.dir))}"
        launch.wait_until(lambda: line_of(launch, 0, resumed), "the start of those that are left")
        first = int(line_of(launch, 0, resumed)[1])
        missing = "127.0.0.2 is missing: training on with 2 of 3 replicas, the same batches in 3 microbatches, not 2; with all "
        assert f"{missing}again when it returns" in launch[0].out.lines, launch
        # After an outer step.
        last = first + ROUND + 2
        launch.wait_until(lambda: run.saved[-1] > last, f"step {last}")
        launch.start(1, **started)
        again = r"stopped at step (\d+) by the return of 127\.0\.0\.2; saved; rerun the same command to resume"
        launch.wait_until(lambda: line_of(launch, 0, again), "the return")
        grown = int(line_of(launch, 0, again)[1])
        launch.wait_until(lambda: run.records()[-1][0] > grown, "a step of three replicas")
        assert launch[0].out.lines.index(f"resumed from step {grown} in {run.dir}") > 0
        text = "The checkpoint has 2 DiLoCo replicas and the run 3: the first 2 continue, 1 begin from the weights of the last"
        assert text in launch[0].err.text, launch
    starts = [line for line in records(run.dir) if "start_unix_s" in line]
    assert [(start["devices"], start.get("absent_hosts", 0)) for start in starts] == [(3, 0), (2, 1), (3, 0)]

    shutil.copytree(run.dir / "checkpoints" / str(first), by_hand.dir / "checkpoints" / str(first))
    with by_hand.launch(
        *COMMON[:4], "checkpoint.keep=1000", "parallel.replica=2", f"train.steps={last + 1}", pace_s=0
    ) as launch:
        launch.start_all()
        launch.assert_ends(0, 0, within_s=START_S)
        launch.assert_resumed()
    expected = [line for line in by_hand.records() if line[0] <= last]
    assert [line[0] for line in expected] == list(range(first + 1, last + 1))
    assert [line for line in run.records() if first < line[0] <= last] == expected
    saved = last - last % 2
    jax.tree.map(np.testing.assert_array_equal, *(saved_state(one.dir, saved) for one in (run, by_hand)))
