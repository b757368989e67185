"""Pipelines: loss and gradients of every schedule equal one device's, whatever else the mesh does, and so do 20 steps."""

import itertools
import subprocess
import sys
from functools import cache, partial

import jax
import numpy as np
import outside
import pytest
from covers import cover, drawn, held, pairwise
from meshes import Run, assert_close, unequal_batch

from jaxllm.config import config_folder

MICROBATCHES, ROWS, S = 4, 4, 16
PIPELINES = {
    # schedule, stages, virtual stages, layers; 7 do not divide.
    "one": ("1f1b", 1, 1, 8),
    "gpipe-2": ("gpipe", 2, 1, 8),
    "gpipe-4": ("gpipe", 4, 1, 7),
    "1f1b-2": ("1f1b", 2, 1, 8),
    "1f1b-4": ("1f1b", 4, 1, 7),
    "1f1b-8": ("1f1b", 8, 1, 8),
    "interleaved-2x2": ("interleaved", 2, 2, 7),
    "interleaved-4x2": ("interleaved", 4, 2, 8),
}
MESHES = [mesh for mesh in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)) if np.prod(mesh) <= 4]
"""(data, context, tensor)"""
REMAT = {
    "none": "none",
    "selective": "selective",
    "full": "full",
    "offload": "offload",
    "mapping": "{query: keep, attention_output: offload, attention_lse: offload, mlp_gate: keep, mlp_up: offload}",
}
VARIANTS = {
    # Every two of heads, tying and documents occur together. 258 ids: the vocabulary divides over no mesh.
    "gqa-untied-packed": ("model.num_kv_heads=2", "train.z_loss_weight=0.01"),
    "mqa-tied-packed": ("model.num_kv_heads=1", "model.tie_embeddings=true", "train.loss_chunk_tokens=24"),
    "gqa-tied": ("model.num_kv_heads=2", "model.tie_embeddings=true", "train.z_loss_weight=0.01", "train.loss_chunk_tokens=24"),
    "mqa-untied": ("model.num_kv_heads=1",),
}


def is_useful(pipeline, mesh, zero, *_):
    """Levels are one where there are no ranks to share."""
    return pipeline != "one" and PIPELINES[pipeline][1] * np.prod(mesh) <= 8 and (zero == 1 or mesh[0] * mesh[1] > 1)


DEFAULT = [
    ("1f1b-2", (1, 2, 1), 2, "mapping", "gqa-tied"),
    ("1f1b-4", (1, 1, 2), 1, "full", "gqa-untied-packed"),
    ("interleaved-2x2", (2, 1, 1), 3, "offload", "gqa-untied-packed"),
]
"""With the other default tests of this file: every schedule, axis, ZeRO level and policy."""
SIXTEEN = [
    ("1f1b-2", (2, 2, 2), 3, "full", "mqa-tied-packed"),
    ("gpipe-2", (2, 2, 2), 1, "none", "gqa-tied"),
    ("interleaved-2x2", (2, 2, 2), 2, "offload", "gqa-untied-packed"),
    ("1f1b-8", (2, 1, 1), 0, "selective", "mqa-untied"),
]
COMBINATIONS = [c for c in itertools.product(PIPELINES, MESHES, (0, 1, 2, 3), REMAT, VARIANTS) if is_useful(*c)]


def pair_values(combination):
    """What meets in pairs: schedule, the axes above 1, ZeRO level, remat policy."""
    pipeline, mesh, zero, remat, _ = combination
    return (PIPELINES[pipeline][0], *(size > 1 for size in mesh), zero, remat)


# Higher, and rounding alone drives two runs apart: at 1e-2 one device's losses differ by 2e-5 when its layers are unrolled.
TWENTY = ("optimizer.learning_rate=3e-3", "optimizer.weight_decay=0.1")
TRAJECTORIES = [
    ("interleaved-2x2", (2, 1, 1), 0, "selective", "gqa-untied-packed"),
    ("gpipe-4", (1, 1, 2), 1, "none", "gqa-untied-packed"),
    ("1f1b-4", (2, 1, 1), 2, "offload", "gqa-untied-packed"),
    ("1f1b-2", (2, 1, 2), 3, "full", "gqa-tied"),
    ("1f1b-8", (1, 1, 1), 1, "mapping", "gqa-tied"),
    ("interleaved-4x2", (1, 2, 1), 3, "selective", "gqa-tied"),
]
"""Twenty steps that equal one device's need equal gradients, so these stand in the cover."""
ELSEWHERE = [*SIXTEEN, *TRAJECTORIES]
COVER = pairwise(COMBINATIONS, start=[*DEFAULT, *ELSEWHERE], values=pair_values)
COVER = cover(COMBINATIONS, 1, start=COVER)
"""And every pipeline, size of an axis and variant."""


