"""Rehearsals: shrinking keeps the mesh, a seed gives the same faults, the verdict finds what is wrong, and a real one holds."""

import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny import TINY

from jaxllm.config import ConfigError, config_folder, load_config, published_models
from jaxllm.rehearsal import rehearse as rehearsing
from jaxllm.rehearsal.faults import Fault, History, Report, Strike, plan_faults, steps_for
from jaxllm.rehearsal.hosts import Line
from jaxllm.rehearsal.shrink import MOST_DEVICES, changes, reads_own_text, shrink

CHECKOUT = Path(__file__).parents[2]
RECIPES = sorted([*config_folder().glob("*.yaml"), *(CHECKOUT / "docs" / "recipes").glob("*.yaml")])
HOSTS, STEPS = 4, 50
MESHES = (
    {},
    {"data": 2, "tensor": 2},
    {"data": 2, "pipe": 4, "zero": 1},
    {"data": 1, "pipe": 2, "context": 2, "tensor": 2, "zero": 3},
    {"data": 1, "pipe": 2, "virtual_stages": 2, "schedule": "interleaved", "replica": 2},
    {"data": 1, "tensor": 8},
)
ANY = {"steps": 1000, "sequence_length": 8192, "global_batch_sequences": 256, "microbatch_sequences": 2}


# ------------------------------------------------------------------------------------------------------------ shrinking


def recipe(path):
    values = yaml.safe_load(path.read_text())
    if values["model"].get("name", "") not in ("", *published_models()):
        # A folder that is not here, with its conversations.
        values["model"]["name"], values["data"] = "smollm2-135m", {}
        values["train"].pop("loss", None)
    return load_config(values)


def assert_shrunk(config, tmp_path, hosts=HOSTS):
    """It resolves on its mesh, and is split in the same way."""
    small = shrink(config, hosts, STEPS, tmp_path)
    assert small.resolve(small.run.cpu_devices * hosts).devices <= MOST_DEVICES
    assert load_config(small.model_dump(mode="json", exclude_unset=True)) == small
    given = config.parallel.model_dump() | {"data": small.parallel.data}
    assert small.parallel.model_dump() == given
    chunks, t = config.parallel.pipe * config.parallel.virtual_stages, config.parallel.tensor
    for one in (config, small):
        assert one.model.num_heads % t == 0
    assert (small.model.num_kv_heads % t == 0) == (config.model.num_kv_heads % t == 0)
    assert (small.model.num_kv_heads == small.model.num_heads) == (config.model.num_kv_heads == config.model.num_heads)
    assert (small.model.num_layers % chunks == 0) == (config.model.num_layers % chunks == 0)
    windows = [
        {window is not None and window < one.train.sequence_length for window in one.model.windows} for one in (config, small)
    ]
    assert windows[0] == windows[1]
    assert small.model.hidden_size <= 256
    assert small.train.sequence_length * small.train.global_batch_sequences <= 16_384
    return small


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_shrinks_to_one_that_resolves_on_its_mesh(path, tmp_path):
    config = recipe(path)
    if config.parallel.data != "auto" and config.devices > MOST_DEVICES:
        with pytest.raises(
            ConfigError, match=f"has {config.devices} devices, and a rehearsal at most 64: make an axis smaller"
        ):
            shrink(config, HOSTS, STEPS, tmp_path)
    else:
        assert_shrunk(config, tmp_path)


@pytest.mark.parametrize("name", published_models())
def test_every_published_model_shrinks_on_every_mesh_that_splits_it(name, tmp_path):
    shrunk = 0
    for mesh in MESHES:
        try:
            config = load_config({"model": {"name": name}, "parallel": mesh, "train": ANY})
        except ConfigError:
            # Three heads do not split over eight ranks.
            continue
        assert_shrunk(config, tmp_path)
        shrunk += 1
    assert shrunk >= 3


