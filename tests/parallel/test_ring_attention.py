"""Attention split over the context axis: the zigzag table, the blocks it is made of, ring and all-gather against plain
attention over the whole sequence, and what they send.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import drawn, pairwise, with_triples
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import compare_kernels, documents
from kernel_cases import kernel_inputs as arrays

from jaxllm import private_jax
from jaxllm.compile.aot import can_compile_for_gpus, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.config import ATTENTION_RESULTS
from jaxllm.mesh.axes import AXES, CONTEXT, MANUAL, TENSOR
from jaxllm.mesh.sharding import tensor_shard_map
from jaxllm.model import cudnn_attention
from jaxllm.model.attention import xla_attention
from jaxllm.model.blockwise_attention import (
    NOTHING,
    Mask,
    Partial,
    documents_by_halves,
    merge,
    rectangle,
    xla_kernel,
)
from jaxllm.parallel import zigzag
from jaxllm.parallel.ring_attention import all_gather_attention, ring_attention
from jaxllm.plots.schedule import zigzag_picture

B, S, H = 2, 64, 8
MHA, GQA = (4, 4), (4, 2)
AUTO = (AxisType.Auto,) * len(AXES)
METHODS = {"ring": ring_attention, "all_gather": all_gather_attention}


def maker(method):
    """(kernel, axis name, c) -> Attend, for a name in METHODS or itself."""
    return METHODS.get(method, method)


needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")


def with_gradients(attend, q, k, v, cotangent, segments=None):
    """(output, dq, dk, dv)"""
    out, vjp = jax.vjp(lambda *x: attend(*x, segments), q, k, v)
    return out, *vjp(cotangent)


whole = jax.jit(partial(with_gradients, xla_attention))


def assert_near(ours, theirs, tolerance=1e-5):
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=name)


# ---------------------------------------------------------------------------------------------------------------- zigzag


@pytest.mark.parametrize("c", [1, 2, 3, 4, 8, 16])
def test_every_causal_pair_of_chunks_is_computed_once_and_by_a_rank_that_has_the_queries(c):
    table = zigzag.blocks(c)
    products = sorted(pair for steps in table for step in steps for pair in step)
    assert products == [(q, k) for q in range(2 * c) for k in range(q + 1)]
    for rank, steps in enumerate(table):
        for step, pairs in enumerate(steps):
            assert {q for q, _ in pairs} <= set(zigzag.chunks(rank, c))
            assert {k for _, k in pairs} <= set(zigzag.chunks((rank - step) % c, c))


@pytest.mark.parametrize("c", [1, 2, 3, 4, 8, 16])
def test_every_rank_computes_two_products_at_every_step_half_of_a_ring_without_zigzag(c):
    assert {zigzag.cost(pairs) for steps in zigzag.blocks(c) for pairs in steps} == {2}
    # Contiguous parts of two chunks each: the last rank computes four products a step but for its own causal one, two.
    assert 2 * c / (4 * (c - 1) + 2) == pytest.approx(0.5, abs=0.5 / (2 * c - 1))


@pytest.mark.parametrize("c", [1, 2, 3, 8])
def test_order_deals_out_chunks_and_inverse_takes_them_back(c):
    x = np.arange(48) * 7
    dealt = x[zigzag.order(48, c)]
    assert (dealt[zigzag.inverse(48, c)] == x).all()
    chunk = 48 // (2 * c)
    for rank, part in enumerate(dealt.reshape(c, 2, chunk)):
        for held, number in zip(part, zigzag.chunks(rank, c), strict=True):
            assert (held == x[number * chunk : (number + 1) * chunk]).all()


def test_the_table_as_text_and_picture(tmp_path):
    assert (
        zigzag.table_text(2)
        == "rank  holds  step 0       step 1\n0     0, 3   0<0 3<0 3<3  3<1 3<2\n1     1, 2   1<1 2<1 2<2  2<0 1<0"
    )
    pytest.importorskip("matplotlib")
    zigzag_picture(4, tmp_path / "zigzag.png")
    assert (tmp_path / "zigzag.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------------- kernels

TILED = xla_kernel(max_rows=8)


def in_two_blocks(kernel, q, k, v, cotangent, segments):
    """(output, lse, dq, dk, dv): the first half of the keys as one block, the second as another."""
    half = S // 2
    early, late = slice(0, half), slice(half, S)
    part = lambda x, where: None if x is None else x[:, where]  # noqa: E731
    causal = [Mask(True, part(segments, s), part(segments, s)) for s in (early, late)]
    full = Mask(False, part(segments, late), part(segments, early))
    first, second = (kernel.forward(q[:, s], k[:, s], v[:, s], m) for s, m in zip((early, late), causal, strict=True))
    second = merge(second, kernel.forward(q[:, late], k[:, early], v[:, early], full))
    o, lse = (jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True))
    gradients = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    for rows, columns, mask in ((early, early, causal[0]), (late, late, causal[1]), (late, early, full)):
        of_queries = (x[:, rows] for x in (o, lse, cotangent))
        found = kernel.backward(q[:, rows], k[:, columns], v[:, columns], *of_queries, mask)
        gradients = [g.at[:, s].add(x) for g, s, x in zip(gradients, (rows, columns, columns), found, strict=True)]
    return o, lse, *gradients


@pytest.mark.parametrize(("heads", "packed"), [pytest.param(MHA, False, marks=pytest.mark.slow), (GQA, True)])
def test_blocks_merged_are_the_whole_and_their_gradients_its_parts(heads, packed):
    q, k, v, cotangent = arrays(heads)
    segments = documents() if packed else None
    o, lse, *gradients = jax.jit(partial(in_two_blocks, TILED))(q, k, v, cotangent, segments)
    assert_near((o, *gradients), whole(q, k, v, cotangent, segments))
    expected = jax.jit(lambda *x: TILED.forward(*x, Mask(True, segments, segments)))(q, k, v).lse_BSN
    np.testing.assert_allclose(lse, expected, atol=1e-5)
    assert (o.dtype, lse.dtype) == (jnp.float32, jnp.float32)


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient():
    q, k, v, cotangent = arrays(GQA)
    strangers = Mask(False, documents(), documents() + 1000)
    blank = jax.jit(lambda *x: TILED.forward(*x, strangers))(q, k, v)
    assert not np.asarray(blank.o_BSNH).any()
    assert (np.asarray(blank.lse_BSN) == np.float32(NOTHING)).all()
    for other in (blank, Partial(cotangent, jnp.ones((B, S, 4)))):
        for merged in (merge(blank, other), merge(other, blank)):
            assert (merged.o_BSNH == other.o_BSNH).all()
            assert (merged.lse_BSN == other.lse_BSN).all()
    for lse in (blank.lse_BSN, jnp.ones((B, S, 4))):
        for gradient in jax.jit(lambda *x: TILED.backward(*x, strangers))(q, k, v, blank.o_BSNH, lse, cotangent):
            assert not np.asarray(gradient).any()  # nan counts as true


@pytest.mark.parametrize("seed", range(5))
def test_documents_leave_a_rectangle_of_a_block_that_is_not_causal(seed):
    """Queries from the front, keys from the back, touching or not; the means give one to many documents."""
    for mean in (2, 20, 200):
        segments = documents(96, mean, seed)
        for queries in (slice(32, 64), slice(64, 96)):
            mask = Mask(False, segments[:, queries], segments[:, :32])
            expected = np.asarray(mask.q_segments_BS)[:, :, None] == np.asarray(mask.k_segments_BT)[:, None, :]
            front, back = (np.asarray(n)[:, None] for n in rectangle(mask))
            found = (np.arange(32)[None] < front)[:, :, None] & (np.arange(32)[None] >= 32 - back)[:, None, :]
            assert (found == expected).all()


@pytest.mark.parametrize(("length", "smallest"), [(64, 16), (40, 4)])
def test_documents_by_halves_are_the_causal_block(length, smallest):
    segments = documents(length)
    halves = documents_by_halves(TILED, TILED, smallest)
    compare_kernels(halves, TILED, *arrays(GQA, length), Mask(True, segments, segments))


def padded_forward(q, k, v, kind, lengths):
    """What cuDNN promises under a padding mask, and nan where it promises nothing."""
    assert kind == "PADDING"
    rows, columns = (jnp.arange(x.shape[1])[None] < length[:, None] for x, length in zip((q, k), lengths, strict=True))
    o, lse = xla_kernel().forward(q, k, v, Mask(False, jnp.ones_like(rows, int), jnp.where(columns, 1, 0)))
    o, lse = jnp.where(rows[..., None, None], o, jnp.nan), jnp.where(rows[..., None], lse, jnp.nan)
    return o.astype(q.dtype), lse.swapaxes(1, 2)


def padded_backward(q, k, v, o, lse, do, kind, lengths):
    rows, columns = (jnp.arange(x.shape[1])[None] < length[:, None] for x, length in zip((q, k), lengths, strict=True))
    mask = Mask(False, jnp.where(rows, 1, 2), jnp.where(columns, 1, 0))
    gradients = xla_kernel().backward(q, k, v, o, lse.swapaxes(1, 2), do, mask)
    return tuple(jnp.where(x[..., None, None], g, jnp.nan) for g, x in zip(gradients, (rows, columns, columns), strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mean", [3, 100])
def test_the_cudnn_kernel_masks_documents_by_lengths_alone(monkeypatch, causal, mean):
    """All of it but the two calls into cuDNN, which are played by the promise they give."""
    monkeypatch.setattr(cudnn_attention, "_call_forward", padded_forward)
    monkeypatch.setattr(cudnn_attention, "_call_backward", padded_backward)
    length = 512
    segments = documents(length, mean)
    mask = Mask(True, segments, segments) if causal else Mask(False, segments[:, 256:], segments[:, :256])
    inputs = arrays(GQA, length if causal else 256)
    compare_kernels(cudnn_attention.cudnn_kernel(), xla_kernel(), *inputs, mask, tolerance=2e-5)
    lengths, _ = cudnn_attention._padding(Mask(False, segments, segments + 1000))
    assert all((np.asarray(length) == 1).all() for length in lengths)  # cuDNN is never given a length of 0


def test_an_unknown_jax_is_refused_by_the_cudnn_kernel(monkeypatch):
    assert cudnn_attention.why_not() is None
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version_info__", (0, 13, 0))
        assert "knows JAX's cuDNN binding up to 0.12" in cudnn_attention.why_not()
    monkeypatch.delattr(private_jax.cudnn_binding(), "_dot_product_attention_bwd_p")
    assert "has another cuDNN binding" in cudnn_attention.why_not()


# -------------------------------------------------------------------------------------------------- against the whole sequence


def over_context(method, c, packed, kernel=TILED, tensor=1):
    """with_gradients of whole sequences in their own order, on c x tensor CPU devices."""
    mesh = Mesh(np.array(jax.devices()[: c * tensor]).reshape(1, 1, c, tensor), AXES, axis_types=AUTO)
    along, heads = P(None, CONTEXT), P(None, None, TENSOR)
    # As in the train step: a region manual over three axes, gradients taken inside, and a region for `tensor` in it.
    attend = tensor_shard_map(maker(method)(kernel, CONTEXT, c), (heads, heads, heads, P()), heads)
    specs = (along, along, along, along, along if packed else None)
    local = partial(with_gradients, attend)
    region = jax.shard_map(local, mesh=mesh, axis_names=set(MANUAL), in_specs=specs, out_specs=along, check_vma=False)

    @jax.jit
    def run(*inputs):
        order, inverse = (f(inputs[0].shape[1], c) for f in (zigzag.order, zigzag.inverse))
        return [x[:, inverse] for x in region(*jax.tree.map(lambda x: x[:, order], inputs))]

    return run


CASES = [(method, c, heads, packed) for method in METHODS for c in (1, 2, 3, 4, 8) for heads in (MHA, GQA) for packed in (0, 1)]
DEFAULT = [
    ("ring", 1, GQA, 1),
    ("ring", 2, MHA, 0),
    ("ring", 8, MHA, 1),
    ("all_gather", 2, GQA, 1),
    ("all_gather", 4, MHA, 0),
    ("all_gather", 8, GQA, 1),
]
ALWAYS = with_triples(CASES, pairwise(CASES, start=DEFAULT))


@pytest.mark.parametrize(
    ("method", "c", "heads", "packed"),
    [
        pytest.param(
            *(method, c, heads, packed),
            id=f"{method}-{c}-{'mha' if heads == MHA else 'gqa'}-{'packed' if packed else 'whole'}",
            marks=() if (method, c, heads, packed) in DEFAULT else pytest.mark.slow,
        )
        for method, c, heads, packed in ALWAYS + drawn(CASES, ALWAYS)
    ],
)
def test_output_and_gradients_are_those_of_the_whole_sequence(method, c, heads, packed):
    inputs = arrays(heads, 60 if c == 3 else S)
    segments = documents(inputs[0].shape[1]) if packed else None
    assert_near(over_context(method, c, packed)(*inputs, segments), whole(*inputs, segments))


@pytest.mark.parametrize("method", [pytest.param("ring"), pytest.param("all_gather", marks=pytest.mark.slow)])
def test_heads_split_over_tensor_too(method):
    inputs = (*arrays(GQA), documents())
    assert_near(over_context(method, 4, True, tensor=2)(*inputs), whole(*inputs))


def test_bfloat16_is_summed_in_float32():
    """Output and gradients within 1% of the float32 ones; one rounding (0.4%) each, however many blocks they sum."""
    inputs = arrays(GQA, dtype=jnp.bfloat16)
    ours = over_context("ring", 4, False)(*inputs, None)
    for a, b in zip(ours, whole(*(x.astype(jnp.float32) for x in inputs)), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.linalg.norm(a.astype(jnp.float32) - b) < 0.01 * np.linalg.norm(b)


@pytest.mark.parametrize("method", METHODS)
def test_no_gradient_reaches_a_later_position_or_another_document(method):
    """The output at one position, differentiated by every q, k and v: exactly 0 but for those it may see."""
    (q, k, v, cotangent), segments = arrays(GQA), documents()
    run = over_context(method, 4, True)
    ids = np.asarray(segments)
    for position in (0, 7, 8, 20, 31, 32, 47, 63):
        at_position = jnp.where((jnp.arange(S) == position)[None, :, None, None], cotangent, 0)
        gradients = run(q, k, v, at_position, segments)[1:]
        dq, dk, dv = (np.abs(np.asarray(g)).sum(axis=(2, 3)) for g in gradients)
        visible = (ids == ids[:, position : position + 1]) & (np.arange(S) <= position)[None]
        assert ((dv > 0) == visible).all()
        assert not dk[~visible].any()
        assert not np.delete(dq, position, axis=1).any()


# ------------------------------------------------------------------------------------------------------- what is sent and kept


def equations(jaxpr, times=1):
    """(equation, how often it runs) of a jaxpr and all inside it."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner_times = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, inner_times)


