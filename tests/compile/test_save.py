"""`jaxllm compile --save`: a run takes the programs that were compiled before it, or says in one sentence why not."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import outside
import pytest
from jax.sharding import Mesh
from run_files import steps_of
from tiny import SMALL_MODEL, TINY

from jaxllm.cluster import distributed
from jaxllm.compile import save
from jaxllm.compile.aot import can_compile_for_gpus
from jaxllm.compile.save import save_programs, saved_lines
from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.hardware import GPUS
from jaxllm.machine import program_cache, xla_flags
from jaxllm.machine.program_cache import SUFFIX
from jaxllm.mesh.axes import make_mesh
from jaxllm.run import programs
from jaxllm.run.loop import fit
from jaxllm.run.programs import (
    MANIFEST,
    Manifest,
    SavedPrograms,
    fingerprint,
    machine_of,
    read_manifest,
    store_of,
    unlike,
)

# All programs of a run: phases, measuring steps, norms, evaluation, and DiLoCo's.
EVERYTHING = {
    "train": TINY["train"]
    | {"steps": 6, "batch_schedule": [[256, 16]], "microbatch_sequences": 2, "eval_every_steps": 2, "eval_batches": 1},
    "log": {"noise_scale_every": 2, "layer_norms_every": 2},
    "parallel": {"tensor": 2, "zero": 3},
}
DILOCO = {"diloco_steps": 2, "diloco_after_steps": 2, "diloco_overlap": True, "microbatch_sequences": 1}


@pytest.fixture
def config_of(text_file, tmp_path):
    def make(folder="run", cache="saved", train=None, **sections) -> Config:
        values = TINY | {"data": {"source": "files", "paths": [str(text_file)]}} | sections
        values |= {"run": {"dir": str(tmp_path / folder), "compilation_cache": str(tmp_path / cache)}}
        return Config(**values | ({"train": values["train"] | train} if train else {}))

    return make


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """The runs here find no program of earlier tests, and every program counts as compiled."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    monkeypatch.undo()
    program_cache.start("auto", Path, os.environ)


OF_A_RUN = {"jit_create", "jit_counted", "jit_begin", "jit_outer_step", "jit_without_gradients"}
"""JAX's names for the programs of a run, without those of a few operations that JAX makes beside them."""


def compiled_in(cache: Path) -> set[str]:
    """The programs of a run that it compiled."""
    return OF_A_RUN & {path.name.partition("-")[0] for path in cache.glob(f"*/*{SUFFIX}")}


@pytest.mark.slow
def test_a_run_of_every_kind_of_program_compiles_none(config_of, caplog, tmp_path):
    """Its losses are those of a run that compiles."""
    parts = EVERYTHING | {"train": EVERYTHING["train"] | DILOCO, "log": {"layer_norms_every": 3}}
    saved = save_programs(config_of(**parts), tmp_path / "saved")
    assert [one.name for one in saved] == [
        *("initial state", "start of the first round", "outer step"),
        # The batch doubles when the first round begins.
        *("train step of 2 microbatches", "layer norms", "train step of 4 microbatches"),
        *("train step of 4 microbatches, synchronising replicas", "layer norms", "evaluation"),
    ]
    trainer = fit(config_of(**parts))
    assert trainer.programs.saved.taken == len(saved)
    assert not compiled_in(tmp_path / "cache")
    assert not caplog.records
    fit(config_of("compiled", cache="nothing", **parts))
    assert compiled_in(tmp_path / "nothing") == OF_A_RUN
    assert [line["loss"] for line in steps_of(tmp_path / "run")] == [line["loss"] for line in steps_of(tmp_path / "compiled")]


