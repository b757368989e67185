"""`jaxllm export`: what leaves a run for programs that serve it."""

import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hf_folders import read_folder

from jaxllm.cli import app as cli
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.data.tokenizer import BYTES, load_tokenizer
from jaxllm.inference.predict import tokenizer_of
from jaxllm.run import exports as module
from jaxllm.run.exports import Exports
from jaxllm.run.loop import fit
from jaxllm.weights import weights
from jaxllm.weights.hf_convert import to_hf
from jaxllm.weights.staging import new_folder

TEXTS = ["Grüße", "Ā and \0, U+0000", " a  b .\r\n\n don't", "日本語 🙂", "".join(map(chr, range(1, 0x250)))]


@pytest.fixture(scope="module")
def run(tiny_config, tmp_path_factory):
    """A run on bytes, of four steps with a checkpoint of two."""
    folder = tmp_path_factory.mktemp("bytes") / "run"
    fit(tiny_config(f"run.dir={folder}", "checkpoint.every_steps=2", "data.held_out_fraction=0.0"))
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line: (exit code, standard output, standard error)."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxllm", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return called


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", [(), ("--step", "2", "--dtype", "bfloat16", "--max-shard-size", "50KB")])
def test_to_hf_is_the_conversion_by_another_name(options, run, command, tmp_path):
    for name in ("export", "convert to-hf"):
        more = ["--to", "hf"] if name == "export" else []
        code, said, error = command(*name.split(), run, tmp_path / name, *more, *options)
        assert (code, error) == (0, "")
        assert said.startswith(f"converted {run} at step {2 if options else 4} to {tmp_path / name}: ")
    assert contents(tmp_path / "export") == contents(tmp_path / "convert to-hf")
    assert len(list((tmp_path / "export").glob("*.safetensors"))) == 1 + bool(options)
    assert command("export", run, tmp_path / "export", "--to", "hf")[0] == 2
    assert command("export", run, tmp_path / "export", "--to", "hf", "--force")[0] == 0


def test_a_checkpoint_is_exported_by_its_path(run, command, tmp_path):
    assert command("export", run / "checkpoints" / "2", tmp_path / "path", "--to", "hf")[0] == 0
    assert command("export", run, tmp_path / "step", "--to", "hf", "--step", 2)[0] == 0
    path, step = (read_folder(tmp_path / name) for name in ("path", "step"))
    assert all((path[name] == step[name]).all() for name in step)


def test_an_option_of_another_format_is_refused(run, command, tmp_path):
    code, _, error = command("export", run, tmp_path / "x", "--to", "torch")
    assert (code, error) == (2, "jaxllm: --to=torch is not one of the choices: use jaxllm, hf, peft, gguf.\n")
    for option in (["--verify"], ["--max-shard-size", "1GB"], ["--max-position", "9"]):
        code, _, error = command("export", run, tmp_path / "x", *option)
        assert code == 2
        assert error == f"jaxllm: {option[0]} has no effect on what is written as jaxllm: leave it out, or write hf.\n"
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "hf"
    to_hf(str(run), str(folder))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_a_run_on_bytes_has_a_tokenizer_of_bytes(text, served):
    """For transformers, and for jaxllm where it reads the folder."""
    found, ids = load_tokenizer(served), list(text.encode())
    assert found.encode(text).tolist() == ids
    assert found.decode(np.array(ids)) == load_tokenizer(BYTES).decode(np.array(ids))
    assert (found.vocab_size, found.bos_id, found.eos_id) == (256, None, 0)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(served)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert (len(theirs), theirs.eos_token_id) == (256, 0)


def test_a_checkpoint_copied_without_its_tokenizer_is_not_of_bytes(run, tmp_path, monkeypatch):
    path = shutil.copytree(run / "checkpoints" / "2", tmp_path / "checkpoints" / "2")
    meta = weights.files.read_meta(path)
    monkeypatch.setattr(weights.files, "read_meta", lambda path: meta)
    for tokenizer, on_bytes in ((None, True), ("bytes", True), ("words", False)):
        meta["config"]["data"]["tokenizer"] = tokenizer
        assert weights.find_weights("SRC", str(path)).outline.trained_on_bytes is on_bytes
    # Whose ids other programs made.
    for source in ("megatron", "tokens"):
        meta["config"]["data"] = {"source": source}
        assert not weights.find_weights("SRC", str(path)).outline.trained_on_bytes


def test_bytes_stay_bytes_in_a_second_export(tiny_config, tmp_path):
    """Also with a vocabulary that is no sign of bytes."""
    run = tmp_path / "run"
    fit(tiny_config(f"run.dir={run}", "model.vocab_size=640", "train.steps=1", "data.held_out_fraction=0.0"))
    weights.export(str(run), str(tmp_path / "first"))
    weights.export(str(tmp_path / "first"), str(tmp_path / "second"))
    for source in ("run", "first", "second"):
        to_hf(str(tmp_path / source), str(tmp_path / f"{source} hf"))
    assert contents(tmp_path / "second hf") == contents(tmp_path / "first hf") == contents(tmp_path / "run hf")
    assert load_tokenizer(tmp_path / "second hf").encode("Grüße").tolist() == list("Grüße".encode())
    said = []
    assert tokenizer_of(weights.find_weights("x", str(tmp_path / "second")).outline, None, said.append).name == BYTES
    assert said == []


