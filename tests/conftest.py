"""Tests are stricter than production: eight CPU devices, warnings are errors, no implicit promotion of ranks or dtypes, no
implicit transfer in a step of the loop.
"""

import functools
import gc
import os
from contextlib import nullcontext
from pathlib import Path

import program_cache

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    program_cache.switch_on(os.environ)
# In the environment, so that they hold in every process that a test starts.
os.environ |= {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}

import durations
import jax
import progress
import pytest
import real_material
import selection
from hypothesis import HealthCheck, settings
from tiny import TINY

from jaxllm.config import Config, RunConfig, load_config
from jaxllm.machine import xla_flags
from jaxllm.machine.program_cache import prune
from jaxllm.machine.program_cache import start as start_program_cache
from jaxllm.run import advisor
from jaxllm.run.trainer import Trainer
from jaxllm.run_report import for_runs

# Traces are many small objects that live long. By its own thresholds Python's garbage collector scans them again and again: of
# tests/parallel/test_sending_once.py it took 18 s of 145 s on a busy machine, with these thresholds 3 s.
gc.set_threshold(50_000, 20, 100)

# A busy machine is no fault of a strategy.
settings.register_profile("jaxllm", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jaxllm")

NUM_DEVICES = int(os.environ.get("JAXLLM_TEST_DEVICES", 8))

if os.environ["JAX_PLATFORMS"] == "cpu":
    # Programs are tiny and run a few times: LLVM's optimiser would take most of the suite's time.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    xla_flags.apply(RunConfig(cpu_devices=NUM_DEVICES))
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    start_program_cache("auto", Path, os.environ)


def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true", help="Write seconds by file into tests/durations.json.")


def pytest_configure(config):
    config.pluginmanager.register(durations.Durations(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Progress(config))


def pytest_sessionstart(session):
    """With xdist the main process does it for its workers."""
    folder = jax.config.jax_compilation_cache_dir
    if folder and not hasattr(session.config, "workerinput"):
        prune(Path(folder).parent, program_cache.LIMIT_BYTES, unused_s=0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    selection.mark(items)


def pytest_collection_finish():
    """Imported modules stay: the garbage collector need not scan them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_file():
    """Traces and programs of one file are useless for the next. Kept, they grew to 5 GB, and Python's garbage collector scanned
    all of them repeatedly."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def gpu_programs():
    folder = jax.config.jax_compilation_cache_dir
    with program_cache.kept_gpu_programs(Path(folder)) if jax.config.jax_enable_compilation_cache and folder else nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def planner():
    """As jaxllm.fit and the command line."""
    advisor.answers = for_runs


@pytest.fixture(scope="session", autouse=True)
def guarded_steps():
    """A step of the loop, and reading its metrics, move data between host and devices only where the code says so. The thread
    that reads ahead is not guarded: jax.make_array_from_callback counts as an implicit transfer.
    """

    def guarded(method):
        @functools.wraps(method)
        def call(*arguments):
            with jax.transfer_guard("disallow"):
                return method(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_start_step", "_layer_norms_if_due", "_read"):
            patch.setattr(Trainer, name, guarded(getattr(Trainer, name)))
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """60 kB of made-up words, always the same."""
    import numpy as np

    words = np.array(["law", "mesh", "ring", "axis", "shard", "gather", "tick", "stage", "\n"])
    picks = np.random.default_rng(0).integers(0, len(words), 12_000)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words[picks]))
    return path


@pytest.fixture(scope="session")
def tiny_config(text_file):
    """tiny_config(*overrides) -> a Config of a model small enough to compile in a second."""

    def make(*overrides: str) -> Config:
        return load_config(TINY, [f"data.paths=[{text_file}]", *overrides])

    return make


@pytest.fixture(scope="session")
def smollm2_folder():
    """A Hugging Face folder of the real SmolLM2-135M-Instruct in float32. Read-only. Skips without a network."""
    return real_material.smollm2()


@pytest.fixture(scope="session")
def smollm2_first_layers():
    """The same model with only its first two layers, for quick tests with real weights."""
    return real_material.smollm2_first_layers()


@pytest.fixture(scope="session")
def chatterbot_file():
    """2,025 real conversations, as JSON lines."""
    return real_material.fetched("get_chatterbot.py", "chatterbot.jsonl")