def test_a_run_takes_what_was_saved(config_of, tmp_path, caplog, capsys):
    """With phases of the batch, measuring steps and norms."""
    saved = save_programs(config_of(**EVERYTHING), tmp_path / "saved")
    assert [one.name for one in saved] == [
        "initial state",
        "train step of 1 microbatch",
        "train step of 1 microbatch, measuring the noise scale",
        "layer norms",
        "train step of 2 microbatches",
        "train step of 2 microbatches, measuring the noise scale",
        "layer norms",
        "evaluation",
    ]
    again = save_programs(config_of(**EVERYTHING), tmp_path / "saved")
    assert {one.compile_s for one in again} == {0}
    assert [one.bytes for one in again] == [one.bytes for one in saved]
    assert saved_lines(again, "saved")[1].startswith("  initial state: was there, ")
    assert fit(config_of(**EVERYTHING)).programs.saved.taken == len(saved)
    assert not compiled_in(tmp_path / "cache")
    assert not caplog.records
    assert "s, from the cache" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------- refusals

HERE = {"JAX": "0.10.2", "devices": "2 cpu", "XLA_FLAGS": ""}


def test_the_first_difference_is_named():
    assert unlike(HERE, HERE, "They are") == ""
    assert unlike({**HERE, "JAX": "0.10.1"}, HERE, "They are") == "They are for JAX 0.10.1, not 0.10.2"
    assert unlike({**HERE, "XLA_FLAGS": "--a=1"}, HERE, "They are") == "They are for XLA_FLAGS --a=1, not none"
    assert unlike({"JAX": "0.10.2"}, HERE, "They are") == "They are for devices none, not 2 cpu"


class Lowered:
    """A lowered program that is not in any folder."""

    def __init__(self, text="module @jit_step {}"):
        self.text, self.args_info, self.out_tree = text, (), jax.tree.structure(())

    def as_text(self) -> str:
        return self.text


PROGRAM = """module @jit_step {
  func.func public @main(%0: i32) {
    %1 = call @where(%0)
    %2 = call @where(%1)
    stablehlo.custom_call @target(%2)
  }
  func.func private @where(%0: i32) {
    call @max(%0)
  }
  func.func private @max(%0: i32) {
    stablehlo.maximum %0
  }
}
"""


def test_a_program_is_what_it_computes():
    """Names of functions, and one function written twice, make no other program; all else does."""
    another = "func.func private @where_7(%0: i32) {\n    call @max(%0)\n  }\n  func.func private @max"
    twice = PROGRAM.replace("%2 = call @where", "%2 = call @where_7").replace("func.func private @max", another)
    same = [PROGRAM.replace("jit_step", "jit_counted"), PROGRAM.replace("@max", "@max_3")]
    assert {fingerprint(text, {}) for text in (PROGRAM, *same)} == {fingerprint(PROGRAM, {})}
    assert fingerprint(twice, {}) == fingerprint(PROGRAM, {})
    changes = [("maximum", "minimum"), ("@target", "@other"), ("@jit_step {", "@jit_step {a")]
    others = [PROGRAM.replace(*change) for change in changes]
    assert len({fingerprint(text, {}) for text in (PROGRAM, *others)} | {fingerprint(PROGRAM, {"a": 1})}) == 5


@pytest.fixture
def saved(config_of, tmp_path, mesh):
    """A folder with a program that does not load, and its config."""
    config = config_of().resolve(8)
    manifest = Manifest(machine_of(mesh), config.model_dump(mode="json"), {fingerprint("text", {}): "train step"})
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / MANIFEST).write_text(manifest.text())
    store_of(tmp_path / "saved").put(fingerprint("text", {}), b"program")
    return config


@pytest.fixture
def mesh(config_of):
    return make_mesh(config_of().resolve(8).parallel)


def refusal(config, mesh, caplog, text="text") -> str:
    """The one sentence of a run that takes no program."""
    programs = SavedPrograms(config, mesh)
    for _ in range(2):
        assert programs.take("train step", Lowered(text), {}) is None
    assert programs.taken == 0
    (record,) = caplog.records
    return record.getMessage()


ADVICE = ": what does not fit is compiled. Run `jaxllm compile --save` again for this run."


def test_a_program_of_another_config_is_refused_by_its_keys(saved, mesh, caplog, tmp_path):
    model = saved.model.model_copy(update={"num_layers": 3})
    other = saved.model_copy(update={"model": model})
    folder = tmp_path / "saved"
    assert refusal(other, mesh, caplog, "other text") == (
        f"{folder} holds no train step of this config, which differs from the saved one in model.num_layers{ADVICE}"
    )
    caplog.clear()
    assert refusal(saved, mesh, caplog, "other text") == f"{folder} holds no train step of this config{ADVICE}"