def test_what_depends_on_the_length_of_the_run_shrinks_with_it(tmp_path):
    train = ANY | {"batch_schedule": [[10**9, 512], [2 * 10**9, 1024]], "diloco_steps": 100, "diloco_after_steps": 200}
    config = load_config(
        {
            **{"model": {"name": "llama-3.2-1b"}, "parallel": {"replica": 2}, "train": train},
            **{"optimizer": {"warmup_tokens": config_tokens(1000) // 10}, "checkpoint": {"every_steps": 500, "keep": 3}},
            "launch": {"least_hosts": 3},
        }
    )
    small = assert_shrunk(config, tmp_path)
    assert [phase.sequences // small.train.global_batch_sequences for phase in small.phases] == [1, 2, 4]
    assert small.phases[-1].first_step < STEPS
    assert small.optimizer.warmup_tokens == pytest.approx(STEPS * small.step_tokens / 10, abs=1)
    assert small.train.diloco_after_steps + small.train.diloco_steps < STEPS
    assert (small.checkpoint.every_steps, small.checkpoint.keep) == (5, 3)
    assert {"checkpoint: every_steps 500 -> 5", "launch: least_hosts 3 -> None"} <= set(changes(config, small))


def config_tokens(steps):
    return steps * ANY["sequence_length"] * ANY["global_batch_sequences"]


def test_small_texts_of_few_token_ids_are_read_and_others_are_not(tiny_config, tmp_path):
    config = tiny_config()
    assert reads_own_text(config)
    assert shrink(config, 2, STEPS, tmp_path).data.paths == config.data.paths
    many = tiny_config("model.vocab_size=50000")
    assert not reads_own_text(many)
    small = shrink(many, 2, STEPS, tmp_path)
    assert (small.model.vocab_size, small.data.paths) == (256, (str(tmp_path / "text" / "*.txt"),))


def test_a_rehearsal_leaves_the_store_of_the_real_run_alone(tiny_config, tmp_path):
    config = tiny_config("checkpoint.store=s3://bucket/run", "checkpoint.store_every_steps=7", "checkpoint.keep=3")
    small = shrink(config, 2, STEPS, tmp_path).checkpoint
    assert (small.store, small.store_every_steps, small.keep) == (None, None, 3)


@pytest.mark.parametrize(
    ("mesh", "hosts", "sentence"),
    [
        ({"data": 4, "tensor": 2}, 3, r"--hosts=3 does not divide the 8 devices of the config's mesh: use one of \[2, 4, 8\]"),
        ({"data": 64, "tensor": 2}, 4, "The mesh has 128 devices, and a rehearsal at most 64: make an axis smaller"),
        ({"tensor": 2, "pipe": 2}, 33, "The mesh has 132 devices, and a rehearsal at most 64: use fewer --hosts"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(mesh, hosts, sentence, tiny_config, tmp_path):
    config = tiny_config(*(f"parallel.{axis}={size}" for axis, size in mesh.items()), "train.global_batch_sequences=64")
    with pytest.raises(ConfigError, match=sentence):
        shrink(config, hosts, STEPS, tmp_path)


def test_cables_without_namespaces_and_too_little_memory_are_refused(tiny_config, monkeypatch):
    monkeypatch.setattr(rehearsing, "networks_are_possible", lambda: False)
    with pytest.raises(ConfigError, match="--cut needs network namespaces, which root may make with iproute2: run it as root"):
        rehearsing.rehearse(tiny_config(), 2, {"kill": 0, "freeze": 0, "cut": 1})
    monkeypatch.setattr(rehearsing, "host_memory", lambda: (2**33, 2**30))
    with pytest.raises(ConfigError, match=r"8 processes of 1 CPU devices need about 6\.3 GiB, and this machine has 1\.0 GiB"):
        rehearsing.rehearse(tiny_config(), 8, {"kill": 1, "freeze": 0, "cut": 0})


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_seed_gives_the_same_faults_and_all_fit_into_the_run():
    counts = {"kill": 9, "freeze": 6, "cut": 5}
    plans = [plan_faults(seed, 16, counts) for seed in range(50)]
    assert plans == [plan_faults(seed, 16, counts) for seed in range(50)]
    assert len(set(plans)) == 50
    for plan in plans:
        assert Counter(fault.kind for fault in plan) == counts
        steps = [fault.step for fault in plan]
        # A save after the last one is still before the end.
        assert all(after - before > 5 for before, after in itertools.pairwise(steps))
        assert steps[-1] + 6 < steps_for(len(plan))
    assert {fault.host for plan in plans for fault in plan} == set(range(16))
    assert {fault.moment for plan in plans for fault in plan} == {"step", "save", "start"}


# -------------------------------------------------------------------------------------------------------------- verdict

LOST = "jaxllm: processes 1 and 3 on h3 are lost (nothing heard for 20 s) during step 8"
FROZEN = f"{LOST}: it is frozen, or its host or network failed"
FAULT = Fault("freeze", 3, "step", 7)


def metrics(first, last, unix_s, **changed):
    """Lines of a start; a second for each step."""
    lines = [
        {"step": step, "loss": 5 - step / 8, "grad_norm": 1.0, "unix_s": unix_s + step - first}
        for step in range(first, last + 1)
    ]
    lines[0]["start_unix_s"] = unix_s - 5.0
    lines[-1] |= changed
    return lines


def report(**changed) -> Report:
    """A run of 10 steps that was frozen at second 1008, in step 8, and resumed from its checkpoint of step 5; with changes."""
    history = {
        "planned": (FAULT,),
        "strikes": (Strike(FAULT, 1008.0, "step 8", 7),),
        "lines": (Line(1028.5, 0, FROZEN),),
        "metrics": [*metrics(1, 7, 1001.0), *metrics(6, 10, 1040.0)],
        "committed": {5: 1006.0, 10: 1046.0},
        "not_whole": {},
        "unfinished": "",
    }
    return Report(10, metrics(1, 10, 0.0), History(**history | changed))


def shown(one: Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(one.render())
    return console.export_text()


def test_a_promise_that_held():
    one = report()
    assert one.held
    # Step 7 was reached again at 1041.
    assert one.lost_s(one.history.strikes[0]) == 33.0
    text = shown(one)
    assert re.search(r"1 +freeze of host 3 after step 7 +step 8 +20\.5 s +33 s", text)
    assert "held: 10 steps, each with the loss and gradient norm of the run without faults, bit for bit" in text


LATE = (Line(1008 + 61.0, 0, FROZEN),)
BROKEN = {
    "another loss": (
        {"metrics": metrics(1, 10, 1001.0, loss=3.7501)},
        "1 step differs from the run without faults, at most by 2.7e-05",
    ),
    "a loss of a step done again": (
        {"metrics": [*metrics(1, 7, 1001.0, grad_norm=2.0), *metrics(6, 10, 1040.0)]},
        "the first is step 7, with grad_norm 2.0 instead of 1.0",
    ),
    "no number": ({"metrics": metrics(1, 10, 1001.0, loss=None)}, "with loss None instead of 3.75"),
    "a step behind a checkpoint": (
        {"committed": {5: 1006.0, 6: 1007.5}, "metrics": [*metrics(1, 7, 1001.0), *metrics(6, 10, 1040.0)]},
        "checkpoint 6 was complete, and the next start began after step 5",
    ),
    "a damaged checkpoint": (
        {"not_whole": {10: "state/d is missing"}},
        "checkpoint 10 was complete, and is not whole at the end",
    ),
    "a missing step": ({"metrics": metrics(1, 9, 1001.0)}, "1 of 10 steps were not done, the first is 10"),
    "no sentence": ({"lines": ()}, "fault 1, the freeze of host 3 after step 7, was not named with its cause within 60 s"),
    "a late sentence": ({"lines": LATE}, "was not named"),
    "its own sentence": ({"lines": (Line(1028.5, 3, FROZEN),)}, "was not named"),
    "another host": ({"lines": (Line(1028.5, 0, FROZEN.replace("1 and 3", "13")),)}, "was not named"),
    "another cause": ({"lines": (Line(1028.5, 0, LOST),)}, "was not named"),
    "no end": ({"unfinished": "host 2 ended with exit code 1"}, "host 2 ended with exit code 1"),
    "no fault": ({"strikes": ()}, "the freeze of host 3 after step 7 did not happen: the run was over"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_promise_is_named(change):
    changed, sentence = BROKEN[change]
    one = report(**changed)
    assert not one.held
    assert f"not held: {one.problems[0]}" in shown(one)
    assert [problem for problem in one.problems if sentence in problem]


def test_checkpoints_that_should_be_kept_are_examined(tiny_config, tmp_path):
    watched = rehearsing._Watched(tiny_config("checkpoint.keep=2", "run.dir=elsewhere"), tmp_path / "watched", 2, None)
    shutil.copytree(CHECKOUT / "tests" / "golden" / "run_0_1_0", tmp_path / "watched" / "run")
    watched._committed = {1: 0.0, 2: 1.0, 3: 2.0}
    assert watched._damaged() == {3: "it is missing"}
    (tmp_path / "watched" / "run" / "checkpoints" / "2" / "meta" / "metadata").unlink()
    assert list(watched._damaged()) == [2, 3]


def test_an_insufficient_sentence_is_shown():
    assert "not named" in shown(report(lines=(Line(1028.5, 0, LOST),)))
    assert f"1  {LOST.removeprefix('jaxllm: ')}\n" in shown(report(lines=(Line(1028.5, 0, LOST),)))
    assert "1  the other hosts said nothing\n" in shown(report(lines=()))


# ------------------------------------------------------------------------------------------------------- real processes

# As a user without root.
PROGRAM = (
    "from jaxllm.cli import app as cli; from jaxllm.rehearsal import rehearse; "
    "rehearse.networks_are_possible = lambda: False; cli.main()"
)


@pytest.fixture
def command(tmp_path, text_file):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    return [sys.executable, "-c", PROGRAM, "rehearse", str(tmp_path / "tiny.yaml"), "--hosts", "2", "--seed", "5"]


@pytest.fixture
def variables(tmp_path):
    return os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}


@pytest.mark.launcher
@pytest.mark.slow
def test_a_real_rehearsal_holds(command, variables, tmp_path):
    command += ["--kill", "1", "--freeze", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert result.returncode == 0, result.stdout + result.stderr
    (fault,) = plan_faults(5, 2, {"kill": 1, "freeze": 0, "cut": 0})
    assert f"seed    5: {fault}\n" in result.stdout
    assert re.search(rf"process {fault.host} on \S+ is lost \(its connection\s+closed\) during", result.stdout)
    assert re.search(r"held: 31 steps, each with the loss and gradient norm", " ".join(result.stdout.split()))
    assert not list(tmp_path.glob("jaxllm-rehearsal-*"))


def processes_of(pid):
    """The processes of the launch that a command has started."""
    name, found = f"JAXLLM_LAUNCH_ID=rehearsal-{pid}".encode(), []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and name in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
        except OSError:
            continue
    return found


@pytest.mark.launcher
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(command, variables, number):
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        # Two supervisors and what they start.
        while len(processes_of(process.pid)) < 4:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGTERM else -number)
        while processes_of(process.pid):
            assert time.monotonic() < deadline
