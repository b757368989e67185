"""A vision tower trains on every mesh as on one device: loss, and gradients of tower, projector and network."""

import itertools

import numpy as np
import pytest
from covers import drawn, pairwise
from meshes import Run, assert_close, unequal_batch

M, ROWS, S, IMAGES, SIDE, TOKEN = 2, 8, 24, 2, 12, 255
TOWERS = {
    "clip": ("model.vision.kind=clip", "model.vision.used_layers=2"),
    "siglip": ("model.vision.kind=siglip", "model.vision.drop_first=false", "model.vision.projector_bias=false"),
}
SIZES = {"image_size": SIDE, "patch_size": 4, "num_layers": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4}
MESHES = [(data, tensor) for data in (1, 2, 8) for tensor in (1, 2, 4) if data * tensor in (4, 8)]
FREEZE = {"trained": (), "frozen": ("train.freeze=[vision]",)}
COMBINATIONS = list(itertools.product((0, 1, 2, 3), MESHES, TOWERS, FREEZE, (1, 2)))
DEFAULT = pairwise([(*_, mesh, tower, freeze, m) for *_, mesh, tower, freeze, m in COMBINATIONS if mesh != (2, 4)])


def batch(seed=0):
    """Sequences with no, one and two images of 9 tokens each. The places of pixels that no sequence reads hold garbage."""
    rng, arrays = np.random.default_rng(seed), unequal_batch(seed, (M, ROWS, S))
    tokens = np.minimum(arrays["tokens"], TOKEN - 1)
    for number, row in enumerate(tokens.reshape(-1, S)):
        for image in range(number % (IMAGES + 1)):
            row[1 + 11 * image : 10 + 11 * image] = TOKEN
    images = rng.normal(size=(M, ROWS, IMAGES, 3, SIDE, SIDE)).astype(np.float32)
    return {**arrays, "tokens": tokens, "mask": arrays["mask"] & (tokens != TOKEN), "images": images}


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(level, mesh, tower, freeze, microbatches):
        data, tensor = mesh
        axes = (
            "data.source=given",
            "data.paths=[]",
            f"train.sequence_length={S}",
            f"parallel.data={data}",
            f"parallel.tensor={tensor}",
            f"parallel.zero={level}",
        )
        sizes = (f"train.global_batch_sequences={M * ROWS}", f"train.microbatch_sequences={M * ROWS // data // microbatches}")
        vision = [f"model.vision.{key}={value}" for key, value in {**SIZES, "image_token_id": TOKEN}.items()]
        config = tiny_config(*axes, *sizes, *vision, *TOWERS[tower], *FREEZE[freeze])
        return Run(config, lambda seed: {name: x.reshape(microbatches, -1, *x.shape[2:]) for name, x in batch(seed).items()})

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    cache = {}

    def reference(*variant):
        if variant not in cache:
            run = make_run(0, (1, 1), *variant, 1)
            loss, gradients = run.gradients()
            cache[variant] = loss, run.plain(gradients)
        return cache[variant]

    return reference


def combinations():
    for combination in DEFAULT + drawn(COMBINATIONS, DEFAULT):
        marks = () if combination in DEFAULT else (pytest.mark.slow,)
        level, (data, tensor), *variant, microbatches = combination
        name = f"zero{level}-data{data}-tensor{tensor}-{'-'.join(variant)}-{microbatches}"
        yield pytest.param(*combination, marks=marks, id=name)


@pytest.mark.parametrize(("level", "mesh", "tower", "freeze", "microbatches"), combinations())
def test_loss_and_gradients_equal_one_device(make_run, one_device, level, mesh, tower, freeze, microbatches):
    expected_loss, expected = one_device(tower, freeze)
    run = make_run(level, mesh, tower, freeze, microbatches)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(without_zeros(run.plain(gradients)), without_zeros(expected), 2e-6)


def without_zeros(gradients):
    """Gradients without those that are 0: of what follows the last layer that is used, and, but for rounding, of the bias that
    attention adds to all keys alike."""
    if "vision" not in gradients:
        return gradients
    vision = dict(gradients["vision"])
    blocks = {name: g[: 2 if "class_token" in vision else 3] for name, g in vision.pop("blocks").items()}
    assert all((vision.pop(name) == 0).all() for name in ("norm_after", "norm_after_bias"))
    assert all((g[2:] == 0).all() for g in gradients["vision"]["blocks"].values() if "class_token" in vision)
    assert np.abs(blocks.pop("key_bias")).max() < 1e-7
    return {**gradients, "vision": {**vision, "blocks": blocks}}
