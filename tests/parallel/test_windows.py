"""Sliding windows: attention within them is that of the whole sequence with the others masked, on every mesh, and what is
outside is neither computed nor sent.
"""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import compare_kernels, documents, kernel_inputs
from meshes import Run, assert_close, unequal_batch
from test_context_compiled import MODEL
from test_ring_attention import (
    GQA,
    MHA,
    H,
    S,
    assert_near,
    equations,
    needs_gpu_compiler,
    over_context,
    traced,
    with_gradients,
)

from jaxllm.compile.aot import compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.compile.jaxpr_flops import matmul_flops
from jaxllm.config import ConfigError, load_config
from jaxllm.config.attention import branch_shares, chunks_in_reach, first_seen, window_shares
from jaxllm.cost_model.flops import attention_flops_per_token, causal_pairs
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import MEASURED
from jaxllm.mesh.axes import axis_sizes
from jaxllm.model import cudnn_attention
from jaxllm.model.attention import xla_attention
from jaxllm.model.blockwise_attention import NOTHING, Mask, Partial, documents_by_halves, within_window, xla_kernel
from jaxllm.parallel.ring_attention import by_kind
from jaxllm.parallel.window_attention import window_attention
from jaxllm.plan.space import groups, meshes, why_not

TILED = within_window(xla_kernel(max_rows=8))


def in_windows(window):
    return lambda kernel, axis_name, c: window_attention(within_window(kernel), axis_name, c, window)


@functools.cache
def whole(window):
    return jax.jit(partial(with_gradients, partial(xla_attention, window=window)))


# ----------------------------------------------------------------------------------------------------------- kinds of layers


def test_kinds_of_the_same_window_are_one_branch():
    """Stages of a pipeline then take the same branch, and send the same, where their layers differ in the rotation alone."""
    sizes = {"num_layers": 8, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "vocab_size": 256}
    model = load_config(
        {
            "model": {**sizes, "sliding_window": 8, "full_attention_every": 2, "no_rope_every": 4},
            "parallel": {"pipe": 4, "context": 2},
            "train": {"steps": 1, "sequence_length": 64, "global_batch_sequences": 8},
        }
    ).model
    assert model.layer_kinds == (0, 1, 0, 2) * 2
    assert model.kinds == (8, None, None)
    assert branch_shares(model, 64) == (0.5, 0.5)
    windowed, full = in_windows(8)(TILED, "context", 1), in_windows(64)(TILED, "context", 1)
    q, k, v = (jnp.zeros((1, 8, heads, 4)) for heads in (2, 1, 1))
    attend = by_kind([windowed, full, full])
    found = equations(jax.make_jaxpr(lambda kind: attend(q, k, v, kind=kind))(0).jaxpr)
    (switch,) = [equation for equation, _ in found if equation.primitive.name == "cond"]
    assert len(switch.params["branches"]) == 2


# ------------------------------------------------------------------------------------------------------------------ blocks


def visible(mask, S, T):
    """[B, S, T] by the definition of Mask."""
    positions = mask.distance + np.arange(S)[:, None] - np.arange(T)[None]
    seen = np.ones((2, S, T), bool) & (positions >= 0 if mask.causal else True)
    seen &= positions < mask.window
    if mask.q_segments_BS is not None:
        seen &= np.asarray(mask.q_segments_BS)[:, :, None] == np.asarray(mask.k_segments_BT)[:, None]
    return seen


