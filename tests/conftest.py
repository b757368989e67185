"""The test room is stricter than production: eight CPU devices, warnings are errors, no silent promotion of ranks."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from tiny import TINY

from jaxllm import xla_flags
from jaxllm.config import Config, RunConfig, load_config

NUM_DEVICES = int(os.environ.get("JAXLLM_TEST_DEVICES", 8))

if os.environ["JAX_PLATFORMS"] == "cpu":
    # Tiny programs that run a few times: LLVM's optimiser would take most of the suite's time.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    xla_flags.apply(RunConfig(cpu_devices=NUM_DEVICES))
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """60 kB of made-up words, the same every time."""
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
