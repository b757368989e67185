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


@pytest.mark.slow
def test_a_program_for_gpus_is_compiled_once(tiny_config, tmp_path):
    """Other options and another memory of the GPU make another program."""
    memory = (aot.DEMAND_BYTES, aot.DEMAND_BYTES, 2**34)
    with program_cache.kept_gpu_programs(tmp_path):
        # On one line: the text has its number.
        programs = [aot.lower_step(tiny_config("parallel.data=1"), aot.gpu_devices(1, 1, memory_bytes=size)) for size in memory]
    lowered, again, small = programs
    first, plain = lowered.compile(), lowered._lowered.compile()
    assert first.as_text() == plain.as_text()
    assert first.memory_analysis().temp_size_in_bytes == plain.memory_analysis().temp_size_in_bytes > 0
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-20])
    assert again.compile() == first
    assert entry.read_bytes() == whole
    # It cannot compile any more.
    again._lowered = SimpleNamespace(as_text=again._lowered.as_text)
    assert again.compile() == first
    lowered.compile({"xla_gpu_enable_triton_gemm": False})
    small.compile()
    assert len(list(tmp_path.iterdir())) == 3


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