class ByDefinition:
    """A kernel that computes all scores."""

    def __init__(self, mask):
        self.mask = mask

    def forward(self, q, k, v, _):
        seen = visible(self.mask, q.shape[1], k.shape[1])[:, None]
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(q.shape[3])
        lse = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)
        p = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0)
        lse = jnp.where(seen.any(-1), lse, NOTHING)
        return Partial(jnp.einsum("bnst,btnh->bsnh", p, v), lse.swapaxes(1, 2))

    def backward(self, q, k, v, o, lse, do, _):
        seen = visible(self.mask, q.shape[1], k.shape[1])[:, None]

        def objective(q, k, v):
            # The gradients among all keys: o and lse are constants.
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
            scores = jnp.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(q.shape[3])
            p = jax.lax.stop_gradient(jnp.where(seen, jnp.exp(scores - lse.swapaxes(1, 2)[..., None]), 0))
            values = jnp.einsum("bsnh,btnh->bnst", do, v)
            slopes = jax.lax.stop_gradient(values - jnp.einsum("bsnh,bsnh->bns", do, o)[..., None])
            return jnp.sum(p * slopes * scores) + jnp.sum(p * values)

        return jax.grad(objective, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("causal", "window", "distance"),
    [(True, 5, 0), (True, 40, 0), (False, 70, 32), (False, 33, 32), (False, 20, 32), (False, 7, 40)],
)
def test_a_block_is_cut_by_its_window(causal, window, distance, packed):
    length = 32
    segments = documents(64, 20) if packed else None
    q_segments, k_segments = (
        (None, None) if segments is None else (segments[:, 0 if causal else 32 :][:, :length], segments[:, :length])
    )
    mask = Mask(causal, q_segments, k_segments, window, distance)
    compare_kernels(TILED, ByDefinition(mask), *kernel_inputs(GQA, length), mask)


def test_documents_by_halves_have_windows():
    segments = documents(64, 20)
    for window in (3, 16, 21, 50):
        mask = Mask(True, segments, segments, window)
        halves = documents_by_halves(TILED, TILED, smallest=16)
        compare_kernels(halves, ByDefinition(mask), *kernel_inputs(GQA, 64), mask)


def promised(q, k, kind, lengths, window):
    """The mask of the rows that cuDNN promises for a kind, and whether it promises each query and key."""
    rows, columns = (
        jnp.arange(x.shape[1])[None] < (x.shape[1] if n is None else n[:, None])
        for x, n in zip((q, k), lengths or (None, None), strict=True)
    )
    segments = jnp.broadcast_to(jnp.where(rows, 1, 2), q.shape[:2]), jnp.broadcast_to(jnp.where(columns, 1, 3), k.shape[:2])
    return Mask("CAUSAL" in kind, *segments, window), (
        jnp.broadcast_to(rows, q.shape[:2]),
        jnp.broadcast_to(columns, k.shape[:2]),
    )


def call_forward(q, k, v, kind, lengths=None, call=None, window=None):
    mask, (rows, _) = promised(q, k, kind, lengths, window)
    o, lse = xla_kernel().forward(q, k, v, mask)
    o, lse = jnp.where(rows[..., None, None], o, jnp.nan), jnp.where(rows[..., None], lse, jnp.nan)
    return o.astype(q.dtype), lse.swapaxes(1, 2)


