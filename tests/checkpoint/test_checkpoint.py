"""Checkpoints: their contents, the faults that they survive, and the meshes, runs and exports that read them."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from contextlib import closing, nullcontext
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from outside import free_port
from run_files import steps_of
from safetensors.numpy import load_file, save_file
from tiny import TINY

import jaxllm
from jaxllm.checkpoint import files, manager
from jaxllm.checkpoint.arrays import give_up, read_arrays
from jaxllm.checkpoint.files import describe_run, read_meta, saved_steps
from jaxllm.checkpoint.manager import Checkpoints, SaveError
from jaxllm.cli import app as cli
from jaxllm.cluster import exit_codes
from jaxllm.config import ConfigError
from jaxllm.machine.host import PACKAGES
from jaxllm.run.loop import fit
from jaxllm.weights.folder import open_folder
from jaxllm.weights.weights import export

CHECKOUT = Path(__file__).parents[2]
# The vocabulary is padded to 260 on four tensor ranks. Constant rate: half a run sees the same rates as a complete one.
COMMON = ("model.vocab_size=258", "optimizer.schedule=constant", "checkpoint.every_steps=2", "train.eval_batches=1")
DATA_8 = ("run.cpu_devices=8", "parallel.data=8", "parallel.zero=3", *COMMON)
TENSOR_4 = ("run.cpu_devices=8", "parallel.data=2", "parallel.tensor=4", "parallel.zero=1", *COMMON)


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """The run directory of four uninterrupted steps, with checkpoints 2 and 4, and its final state."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, fit(tiny_config(*DATA_8, f"run.dir={folder}")).state


@pytest.fixture(scope="module")
def trainer(tiny_config, whole):
    """Restores repeatedly; never trains."""
    return jaxllm.Trainer(tiny_config(*DATA_8))


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the complete run, to be damaged."""
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def losses(folder):
    return {line["step"]: line["loss"] for line in steps_of(folder)}


def restore(trainer, folder):
    """The checkpoints of a run directory, after the trainer restored the newest readable one."""
    checkpoints = Checkpoints(folder, trainer.config.checkpoint)
    trainer.restore(checkpoints)
    return checkpoints


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def array_files(folder) -> list[Path]:
    return sorted((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


def array_file(folder) -> Path:
    return array_files(folder)[-1]


# ---------------------------------------------------------------------------------------------------- what a checkpoint holds


def test_metadata_says_where_the_run_is_and_what_made_it(whole, trainer):
    meta = read_meta(whole[0] / "checkpoints" / "4")
    assert (meta["format"], meta["step"], meta["samples"], meta["vocab_size"]) == (2, 4, 32, 258)
    assert meta["fingerprint"] == trainer.data.fingerprint
    assert jaxllm.Config.model_validate(meta["config"]).model == trainer.config.model
    assert meta["versions"]["jax"] == jax.__version__
    assert set(meta["versions"]) == {"python", *PACKAGES}


def test_the_newest_are_kept_and_the_multiples_for_good(trainer, whole, tiny_config, tmp_path):
    restore(trainer, whole[0])
    config = tiny_config(*DATA_8, "checkpoint.keep=1", "checkpoint.keep_every_steps=2", "checkpoint.asynchronous=false")
    checkpoints = Checkpoints(tmp_path, config.checkpoint)
    for step in range(1, 6):
        checkpoints.save(step, trainer.state, describe_run(config, step, "text"))
        assert saved_steps(tmp_path / "checkpoints")[-1] == step
    written = (tmp_path / "checkpoints" / "5" / "files.json").stat().st_mtime_ns
    checkpoints.save(5, trainer.state, describe_run(config, 5, "other text"))
    checkpoints.close()
    assert saved_steps(tmp_path / "checkpoints") == [2, 4, 5]
    assert (tmp_path / "checkpoints" / "5" / "files.json").stat().st_mtime_ns == written


# ------------------------------------------------------------------------------------------------------------------ damage


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def overwrite(path):
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + bytes(size - size // 2))


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def unlist(folder):
    """Makes a checkpoint of a version that wrote no list of files."""
    (folder / "files.json").unlink()
    replace(folder / "meta" / "metadata", '"format": 2', '"format": 1')


def unlisted(change):
    """Without the list of files, only reading shows the damage."""

    def both(folder):
        unlist(folder)
        change(folder)

    return both


def to_all_arrays(change):
    """The distribution of arrays over Orbax's files depends on timing, and some bytes of a file may never be read."""
    return lambda folder: [change(path) for path in array_files(folder)]


