"""Packed documents are strangers: the step computes the same for each as if it were alone, and no gradient crosses over."""

import jax
import numpy as np
import pytest

from jaxllm.data.documents import Documents
from jaxllm.data.loader import PackedDocuments
from jaxllm.mesh.axes import batch_sharding, make_mesh
from jaxllm.train.build import build_training

S, ROWS = 16, 4
LENGTHS = [7, 4, 20, 9, 1, 13, 5, 3]


class OwnIds(Documents):
    """Documents with token ids of their own: document d has ids 30 d, 30 d + 1, ..."""

    lengths = np.array(LENGTHS)

    def read(self, documents, starts, stops):
        return [30 * d + np.arange(a, b) for d, a, b in zip(documents, starts, stops, strict=True)]


def rows(packing):
    found = PackedDocuments("text", OwnIds(), np.arange(len(LENGTHS)), S, packing, True, 256).in_order(range(ROWS))
    assert found["segments"].max() > 2  # or nothing would be tested
    return found


@pytest.fixture(scope="module", params=[(1, 1, 1), (2, 2, 1), (4, 2, 3)], ids=["one", "data2-tensor2", "zero3"])
def step(request, tiny_config):
    """(value_and_grad and loss_sum of arrays [ROWS, S], parameters) on a mesh."""
    data, tensor, zero = request.param
    axes = (f"parallel.data={data}", f"parallel.tensor={tensor}", f"parallel.zero={zero}")
    config = tiny_config("train.global_batch_sequences=4", *axes).resolve(data * tensor)
    mesh = make_mesh(config.parallel, jax.devices()[: data * tensor])
    training = build_training(config, mesh)
    jitted = [jax.jit(f) for f in (training.functions.value_and_grad, training.functions.loss_sum)]
    with jax.set_mesh(mesh):
        params = training.create_state(0).params

    def on_mesh(function):
        def call(batch):
            with jax.set_mesh(mesh):
                return function(params, {k: jax.device_put(v[None], batch_sharding(mesh)) for k, v in batch.items()})

        return call

    return [on_mesh(f) for f in jitted]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_documents_loss_has_no_gradient_in_any_other(step, packing):
    batch = rows(packing)
    value_and_grad, _ = step
    for document in (0, 2, 5):
        own = (batch["tokens"] // 30 == document) & (batch["segments"] > 0)
        _, gradients = value_and_grad(batch | {"mask": batch["mask"] & own})
        rows_of_ids = np.abs(np.asarray(gradients["embedding"])).sum(axis=1)
        its_ids = 30 * document + np.arange(LENGTHS[document] - 1)
        assert (rows_of_ids[its_ids] > 0).all()
        assert not np.delete(rows_of_ids, its_ids).any()


def test_the_loss_is_that_of_each_document_alone(step):
    batch = rows("best_fit")
    _, loss_sum = step
    total, count = map(float, loss_sum(batch))
    alone = 0.0
    for row in range(ROWS):
        for segment in range(1, batch["segments"][row].max() + 1):
            here = np.flatnonzero(batch["segments"][row] == segment)
            single = {name: np.zeros_like(array) for name, array in batch.items()}
            for name, array in single.items():
                array[0, : len(here)] = batch[name][row, here]
            alone += float(loss_sum(single)[0])
    assert count == sum(LENGTHS) - len(LENGTHS)  # each token but the last of its document predicts one
    assert total == pytest.approx(alone, rel=1e-6)