def traced(method, c, length=64, packed=False, gradient=True, wrap=lambda attend: attend, kernel=TILED):
    """The jaxpr of one rank's program; no devices needed."""
    mesh = AbstractMesh((1, 1, c, 1), AXES, axis_types=AUTO)
    attend = wrap(maker(method)(kernel, CONTEXT, c))

    def local(q, k, v, cotangent, segments):
        return with_gradients(attend, q, k, v, cotangent, segments) if gradient else attend(q, k, v, segments)

    shapes = [jax.ShapeDtypeStruct((1, length, n, H), jnp.float32) for n in (2, 1, 1, 2)]
    shapes.append(jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None)
    specs = (*[P(None, CONTEXT)] * 4, P(None, CONTEXT) if packed else None)
    program = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, CONTEXT), check_vma=False)
    return jax.make_jaxpr(program)(*shapes).jaxpr


def executed(jaxpr, primitive):
    return sum(times for equation, times in equations(jaxpr) if equation.primitive.name == primitive)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_the_ring_hops_c_minus_1_times_for_each_thing_that_travels(c, packed):
    forward = executed(traced("ring", c, 48, packed, gradient=False), "ppermute")
    both = traced("ring", c, 48, packed)
    keys = 2 if packed else 1  # k and v in one array, segments in another
    assert forward == keys * (c - 1)
    assert executed(both, "ppermute") - forward == (keys + 1) * (c - 1)
    assert not executed(both, "all_gather")
    assert not executed(both, "cond")