DAMAGES = {
    "array truncated": (lambda c: truncate(array_file(c)), "bytes of"),
    "array overwritten": (lambda c: overwrite(array_file(c)), "has changed"),
    "array removed": (lambda c: array_file(c).unlink(), "is missing"),
    "manifest removed": (lambda c: (c / "state" / "manifest.ocdbt").unlink(), "state/manifest.ocdbt is missing"),
    "tree truncated": (lambda c: truncate(c / "state" / "_METADATA"), "state/_METADATA has"),
    "meta truncated": (lambda c: truncate(c / "meta" / "metadata"), "not JSON ("),
    "meta removed": (lambda c: shutil.rmtree(c / "meta"), "No such file"),
    "state removed": (lambda c: shutil.rmtree(c / "state"), "state is missing"),
    "meta changed": (lambda c: replace(c / "meta" / "metadata", '"seed": 0', '"seed": 1'), "meta/metadata has changed"),
    "list removed": (lambda c: (c / "files.json").unlink(), "files.json is missing"),
    "list truncated": (lambda c: truncate(c / "files.json"), "not JSON ("),
    "unlisted, arrays truncated": (unlisted(to_all_arrays(truncate)), ""),
    "unlisted, arrays removed": (unlisted(to_all_arrays(Path.unlink)), ""),
    "unlisted, manifest removed": (unlisted(lambda c: (c / "state" / "manifest.ocdbt").unlink()), ""),
    "unlisted, tree truncated": (unlisted(lambda c: truncate(c / "state" / "_METADATA")), ""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_moved_and_not_used(name, run, whole, trainer):
    spoil, reason = DAMAGES[name]
    restore(trainer, whole[0])
    Checkpoints(run, trainer.config.checkpoint)
    shutil.rmtree(run / "checkpoints" / "2", ignore_errors=True)
    shutil.copytree(whole[0] / "checkpoints" / "2", run / "checkpoints" / "2")
    spoil(run / "checkpoints" / "4")
    before = sorted(path.name for path in (run / "checkpoints" / "4").rglob("*"))
    checkpoints = restore(trainer, run)
    assert (trainer.step, checkpoints.latest, saved_steps(run / "checkpoints")) == (2, 2, [2])
    (sentence,) = checkpoints.damaged
    assert sentence.startswith("checkpoint 4 is damaged (")
    assert reason in sentence
    assert sorted(path.name for path in (run / "checkpoints-damaged" / "4-1").rglob("*")) == before


LEAST_METADATA = '{"format": %d, "step": 4, "fingerprint": "", "config": {"model": {}, "train": '
LEAST_METADATA += '{"global_batch_sequences": 8, "sequence_length": 16}}}'


@pytest.mark.parametrize("offset", [0, 33 * 2**20, 66 * 2**20 - 1])
def test_a_flipped_bit_of_a_large_file_is_found_by_the_process_that_reads_it(tmp_path, offset):
    """Format 1 covered only the ends of such a file: its checkpoints are read as before."""
    large, small = tmp_path / "state" / "ocdbt.process_1" / "d" / "large", tmp_path / "state" / "_METADATA"
    large.parent.mkdir(parents=True)
    large.touch()
    os.truncate(large, 66 * 2**20)
    small.write_text("{}")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "metadata").write_text(LEAST_METADATA % 2)
    files.describe_files(tmp_path)
    assert files.changed(tmp_path) is None
    with large.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x10")
    reason = "state/ocdbt.process_1/d/large has changed"
    assert [files.changed(tmp_path, process, 2) for process in range(2)] == [None, reason]
    assert files.changed(tmp_path) == reason
    in_format_1 = {"state/ocdbt.process_1/d/large": [66 * 2**20, zlib.crc32(bytes(2 * 2**20))]}
    (tmp_path / "files.json").write_text(json.dumps(in_format_1))
    (tmp_path / "meta" / "metadata").write_text(LEAST_METADATA % 1)
    assert files.changed(tmp_path) == (None if 2**20 <= offset < 65 * 2**20 else reason)


def test_the_checksums_of_a_save_are_those_of_its_files(trainer, whole, tmp_path, monkeypatch):
    """Each process computes those of its arrays before the checkpoint is complete."""
    parts = []

    def spy(folder):
        parts.extend(json.loads(path.read_text()) for path in folder.glob(f"{files.PART}*"))
        files.describe_files(folder)

    monkeypatch.setattr(manager, "describe_files", spy)
    restore(trainer, whole[0])
    with closing(Checkpoints(tmp_path, trainer.config.checkpoint)) as checkpoints:
        checkpoints.save(4, trainer.state, describe_run(trainer.config, 4, "text"))
        checkpoints.wait()
    folder = tmp_path / "checkpoints" / "4"
    listed = json.loads((folder / "files.json").read_text())
    written = [path for item in ("state", "meta") for path in (folder / item).rglob("*") if path.is_file()]
    there = {path.relative_to(folder).as_posix(): [path.stat().st_size, zlib.crc32(path.read_bytes())] for path in written}
    assert listed == there
    assert parts == [{name: value for name, value in listed.items() if name.startswith("state/ocdbt.process_0/")}]
    assert len(parts[0]) > 1
    assert not list(folder.glob(f"{files.PART}*"))


def test_a_file_that_this_machine_cannot_read_now_is_not_damage(run, trainer, monkeypatch):
    def out_of_descriptors(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(files, "checksum", out_of_descriptors)
    with pytest.raises(ConfigError, match=r"checkpoints/4 cannot be read here \(Too many open files\): it shows no damage"):
        restore(trainer, run)
    assert saved_steps(run / "checkpoints") == [2, 4]


def test_weights_whose_bytes_have_changed_are_used_nowhere(run, tiny_config, tmp_path, capsys):
    to_all_arrays(overwrite)(run / "checkpoints" / "4")
    sentence = r"The checkpoint .*checkpoints/4 is damaged \(state/.* has changed\): use another, or restore a copy of it\."
    for path in (run, run / "checkpoints" / "4"):
        with pytest.raises(ConfigError, match=sentence):
            jaxllm.Trainer(tiny_config(*DATA_8, f"train.init_from={path}"))
        with pytest.raises(ConfigError, match=sentence):
            export(str(path), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["lr[3e-4]", "a*b?", "c\\d"])
def test_a_path_that_orbax_misreads_is_refused(name, tiny_config, trainer, whole, tmp_path, monkeypatch):
    """Orbax misreads most of them only when it saves, and what was saved elsewhere can be read."""
    run = shutil.copytree(whole[0], tmp_path / name)
    found = " and ".join(sorted(set(name) & set("[]*?\\")))
    sentence = (
        f"={run} has {found} in its path, {run}, where Orbax loses checkpoints: choose a folder without any of [ ] * ? \\"
    )
    is_backslash = found == "\\"
    with pytest.raises(ConfigError, match=re.escape(sentence)) if is_backslash else nullcontext():
        restore(trainer, run)
        assert_equal(trainer.state, whole[1])
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Checkpoints(run, trainer.config.checkpoint).save(6, trainer.state, describe_run(trainer.config, 6, "text"))
    monkeypatch.setattr("jaxllm.cluster.distributed.start", lambda run: pytest.fail("a device was touched"))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        fit(tiny_config(*DATA_8, f"run.dir='{run}'"))
    if is_backslash:
        of_step = f"train.init_from{sentence}".replace(str(run), str(run / "checkpoints" / "4"))
        with pytest.raises(ConfigError, match=re.escape(of_step)):
            jaxllm.Trainer(tiny_config(*DATA_8, f"train.init_from='{run}'"))
    assert saved_steps(run / "checkpoints") == [2, 4]


def test_a_step_that_is_damaged_again_gets_another_name(run, trainer, tmp_path):
    for number in (1, 2):
        again = shutil.copytree(run / "checkpoints" / "4", tmp_path / f"again-{number}")
        truncate(array_file(run / "checkpoints" / "4"))
        restore(trainer, run)
        assert (run / "checkpoints-damaged" / f"4-{number}").is_dir()
        shutil.copytree(again, run / "checkpoints" / "4")


@pytest.mark.parametrize("listed", [True, False])
def test_all_damaged_is_refused_again_and_again(run, trainer, listed):
    for step in (2, 4):
        if not listed:
            unlist(run / "checkpoints" / str(step))
        to_all_arrays(Path.unlink)(run / "checkpoints" / str(step))
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"No checkpoint in .* is intact: 4 \(.*\), 2 \(.*\); restore a copy of one there"
        ):
            restore(trainer, run)
    assert saved_steps(run / "checkpoints") == [2, 4]


def test_what_an_interrupted_save_left_is_ignored_and_cleared(run, trainer):
    (run / "checkpoints" / "6.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    checkpoints = restore(trainer, run)
    assert trainer.step == 4
    checkpoints.save(6, trainer.state, describe_run(trainer.config, 6, "text"))
    checkpoints.wait()
    checkpoints.close()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "6"]


def test_a_newer_format_is_refused_not_moved(run, trainer):
    path = run / "checkpoints" / "4" / "meta" / "metadata"
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(ConfigError, match="has format 3, and this jaxllm reads up to 2: install a newer jaxllm"):
        Checkpoints(run, trainer.config.checkpoint)


def test_a_full_disk_stops_the_run_and_loses_nothing(tiny_config, text_file, whole, run):
    """A limit on the file size stands in for a full disk: the write fails in a background thread in the same way."""
    shutil.rmtree(run / "checkpoints" / "4")
    recipe = run.parent / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    command = [sys.executable, "-m", "jaxllm.cli", "train", recipe, *DATA_8, f"run.dir={run}", "train.steps=2000"]
    failed = subprocess.run(
        ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *command],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert failed.returncode == 2, failed.stdout + failed.stderr
    (line,) = (line for line in failed.stderr.splitlines() if line.startswith("jaxllm: "))
    assert f"Checkpoint 4 could not be written to {run}/checkpoints (File too large" in line
    assert "the newest complete checkpoint is 2" in line
    assert "Traceback" not in failed.stderr
    assert saved_steps(run / "checkpoints") == [2]
    assert_equal(fit(tiny_config(*DATA_8, f"run.dir={run}")).state, whole[1])


def test_a_folder_that_cannot_be_made_is_said_at_once(trainer, whole, tmp_path):
    restore(trainer, whole[0])
    checkpoints = Checkpoints(tmp_path, trainer.config.checkpoint)
    checkpoints.save(2, trainer.state, describe_run(trainer.config, 2, "text"))
    checkpoints.wait()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").touch()
    sentence = (
        r"^Checkpoint 4 could not be written to .* \((File exists|Not a directory): .*\): no earlier checkpoint exists; remove"
    )
    with pytest.raises(SaveError, match=sentence):
        checkpoints.save(4, trainer.state, describe_run(trainer.config, 4, "text"))
    checkpoints.close()
    assert saved_steps(tmp_path / "elsewhere") == [2]


def test_a_save_that_a_device_or_a_peer_ended_may_be_started_again(trainer, tmp_path):
    checkpoints = Checkpoints(tmp_path, trainer.config.checkpoint)
    full, gone = OSError(errno.ENOSPC, "No space left on device"), jax.errors.JaxRuntimeError("INTERNAL: connection closed")
    # A save that waited for a killed peer reported it in this form.
    copied = ValueError("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:41120: Connection reset by peer")
    torn = ValueError('DATA_LOSS: Error opening "zarr3" driver')
    assert [checkpoints._failure(error).exit_code for error in (full, torn)] == [exit_codes.BAD_INPUT] * 2
    assert [checkpoints._failure(error).exit_code for error in (gone, copied)] == [exit_codes.LOST] * 2


# ------------------------------------------------------------------------------------------------------------ other meshes


@pytest.mark.parametrize(
    ("first", "second"), [(DATA_8, TENSOR_4), pytest.param(TENSOR_4, DATA_8, marks=pytest.mark.slow)], ids=["split", "join"]
)
def test_another_mesh_and_zero_level_goes_on_alike(first, second, tiny_config, whole, run, tmp_path):
    """data 8, ZeRO 3 -> data 2 x tensor 4, ZeRO 1, and back."""
    if first == DATA_8:
        shutil.rmtree(run / "checkpoints" / "4")
    else:
        run = tmp_path / "other"
        fit(tiny_config(*first, f"run.dir={run}", "train.steps=2"))
    fit(tiny_config(*second, f"run.dir={run}"))
    assert sorted(losses(run)) == [1, 2, 3, 4]
    for step, loss in losses(whole[0]).items():
        assert losses(run)[step] == pytest.approx(loss, rel=2e-6)


def test_the_padded_vocabulary_comes_and_goes(tiny_config, whole, trainer, tmp_path):
    """Tensor 1 -> 4 -> 1, bit for bit, with the same loss in between."""
    restore(trainer, whole[0])
    padded = jaxllm.Trainer(tiny_config(*TENSOR_4))
    restore(padded, whole[0])
    table = np.asarray(padded.state.params["embedding"])
    assert table.shape[0] == 260
    np.testing.assert_array_equal(table[258:], 0)
    assert padded.evaluate(1)[0] == pytest.approx(trainer.evaluate(1)[0], rel=1e-6)
    checkpoints = Checkpoints(tmp_path, padded.config.checkpoint)
    checkpoints.save(4, padded.state, describe_run(padded.config, 4, "text"))
    checkpoints.wait()
    checkpoints.close()
    restore(trainer, tmp_path)
    assert_equal(trainer.state, whole[1])


def test_another_model_is_refused(tiny_config, whole):
    """By its config, since shapes of arrays may differ by padding; and by its arrays, where there is no config."""
    other = jaxllm.Trainer(tiny_config(*DATA_8, "model.intermediate_size=128"))
    with pytest.raises(ConfigError, match=r"has a model with model.intermediate_size=64, not 128: set model.intermediate_size"):
        restore(other, whole[0])
    with pytest.raises(ConfigError, match=r"layers\.\S+ has shape \(.*64.*\) in .* and \(.*128.*\) in this config"):
        Checkpoints(whole[0], other.config.checkpoint).restore(give_up(other.state), other.programs.functions.table)


def test_a_run_on_text_that_changed_is_refused(tiny_config, run, trainer):
    unlist(run / "checkpoints" / "4")
    replace(run / "checkpoints" / "4" / "meta" / "metadata", trainer.data.fingerprint, "of other text")
    sentence = r"holds a run on other text: the files of data\.\* have changed since; restore them"
    with pytest.raises(ConfigError, match=sentence):
        fit(tiny_config(*DATA_8, f"run.dir={run}"))


# --------------------------------------------------------------------------------------------------------- several processes


@pytest.fixture
def pair(text_file, tmp_path):
    """pair(*overrides, folders=, limits=, first=) -> two processes as two hosts, each with a working folder and a `ulimit -f`.
    `first` is a statement that they run first."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    started = []

    def start(*overrides, folders=(tmp_path, tmp_path), limits=("unlimited", "unlimited"), first="pass"):
        port = free_port()
        program = f"{first}; from jaxllm.cli.app import main; main()"
        command = [sys.executable, "-c", program, "train", recipe, "run.cpu_devices=1", "parallel.data=2"]
        for rank, (folder, limit) in enumerate(zip(folders, limits, strict=True)):
            place = {"JAXLLM_COORDINATOR": f"127.0.0.1:{port}", "JAXLLM_NUM_PROCESSES": "2", "JAXLLM_PROCESS_ID": str(rank)}
            started.append(
                subprocess.Popen(
                    ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *map(str, command), "run.dir=run", *overrides],
                    env={**os.environ, "PYTHONPATH": str(CHECKOUT), **place},
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=200) for process in started[-2:]]
        return [(process.returncode, *output) for process, output in zip(started[-2:], outputs, strict=True)]

    yield start
    for process in started:
        process.kill()


@pytest.mark.slow
def test_a_run_directory_that_hosts_do_not_share_is_refused_on_all(pair, whole, tmp_path):
    """Also where only one of them has a checkpoint, and would read no train.init_from."""
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    folders[1].mkdir()
    shutil.copytree(whole[0], folders[0] / "run")
    # Half a second: these folders are on one host.
    first = "from jaxllm.checkpoint import host_shares; host_shares.SHARED_LIMIT_S = 0.5"
    for code, _, error in pair(f"train.init_from={tmp_path / 'gone'}", folders=folders, first=first):
        assert code == 2
        assert "run.dir=run of process 1 is not that of process 0: put it on storage that all hosts share, or set " in error


@pytest.mark.slow
def test_two_processes_agree_on_the_checkpoint_before_the_damaged_one(pair, tmp_path):
    overrides = ("optimizer.schedule=constant", "checkpoint.every_steps=2", "data.held_out_fraction=0.0")
    for code, _, error in pair(*overrides):
        assert code == 0, error
    # Process 0 does not read these files to verify them.
    for path in array_files(tmp_path / "run" / "checkpoints" / "4"):
        if "ocdbt.process_1" in path.parts:
            overwrite(path)
    before = losses(tmp_path / "run")
    (code, out, error), (other_code, *_) = pair(*overrides)
    assert (code, other_code) == (0, 0), error
    sentence = r"checkpoint 4 is damaged \(state/ocdbt.process_1/d/.* has changed\): moved to .*-damaged\nresumed from step 2"
    assert re.search(sentence, out)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2, 4]
    assert losses(tmp_path / "run") == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_cannot_save_leaves_and_the_other_does_not_wait_for_ever(rank, pair, tmp_path):
    limits = ["unlimited", "unlimited"]
    limits[rank] = "16"
    started = time.monotonic()
    ends = pair("checkpoint.every_steps=20", "train.steps=100000", limits=limits)
    assert "Checkpoint 20 could not be written" in ends[rank][2]
    assert ends[rank][0] == 2
    assert ends[1 - rank][0] != 0
    assert saved_steps(tmp_path / "run" / "checkpoints") == []
    assert time.monotonic() - started < 150


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_ends_all_processes_at_once(pair, tmp_path):
    no_room = """
import os
real = os.mkdir
def mkdir(path, *rest, **more):
    if "4.orbax-checkpoint-tmp" in str(path):
        raise OSError(28, "No space left on device", str(path))
    return real(path, *rest, **more)
os.mkdir = mkdir
pass"""
    for code, _, error in pair("checkpoint.every_steps=2", "run.phase_timeout_s=100", first=no_room):
        assert code == 2
        assert "Checkpoint 4 could not be written to" in error
        assert "the newest complete checkpoint is 2; remove the cause, and rerun the same command to resume" in error
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2]


# ------------------------------------------------------------------------------------------------- weights alone, and export


@pytest.fixture(scope="module")
def exported(whole, tmp_path_factory):
    """{dtype: folder} of the complete run's weights, exported by the command line."""
    (whole[0] / "tokenizer").mkdir()
    (whole[0] / "tokenizer" / "tokenizer.json").write_text("{}")
    parent = tmp_path_factory.mktemp("exported")
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-m", "jaxllm.cli", "export", whole[0], parent / dtype, "--dtype", dtype]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"converted {whole[0]} at step 4 to {parent / dtype}: ")
        assert f" bytes of {dtype} in 1 file\n" in done.stdout
    shutil.rmtree(whole[0] / "tokenizer")
    return {dtype: parent / dtype for dtype in ("float32", "bfloat16")}


def test_an_export_holds_the_weights_the_model_and_the_tokenizer(exported, whole):
    for dtype, folder in exported.items():
        assert sorted(path.name for path in folder.iterdir()) == ["model.json", "tokenizer", "weights.safetensors"]
        described = json.loads((folder / "model.json").read_text())
        assert (described["model"]["vocab_size"], described["dtype"]) == (258, dtype)
        opened = open_folder("an export", str(folder))
        theirs = jax.tree.map(lambda x, dtype=dtype: np.asarray(x).astype(dtype), whole[1].params)
        for path, x in jax.tree_util.tree_leaves_with_path(theirs):
            ours = opened.read(tuple(key.key for key in path))
            assert ours.dtype == dtype
            np.testing.assert_array_equal(ours, x)


@pytest.mark.parametrize("kind", ["run", "checkpoint", "export", "bfloat16"])
def test_a_run_starts_from_weights_alone_on_any_mesh(kind, tiny_config, whole, exported):
    path = {
        "run": whole[0],
        "checkpoint": whole[0] / "checkpoints" / "2",
        "export": exported["float32"],
        "bfloat16": exported["bfloat16"],
    }[kind]
    started = jaxllm.Trainer(tiny_config(*TENSOR_4, f"train.init_from={path}"))
    assert (started.step, int(started.state.step)) == (0, 0)
    assert all(not np.any(moment) for moment in jax.tree.leaves(started.state.opt_state))
    if kind == "checkpoint":
        assert started.start.weights.description == f"{whole[0]} at step 2"
        return
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    for mine, theirs in zip(*map(jax.tree.leaves, (started.state.params, whole[1].params)), strict=True):
        theirs = np.asarray(theirs).astype(dtype).astype("float32")
        mine = np.asarray(mine)
        np.testing.assert_array_equal(mine[tuple(map(slice, theirs.shape))], theirs)
        assert np.abs(mine).sum(dtype="float64") == np.abs(theirs).sum(dtype="float64")


def test_weights_that_are_not_finite_start_nothing(tiny_config, exported, tmp_path):
    folder = shutil.copytree(exported["float32"], tmp_path / "nan")
    weights = load_file(folder / "weights.safetensors")
    weights["layers.mlp.up"][1, 2, 3] = np.nan
    save_file(weights, folder / "weights.safetensors")
    with pytest.raises(
        ConfigError, match=r"^layers\.mlp\.up in .*nan has values that are not finite .*: use intact weights\.$"
    ):
        jaxllm.Trainer(tiny_config(*TENSOR_4, f"train.init_from={folder}"))


def test_moments_are_not_read_for_weights_alone(tmp_path):
    """TensorStore counts its reads: here 4 MB of weights, and no bytes of the 8 MB of moments."""
    tensorstore = pytest.importorskip("tensorstore")

    def bytes_read():
        metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in metrics for value in metric["values"])

    noise = jax.random.normal(jax.random.key(0), (3, 1024, 1024))
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"params": {"w": noise[0]}, "opt_state": {"mu": noise[1], "nu": noise[2]}})
    before = bytes_read()
    like = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=noise.sharding)
    read = read_arrays(tmp_path / "state", {"params": {"w": like}}, {})
    assert 3e6 < bytes_read() - before < 4.5e6
    np.testing.assert_array_equal(read["params"]["w"], noise[0])


