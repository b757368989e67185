"""The network with the call that Tunix's trainers make: `(tokens, positions, cache, attention_mask) -> (logits, cache)`.

    model = TunixModel(jaxllm.load_model(FOLDER, "float32"))
    PeftTrainer(model, optax.adamw(1e-5), TrainingConfig(...)).train(batches)
    model.stacked()

Tunix computes loss and update, by nnx.value_and_grad and nnx.Optimizer. Each layer is a module of its own here, called in turn,
so that Qwix can add parameters to it; in a Llama the layers are one stack, and a layer is merged inside a scan. Neither is
imported here. google-tunix 0.1.7 (sft/peft_trainer.py, sft/dpo/dpo_trainer.py) and qwix 0.1.8 were tried.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.config.model_spec import has_experts
from jaxllm.model.attention import Attend, plain_attention
from jaxllm.model.layers import Ops
from jaxllm.model.llama import BlockContext, Llama


class TunixModel(nnx.Module):
    """A Llama as Tunix calls it, with a copy of its layers.

    Args:
      model: with the weights to train. Give master weights (float32), as Tunix updates what it is given.
    """

    def __init__(self, model: Llama):
        if has_experts(model.config):
            raise ValueError("TunixModel has no place for a router's losses: train a model with experts by jaxllm train.")
        self.model = nnx.merge(*nnx.split(model))
        graph, stack = nnx.split(model.layers)
        of_layer = lambda number: jax.tree.map(lambda x: x[number], stack)  # noqa: E731
        blocks = [nnx.merge(graph, of_layer(number)) for number in range(model.config.num_layers)]
        for variable in (v for block in blocks for _, v in nnx.iter_graph(block) if isinstance(v, nnx.Param)):
            variable.set_metadata("out_sharding", variable.get_metadata("out_sharding")[1:])
        layers: Any = nnx.List(blocks)
        self.model.layers = layers

    def __call__(
        self,
        input_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"] | None = None,
        cache: None = None,
        attention_mask: Bool[Array, "B S S"] | None = None,
    ) -> tuple[Float[Array, "B S V"], None]:
        """(float32 logits, None).

        Args:
          attention_mask: whether a position (dim 1) sees another (dim 2); None: all positions up to its own.

        Raises:
          ValueError: there is a cache, as Tunix's samplers have; `jaxllm.generate` continues texts.
        """
        if cache is not None:
            raise ValueError("TunixModel keeps no cache: train with it, and generate with jaxllm.generate and its stacked().")
        config = self.model.config
        ops = Ops(attend=plain_attention(config) if attention_mask is None else _attend_where(config, attention_mask))
        h_BSD = self.model.hidden(input_tokens, positions, ops=ops, run_layers=partial(self._run_layers, ops))
        logits_BSV = jnp.einsum("BSD,VD->BSV", h_BSD, self.model.head_matrix(), preferred_element_type=jnp.float32)
        return logits_BSV[..., : config.vocab_size], None

    def stacked(self) -> Llama:
        """The network as the rest of jaxllm takes it, with the present weights. Those that Qwix added are left out."""
        config, own = self.model.config, dict(nnx.to_flat_state(nnx.state(self.model, nnx.Param)))
        rows = self.model.embedding.shape[0]
        graph, state = jax.eval_shape(lambda: nnx.split(Llama(config, rngs=nnx.Rngs(0), vocab_rows=rows)))

        def value(path: tuple[Any, ...]) -> jax.Array:
            if path[0] != "layers":
                return own[path][...]
            return jnp.stack([own["layers", number, *path[1:]][...] for number in range(config.num_layers)])

        found = [(path, variable.replace(value(path))) for path, variable in nnx.to_flat_state(state)]
        return nnx.merge(graph, nnx.from_flat_state(found))

    def _run_layers(self, ops: Ops, block: Any, layers: Any, h_BSD: jax.Array, block_context: BlockContext) -> jax.Array:
        """A RunLayers (llama.py) by the modules themselves."""
        config: ModelConfig = self.model.config
        blocks: Any = self.model.layers
        for module, kind in zip(blocks, config.layer_kinds, strict=True):
            here, own = ops, block_context
            if len(config.kinds) > 1:
                here, own = replace(ops, attend=partial(ops.attend, kind=kind)), block_context.of_kind(kind)
            h_BSD = module(h_BSD, own.rotary, own.segments_BS, here)[0]
        return h_BSD


def _attend_where(model: ModelConfig, mask_BST: jax.Array) -> Attend:
    """Attention of the positions that the mask lets see each other, within the windows of the layers."""
    S = mask_BST.shape[1]
    windows = jnp.array([S if window is None else window for window in model.kinds], jnp.int32)

    def attend(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BS: None, *, kind: int = 0) -> jax.Array:
        distance_ST = jnp.arange(S)[:, None] - jnp.arange(S)[None]
        visible_BST = mask_BST.astype(bool) & (distance_ST < windows[kind])[None]
        return jax.nn.dot_product_attention(q_BSNH, k_BTKH, v_BTKH, mask=visible_BST[:, None])

    return attend
