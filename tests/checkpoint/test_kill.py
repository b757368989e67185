"""SIGKILL at six or more random moments, two of them inside a save: the run ends as if nothing had happened."""

import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from outside import wait_until
from run_files import saved_state, steps_of
from tiny import TINY

from jaxllm.checkpoint.files import saved_steps

CHECKOUT = Path(__file__).parents[2]
STEPS, SEED, LIMIT_S = 600, 0, 200
INSIDE, MORE = 2, 6
"""Kills inside a save, and the number of extra kills to get them, because some saves end before the signal arrives."""


def start(recipe, folder, *overrides) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxllm.cli", "train", recipe, "run.cpu_devices=1", f"run.dir={folder}", *overrides]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Reader(threading.Thread):
    """The output of a process so far."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self.stream, self.lines = stream, []
        self.start()

    def run(self):
        for line in self.stream:
            self.lines.append(line)
        self.stream.close()

    @property
    def trains(self) -> bool:
        return any(re.match(r"step \d+/", line) for line in self.lines)


def metrics(folder):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(folder)]


@pytest.mark.slow
def test_killed_again_and_again_a_run_ends_as_if_undisturbed(text_file, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    train = TINY["train"] | {"steps": STEPS}
    data = {"source": "files", "paths": [str(text_file)], "held_out_fraction": 0.0}
    recipe.write_text(yaml.safe_dump(TINY | {"train": train, "data": data, "log": {"every_steps": 1}}))
    whole, folder, rng = tmp_path / "whole", tmp_path / "killed", random.Random(SEED)
    undisturbed = start(recipe, whole)
    out, error = undisturbed.communicate(timeout=LIMIT_S)
    assert undisturbed.returncode == 0, out + error

    def being_written():
        return list((folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"))

    inside_a_save = 0
    # At any time during the start or during training, and when a folder appears that is being written.
    moments = ["start", "time", "save"] * 2
    rng.shuffle(moments)

    def all_moments():
        yield from moments
        for _ in range(MORE):
            if inside_a_save < INSIDE:
                yield "save"
        yield "never"

    for number, moment in enumerate(all_moments()):
        before = saved_steps(folder / "checkpoints")
        process = start(recipe, folder, f"checkpoint.every_steps={rng.choice([1, 2])}")
        reader = Reader(process.stdout)
        if moment == "start":
            time.sleep(rng.uniform(0.5, 5))
        elif moment != "never":
            wait_until(lambda reader=reader: reader.trains, process, LIMIT_S)
            time.sleep(rng.uniform(0, 0.5))
            if moment == "save":
                wait_until(being_written, process, LIMIT_S)
                time.sleep(rng.uniform(0, 0.03))
        if moment != "never":
            assert process.poll() is None, f"the run ended before kill {number}: raise STEPS"
            process.kill()
        process.wait(timeout=LIMIT_S)
        reader.join()
        inside_a_save += bool(being_written()) and moment != "start"
        said = "".join(reader.lines)
        assert "damaged" not in said
        resumed = re.search(r"^resumed from step (\d+) in ", said, re.MULTILINE)
        if resumed or reader.trains:
            assert (int(resumed[1]) if resumed else None) == (before[-1] if before else None)
        error = process.communicate()[1]
        if moment == "never":
            assert process.returncode == 0, said + error

    print(f"{inside_a_save} of {number} kills fell inside a save")
    assert inside_a_save >= INSIDE
    assert metrics(folder) == metrics(whole)
    assert [step for step, *_ in metrics(folder)] == list(range(1, STEPS + 1))
    jax.tree.map(np.testing.assert_array_equal, saved_state(folder, STEPS), saved_state(whole, STEPS))