def test_what_holds_no_weights_is_refused_before_a_device_is_touched(tiny_config, whole, exported, run, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.cluster.distributed.start", lambda run: pytest.fail("a device was touched"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    array_file(run / "checkpoints" / "4").unlink()
    for path, sentence in (
        (tmp_path / "none", "is not a folder: give a run directory"),
        (tmp_path / "empty", "holds no weights: give a run directory"),
        (tmp_path / "new", "is a run without a checkpoint yet"),
        (run / "checkpoints" / "4", "is damaged"),
    ):
        with pytest.raises(ConfigError, match=rf"train.init_from.*{sentence}"):
            jaxllm.Trainer(tiny_config(*DATA_8, f"train.init_from={path}"))
    for path in (whole[0], exported["float32"]):
        with pytest.raises(ConfigError, match=r"holds a model with model.intermediate_size=64, not 128: set model.interm"):
            jaxllm.Trainer(tiny_config(*DATA_8, f"train.init_from={path}", "model.intermediate_size=128"))


def test_a_run_with_a_checkpoint_ignores_init_from(tiny_config, run, capsys):
    resumed = fit(tiny_config(*DATA_8, f"run.dir={run}", "train.init_from=nowhere"))
    assert resumed.step == 4
    assert "resumed from step 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{run}", "{run}"], "exists already, and nothing is overwritten"),
        (["{run}", "{new}", "--step", "3"], "has no checkpoint of step 3: it has 2, 4"),
        (["{run}/checkpoints/4", "{new}", "--step", "2"], "--step=2 selects a checkpoint of a run directory, and"),
        (["{run}", "{new}", "--dtype", "int8"], "--dtype=int8 is not one of the choices"),
        (["{new}", "{new}"], "is not a folder"),
        (["{run}", "/proc/new/export"], "/proc/new/export could not be written"),
    ],
)
def test_exports_that_cannot_be_are_one_sentence(arguments, sentence, run, tmp_path, monkeypatch, capsys):
    # This process has its devices already.
    monkeypatch.setattr("jaxllm.cluster.distributed.start", lambda run: None)
    filled = [argument.format(run=run, new=tmp_path / "new") for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["jaxllm", "export", *filled])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "new").exists()
