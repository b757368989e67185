"""Several processes as several hosts: the same losses as one, checkpoints passed between them, refusals, the local launcher."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from golden.weights import to_ours
from hf_folders import HUB, model_of, random_weights, write_folder
from outside import free_port
from run_files import records
from tiny import TINY

import jaxllm
from jaxllm.cli import app as cli
from jaxllm.cluster.exit_codes import LOST
from jaxllm.run.loop import fit

CHECKOUT = Path(__file__).parents[2]
LAUNCHER = CHECKOUT / "launch" / "local_cluster.sh"
VARIABLES = ("JAXLLM_COORDINATOR", "JAXLLM_NUM_PROCESSES", "JAXLLM_PROCESS_ID")
LIMIT_S = 300
# So that a run of two steps sees the learning rates of one of four.
CONSTANT = "optimizer.schedule=constant"
COMMON = (CONSTANT, "checkpoint.every_steps=2", "train.eval_batches=2")

# Writes the initial parameters, then trains.
PROGRAM = """
import sys
import jax, numpy as np
from jax.experimental import multihost_utils
import jaxllm
from jaxllm.run.loop import fit

config = jaxllm.load_config(sys.argv[2], sys.argv[3:])
params = multihost_utils.process_allgather(jaxllm.Trainer(config).state.params, tiled=True)
if jax.process_index() == 0:
    np.savez(sys.argv[1], *jax.tree.leaves(params))
fit(config)
"""


@pytest.fixture(scope="module")
def recipe(text_file, tmp_path_factory):
    """TINY as a file. Its text has bytes above 127 too: two stages halve the vocabulary, and both halves must be in use."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "words.txt").write_text(text_file.read_text().replace("a", "ä"), encoding="utf-8")
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(folder / "words.txt")]}}))
    return path


def environment(**variables: str) -> dict[str, str]:
    # Includes conftest's XLA_FLAGS: tiny programs compile fastest unoptimised.
    return {**os.environ, "JAXLLM_VENV": "none", "PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT), **variables}


def cluster(count: int, *command, **options) -> subprocess.CompletedProcess:
    arguments = ["bash", str(LAUNCHER), str(count), *map(str, command)]
    return subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, **options)


def figures(folder: Path, key: str) -> list[float]:
    return [line[key] for line in records(folder) if key in line]


def assert_same_run(folder: Path, reference: Path) -> None:
    for key in ("loss", "eval_loss", "grad_norm"):
        np.testing.assert_allclose(figures(folder, key), figures(reference, key), rtol=1e-6, err_msg=key)
    assert figures(folder, "step") == figures(reference, "step")


# -------------------------------------------------------------------------------------------------------------- loading

# Writes the weights that a run starts from, the bytes read for them, and the logits of a model that each process loads itself.
LOADING = """
import sys
import jax, numpy as np
from jax.experimental import multihost_utils
import jaxllm
from jaxllm.weights.safetensors import TensorFile
from jaxllm.weights import weights

output, *config = sys.argv[1:]
read, into, load = [], TensorFile.read_into, weights.load_params

def counted(file, row, offset):
    read.append(row.size)
    into(file, row, offset)

def counting(*what):
    TensorFile.read_into = counted
    params = load(*what)
    TensorFile.read_into = into
    return params

weights.load_params = counting
config = jaxllm.load_config(config[0], config[1:])
params = multihost_utils.process_allgather(jaxllm.Trainer(config).state.params, tiled=True)
for_the_run = sum(read)
logits = jaxllm.load_model(config.train.init_from, "float32")(np.arange(12, dtype=np.int32)[None])
np.savez(f"{output}-{jax.process_index()}", *jax.tree.leaves(params), read=for_the_run, logits=logits)
"""