def batch(seed=0, microbatches=MICROBATCHES):
    """The third microbatch has no target."""
    arrays = unequal_batch(seed, (MICROBATCHES, ROWS, S), least=0.05, ends=1)
    arrays["mask"][2] = False
    return {name: array[:microbatches] for name, array in arrays.items()}


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(pipeline, mesh, zero, remat, variant, *more, microbatches=MICROBATCHES):
        schedule, pipe, virtual_stages, layers = PIPELINES[pipeline]
        data, context, tensor = mesh
        axes = {"pipe": pipe, "data": data, "context": context, "tensor": tensor, "zero": zero, "remat": REMAT[remat]}
        parallel = axes | {"schedule": schedule, "virtual_stages": virtual_stages}
        train = {
            "global_batch_sequences": microbatches * ROWS,
            "microbatch_sequences": ROWS // data,
            "sequence_length": S,
            "steps": 20,
        }
        packed = variant.endswith("packed")
        config = tiny_config(
            *(f"parallel.{key}={value}" for key, value in parallel.items()),
            *(f"train.{key}={value}" for key, value in train.items()),
            f"model.num_layers={layers}",
            "model.vocab_size=258",
            f"data.mask_documents={str(packed).lower()}",
            *VARIANTS[variant],
            *more,
        )

        def arrays(seed):
            return {name: a for name, a in batch(seed, microbatches).items() if packed or name != "segments"}

        return Run(config, arrays)

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    """One device's Run of a variant and a number of layers, with its gradients."""

    @cache
    def reference(variant, layers):
        run = make_run("one", (1, 1, 1), 0, "selective", variant, f"model.num_layers={layers}")
        loss, gradients = run.gradients()
        return run, float(loss), run.plain(gradients)

    return reference


def check(run, reference):
    plain_run, expected_loss, expected = reference
    jax.tree.map(np.testing.assert_array_equal, run.plain(run.state.params), plain_run.plain(plain_run.state.params))
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(run.plain(gradients), expected, 2e-6)


def layers_of(pipeline):
    return PIPELINES[pipeline][3]


def name_of(pipeline, mesh, zero, remat, variant):
    axes = "-".join(f"{axis}{size}" for axis, size in zip(("data", "context", "tensor"), mesh, strict=True) if size > 1)
    return "-".join(filter(None, (pipeline, axes, f"zero{zero}", remat, variant)))


def parameters():
    """Slow: the cover. Nightly: two of the rest by the commit's hash. A few of these hang or differ on forced CPU devices
    (xla_flags.SEVERAL_CPU_DEVICES_FLAGS)."""
    for combination in [c for c in COVER if c not in ELSEWHERE] + (others := drawn(COMBINATIONS, COVER, 2)):
        marks = pytest.mark.nightly if combination in others else () if combination in DEFAULT else pytest.mark.slow
        yield pytest.param(*combination, marks=marks, id=name_of(*combination))


def test_the_cover_holds_every_pair():
    assert held(COVER, 2, pair_values) >= held(COMBINATIONS, 2, pair_values)
    assert held(COVER, 1) >= held(COMBINATIONS, 1)


@pytest.mark.parametrize(("pipeline", "mesh", "zero", "remat", "variant"), parameters())
def test_loss_and_gradients_equal_one_device(make_run, one_device, pipeline, mesh, zero, remat, variant):
    """Initial values bit for bit; gradients of identity layers and of rows that pad the vocabulary 0."""
    check(make_run(pipeline, mesh, zero, remat, variant), one_device(variant, layers_of(pipeline)))


OWN_LAYERS = [
    ("1f1b-2", (2, 1, 1), 1, "full", "gqa-untied-packed"),
    ("gpipe-4", (2, 1, 1), 0, "selective", "gqa-tied"),
    ("1f1b-4", (1, 1, 2), 1, "selective", "mqa-untied"),
]


