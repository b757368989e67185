"""Laws of the network: causality, document boundaries, and no effect of looping or padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.config import ConfigError
from jaxllm.cost_model.flops import parameter_count
from jaxllm.model import cudnn_attention
from jaxllm.model.attention import choose_kernel, xla_attention
from jaxllm.model.layers import Ops, rotary_frequencies, rotary_table, rotate
from jaxllm.model.llama import Llama, scan_layers
from jaxllm.parallel.parameters import initial_params, parameter_table

S = 12


@pytest.fixture(scope="module")
def config(tiny_config):
    return tiny_config("model.tie_embeddings=false")


@pytest.fixture(scope="module")
def network(config):
    graph, _ = parameter_table(config)
    return graph, initial_params(config, jax.random.key(1))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, S)), jnp.int32)


def influence(network, tokens, segments=None):
    """[i, j] = largest |d (hidden state i) / d (input embedding of position j)|."""
    graph, params = network
    width = params["embedding"].shape[1]

    def hidden_of_inputs(inputs_SD):
        # One vocabulary row per position: the gradient of row j is that of position j's input.
        model = nnx.merge(graph, {**params, "embedding": inputs_SD})
        return model.hidden(jnp.arange(S)[None], segments_BS=segments)[0]

    inputs_SD = params["embedding"][tokens[0]]
    jacobian = jax.jacrev(hidden_of_inputs)(inputs_SD)
    assert jacobian.shape == (S, width, S, width)
    return jnp.abs(jacobian).max(axis=(1, 3))


def test_position_i_never_sees_a_later_one(network, tokens):
    seen = influence(network, tokens)
    later = np.triu(np.ones((S, S), bool), k=1)
    assert (np.asarray(seen)[later] == 0.0).all()
    assert (np.asarray(seen)[~later] > 0.0).all()


def test_a_document_never_sees_another(network, tokens):
    segments = jnp.asarray([[0] * 5 + [1] * 4 + [2] * 3])
    seen = np.asarray(influence(network, tokens, segments))
    same = np.asarray(segments[0][:, None] == segments[0][None, :])
    assert (seen[~same] == 0.0).all()
    assert (seen[same & np.tril(np.ones((S, S), bool))] > 0.0).all()


def test_a_packed_document_gives_its_own_logits(network, tokens):
    graph, params = network
    model = nnx.merge(graph, params)
    packed = model(tokens, jnp.asarray([[*range(5), *range(7)]]), jnp.asarray([[0] * 5 + [1] * 7]))
    alone = model(tokens[:, 5:])
    np.testing.assert_allclose(packed[:, 5:], alone, atol=1e-5)


def test_unrolled_layers_equal_scanned_ones(network, tokens):
    graph, params = network
    model = nnx.merge(graph, params)
    scanned = model.hidden(tokens)
    unrolled = model.hidden(tokens, run_layers=partial(scan_layers, unroll=True))
    np.testing.assert_allclose(scanned, unrolled, atol=1e-6)


def test_vocabulary_padding_changes_no_value(config, network, tokens):
    _, params = network
    padded = Llama(config.model, rngs=nnx.Rngs(params=jax.random.key(1)), vocab_rows=260)
    values = nnx.to_pure_dict(nnx.state(padded))
    assert (values["embedding"][256:] == 0).all()
    assert values["embedding"].shape == values["head"].shape == (260, 32)
    jax.tree.map(np.testing.assert_array_equal, values["layers"], params["layers"])
    np.testing.assert_array_equal(values["head"][:256], params["head"])
    assert padded(tokens).shape == (1, S, 256)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.tie_embeddings=true",),
        ("model.head_dim=16", "model.num_kv_heads=1"),
        ("model.qkv_bias=true", "model.qk_norm=head"),
        ("model.qk_norm=width", "model.block_norms=both"),
    ],
)
def test_every_parameter_is_named_and_counted(tiny_config, overrides):
    config = tiny_config(*overrides)
    _, table = parameter_table(config)
    parameters = jax.tree.leaves(table)
    assert sum(p.size for p in parameters) == parameter_count(config.model)
    for p in parameters:
        assert len(p.dims) == len(p.shape)
        assert (p.path.split(".")[0] == "layers") == (p.dims[0] == "layers")
    sizes = {(dim, size) for p in parameters for dim, size in zip(p.dims, p.shape, strict=True)}
    m = config.model
    assert sizes == {
        ("layers", m.num_layers),
        ("vocab", m.vocab_size),
        ("embed", m.hidden_size),
        ("heads", m.num_heads),
        ("kv_heads", m.num_kv_heads),
        ("head_dim", m.head_dim),
        ("mlp", m.intermediate_size),
    }


def test_attention_matches_one_head_at_a_time():
    """Query head n reads key-value head n // (N / K); softmax(q k / sqrt(H)) v over positions not later than its own."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 6, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    expected = np.zeros_like(q)
    for b, i, n in np.ndindex(2, 6, 4):
        scores = k[b, : i + 1, n // 2] @ q[b, i, n] / np.sqrt(8)
        weights = np.exp(scores - scores.max())
        expected[b, i, n] = weights / weights.sum() @ v[b, : i + 1, n // 2]
    np.testing.assert_allclose(xla_attention(q, k, v), expected, atol=1e-6)


def test_rotation_depends_on_distance_alone(config):
    """<R(i) q, R(j) k> is a function of i - j."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(i, j):
        at = lambda position: rotary_table(config.model, jnp.full((1, 1), position))  # noqa: E731
        return jnp.sum(rotate(q, at(i)) * rotate(k, at(j)))

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(8, 3)) > 1e-3


def test_llama3_scaling_stretches_slow_pairs_only(tiny_config):
    plain = tiny_config("model.head_dim=64", "model.rope_theta=500000.0").model
    scaling = "model.rope_scaling={factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192}"
    stretched = tiny_config("model.head_dim=64", "model.rope_theta=500000.0", scaling).model
    before, after = rotary_frequencies(plain), rotary_frequencies(stretched)
    wavelength = 2 * np.pi / before
    np.testing.assert_array_equal(after[wavelength < 8192 / 4], before[wavelength < 8192 / 4])
    np.testing.assert_allclose(after[wavelength > 8192], before[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any()
    assert ((after < before) & (after > before / 8))[between].all()


class Device:
    """The parts of a jax.Device that the choice of a kernel reads."""

    def __init__(self, platform, compute_capability=None):
        self.platform, self.device_kind = platform, f"some {platform}"
        if compute_capability:
            self.compute_capability = compute_capability


CPU, HOPPER, TURING = Device("cpu"), Device("gpu", "9.0"), Device("gpu", "7.5")


def test_a_named_kernel_that_cannot_run_is_an_error(tiny_config, monkeypatch):
    with pytest.raises(ConfigError, match=r"model.attention=cudnn cannot run here, because it needs an NVIDIA GPU"):
        choose_kernel(tiny_config("model.attention=cudnn").model, CPU)
    with pytest.raises(ConfigError, match=r"model.compute_dtype is float32"):
        choose_kernel(tiny_config("model.attention=cudnn").model, HOPPER)
    with pytest.raises(ConfigError, match=r"needs Ampere .* and some gpu has 7.5"):
        choose_kernel(tiny_config("model.attention=cudnn").model, TURING)
    monkeypatch.setattr(cudnn_attention, "why_not", lambda: "the binding is another")
    with pytest.raises(ConfigError, match=r"cannot run here, because the binding is another"):
        choose_kernel(tiny_config("model.attention=cudnn", "model.compute_dtype=bfloat16").model, HOPPER)


def test_only_auto_falls_back_and_says_so(tiny_config, caplog, monkeypatch):
    assert choose_kernel(tiny_config().model, CPU) == "xla"
    assert not caplog.records
    assert choose_kernel(tiny_config().model, HOPPER) == "xla"
    assert "takes xla, not cudnn: it computes in bfloat16" in caplog.text
    half = tiny_config("model.compute_dtype=bfloat16").model
    assert choose_kernel(half, HOPPER) == "cudnn"
    monkeypatch.setattr(cudnn_attention, "why_not", lambda: "the binding is another")
    assert choose_kernel(half, HOPPER) == "xla"
    assert "takes xla, not cudnn: the binding is another" in caplog.text


def test_the_program_does_not_grow_with_depth(tiny_config):
    """HLO of a gradient through 32 scanned layers is within 5% of that through 4."""

    def size(layers):
        config = tiny_config(f"model.num_layers={layers}")
        graph, table = parameter_table(config)
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), table)

        def loss(params, tokens):
            return nnx.merge(graph, params).hidden(tokens, ops=Ops()).sum()

        return len(jax.jit(jax.grad(loss)).lower(shapes, jax.ShapeDtypeStruct((2, S), jnp.int32)).as_text())

    assert size(32) == pytest.approx(size(4), rel=0.05)