@pytest.mark.launcher
def test_each_of_two_processes_reads_its_own_half_of_a_folder(recipe, tmp_path):
    config = {**HUB, "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    weights = random_weights(config, "BF16")
    folder = write_folder(tmp_path / "hf", config, weights, shards=3)
    text = yaml.safe_load(recipe.read_text()) | {"model": {"name": str(folder), "compute_dtype": "float32"}}
    (tmp_path / "named.yaml").write_text(yaml.safe_dump(text))
    (tmp_path / "loading.py").write_text(LOADING)
    mesh = ("run.cpu_devices=4", "parallel.data=8", "parallel.zero=3")
    result = cluster(2, "python", tmp_path / "loading.py", tmp_path / "seen", tmp_path / "named.yaml", *mesh)
    assert result.returncode == 0, result.stdout + result.stderr
    ours = jax.tree.leaves(to_ours({name: x.astype(np.float32) for name, x in weights.items()}, model_of(config)))
    logits = jaxllm.load_model(folder, "float32", {"data": 1})(np.arange(12, dtype=np.int32)[None])
    for process in range(2):
        with np.load(tmp_path / f"seen-{process}.npz") as seen:
            assert 2 * int(seen["read"]) == sum(array.nbytes for array in weights.values())
            for number, array in enumerate(ours):
                np.testing.assert_array_equal(seen[f"arr_{number}"], array)
            np.testing.assert_allclose(seen["logits"], logits, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.launcher
def test_two_processes_train_like_one_and_one_resumes_them(recipe, tmp_path):
    mesh = ("parallel.data=2", "parallel.tensor=4", *COMMON)
    program, initial, pair, alone = (tmp_path / name for name in ("program.py", "initial.npz", "pair", "alone"))
    program.write_text(PROGRAM)
    command = ("python", program, initial, recipe, "run.cpu_devices=4", *mesh, "train.steps=2", f"run.dir={pair}")
    result = cluster(2, *command, "log.sample_tokens=2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[0] step 2/2" in result.stdout
    assert "[0] sample:" in result.stdout
    assert "[1] step" not in result.stdout

    config = jaxllm.load_config(recipe, ["run.cpu_devices=8", *mesh, f"run.dir={alone}"])
    expected = jax.tree.leaves(jaxllm.Trainer(config).state.params)
    found = np.load(initial)
    for mine, name in zip(expected, found.files, strict=True):
        np.testing.assert_array_equal(mine, found[name])

    fit(config)
    resumed = fit(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(pair)})}))
    assert resumed.step == 4
    np.testing.assert_allclose(figures(pair, "loss"), figures(alone, "loss"), rtol=1e-6)
    np.testing.assert_allclose(figures(pair, "grad_norm"), figures(alone, "grad_norm"), rtol=1e-6)