def test_a_damaged_program_is_refused(saved, mesh, caplog, tmp_path):
    (entry,) = (tmp_path / "saved" / "saved").iterdir()
    os.truncate(entry, 20)
    assert refusal(saved, mesh, caplog) == f"The train step in {tmp_path}/saved is damaged{ADVICE}"


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_program_of_somebody_else_is_not_run(saved, mesh, caplog, tmp_path, monkeypatch):
    """XLA's executables travel as pickles. Neither another key's signature nor a copied one makes one taken."""
    store, mark = store_of(tmp_path / "saved"), tmp_path / "executed"
    (mine,) = store.folder.iterdir()
    monkeypatch.setattr(program_cache, "_key_file", tmp_path / "their.key")
    store_of(tmp_path / "saved").put(fingerprint("text", {}), pickle.dumps(Payload(mark)))
    monkeypatch.undo()
    (theirs,) = set(store.folder.iterdir()) - {mine}
    mine.write_bytes(theirs.read_bytes())
    assert refusal(saved, mesh, caplog) == (
        f"The train step in {tmp_path}/saved is not signed by your key, and a program of somebody else would run as you{ADVICE}"
    )
    assert not mark.exists()


def test_a_program_that_does_not_load_is_refused(saved, mesh, caplog, tmp_path):
    sentence = refusal(saved, mesh, caplog)
    assert sentence.startswith(f"The train step in {tmp_path}/saved does not load (")
    assert sentence.endswith(ADVICE)


def test_programs_for_another_machine_are_refused(saved, mesh, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "machine_of", lambda mesh: {"JAX": "0.0", "devices": "8 cpu"})
    assert refusal(saved, mesh, caplog) == f"The programs in {tmp_path}/saved are for JAX {jax.__version__}, not 0.0{ADVICE}"
    with pytest.raises(ConfigError, match=r"saved holds programs for JAX .*, not 0\.0: name another folder\.$"):
        save._manifest(tmp_path / "saved", {"JAX": "0.0"})


@pytest.mark.parametrize("folder", ["saved", "saved/saved"])
def test_a_folder_that_everyone_may_write_into_is_refused(saved, mesh, caplog, tmp_path, folder):
    (tmp_path / folder).chmod(0o777)
    assert refusal(saved, mesh, caplog) == (
        f"Every user of this machine may write into {tmp_path}/saved, whose programs would run as you{ADVICE}"
    )


@pytest.mark.parametrize(
    ("content", "because"),
    [
        ("", "not JSON (Expecting value at column 1)"),
        ("[]", "it is []: it should be a valid dictionary"),
        ('{"format": 2}', "its format is 2, not 1"),
        ('{"format": 1, "machine": {"JAX": 1}, "programs": {}, "config": {}}', "machine.JAX is 1: it should be a valid string"),
    ],
)
def test_another_manifest_is_refused(saved, mesh, caplog, tmp_path, content, because):
    (tmp_path / "saved" / MANIFEST).write_text(content)
    sentence = refusal(saved, mesh, caplog)
    assert sentence == f"{tmp_path}/saved/{MANIFEST} cannot be read ({because}){ADVICE}"
    with pytest.raises(ConfigError, match=r"--save .* cannot be used \(.*\): name another folder\."):
        save._manifest(tmp_path / "saved", {})


def test_one_processs_problem_is_that_of_all(saved, mesh, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "first_nonempty", lambda text: text or "Another process sees no program")
    assert refusal(saved, mesh, caplog) == f"Another process sees no program{ADVICE}"


def test_what_was_left_to_the_first_run_is_compiled_without_a_word(saved, mesh, caplog, tmp_path):
    manifest = read_manifest(tmp_path / "saved")
    manifest.left[fingerprint("text of a step", {})] = "train step"
    (tmp_path / "saved" / MANIFEST).write_text(manifest.text())
    assert SavedPrograms(saved, mesh).take("train step", Lowered("text of a step"), {}) is None
    assert not caplog.records