def call_backward(q, k, v, o, lse, do, kind, lengths=None, call=None, window=None):
    mask, seen = promised(q, k, kind, lengths, window)
    gradients = xla_kernel().backward(q, k, v, o, lse.swapaxes(1, 2), do, mask)
    return tuple(jnp.where(x[..., None, None], g, jnp.nan) for g, x in zip(gradients, (seen[0], seen[1], seen[1]), strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_the_cudnn_kernel_turns_a_cut_block_into_a_causal_one(monkeypatch, packed):
    """All of it but the two calls into cuDNN, which are played by the promise they give."""
    monkeypatch.setattr(cudnn_attention, "_call_forward", call_forward)
    monkeypatch.setattr(cudnn_attention, "_call_backward", call_backward)
    kernel, length = within_window(cudnn_attention.cudnn_kernel()), 32
    segments = documents(64, 30) if packed else None
    later, earlier = (None, None) if segments is None else (segments[:, 32:], segments[:, :32])
    for window, distance in ((70, 32), (50, 32), (33, 32), (20, 32), (7, 32)):
        mask = Mask(False, later, earlier, window, distance)
        compare_kernels(kernel, ByDefinition(mask), *kernel_inputs(GQA, length), mask, tolerance=2e-5)
    mask = Mask(True, later, later, 9)
    compare_kernels(kernel, ByDefinition(mask), *kernel_inputs(GQA, length), mask, tolerance=2e-5)


# --------------------------------------------------------------------------------------------- against the whole sequence


@pytest.mark.parametrize(
    ("c", "window", "heads", "packed"),
    [
        pytest.param(*case, marks=() if number < 4 else pytest.mark.slow, id="-".join(map(str, (case[0], case[1], case[3]))))
        for number, case in enumerate(
            [
                (1, 11, GQA, 1),
                (2, 20, MHA, 1),
                (4, 8, GQA, 0),
                (8, 40, GQA, 1),
                (2, 1, GQA, 1),
                (4, 40, MHA, 1),
                (3, 33, GQA, 0),
                (8, 3, MHA, 1),
                (2, 63, MHA, 0),
            ]
        )
    ],
)
def test_output_and_gradients_are_those_of_the_whole_sequence(c, window, heads, packed):
    inputs = kernel_inputs(heads, 60 if c == 3 else S)
    segments = documents(inputs[0].shape[1]) if packed else None
    assert_near(over_context(in_windows(window), c, packed)(*inputs, segments), whole(window)(*inputs, segments))


def test_no_gradient_passes_the_window():
    """The output at one position, differentiated by every q, k and v: exactly 0 but for those it may see."""
    (q, k, v, cotangent), segments = kernel_inputs(GQA), documents(mean=40)
    run, ids, window = over_context(in_windows(11), 4, True), np.asarray(segments), 11
    for position in (0, 10, 11, 31, 32, 63):
        at_position = jnp.where((jnp.arange(S) == position)[None, :, None, None], cotangent, 0)
        dq, dk, dv = (np.abs(np.asarray(g)).sum(axis=(2, 3)) for g in run(q, k, v, at_position, segments)[1:])
        before = position - np.arange(S)
        seen = (ids == ids[:, position : position + 1]) & (before >= 0)[None] & (before < window)[None]
        assert ((dv > 0) == seen).all()
        assert not dk[~seen].any()
        assert not np.delete(dq, position, axis=1).any()


# ----------------------------------------------------------------------------------------------------------- work and bytes


@pytest.mark.parametrize("c", [1, 4])
def test_work_falls_with_the_window(c):
    """Matmul FLOPs of both passes: 7 x 2 x pairs x heads x head size, of the tiles that are touched."""
    length, rows = 4096, 64
    found = {}
    for window in (64, 256, 1024):
        jaxpr = traced(in_windows(window), c, length, kernel=xla_kernel(max_rows=rows))
        found[window] = matmul_flops(jaxpr) / (7 * 2 * 2 * H) / length
    # Keys per query: the window, the rows of a tile, and of the square at a chunk's start the half that the window cuts off.
    for window in (64, 256):
        assert 0.9 * window < found[window] < window + rows + (window**2 / (length // (2 * c)) if c > 1 else 0) + 1
    # Two chunks before are seen, the first of them whole. Of the own chunk the half above the diagonal is masked too.
    assert 0.9 * 1024 < found[1024] < 1024 + (512 if c > 1 else 0) + rows


@pytest.mark.parametrize(("c", "window"), [(4, 9), (4, 8), (4, 20), (8, 2), (8, 40), (2, 60)])
def test_a_rank_sends_what_others_see_and_no_more(c, window):
    """Keys and values forward; backward the same, and their gradients."""
    length = 64 // (2 * c)
    forward, both = (sent(traced(in_windows(window), c, 64, gradient=gradient)) for gradient in (False, True))
    expected = 0
    for distance in range(1, chunks_in_reach(window, length, c) + 1):
        keys = length - first_seen(window, length, distance)
        assert keys > 0
        # A chunk that is its own rank's neighbour is not sent.
        low, high, crossing = (
            c - distance,
            c - distance,
            [s for s in range(max(0, c - distance), c) if 2 * c - 1 - distance - s >= 0],
        )
        crosses = any(source != 2 * c - 1 - distance - source for source in crossing)
        expected += keys * ((low > 0) + (high > 0) + crosses)
    assert forward == expected * 2 * H
    assert both == 3 * forward
    assert sent(traced("ring", c, 64, gradient=False)) == (c - 1) * 2 * length * 2 * H


@needs_gpu_compiler
@pytest.mark.slow
def test_all_that_a_step_sends_lies_behind_matmuls():
    """Compiled for eight H100s, where each chunk sees the one before it."""
    chosen = load_config(
        {"model": MODEL, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 2}},
        ["parallel.context=8", "parallel.data=1", "model.sliding_window=512", "data.mask_documents=false"],
    ).resolve(8)
    text = compile_step(chosen, gpu_devices(hosts=1, gpus_per_host=8)).as_text()
    assert set(re.findall(r'mask_type": ?"(\w+)"', text)) == {"CAUSAL"}
    assert {"0", "512"} == set(re.findall(r'sliding_window_length": ?"?(\d+)', text))
    found = [c for c in Module(text, axis_sizes(chosen.parallel)).collectives() if c.kind == "collective-permute"]
    assert {shape[1] for c in found for _, shape in c.buffers} == {511}
    assert all(c.asynchronous for c in found)
    # Before the loop over layers XLA of JAX 0.12 may end the transfers of keys and values before a matmul begins.
    assert sum(not c.spans_matmul for c in found) <= 2 * (jax.__version_info__ >= (0, 11))


def sent(jaxpr):
    """Elements that a rank sends."""
    return sum(e.invars[0].aval.size * times for e, times in equations(jaxpr) if e.primitive.name == "ppermute")


def test_model_flops_count_the_window(tiny_config):
    # The diagonal counts half, and so does the window's far end.
    assert causal_pairs(100, 30) == sum(min(position + 0.5, 30) for position in range(100))
    model = tiny_config("model.sliding_window=16", "train.sequence_length=64").model
    full = tiny_config("train.sequence_length=64").model
    share = (16 - 16**2 / 128) / 32
    assert attention_flops_per_token(model, 64, True) == share * attention_flops_per_token(full, 64, True)
    assert attention_flops_per_token(model, 16, True) == attention_flops_per_token(full, 16, True)
    assert window_shares(model.model_copy(update={"full_attention_every": 2}), 64) == {16: 0.5, None: 0.5}


@pytest.mark.parametrize("context", [1, 2, 8])
def test_step_time_falls_with_the_window(context):
    def attention(window):
        keys = [
            f"model.sliding_window={window}",
            f"parallel.context={context}",
            "parallel.data=1",
            "train.sequence_length=32768",
        ]
        config = load_config(
            {"model": {"name": "llama-3.1-8b"}, "train": {"steps": 1, "global_batch_sequences": 8, "sequence_length": 8192}},
            keys,
        )
        model = StepModel(config.resolve(context), find_gpu("h100-80gb"), 8, MEASURED)
        return sum(model.attention_s()), sum(times.total_s for times in model.tick()[1:3])

    (narrow, sent_narrow), (wide, sent_wide), (all_of_it, sent_all) = map(attention, (1024, 8192, "null"))
    assert narrow < 0.25 * wide < 0.25 * all_of_it * 1.01
    assert sent_narrow <= sent_wide <= sent_all


# --------------------------------------------------------------------------------------------------------------- a train step

ROWS, LENGTH = 24, 16
NETWORK = ("model.sliding_window=5", "model.num_layers=4", "model.vocab_size=258", "model.num_kv_heads=2")
GEMMA = (
    *("model.local_rope_theta=100.0", "model.query_pre_attn_scalar=3", "model.activation=gelu_tanh"),
    *("model.scale_embeddings=true", "model.norm_plus_one=true", "model.block_norms=both", "model.qk_norm=head"),
    *("model.tie_embeddings=true", "model.full_attention_every=2", "model.initializer_std=0.2"),
)
KINDS = {"all": (), "gemma": GEMMA, "first": ("model.full_attention_first=1",)}
CASES = [
    # data, context, tensor, pipe; ZeRO; microbatches; which layers attend to all; whether documents are masked
    ((8, 1, 1, 1), 1, 1, "all", 1, "parallel.remat=selective"),
    ((4, 1, 2, 1), 1, 2, "gemma", 0, "parallel.remat=none"),
    ((3, 1, 1, 1), 0, 2, "first", 1, "model.scan_layers=false"),
    ((2, 2, 2, 1), 3, 2, "gemma", 1, "parallel.remat=full"),
    ((1, 4, 1, 1), 2, 2, "all", 1, "parallel.remat=offload"),
    ((2, 4, 1, 1), 3, 1, "first", 0, "parallel.context_method=all_gather parallel.remat=selective"),
    ((1, 1, 2, 2), 1, 4, "first", 1, "parallel.remat=full"),
    ((1, 2, 1, 2), 2, 2, "gemma", 0, "parallel.remat=selective"),
    ((2, 1, 1, 2), 3, 2, "gemma", 1, "parallel.schedule=interleaved parallel.virtual_stages=2"),
    ((2, 1, 1, 2), 1, 2, "all", 0, "parallel.schedule=gpipe"),
]

DEFAULT = (3, 5, 7)
"""Every kind, every axis, several ranks and microbatches."""


@pytest.fixture(scope="module")
def make_run(tiny_config):
    """Makes runs whose microbatches, however many, share one batch of ROWS sequences."""

    def make(mesh, kinds, packed, *more, zero=0, microbatches=1):
        axes = [f"parallel.{axis}={size}" for axis, size in zip(("data", "context", "tensor", "pipe"), mesh, strict=True)]
        batch = (
            f"train.global_batch_sequences={ROWS}",
            f"train.microbatch_sequences={ROWS // mesh[0] // microbatches}",
            f"train.sequence_length={LENGTH}",
            f"data.mask_documents={'true' if packed else 'false'}",
        )
        config = tiny_config(*NETWORK, *KINDS[kinds], *axes, *batch, f"parallel.zero={zero}", *more)
        rows = unequal_batch(0, (1, ROWS, LENGTH), ends=1 if packed else 0)
        return Run(config, lambda seed: {name: x.reshape(microbatches, -1, LENGTH) for name, x in rows.items()})

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    """By the network's own forward pass, which masks what is outside the window."""

    @functools.cache
    def gradients(kinds, packed):
        run = make_run((1, 1, 1, 1), kinds, packed)
        loss, found = run.gradients()
        return loss, run.plain(found)

    return gradients


@pytest.mark.parametrize(
    ("mesh", "zero", "microbatches", "kinds", "packed", "more"),
    [pytest.param(*case, marks=() if number in DEFAULT else pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=str,
)
def test_loss_and_gradients_equal_one_device(make_run, one_device, mesh, zero, microbatches, kinds, packed, more):
    run = make_run(mesh, kinds, packed, *more.split(), zero=zero, microbatches=microbatches)
    loss, gradients = run.gradients()
    expected = one_device(kinds, packed)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(run.plain(gradients), expected[1], 1e-5)


def test_chunks_with_kinds_in_another_order_are_refused_beside_a_ring(tiny_config):
    keys = (*NETWORK, "model.full_attention_every=3", "parallel.pipe=2", "parallel.context=2")
    with pytest.raises(ConfigError, match="cut the layers at whole periods of model"):
        tiny_config(*keys)
    # All positions are in the window: no layer differs in its attention.
    assert tiny_config(*keys, "train.sequence_length=4").parallel.pipe == 2


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            ["full_attention_every=3"],
            r"full_attention_every=3 has no effect without .*: set model\.full_attention_every=null\.",
        ),
        (
            ["local_rope_theta=5.0", "full_attention_first=1"],
            r"model\.full_attention_first=0 and model\.local_rope_theta=null\.",
        ),
        (["sliding_window=0"], "sliding_window=0"),
        (["sliding_window=4", "full_attention_every=1"], "sliding_window=4 is on none of 2 layers"),
        (["sliding_window=4", "full_attention_first=2"], "sliding_window=4 is on none of 2 layers"),
        (["sliding_window=4", "full_attention_first=true"], "full_attention_first"),
    ],
)
def test_windows_without_effect_are_refused(tiny_config, keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        tiny_config("model.num_layers=2", *(f"model.{key}" for key in keys))


def test_every_candidate_of_a_plan_is_a_config():
    config = load_config(
        {"model": {"name": "gemma-3-12b"}, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 64}}
    )
    found = 0
    for mesh in meshes(config, 64):
        if why_not(config, mesh, 8) is None:
            for group in groups(config, mesh, 8):
                sizes = [f"parallel.{axis}={getattr(mesh, axis)}" for axis in ("pipe", "data", "context", "tensor")]
                pipeline = [f"parallel.schedule={group.schedule}", f"parallel.virtual_stages={group.virtual_stages}"]
                found += mesh.context > 1 < mesh.pipe
                if group.zero == 1 and group.microbatches:
                    batch = [f"train.microbatch_sequences={group.microbatches[0]}"]
                    load_config(config.model_dump(mode="json"), [*sizes, *pipeline, *batch, "parallel.zero=1"])
    assert found