def test_all_gather_gathers_twice_and_scatters_once():
    jaxpr = traced("all_gather", 8)
    found = {name: executed(jaxpr, name) for name in ("all_gather", "reduce_scatter", "ppermute", "cond")}
    assert found == {"all_gather": 2, "reduce_scatter": 1, "ppermute": 0, "cond": 0}


@pytest.mark.parametrize("method", METHODS)
def test_the_program_does_not_grow_with_the_ring(method):
    sizes = {c: len(list(equations(traced(method, c, 1024)))) for c in (4, 8, 64)}
    assert sizes[4] == sizes[8] == sizes[64]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_of_the_size_of_the_scores(method, packed):
    """131,072 tokens on 8 ranks: S x S / c is 2^31 elements a head; the largest array has 2^26 for all of them (xla_kernel's
    max_scores)."""
    length = 2**17
    for kernel in (xla_kernel(), documents_by_halves(xla_kernel(), xla_kernel())):
        found = equations(traced(method, 8, length, packed, kernel=kernel if packed else xla_kernel()))
        local = [v.aval.size for e, _ in found if e.primitive.name != "shard_map" for v in e.outvars]
        assert max(local) <= 2**26 < length**2 // 8


def kept_by(policy):
    return partial(jax.checkpoint, policy=policy)


