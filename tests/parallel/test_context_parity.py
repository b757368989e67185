"""Context parallelism: loss and gradients of the whole train step equal one device's, whatever else the mesh does."""

import itertools
import subprocess
import sys
from functools import cache

import jax
import numpy as np
import outside
import pytest
from covers import drawn, pairwise, with_triples
from meshes import Run, assert_close, trimmed, unequal_batch

from jaxllm.config import config_folder

MICROBATCHES, ROWS, S = 2, 4, 32
MESHES = [mesh for mesh in itertools.product((2, 4, 8), (1, 2), (1, 2)) if np.prod(mesh) <= 16]
"""(context, tensor, data)"""
HEADS = {"mha": 4, "gqa": 2}
METHODS, DOCUMENTS = ("ring", "all_gather"), ("packed", "one document")
COMBINATIONS = [c for c in itertools.product(MESHES, METHODS, DOCUMENTS, HEADS, (0, 1, 2, 3)) if np.prod(c[0]) <= 8]
DEFAULT = pairwise([(*c[:4], number % 4) for number, c in enumerate(COMBINATIONS[::4])])
"""Every two values, ZeRO levels in turns."""
COVER = pairwise(COMBINATIONS, start=DEFAULT)
SIXTEEN = [
    (mesh, method, DOCUMENTS[number // 2 % 2], list(HEADS)[number % 2], number % 4)
    for number, (mesh, method) in enumerate(itertools.product([mesh for mesh in MESHES if np.prod(mesh) == 16], METHODS))
]


def batch(seed, packed):
    return unequal_batch(seed, (MICROBATCHES, ROWS, S), least=0.2, ends=2 if packed else 0)


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(mesh, method, packed, heads, zero=1, *more):
        context, tensor, data = mesh
        axes = (f"parallel.context={context}", f"parallel.tensor={tensor}", f"parallel.data={data}", f"parallel.zero={zero}")
        sizes = ("train.global_batch_sequences=8", f"train.microbatch_sequences={4 // data}", f"train.sequence_length={S}")
        choices = (f"parallel.context_method={method}", f"model.num_kv_heads={HEADS[heads]}")
        masks = f"data.mask_documents={'true' if packed == 'packed' else 'false'}"
        config = tiny_config(*axes, *sizes, *choices, masks, "optimizer.learning_rate=1e-2", "train.steps=10", *more)
        return Run(config, lambda seed: batch(seed, packed == "packed"))

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    return cache(lambda packed, heads: make_run((1, 1, 1), "auto", packed, heads).gradients())


def parameters():
    """By default every two values but ZeRO levels; slow: these too, three triples, four of the rest by the commit's hash."""
    always = with_triples(COMBINATIONS, COVER)
    for combination in always + drawn(COMBINATIONS, always, 4) + SIXTEEN:
        mesh, method, packed, heads, zero = combination
        marks = [] if combination in DEFAULT else [pytest.mark.slow]
        if np.prod(mesh) > jax.device_count():
            marks.append(pytest.mark.skip(reason="run by test_sixteen_devices"))
        name = f"context{mesh[0]}-tensor{mesh[1]}-data{mesh[2]}-{method}-{packed.replace(' ', '-')}-{heads}-zero{zero}"
        yield pytest.param(*combination, marks=marks, id=name)


@pytest.mark.parametrize(("mesh", "method", "packed", "heads", "zero"), parameters())
def test_loss_and_gradients_equal_one_device(make_run, one_device, mesh, method, packed, heads, zero):
    run = make_run(mesh, method, packed, heads, zero)
    assert run.functions.attention == f"xla {method}"
    loss, gradients = run.gradients()
    expected_loss, expected = one_device(packed, heads)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(trimmed(gradients, 256), trimmed(expected, 256), 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() > 8, reason="this is the process it starts")
def test_sixteen_devices():
    """Meshes of sixteen: this file again, in a process that has as many."""
    names = [f"context{c}-tensor{t}-data{d}" for c, t, d in MESHES if c * t * d == 16]
    command = [sys.executable, "-m", "pytest", "-v", "-k", " or ".join(names), __file__]
    environment = outside.environment(JAXLLM_TEST_DEVICES="16")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=config_folder().parent, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:]
    # Both methods.
    assert f"{2 * len(names)} passed" in result.stdout


@pytest.mark.parametrize(("remat", "zero"), [("none", 1), ("full", 2)])
def test_every_remat_policy_and_unrolled_layers(make_run, one_device, remat, zero):
    run = make_run((4, 1, 2), "ring", "packed", "gqa", zero, f"parallel.remat={remat}", "model.scan_layers=false")
    loss, gradients = run.gradients()
    expected_loss, expected = one_device("packed", "gqa")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(trimmed(gradients, 256), trimmed(expected, 256), 1e-5)


def test_ten_steps_equal_one_device(make_run):
    """With the optimizer, ZeRO 3 and accumulation."""
    expected = make_run((1, 1, 1), "auto", "packed", "gqa").losses(10)
    found = make_run((2, 2, 2), "ring", "packed", "gqa", 3).losses(10)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_no_gradient_crosses_a_document_or_goes_back_in_time(make_run, method):
    """Through the whole step: only the tokens that a position may see have a gradient in the embedding from its loss."""
    run = make_run((4, 1, 2), method, "packed", "gqa")
    arrays = batch(0, True)
    # Every position its own id; one target counts, in row 1 of the first microbatch.
    arrays["tokens"] = np.broadcast_to(np.arange(S, dtype=np.int32), arrays["tokens"].shape).copy()
    segments = arrays["segments"][0, 1]
    for position in (3, 9, 17, 31):
        arrays["mask"] = np.zeros_like(arrays["mask"])
        arrays["mask"][0, 1, position] = True
        run.batch = lambda _: arrays
        _, gradients = run.gradients()
        reached = np.abs(np.asarray(gradients["embedding"])).sum(axis=1) > 0
        expected = (np.arange(S) <= position) & (segments == segments[position])
        np.testing.assert_array_equal(reached[:S], expected)
        assert not reached[S:].any()


def test_auto_gathers_short_sequences_and_rings_long_ones(tiny_config):
    from jaxllm.cost_model.activations import context_method

    def method(S, context, kv_heads):
        long = (f"train.sequence_length={S}", f"parallel.context={context}", f"model.num_kv_heads={kv_heads}")
        return context_method(tiny_config(*long))

    assert method(8192, 2, 4) == "ring"
    assert method(8192, 4, 4) == "all_gather"
    assert method(8192, 4, 2) == "ring"