@pytest.mark.parametrize(
    "combination",
    [pytest.param(c, marks=[pytest.mark.slow] * (number > 0), id=name_of(*c)) for number, c in enumerate(OWN_LAYERS)],
)
def test_stages_whose_layers_have_arrays_of_their_own_equal_one_device(make_run, one_device, combination):
    pipeline, *_, variant = combination
    # Seven leave an identity layer.
    layers = 4 if pipeline == "1f1b-2" else 7
    run = make_run(*combination, f"model.num_layers={layers}", "model.scan_layers=false")
    check(run, one_device(variant, layers))


@pytest.mark.slow
def test_a_tick_without_work_adds_nothing_to_sums_however_large_scores_are(make_run):
    """The log-sum-exp that attention over context ranks keeps belongs to the documents of one microbatch. By those of another
    e^(score - log-sum-exp) overflows, and zero times infinity would be in the sums of layers with arrays of their own."""
    found = []
    for scan in ("true", "false"):
        run = make_run(
            "1f1b-2", (1, 2, 1), 1, "selective", "gqa-untied-packed", "model.num_layers=4", f"model.scan_layers={scan}"
        )
        query = run.state.params["layers"]["attention"]["query"]
        run.state.params["layers"]["attention"]["query"] = 30_000 * query
        found.append(run.plain(run.gradients()[1]))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(found))
    assert_close(found[1], found[0], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes", [("model.compute_dtype=bfloat16",), ("model.compute_dtype=bfloat16", "model.matmul_dtype=fp8")]
)
def test_layers_of_a_stage_in_stacks_or_apart_follow_each_other(make_run, dtypes):
    """Weights are rounded to FP8 once a step, or in each microbatch, to the same bits. Sums of products that are not rounded to
    bfloat16 before are as near as its 8 bits."""
    more = ("1f1b-2", (2, 1, 1), 1, "selective", "gqa-tied", "model.num_layers=4", *dtypes)
    runs = [make_run(*more, f"model.scan_layers={scan}") for scan in ("true", "false")]
    (loss, stacks), (loss_apart, apart) = (run.gradients() for run in runs)
    assert loss == loss_apart
    assert_close(runs[1].plain(apart), runs[0].plain(stacks), 2**-8)


@pytest.mark.slow
def test_a_stage_whose_layers_are_apart_measures_as_stacks_do(make_run):
    """The noise scale's parts need gradients that no matmul has added to sums."""
    more = ("1f1b-2", (2, 1, 1), 1, "selective", "gqa-tied", "model.num_layers=4")
    runs = [make_run(*more, f"model.scan_layers={scan}") for scan in ("true", "false")]
    found = []
    for run in runs:
        with jax.set_mesh(run.mesh):
            found.append(jax.jit(run.functions.value_grad_and_parts)(run.state.params, run.place(run.batch(0))))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8), *found)


@pytest.mark.nightly  # xla_flags.py names the race that its options make rare and do not exclude
def test_collectives_of_a_ticks_two_passes_never_mix(make_run):
    """On forced CPU devices (xla_flags.py): where they did, half of the runs of this mesh hung or differed within seconds."""
    run = make_run("1f1b-4", (1, 2, 1), 3, "full", "gqa-untied-packed")
    expected = jax.device_get(run.gradients())
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.gradients()), expected)


@pytest.mark.skipif(jax.device_count() < 16, reason="run by test_sixteen_devices")
@pytest.mark.parametrize("combination", SIXTEEN, ids=[name_of(*c) for c in SIXTEEN])
def test_on_sixteen(make_run, one_device, combination):
    pipeline, *_, variant = combination
    check(make_run(*combination), one_device(variant, layers_of(pipeline)))


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() > 8, reason="this is the process it starts")
def test_sixteen_devices():
    """All four axes above 1, and other meshes of sixteen: this file again, in a process that has as many."""
    tests = [f"{__file__}::test_on_sixteen[{name_of(*c)}]" for c in SIXTEEN]
    environment = outside.environment(JAXLLM_TEST_DEVICES="16")
    command = [sys.executable, "-m", "pytest", "-v", *tests]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=config_folder().parent, timeout=500)
    assert result.returncode == 0, result.stdout[-4000:]
    assert f"{len(tests)} passed" in result.stdout


