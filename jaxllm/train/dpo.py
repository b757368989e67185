"""Direct Preference Optimization (Rafailov et al., 2023): the loss. The reference is run/evaluation.py.

For a pair with the chosen answer c and the rejected r of one prompt,

    loss = -log sigmoid(beta ((log p(c) - log p_ref(c)) - (log p(r) - log p_ref(r))))

where log p is the sum over an answer's tokens, and p_ref the model that training begins with. Its sums are computed once,
before the first step, and stored with the run. In a batch `reference` holds each text's sum at its first position, and 0
elsewhere.
"""

import jax
import jax.numpy as jnp

from jaxllm.config import Config
from jaxllm.mesh.axes import CONTEXT
from jaxllm.model.loss import token_losses
from jaxllm.parallel.types import Loss, Rows


def dpo_loss(config: Config) -> Loss:
    """The loss of a microbatch of pairs (data/loader.py), and the number of its pairs."""
    beta, model, train = config.train.dpo_beta, config.model, config.train

    def loss(h_BSD: jax.Array, head_VD: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        options = (model.vocab_size, train.loss_chunk_tokens)
        losses_BS: jax.Array = token_losses(h_BSD, head_VD, rows["targets"], *options)
        ratio_BS = jnp.where(rows["mask"], -losses_BS, 0.0) - rows["reference"]
        # Each text has a position at least, so there are no more than positions. The texts of a context rank's sequences may
        # be partly on others. Each rank then has all pairs, and each counts them: so sum, count and gradients grow alike.
        texts = train.sequence_length + 2 - train.sequence_length % 2
        add = jax.vmap(lambda x, segments: jnp.zeros(texts, x.dtype).at[segments - 1].add(x, mode="drop"))
        here_BS, is_text_BS = (
            jax.lax.psum(add(x, jnp.where(rows["segments"] > 0, rows["segments"], texts + 1)), CONTEXT)
            for x in (ratio_BS, rows["mask"].astype(jnp.float32))
        )
        margins_BP, is_pair_BP = beta * (here_BS[:, ::2] - here_BS[:, 1::2]), is_text_BS[:, ::2] > 0
        return jnp.where(is_pair_BP, jax.nn.softplus(-margins_BP), 0.0).sum(), is_pair_BP.sum().astype(jnp.float32)

    return loss