def test_an_error_without_a_text_is_named(saved, mesh, caplog, monkeypatch):
    def load(*arguments, **options):
        raise AssertionError

    monkeypatch.setattr(programs.serialize_executable, "deserialize_and_load", load)
    assert "does not load (AssertionError)" in refusal(saved, mesh, caplog)


def test_hosts_must_see_the_same_programs(saved, mesh, caplog, monkeypatch, tmp_path):
    """A host without them takes part in no later exchange, so all do without."""
    monkeypatch.setattr(distributed, "exchange", lambda text, combine: combine([text, ""]))
    assert refusal(saved, mesh, caplog) == (
        f"The hosts see different programs in {tmp_path}/saved, which should be on a shared disk{ADVICE}"
    )


def test_the_order_of_devices_is_of_a_program(mesh):
    turned = Mesh(np.flip(mesh.devices), mesh.axis_names)
    assert unlike(machine_of(mesh), machine_of(turned), "They are") == (
        "They are for device order 0 1 2 3 4 5 6 7, not 7 6 5 4 3 2 1 0"
    )


def test_the_last_of_two_flags_counts(mesh, monkeypatch):
    monkeypatch.setattr(xla_flags, "given_flags", lambda: "--b=2 --a=1 --a=3 --xla_dump_to=x")
    assert machine_of(mesh)["XLA_FLAGS"] == "--a=3 --b=2"


# -------------------------------------------------------------------------------------------------------- other machines

SAVE = """
import sys
import jaxllm
from jaxllm.compile.save import save_programs
save_programs(jaxllm.load_config(sys.argv[1], sys.argv[3:]), sys.argv[2])
"""
RUN = """
import sys
import jaxllm
from jaxllm.machine import program_cache
trainer = jaxllm.fit(jaxllm.load_config(sys.argv[1], [f"run.compilation_cache={sys.argv[2]}", *sys.argv[3:]]))
print(trainer.programs.saved.taken, program_cache.counts().compiled, file=sys.__stderr__)
"""


@pytest.mark.slow
def test_two_processes_save_and_two_others_take(text_file, tmp_path):
    """Also if a cache has the programs: XLA cannot store again what it loaded."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    for program in (SAVE, RUN):
        port, processes = outside.free_port(), []
        for rank in range(2):
            names = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")
            given = {f"JAXLLM_{name}": str(value) for name, value in zip(names, (f"127.0.0.1:{port}", 2, rank), strict=True)}
            flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
            words = [str(recipe), str(tmp_path / "saved"), "run.cpu_devices=2", "parallel.tensor=2", f"run.dir={tmp_path}/run"]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", program, *words],
                    env=outside.environment(**given, **flags),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        errors = [process.communicate(timeout=300)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors
    assert [error.splitlines()[-1] for error in errors] == ["3 0", "3 0"]


needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")


@pytest.mark.slow
@needs_gpu_compiler
def test_what_calls_cudnn_is_left_to_the_first_run(config_of, tmp_path):
    """The others are loaded down to the executable, which only a GPU's client loads."""
    model = SMALL_MODEL | {"compute_dtype": "bfloat16", "attention": "auto"}
    config = config_of(model=model, parallel={"tensor": 2}, train={"sequence_length": 128})
    found = save_programs(config, tmp_path / "saved", GPUS["h100-80gb"], 4, 2)
    assert [(one.name, one.bytes > 0) for one in found] == [
        ("initial state", True),
        ("train step of 1 microbatch", False),
        ("evaluation", False),
    ]
    assert saved_lines(found, "saved")[-1] == (
        "Those left call cuDNN, whose plans XLA makes on a GPU only. The first run keeps them."
    )
    manifest = read_manifest(tmp_path / "saved")
    assert list(manifest.programs.values()) == ["initial state"]
    assert list(manifest.left.values()) == ["train step of 1 microbatch", "evaluation"]
    assert manifest.machine["devices"] == "4 NVIDIA H100 80GB HBM3"
    assert manifest.machine["devices on a host"] == "2"
    assert "--xla_cpu" not in manifest.machine["XLA_FLAGS"]
