"""The experts of one layer against a loop over tokens, and their losses against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.config import ConfigError
from jaxllm.model.experts import combine, dispatch, route, sort_by_expert, spread
from jaxllm.model.layers import Experts, Ops

B, S, D, E, K = 2, 8, 16, 5, 2


@pytest.fixture(scope="module")
def make_layer(tiny_config):
    def make(*more):
        sizes = (f"model.hidden_size={D}", "model.intermediate_size=12", f"model.num_experts={E}")
        model = tiny_config(*sizes, f"model.experts_per_token={K}", "model.initializer_std=0.5", *more).model
        with nnx.use_eager_sharding(False):
            return model, Experts(model, rngs=nnx.Rngs(0))

    return make


def inputs(seed=0):
    return jax.random.normal(jax.random.key(seed), (B, S, D))


def plain(model, layer, x_BSD):
    """Each token's experts, one after the other."""
    router, gate, up, down = (np.asarray(getattr(layer, name)[...], np.float64) for name in ("router", "gate", "up", "down"))
    y_BSD = np.zeros(x_BSD.shape)
    for b, s in np.ndindex(x_BSD.shape[:2]):
        x = np.asarray(x_BSD[b, s], np.float64)
        p = np.exp(x @ router)
        p /= p.sum()
        chosen = np.argsort(-p)[: model.experts_per_token]
        weights = p[chosen] / (p[chosen].sum() if model.normalize_expert_weights else 1)
        for e, weight in zip(chosen, weights, strict=True):
            a = x @ gate[e]
            y_BSD[b, s] += weight * ((a / (1 + np.exp(-a)) * (x @ up[e])) @ down[e])
    return y_BSD


@pytest.mark.parametrize("normalize", ["true", "false"])
def test_experts_equal_a_loop_over_tokens(make_layer, normalize):
    model, layer = make_layer(f"model.normalize_expert_weights={normalize}")
    x_BSD = inputs()
    np.testing.assert_allclose(layer(x_BSD, Ops())[0], plain(model, layer, x_BSD), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("favoured", [(0, 1), (E - 1, 2)])
def test_all_tokens_on_the_same_experts(make_layer, favoured):
    """The other experts have no rows, and their matrices no gradient."""
    model, layer = make_layer()
    layer.router[...] = layer.router[...].at[0].add(jnp.where(jnp.isin(jnp.arange(E), jnp.array(favoured)), 20.0, 0.0))
    x_BSD = inputs().at[..., 0].set(1.0)
    np.testing.assert_allclose(layer(x_BSD, Ops())[0], plain(model, layer, x_BSD), rtol=1e-4, atol=3e-5)
    gradients = nnx.grad(lambda layer: jnp.sum(layer(x_BSD, Ops())[0] ** 2))(layer)
    moved = [np.abs(gradients[name][...]).max(axis=(1, 2)) > 0 for name in ("gate", "up", "down")]
    np.testing.assert_array_equal(moved, [np.isin(np.arange(E), favoured)] * 3)


def test_gradients_equal_those_of_all_experts_weighted(make_layer):
    """With weights of 0 for those that are not chosen: autodiff of einsums, without sorting."""
    _, layer = make_layer("model.normalize_expert_weights=true")
    x_BSD = inputs()

    def dense(layer, x_BSD):
        p = jax.nn.softmax(x_BSD @ layer.router[...])
        chosen = jax.nn.one_hot(jax.lax.top_k(p, K)[1], E).sum(axis=-2)
        weights = p * chosen / (p * chosen).sum(axis=-1, keepdims=True)
        gate, up = (jnp.einsum("BSD,EDF->BSEF", x_BSD, w[...]) for w in (layer.gate, layer.up))
        return jnp.einsum("BSEF,EFD,BSE->BSD", jax.nn.silu(gate) * up, layer.down[...], weights)

    def of(function):
        return nnx.grad(lambda layer, x: jnp.sum(jnp.sin(function(layer, x))), argnums=(0, 1))(layer, x_BSD)

    found, expected = of(lambda layer, x: layer(x, Ops())[0]), of(dense)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_dispatch_and_combine_are_transposes():
    ids_TK = jax.random.permutation(jax.random.key(0), jnp.tile(jnp.arange(E), (7, 1)), axis=1, independent=True)[:, :3]
    order = sort_by_expert(ids_TK, E)
    np.testing.assert_array_equal(order.sizes_E, np.bincount(np.asarray(ids_TK).ravel(), minlength=E))
    x_TD, y_RD = jax.random.normal(jax.random.key(1), (7, D)), jax.random.normal(jax.random.key(2), (21, D))
    experts_R = np.asarray(ids_TK).ravel()[order.of_sorted_R]
    assert (np.diff(experts_R) >= 0).all()
    np.testing.assert_allclose(jnp.vdot(dispatch(x_TD, order), y_RD), jnp.vdot(x_TD, combine(y_RD, order)), rtol=1e-5)


def test_losses_are_those_of_their_papers(make_layer):
    """Balance: 1 for equal shares, E / K where all tokens choose the same experts. Both are sums over tokens."""
    model, layer = make_layer("model.balance_loss_weight=1", "model.router_z_loss_weight=0.5")
    x_BSD = inputs()
    _, losses = layer(x_BSD, Ops())
    logits = np.asarray(x_BSD, np.float64) @ np.asarray(layer.router[...], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1)[..., :K]
    share = np.stack([np.bincount(row.ravel(), minlength=E) for row in chosen]) / (S * K)
    np.testing.assert_allclose(losses["balance"], E * np.sum(share * p.sum(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(losses["router_z"], 0.5 * np.sum(np.log(np.exp(logits).sum(-1)) ** 2), rtol=1e-5)
    alike = model.model_copy(update={"router_z_loss_weight": 0.0})
    _, losses = route(alike, jnp.ones((1, 8, D)), jnp.zeros((D, E)).at[:, :K].set(50.0), lambda x: x)
    assert set(losses) == {"balance"}
    np.testing.assert_allclose(losses["balance"], 8 * E / K, rtol=1e-5)


def test_spread_is_that_of_equal_experts():
    found = spread(jnp.array([[3.0, 3, 3, 3], [8, 8, 0, 0], [0, 5, 0, 0]]))
    np.testing.assert_allclose(found["expert_load_max"], [1, 2, 4], rtol=1e-6)
    np.testing.assert_allclose(found["experts_used"], [4, 2, 1], rtol=1e-6)


REFUSED = {
    "model.experts_per_token=2": "model.experts_per_token=2 has no effect without model.num_experts: leave it out.",
    "model.num_experts=4": "model.experts_per_token=None of model.num_experts=4: set it to the number of experts of each token",
    "model.num_experts=4 model.experts_per_token=5": "number of experts of each token, 1 to 4.",
    "model.num_experts=4 model.experts_per_token=2 model.lora.rank=2": "adapters of experts are not supported: set model.lora",
    "model.num_experts=4 model.experts_per_token=2 model.matmul_dtype=fp8": "fp8 is not supported with model.num_experts",
    "model.num_experts=4 model.experts_per_token=2 optimizer.name=muon": "muon does not know the matrices of model.num_experts",
    "model.num_experts=4 model.experts_per_token=2 train.loss=given": "train.loss=given may count something else than tokens",
    "model.num_experts=4 model.experts_per_token=2 parallel.tensor=2 parallel.tensor_ring=true": "set tensor_ring=false.",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_experts_do_not_support_is_refused(tiny_config, overrides):
    with pytest.raises(ConfigError) as refused:
        tiny_config(*overrides.split())
    assert REFUSED[overrides] in str(refused.value)
