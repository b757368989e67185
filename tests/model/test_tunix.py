"""The network as Tunix calls it, and as plain NNX takes it: the numbers are the Llama's. With google-tunix and qwix installed
their trainers run too."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import TINY

from jaxllm.config import load_config
from jaxllm.model.llama import Llama
from jaxllm.model.tunix import TunixModel

IDS = np.random.default_rng(0).integers(0, 256, (4, 16))


def network(**model):
    values = {**TINY, "data": {"mask_documents": False}, "model": TINY["model"] | model}
    return Llama(load_config({**values, "data": {"source": "given"}}).model, rngs=nnx.Rngs(0))


def causal(mask_BS):
    """As Tunix's make_causal_attn_mask."""
    S = mask_BS.shape[1]
    return mask_BS[:, None, :] & np.tril(np.ones((S, S), bool))[None]


def positions(mask_BS):
    """As Tunix's build_positions_from_mask."""
    counted = mask_BS.cumsum(-1)
    return counted - (counted >= 1)


@pytest.mark.parametrize(
    "model",
    [{"tie_embeddings": True}, {"sliding_window": 5, "full_attention_every": 2, "num_layers": 4}],
    ids=["tied", "windows"],
)
def test_logits_are_the_llamas(model):
    """With left padding, which a Llama takes as a document of its own."""
    llama = network(**model)
    ours = TunixModel(llama)
    mask = np.arange(16) >= np.array([[0], [3], [0], [7]])
    call = nnx.jit(lambda model, *inputs: model(*inputs))
    logits, cache = call(ours, IDS, positions(mask), None, causal(mask))
    assert cache is None
    expected = call(llama, IDS, positions(mask), mask.astype(np.int32))
    np.testing.assert_allclose(np.asarray(logits)[mask], np.asarray(expected)[mask], atol=2e-6)
    np.testing.assert_allclose(call(ours, IDS)[0], call(llama, IDS), atol=2e-6)
    np.testing.assert_array_equal(call(ours.stacked(), IDS), call(llama, IDS))


def test_a_cache_is_refused():
    with pytest.raises(ValueError, match="keeps no cache: train with it"):
        TunixModel(network())(IDS, None, {})


def test_experts_are_refused():
    with pytest.raises(ValueError, match="no place for a router's losses"):
        TunixModel(SimpleNamespace(config=SimpleNamespace(num_experts=4)))


def loss(model, ids):
    log_p = jax.nn.log_softmax(model(ids[:, :-1]))
    return -jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1).mean()


def test_plain_nnx_trains_it():
    """The lines of docs/extending.md equal optax by hand."""
    model = network()
    graph, params = nnx.split(network())
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids):
        value, gradients = nnx.value_and_grad(loss)(model, ids)
        optimizer.update(model, gradients)
        return value

    @jax.jit
    def by_hand(params):
        value, gradients = jax.value_and_grad(lambda params: loss(nnx.merge(graph, params), IDS))(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    for _ in range(3):
        value, params = by_hand(params)
        np.testing.assert_allclose(step(model, optimizer, jnp.asarray(IDS)), value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), nnx.state(model), params)


@pytest.fixture
def tunix():
    """Tunix's own code promotes ranks and dtypes."""
    found = pytest.importorskip("tunix", reason="google-tunix is not installed")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield found


def sft(model, steps):
    """Losses of Tunix's PeftTrainer on one batch."""
    from tunix.sft import peft_trainer

    losses = []

    class Trainer(peft_trainer.PeftTrainer):
        def _train_step(self, model, optimizer, inputs):
            found = super()._train_step(model, optimizer, inputs)
            jax.debug.callback(lambda loss: losses.append(float(loss)), found[0])
            return found

    mask = np.arange(16)[None] < np.full((4, 1), 12)
    inputs = {"positions": jnp.asarray(positions(mask)), "attention_mask": jnp.asarray(causal(mask))}
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=steps)
    trainer = Trainer(model, optax.adamw(1e-2), config).with_gen_model_input_fn(
        lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask, **inputs}
    )
    batch = peft_trainer.TrainingInput(input_tokens=jnp.asarray(IDS), input_mask=jnp.asarray(mask))
    trainer.train([batch] * steps, None)
    jax.effects_barrier()
    return losses


def test_tunix_fine_tunes_it(tunix):
    model = TunixModel(network())
    losses = sft(model, 20)
    assert losses[0] == pytest.approx(np.log(256), abs=0.2)
    assert losses[-1] < 1


def test_tunix_trains_qwixs_lora_on_it(tunix):
    """The base stays as it was, and the first logits too."""
    qwix = pytest.importorskip("qwix")
    base = network()
    provider = qwix.LoraProvider(module_path=".*layers.*", rank=4, alpha=8.0)
    inputs = {"input_tokens": jnp.asarray(IDS), "positions": None, "cache": None, "attention_mask": None}
    model = qwix.apply_lora_to_model(TunixModel(base), provider, rngs=nnx.Rngs(1), **inputs)
    np.testing.assert_allclose(model(**inputs)[0], base(IDS), atol=2e-6)
    losses = sft(model, 20)
    assert losses[-1] < losses[0] - 0.2
    np.testing.assert_array_equal(model.stacked()(IDS), base(IDS))


def test_tunix_prefers_with_it(tunix):
    """DPO begins at log 2, as policy and reference are the same."""
    from tunix.sft.dpo import dpo_trainer

    losses = []

    class Trainer(dpo_trainer.DPOTrainer):
        def _post_process_train_step(self, aux):
            super()._post_process_train_step(aux)
            losses.append(float(aux["rewards/margin"]))

    rng = np.random.default_rng(1)
    ids = {name: jnp.asarray(rng.integers(0, 256, (4, 6))) for name in ("chosen_ids", "rejected_ids")}
    masks = {name: jnp.ones((4, 6), bool) for name in ("chosen_mask", "rejected_mask")}
    prompt_mask = np.arange(8) >= np.array([[0], [3], [0], [7]])
    pairs = dpo_trainer.TrainingInput(prompt_ids=jnp.asarray(IDS[:, :8]), prompt_mask=jnp.asarray(prompt_mask), **ids, **masks)
    config = dpo_trainer.DPOTrainingConfig(eval_every_n_steps=1000, max_steps=10)
    Trainer(TunixModel(network()), TunixModel(network()), optax.adamw(1e-3), config).train([pairs] * 10, None)
    assert losses[0] == pytest.approx(0, abs=1e-6)
    assert losses[-1] > 0.5