@pytest.mark.parametrize(
    ("pipeline", "microbatches"),
    [("gpipe-4", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("1f1b-4", 3), ("1f1b-4", 1), ("gpipe-4", 1)))],
)
def test_fewer_microbatches_than_stages(make_run, one_device, pipeline, microbatches):
    """Held against the same batch on one device with microbatches after it that have no target."""
    run = make_run(pipeline, (1, 1, 1), 1, "none", "mqa-tied-packed", microbatches=microbatches)
    reference, *_ = one_device("mqa-tied-packed", layers_of(pipeline))
    whole = batch()
    whole["mask"][microbatches:] = False
    with jax.set_mesh(reference.mesh):
        function = jax.jit(reference.functions.value_and_grad)
        expected_loss, expected = function(reference.state.params, reference.place(whole))
    check(run, (reference, float(expected_loss), reference.plain(expected)))


@pytest.mark.slow
def test_three_virtual_stages(make_run, one_device):
    """Twelve places for eleven layers."""
    layers = "model.num_layers=11"
    three = ("parallel.virtual_stages=3", layers)
    run = make_run("interleaved-2x2", (2, 1, 1), 3, "selective", "gqa-untied-packed", *three)
    check(run, one_device("gqa-untied-packed", 11))


@pytest.mark.slow
def test_unrolled_layers(make_run, one_device):
    run = make_run("interleaved-2x2", (2, 1, 1), 3, "selective", "gqa-untied-packed", "model.scan_layers=false")
    check(run, one_device("gqa-untied-packed", layers_of("interleaved-2x2")))


def losses(run):
    """Of twenty steps, four batches over and over, so that the loss falls."""
    batches = run.batch
    run.batch = lambda step: batches(step % 4)
    return run.losses(20)


@pytest.fixture(scope="module")
def twenty_losses(make_run):
    """One device's."""

    @cache
    def of(variant, layers):
        return losses(make_run("one", (1, 1, 1), 0, "selective", variant, f"model.num_layers={layers}", *TWENTY))

    return of


def trajectories():
    for number, combination in enumerate(TRAJECTORIES):
        yield pytest.param(*combination, marks=pytest.mark.slow if number else (), id=name_of(*combination))


@pytest.mark.parametrize(("pipeline", "mesh", "zero", "remat", "variant"), trajectories())
def test_twenty_steps_equal_one_device(make_run, twenty_losses, pipeline, mesh, zero, remat, variant):
    """And the identity layer where there are seven layers is 0 to the end, and so are its moments."""
    run = make_run(pipeline, mesh, zero, remat, variant, *TWENTY)
    expected = twenty_losses(variant, layers_of(pipeline))
    np.testing.assert_allclose(losses(run), expected, rtol=2e-6)
    assert expected[-1] < expected[0] - 0.3
    adam = run.state.opt_state[0]
    for tree in (run.state.params, adam.mu, adam.nu):
        assert all((np.asarray(x) != 0).any() for x in jax.tree.leaves(run.plain(tree)))


@pytest.mark.parametrize(
    ("pipeline", "mesh"), [("gpipe-4", (1, 1, 2)), pytest.param("interleaved-2x2", (2, 1, 2), marks=pytest.mark.slow)]
)
def test_bfloat16_in_a_pipeline_follows_float32(make_run, one_device, pipeline, mesh):
    """Messages, sums over stages and casts in bfloat16, within its rounding (2^-8 a product)."""
    run = make_run(pipeline, mesh, 1, "selective", "mqa-tied-packed", "model.compute_dtype=bfloat16")
    loss, gradients = run.gradients()
    _, expected_loss, expected = one_device("mqa-tied-packed", layers_of(pipeline))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
    assert_close(run.plain(gradients), expected, 0.02)


@pytest.mark.parametrize(
    ("pipeline", "mesh", "zero"),
    [
        ("interleaved-2x2", (1, 1, 2), 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("1f1b-4", (2, 1, 1), 3), ("gpipe-2", (2, 2, 1), 3), ("interleaved-4x2", (1, 2, 1), 0))
        ),
    ],
)
def test_evaluation_equals_one_device(make_run, one_device, pipeline, mesh, zero):
    tested = make_run(pipeline, mesh, zero, "selective", "mqa-tied-packed")
    reference, *_ = one_device("mqa-tied-packed", layers_of(pipeline))
    totals = []
    for run in (tested, reference):
        with jax.set_mesh(run.mesh):
            totals.append(jax.jit(run.functions.loss_sum)(run.state.params, run.place(run.batch(0))))
    (loss, count), (expected_loss, expected_count) = totals
    assert int(count) == int(expected_count) == batch()["mask"].sum()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
