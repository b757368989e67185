"""The persistent compilation cache of the tests: its folder and its size."""

import os
import subprocess
import sys
from types import SimpleNamespace

import outside
import program_cache
import pytest

from jaxllm.compile import aot

# Its compilation is slow enough for the cache.
PROGRAM = """
import sys
import jax, jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.eye(8)).sum(), len(hits) > 0)
"""


@pytest.fixture
def run(tmp_path):
    def start(**variables) -> tuple[str, str, str]:
        environment = outside.environment(JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(tmp_path), **variables)
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
        return *done.stdout.split(), done.stderr

    return start


def test_the_callers_values_stay():
    environ = {"JAX_COMPILATION_CACHE_DIR": "here", "PYTHONWARNINGS": "error"}
    program_cache.switch_on(environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == "here"
    assert environ["PYTHONWARNINGS"] == "error,ignore:Error reading persistent compilation cache entry:UserWarning"


def test_each_jax_has_its_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = program_cache.default_folder()
    assert folder == program_cache.default_folder()
    assert folder.parent == tmp_path / "jaxllm-tests"
    monkeypatch.setattr(program_cache, "version", lambda package: "0.0")
    assert program_cache.default_folder() != folder


def test_the_entries_unused_for_longest_are_deleted_first(tmp_path):
    for number in range(4):
        path = tmp_path / f"jit_f-{number}-cache"
        path.write_bytes(bytes(10))
        os.utime(path, (number, number))
    (tmp_path / "no_entry").write_bytes(bytes(100))
    program_cache.prune(tmp_path, limit_bytes=25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jit_f-2-cache", "jit_f-3-cache", "no_entry"]
    program_cache.prune(tmp_path / "none")


class Lowered:
    """A lowered step that counts its compilations."""

    def __init__(self):
        self.compilations = 0

    def as_text(self, debug_info):
        assert debug_info
        return 'module @step {} loc("/a/checkout/step.py":12:0 to :30)'

    def compile(self, compiler_options):
        self.compilations += 1
        memory = SimpleNamespace(temp_size_in_bytes=7, host_temp_size_in_bytes=0, other=None)
        return SimpleNamespace(as_text=lambda: f"HloModule {compiler_options}", memory_analysis=lambda: memory)


def test_a_program_for_gpus_is_compiled_once(tmp_path):
    """Other options, another GPU and other versions of the compiler make another program; another checkout does not."""
    lowered = Lowered()

    def step(target="h100", versions=("0.10.2",)):
        return program_cache.GpuLowered(lowered, target, versions, tmp_path)

    first = step().compile({"a": 1})
    assert first.as_text() == "HloModule {'a': 1}"
    assert first.memory_analysis() == SimpleNamespace(temp_size_in_bytes=7, host_temp_size_in_bytes=0)
    (entry,) = tmp_path.iterdir()
    lowered.as_text = lambda debug_info: 'module @step {} loc("/b/step.py":14:0 to :31)'
    assert step().compile({"a": 1}) == first
    assert lowered.compilations == 1
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-20])
    assert step().compile({"a": 1}) == first
    assert lowered.compilations == 2
    assert entry.read_bytes() == whole
    for number, compile_other in enumerate((
        lambda: step().compile({"a": 2}),
        lambda: step("h200").compile({"a": 1}),
        lambda: step(versions=("0.11.2",)).compile({"a": 1}),
        lambda: step().compile({"a": 1, "xla_dump_to": "x"}),
    )):  # fmt: skip
        compile_other()
        assert lowered.compilations == 3 + number
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_steps_compiled_for_gpus_are_kept(tiny_config, tmp_path):
    with program_cache.kept_gpu_programs(tmp_path):
        # On one line: the text has its number.
        compiled = [aot.compile_step(tiny_config("parallel.data=1"), aot.gpu_devices(1, 1)) for _ in range(2)]
    assert compiled[0] == compiled[1]
    assert compiled[0].memory_analysis().temp_size_in_bytes > 0
    assert len(list(tmp_path.iterdir())) == 1


def test_half_an_entry_is_compiled_again_without_a_word(run, tmp_path):
    value, hit, _ = run()
    assert hit == "False"
    assert run()[:2] == (value, "True")
    (entry, *more) = tmp_path.glob("*-cache")
    for path in (entry, *more):
        os.truncate(path, path.stat().st_size // 2)
    assert run() == (value, "False", "")


def test_it_can_be_switched_off(run, tmp_path):
    run(JAX_ENABLE_COMPILATION_CACHE="0")
    assert not list(tmp_path.glob("*-cache"))