def test_a_remat_policy_that_keeps_the_results_spares_the_forward_ring():
    c = 8
    selective = kept_by(jax.checkpoint_policies.save_only_these_names(*ATTENTION_RESULTS))
    nothing = kept_by(jax.checkpoint_policies.nothing_saveable)
    hops = {name: executed(traced("ring", c, wrap=wrap), "ppermute") for name, wrap in (("kept", selective), ("not", nothing))}
    # Forward once, and twice backward: keys, and gradients. Without the names the recomputation runs the forward ring again.
    assert hops == {"kept": 3 * (c - 1), "not": 4 * (c - 1)}


# ---------------------------------------------------------------------------------------------------------- compiled for H100s


class Compiled:
    """Three layers of attention alone, bf16 and cuDNN, on 8 H100s along the context axis: forward and backward as two loops."""

    layers, c, N, K, H = 3, 8, 8, 2, 128

    def __init__(self, method, packed, tokens=8192):
        c, N, K, H = self.c, self.N, self.K, self.H
        mesh = Mesh(np.array(gpu_devices(hosts=1, gpus_per_host=c)).reshape(1, 1, c, 1), AXES, axis_types=AUTO)
        heads, along = P(None, None, TENSOR), P(None, CONTEXT)
        attend = maker(method)(cudnn_attention.cudnn_kernel(), CONTEXT, c)
        attend = tensor_shard_map(attend, (heads, heads, heads, P()), heads)

        def local(h, segments, cotangent):
            def layer(h, _):
                return h + attend(h, h[:, :, :K], h[:, :, K : 2 * K], segments), None

            out, vjp = jax.vjp(lambda h: jax.lax.scan(layer, h, length=self.layers)[0], h)
            return out, *vjp(cotangent)

        def placed(shape, dtype):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, along))

        h = placed((1, tokens, N, H), jnp.bfloat16)
        segments = placed((1, tokens), jnp.int32) if packed else None
        specs = (along, along if packed else None, along)
        region = jax.shard_map(local, mesh=mesh, axis_names=set(MANUAL), in_specs=specs, out_specs=along, check_vma=False)
        with jax.set_mesh(mesh):
            compiled = jax.jit(region).trace(h, segments, h).lower(lowering_platforms=("cuda",)).compile()
        self.text = compiled.as_text()
        self.module = Module(self.text, dict(zip(AXES, mesh.devices.shape, strict=True)))
        self.collectives = self.module.collectives()

    def sent(self, dtype):
        """Arrays of this dtype that each rank sends in one run."""
        return sum(c.executed for c in self.collectives for kind, _ in c.buffers if kind == dtype)


