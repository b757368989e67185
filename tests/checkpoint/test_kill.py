"""SIGKILL at six or more random moments, two of them inside a save, and with a store on one new machine after another: the run
ends as if nothing had happened.
"""

import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import unquote

import jax
import numpy as np
import pytest
import yaml
from outside import wait_until
from run_files import saved_state, steps_of
from store_servers import gcs_door, s3_door
from tiny import TINY

from jaxllm.checkpoint.files import saved_steps
from jaxllm.checkpoint.store import Store

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


def recipe_of(steps, text_file, folder) -> Path:
    path = folder / "tiny.yaml"
    train = TINY["train"] | {"steps": steps}
    data = {"source": "files", "paths": [str(text_file)], "held_out_fraction": 0.0}
    path.write_text(yaml.safe_dump(TINY | {"train": train, "data": data, "log": {"every_steps": 1}}))
    return path


@pytest.mark.slow
def test_killed_again_and_again_a_run_ends_as_if_undisturbed(text_file, tmp_path):
    recipe = recipe_of(STEPS, text_file, tmp_path)
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
        # The last one saves seldom, because the rest of the steps is long.
        every = STEPS if moment == "never" else rng.choice([1, 2])
        process = start(recipe, folder, f"checkpoint.every_steps={every}")
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


STORED_STEPS = 8


@pytest.fixture(scope="module")
def undisturbed(text_file, tmp_path_factory):
    """The recipe and the run directory of a run without a store."""
    home = tmp_path_factory.mktemp("undisturbed")
    recipe = recipe_of(STORED_STEPS, text_file, home)
    process = start(recipe, home / "run")
    out, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + error
    return recipe, home / "run"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "moments"), [("s3", ["first copy", "commit", "restore", "deletion"]), ("gs", ["first copy", "commit", "restore"])]
)
def test_killed_on_one_new_machine_after_another_a_run_ends_as_if_undisturbed(undisturbed, tmp_path, kind, moments):
    """Each kill is inside a request to the store, and takes the disk of the run with it."""
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    recipe, whole = undisturbed
    with {"s3": s3_door, "gs": gcs_door}[kind]("runs") as door:
        place, options = Store(f"{kind}://runs/killed"), ("checkpoint.every_steps=2", "checkpoint.keep=1")

        def there() -> list[int]:
            return [step for step, files in place.steps().items() if "files.json" in files]

        for number, moment in enumerate([*moments, "never"]):
            before, folder = there(), tmp_path / str(number)
            reached, gone = threading.Event(), threading.Event()

            def rule(method, path, moment=moment, before=before, reached=reached, gone=gone):
                path, is_write = unquote(path), method in ("PUT", "POST")
                is_reached = {
                    "first copy": is_write and "/state/" in path,
                    # Beside the checkpoint before, if there is one.
                    "commit": is_write and "/files.json" in path and (before or there()),
                    "restore": method == "GET" and "/state/" in path,
                    "deletion": method == "DELETE" and "/files.json" in path,
                }
                if is_reached.get(moment):
                    reached.set()
                    gone.wait(LIMIT_S)
                    return 503

            door.rule = rule
            process = start(recipe, folder, f"checkpoint.store={place.address}", *options)
            reader = Reader(process.stdout)
            if moment != "never":
                wait_until(reached.is_set, process, LIMIT_S)
                process.kill()
            process.wait(timeout=LIMIT_S)
            gone.set()
            reader.join()
            said, error, door.rule = "".join(reader.lines), process.communicate()[1], None
            assert "damaged" not in said
            if moment != "restore":
                taken = re.search(rf"^took checkpoint (\d+) from {place.address}$", said, re.MULTILINE)
                assert (int(taken[1]) if taken else None) == (before[-1] if before else None)
            now = there()
            assert {"first copy": now == [], "commit": len(now) == 1, "restore": now == before}.get(moment, True), now
            if moment == "deletion":
                # The copy is whole, and the one before is about to be deleted.
                assert len(now) == 2
            if moment == "never":
                assert process.returncode == 0, said + error
        assert there() == list(place.steps()) == [STORED_STEPS]
    assert metrics(folder) == metrics(whole)
    assert [step for step, *_ in metrics(folder)] == list(range(1, STORED_STEPS + 1))
    jax.tree.map(np.testing.assert_array_equal, saved_state(folder, STORED_STEPS), saved_state(whole, STORED_STEPS))