# Trains in each folder in turn, and prints the axes all of whose groups have several processes.
TRAINING = """
import sys
import jaxllm
from jaxllm.mesh.axes import groups_along
from jaxllm.run.loop import fit

folders, recipe, *overrides = sys.argv[1:]
for folder in folders.split():
    mesh = fit(jaxllm.load_config(recipe, [*overrides, f"run.dir={folder}"])).mesh
groups = {axis: groups_along(mesh.devices, axis) for axis in mesh.axis_names}
crossing = [axis for axis in groups if all(len({device.process_index for device in group}) > 1 for group in groups[axis])]
print("between processes:", *crossing)
"""


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("processes", "devices", "mesh", "crossing"),
    [
        (2, 4, "data=2 tensor=4 zero=3", "data"),
        (2, 1, "context=2 context_method=ring", "context"),
        (2, 2, "pipe=2 tensor=2", "pipe"),
        (2, 2, "replica=2 data=2 zero=3", "replica"),
        pytest.param(2, 1, "pipe=2", "pipe", marks=pytest.mark.nightly),
        pytest.param(4, 2, "data=4 tensor=2 zero=3", "data", marks=pytest.mark.nightly),
        pytest.param(2, 2, "data=2 tensor=2 zero=1", "data", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_any_number_of_processes_trains_like_one(recipe, tmp_path, processes, devices, mesh, crossing):
    """And one process continues from their checkpoint as if the run had never stopped."""
    (tmp_path / "training.py").write_text(TRAINING)
    keys = [f"parallel.{key}" for key in mesh.split()]
    # Several microbatches, so that the stages of a pipeline overlap. Little held-out text, because each evaluation reads all of
    # it, as the one at the end always does.
    keys += ["train.microbatch_sequences=2", "train.eval_every_steps=2", "data.held_out_fraction=0.01", CONSTANT]

    def train(count: int, devices: int, steps: int, folders: str) -> list[str]:
        overrides = (f"run.cpu_devices={devices}", f"train.steps={steps}", *keys)
        result = cluster(count, "python", "training.py", folders, recipe, *overrides, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.splitlines()

    assert f"[0] between processes: {crossing}" in train(processes, devices, 4, "many")
    assert "[0] resumed from step 4 in many" in train(1, processes * devices, 6, "many one")
    assert figures(tmp_path / "one", "step") == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert_same_run(tmp_path / "many", tmp_path / "one")


@pytest.mark.launcher
def test_processes_take_up_the_checkpoint_of_one(recipe, tmp_path):
    """And two resume that of four, on the same mesh."""
    mesh = ("parallel.data=4", "parallel.tensor=2", "parallel.zero=3", *COMMON)
    config = jaxllm.load_config(recipe, ["run.cpu_devices=8", *mesh, "train.steps=6", f"run.dir={tmp_path / 'whole'}"])
    fit(config)
    half = {"train": config.train.model_copy(update={"steps": 2})}
    fit(config.model_copy(update=half | {"run": config.run.model_copy(update={"dir": str(tmp_path / "relay")})}))
    for count, steps in ((4, 4), (2, 6)):
        overrides = (f"run.cpu_devices={8 // count}", *mesh, f"train.steps={steps}", "run.dir=relay")
        result = cluster(count, "jaxllm", "train", recipe, *overrides, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"[0] resumed from step {steps - 2}" in result.stdout
    np.testing.assert_allclose(figures(tmp_path / "relay", "loss"), figures(tmp_path / "whole", "loss"), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (("host:29500", None, None), "JAXLLM_COORDINATOR is set, but not JAXLLM_NUM_PROCESSES and JAXLLM_PROCESS_ID"),
        ((None, "2", "0"), "JAXLLM_NUM_PROCESSES and JAXLLM_PROCESS_ID are set, but not JAXLLM_COORDINATOR: set all of"),
        (("host", "2", "0"), "JAXLLM_COORDINATOR=host has no port: write host:port"),
        (("host:http", "2", "0"), "JAXLLM_COORDINATOR=host:http has no port"),
        (("host:29500", "two", "0"), "JAXLLM_NUM_PROCESSES=two is not valid: it should be a whole number from 1 to 131,072"),
        (("host:29500", "0", "0"), "JAXLLM_NUM_PROCESSES=0 is not valid"),
        (("host:29500", "2", "-1"), "JAXLLM_PROCESS_ID=-1 is not valid: it should be a whole number of at least 0"),
        (
            ("host:29500", "2", "2"),
            "JAXLLM_PROCESS_ID=2 is not below JAXLLM_NUM_PROCESSES=2: processes are numbered from 0 to 1",
        ),
        # The variables are valid, so the check reaches the JAX that already runs in this test.
        (("host:29500", "2", "1"), "JAXLLM_NUM_PROCESSES=2, but JAX already runs alone in this process"),
    ],
)
def test_invalid_variables_are_refused(values, sentence, recipe, tmp_path, monkeypatch, capsys):
    jax.devices()
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["jaxllm", "train", str(recipe), f"run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def process(recipe, folder, port: int, rank: int, *overrides: str, **variables: str) -> subprocess.Popen:
    place = zip(VARIABLES, (f"127.0.0.1:{port}", "2", str(rank)), strict=True)
    command = [sys.executable, "-m", "jaxllm.cli", "train", recipe, "run.cpu_devices=1", f"run.dir={folder}", *overrides]
    return subprocess.Popen(
        command, env=environment(**dict(place), **variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def refusal(process: subprocess.Popen, code: int = 2) -> str:
    _, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, error
    (line,) = (line for line in error.splitlines() if line.startswith("jaxllm: "))
    assert "Traceback" not in error
    return line


@pytest.fixture
def ports():
    """Two free ports."""
    return free_port(), free_port()


@pytest.fixture
def port(ports):
    return ports[0]


def test_a_taken_port_is_refused(recipe, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refusal(process(recipe, tmp_path, port, 0))
    assert f"Port {port} of JAXLLM_COORDINATOR is taken on this host: choose another" in line


def test_missing_processes_are_refused_after_the_time_limit(recipe, tmp_path, ports):
    """The others may come to the next start if a supervisor restarts the run: the exit code asks for it."""
    without_0, alone = ports
    limit = {"JAXLLM_START_TIMEOUT_S": "2"}
    first = process(recipe, tmp_path, without_0, 1, **limit)
    again = process(recipe, tmp_path, without_0, 1, **limit, JAXLLM_RESTARTS="yes")
    zero = process(recipe, tmp_path, alone, 0, **limit)
    line = refusal(first)
    assert f"Process 1 cannot reach process 0 at 127.0.0.1:{without_0} after 2 s (Connection refused; 127.0.0.1 is" in line
    assert line == refusal(again, LOST)
    line = refusal(zero)
    assert f"Process 1 of 2 did not come to 127.0.0.1:{alone} within 2 s (there: 0 on {socket.gethostname()}" in line


def test_different_configs_are_refused(recipe, tmp_path, port):
    pair = [process(recipe, tmp_path, port, 0), process(recipe, tmp_path, port, 1, "train.seed=1")]
    for line in map(refusal, pair):
        assert "different configs: train.seed of process 1 is not that of process 0" in line


# ------------------------------------------------------------------------------------------------------------- launcher


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "number of processes first, not ''"),
        (("jaxllm", "train"), "number of processes first, not 'jaxllm'"),
        (("0", "true"), "not '0'"),
        (("2",), "local_cluster.sh 2 needs the command"),
    ],
)
def test_usage_is_refused_in_a_sentence(arguments, hint):
    result = subprocess.run(["bash", LAUNCHER, *arguments], env=environment(), capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert hint in line


def test_lines_are_marked_and_processes_placed(tmp_path):
    words = 'echo "$JAXLLM_PROCESS_ID of $JAXLLM_NUM_PROCESSES in $PWD"; echo "$JAXLLM_COORDINATOR" >&2; printf end'
    result = cluster(3, "bash", "-c", words, cwd=tmp_path)
    assert result.returncode == 0
    expected = [line for rank in range(3) for line in (f"[{rank}] {rank} of 3 in {tmp_path}", f"[{rank}] end")]
    assert sorted(result.stdout.splitlines()) == sorted(expected)
    coordinators = {line.split()[1] for line in result.stderr.splitlines()}
    assert len(coordinators) == 1
    assert coordinators.pop().startswith("127.0.0.1:")


def test_the_first_failure_ends_the_others():
    started = time.monotonic()
    result = cluster(
        3, "bash", "-c", '((JAXLLM_PROCESS_ID != 1)) || { echo bad; exit 7; }; trap "exit 5" TERM; sleep 60 & wait'
    )
    assert result.returncode == 7
    assert result.stdout.splitlines() == ["[1] bad"]
    assert "process 1 failed with exit code 7" in result.stderr
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 11), (signal.SIGTERM, 12)])
def test_signals_are_passed_on(number, code):
    words = 'trap "echo int; exit 11" INT; trap "echo term; exit 12" TERM; echo ready; while :; do sleep 0.1; done'
    with subprocess.Popen(
        ["bash", LAUNCHER, "2", "bash", "-c", words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        ready = {launcher.stdout.readline() for _ in range(2)}
        assert ready == {"[0] ready\n", "[1] ready\n"}
        launcher.send_signal(number)
        out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    word = {11: "int", 12: "term"}[code]
    assert sorted(out.splitlines()) == [f"[0] {word}", f"[1] {word}"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_finds_nothing():
    result = subprocess.run(["shellcheck", "-x", LAUNCHER], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("platforms", ["cuda", "gpu,cpu"])
def test_platforms_that_are_not_here_are_named(platforms, recipe, tmp_path):
    """As an image for GPUs sets them, on a login node."""
    command = [sys.executable, "-m", "jaxllm.cli", "inspect", recipe]
    environment = {**os.environ, "JAX_PLATFORMS": platforms}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith(f"jaxllm: JAX_PLATFORMS={platforms} asks for devices that this host, or its JAX, does not have (")
    assert line.endswith("): unset it, or set JAX_PLATFORMS=cpu.")