@needs_gpu_compiler
def test_every_hop_lies_behind_a_cudnn_block_forward_and_backward():
    step = Compiled("ring", packed=False)
    assert {(c.kind, c.axes) for c in step.collectives} == {("collective-permute", (CONTEXT,))}
    hops = step.layers * (step.c - 1)
    assert (step.sent("bf16"), step.sent("f32")) == (2 * hops, hops)
    assert {shape for c in step.collectives for _, shape in c.buffers} == {(2, 1, 8192 // step.c, step.K, step.H)}
    assert all(c.asynchronous and c.spans_matmul for c in step.collectives)
    assert step.text.count("fmhaSoftmaxBackward") > 0


@needs_gpu_compiler
def test_cudnn_masks_documents_as_padding_in_every_block():
    step = Compiled("ring", packed=True, tokens=2048)
    hops = step.layers * (step.c - 1)
    assert (step.sent("bf16"), step.sent("f32")) == (2 * hops, hops)
    assert 0 < step.sent("s32") <= 2 * hops  # the same in every layer, so XLA may let them travel once for all
    calls = [line for line in step.text.splitlines() if 'custom_call_target="__cudnn$fmha' in line]
    assert calls
    assert all('"mask_type": "PADDING"' in line for line in calls)
    assert all(c.asynchronous and c.spans_matmul for c in step.collectives if {dtype for dtype, _ in c.buffers} != {"s32"})


@needs_gpu_compiler
def test_all_gather_compiles_for_cudnn():
    step = Compiled("all_gather", packed=False)
    counts = {kind: sum(c.executed for c in step.collectives if c.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    assert counts == {"all-gather": 2 * step.layers, "reduce-scatter": step.layers}
    assert {dtype for c in step.collectives if c.kind == "reduce-scatter" for dtype, _ in c.buffers} == {"f32"}