def test_servers_stop_at_the_end_of_a_document(served):
    assert json.loads((served / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert json.loads((served / "config.json").read_text())["eos_token_id"] == 0


def test_transformers_continues_as_jaxllm_does(served, run):
    transformers = pytest.importorskip("transformers")
    import jaxllm

    model = transformers.AutoModelForCausalLM.from_pretrained(served)
    ids = transformers.AutoTokenizer.from_pretrained(served)("def ", return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    (ours,) = jaxllm.generate(run, "def ", max_new_tokens=12)
    assert theirs == ours.ids


# -------------------------------------------------------------------------------------------------- exports beside training


def test_a_run_exports_its_checkpoints_itself(tiny_config, tmp_path, capfd):
    folder = tmp_path / "run"
    fit(tiny_config(f"run.dir={folder}", "checkpoint.export_every_steps=2", "data.held_out_fraction=0.0"))
    said = capfd.readouterr().out
    assert sorted(path.name for path in (folder / "exports").iterdir()) == ["2", "4"]
    for step in (2, 4):
        to_hf(str(folder), str(tmp_path / str(step)), step=step)
        assert contents(folder / "exports" / str(step)) == contents(tmp_path / str(step))
        assert f"exported step {step} to {folder / 'exports' / str(step)}\n" in said


def exported(folder, step, limit_s=60):
    """The lines of an export of a run directory at a step that is due."""
    lines = []
    exports = Exports(folder, step, lines.append, limit_s)
    exports.begin(step)
    assert exports.done(60)
    exports.close()
    return lines


def test_an_export_that_fails_is_one_line(tmp_path):
    (warning,) = exported(tmp_path, 7)
    assert warning == "warning: checkpoint 7 was not exported (checkpoint.keep deleted it)"
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    (warning,) = exported(tmp_path, 7)
    assert warning.startswith("warning: checkpoint 7 was not exported (")
    assert "holds no weights: give a run directory" in warning
    assert list((tmp_path / "exports").iterdir()) == []
    (tmp_path / "exports").rmdir()
    (tmp_path / "exports").touch()
    assert exported(tmp_path, 7) == ["warning: checkpoint 7 was not exported (File exists)"]


def test_an_export_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    monkeypatch.setattr(module, "BESIDE_TRAINING", (sys.executable, "-c", "import time; time.sleep(60)"))
    (warning,) = exported(tmp_path, 7, limit_s=0.2)
    assert warning == "warning: checkpoint 7 was not exported (it took longer than run.phase_timeout_s=0.2)"


def test_of_two_that_write_one_destination_the_first_stays_whole(tmp_path):
    """As an export that a killed run left, and that of its next start."""
    target = str(tmp_path / "7")

    def write(text, meanwhile=lambda: None):
        with new_folder(target, 0) as folder:
            (folder / "a").write_text(text)
            meanwhile()
            (folder / "b").write_text(text)

    with pytest.raises(ConfigError, match=f"^{target} exists already, and nothing is overwritten: "):
        write("late", lambda: write("early"))
    assert contents(tmp_path / "7") == {"a": b"early", "b": b"early"}
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


SILENT = SimpleNamespace(agreed_signal=lambda: None)
"""No signal has come."""


def exporting(trainer, checkpoints, folder, console, signals):
    run = SimpleNamespace(trainer=trainer, checkpoints=checkpoints, folder=folder, console=console, signals=signals)
    return module.exporting(run, trainer.config.checkpoint.export_every_steps)


def test_a_start_removes_what_a_killed_export_left(tmp_path):
    for name in (".7.being-written-0123456789ab", ".8.being-written", "9"):
        (tmp_path / "exports" / name).mkdir(parents=True)
        (tmp_path / "exports" / name / "part").touch()
    with exporting(
        trainer_of(export_every_steps=1), SimpleNamespace(latest=None), tmp_path, SimpleNamespace(say=pytest.fail), SILENT
    ):
        assert [path.name for path in (tmp_path / "exports").iterdir()] == ["9"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process end with its parent")
def test_an_export_whose_run_was_killed_ends(tmp_path):
    command = list(module.BESIDE_TRAINING)
    # No process can have this number (proc(5), pid_max).
    command[-2] = str(2**22 + 1)
    ended = subprocess.run([*command, "--help"], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


TWO_STEPS = """
import pathlib, sys, time
log = pathlib.Path(sys.argv[1])
with log.open("a") as file:
    print("begin", pathlib.Path(sys.argv[-3]).name, file=file, flush=True)
    deadline = time.monotonic() + 30
    while not log.with_name("go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    print("end", pathlib.Path(sys.argv[-3]).name, file=file, flush=True)
"""


def test_training_does_not_wait_and_one_runs_at_a_time(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setattr(module, "BESIDE_TRAINING", (sys.executable, "-c", TWO_STEPS, str(log)))
    lines = []
    exports = Exports(tmp_path, 1, lines.append, 60)
    exports.begin(1)
    exports.begin(2)
    # Neither has ended, for nothing has let it.
    assert not exports.done(0)
    while not log.exists() or not log.read_text():
        assert not exports.done(0.05)
    (tmp_path / "go").touch()
    assert exports.done(60)
    exports.close()
    assert log.read_text().split("\n") == ["begin 1", "end 1", "begin 2", "end 2", ""]
    assert lines == [f"exported step {step} to {tmp_path / 'exports' / str(step)}" for step in (1, 2)]


def trainer_of(**keys):
    """What exports need of a trainer whose config has these keys of checkpoint."""
    config = SimpleNamespace(checkpoint=CheckpointConfig(**keys), run=SimpleNamespace(phase_timeout_s=60))
    return SimpleNamespace(config=config, stopped_by=None)


def test_a_checkpoint_waits_for_its_export_and_not_for_one_that_failed(tmp_path, monkeypatch):
    (tmp_path / "checkpoints/2").mkdir(parents=True)
    monkeypatch.setattr(module, "BESIDE_TRAINING", (sys.executable, "-c", TWO_STEPS + "sys.exit(3)", str(tmp_path / "log")))
    lines, checkpoints = [], SimpleNamespace(latest=None)
    with exporting(trainer_of(export_every_steps=2), checkpoints, tmp_path, SimpleNamespace(say=lines.append), SILENT):
        for step in (2, 3):
            checkpoints.on_saved(step)
        assert [checkpoints.is_awaited(step) for step in (1, 2, 3)] == [False, True, False]
        (tmp_path / "go").touch()
    assert not checkpoints.is_awaited(2)
    assert lines == ["warning: checkpoint 2 was not exported (exit code 3)"]


def test_a_start_begins_with_what_is_missing(tmp_path, monkeypatch):
    """The temporary ones first, which checkpoint.keep will delete; none that is newer than where the run begins."""
    monkeypatch.setattr(module, "BESIDE_TRAINING", (sys.executable, "-c", TWO_STEPS, str(tmp_path / "log")))
    (tmp_path / "go").touch()
    (tmp_path / "exports/8").mkdir(parents=True)
    for step in (4, 6, 8, 9, 10, 12, 14):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    lines, checkpoints = [], SimpleNamespace(latest=12)
    trainer = trainer_of(export_every_steps=2, keep_every_steps=4)
    with exporting(trainer, checkpoints, tmp_path, SimpleNamespace(say=lines.append), SILENT):
        pass
    assert lines == [f"exported step {step} to {tmp_path / 'exports' / str(step)}" for step in (6, 10, 4, 12)]


def test_a_new_checkpoint_that_will_be_deleted_comes_before_old_ones_that_stay(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setattr(module, "BESIDE_TRAINING", (sys.executable, "-c", TWO_STEPS, str(log)))
    for step in (4, 8):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    lines, checkpoints = [], SimpleNamespace(latest=8)
    trainer = trainer_of(export_every_steps=2, keep_every_steps=4)
    with exporting(trainer, checkpoints, tmp_path, SimpleNamespace(say=lines.append), SILENT):
        while not log.exists() or not log.read_text():
            pass
        for step in (12, 10):
            checkpoints.on_saved(step)
        (tmp_path / "go").touch()
    assert lines == [f"exported step {step} to {tmp_path / 'exports' / str(step)}" for step in (4, 10, 8, 12)]


def test_a_signal_ends_the_wait_for_exports(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BESIDE_TRAINING", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    asked = iter([None, "SIGTERM"])
    trainer, lines, checkpoints = trainer_of(export_every_steps=1), [], SimpleNamespace(latest=None)
    signals = SimpleNamespace(agreed_signal=lambda: next(asked))
    with exporting(trainer, checkpoints, tmp_path, SimpleNamespace(say=lines.append), signals):
        checkpoints.on_saved(1)
    assert trainer.stopped_by == "SIGTERM"
    assert lines == ["stopped by SIGTERM; the next start exports the rest"]
    assert checkpoints.is_awaited(1)


def test_what_is_not_due_or_exported_already_is_left_alone(tmp_path):
    (tmp_path / "exports" / "4").mkdir(parents=True)
    exports = Exports(tmp_path, 4, pytest.fail, 60)
    for step in (3, 4, 5):
        exports.begin(step)
    assert exports._jobs == []
    exports.close()


def test_the_end_of_a_stopped_run_waits_for_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BESIDE_TRAINING", (sys.executable, "-c", "import time; time.sleep(60)"))
    exports = Exports(tmp_path, 1, pytest.fail, 60)
    exports.begin(1)
    exports.begin(2)
    exports.close()
    # The next start exports them, and a save that ends after this deletes neither.
    assert exports.waits_for(1)
    assert exports.waits_for(2)
    assert all(job.done() for job in exports._jobs)
    assert exports._process is None or exports._process.returncode
