"""What the tests add to the persistent compilation cache (tests/machine/test_program_cache.py): programs for GPUs."""

import subprocess
import sys
from types import SimpleNamespace

import outside
import program_cache
import pytest

from jaxllm.compile import aot


def test_the_callers_values_stay():
    environ = {"JAX_COMPILATION_CACHE_DIR": "here"}
    program_cache.switch_on(environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == "here"


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


def test_it_can_be_switched_off(tmp_path):
    program = """if True:
        import os
        from jaxllm.machine import program_cache
        program_cache.start("auto", program_cache.Path, os.environ)
        print(program_cache._store)
    """
    environment = outside.environment(JAX_COMPILATION_CACHE_DIR=str(tmp_path), JAX_ENABLE_COMPILATION_CACHE="0")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr
    assert not list(tmp_path.iterdir())
