"""Same weights, same batches, same numbers as transformers' networks: logits, loss, gradients and ten AdamW steps.

The golden files hold transformers' results (tests/golden/make_golden.py). If torch and transformers are installed, the results
are computed again.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.make_golden import CASES, LOGITS, STEPS, B, S, case_config, compute, draw_batches, draw_weights, golden_path
from golden.weights import shapes_of_theirs, to_ours, to_theirs

from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import merge_model
from jaxllm.train.optimizer import make_learning_rate, make_optimizer
from jaxllm.train.step import TrainState, make_train_step, make_update

LOGIT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
GRAD_NORM_TOLERANCE = 1e-5  # relative
TRAINING_LOSS_TOLERANCE = 1e-4


@pytest.fixture(scope="session", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="session")
def golden(case):
    """The golden file, with weights and batches in the dtypes in which they were drawn."""
    with np.load(golden_path(case)) as file:
        arrays = dict(file)
    for name, array in arrays.items():
        if name.startswith("weight/"):
            arrays[name] = array.astype(np.float32)
    return arrays | {name: arrays[name].astype(np.int32) for name in ("tokens", "targets")}


@pytest.fixture(scope="session")
def ours(case, golden):
    """jaxllm's results for the weights and batches of the golden file, with its keys; logits of every position."""
    config = case_config(case)
    if case == "gqa_tied":
        # One case with gradient accumulation: the rows have 40, 23 and 3 valid targets.
        train = config.train.model_copy(update={"microbatch_sequences": 1})
        config = config.model_copy(update={"train": train})
    mesh = make_mesh(config.parallel, jax.devices()[:1])
    with jax.set_mesh(mesh):
        run = parallelize(config, mesh)
        params = jax.device_put(to_ours(weights_of(golden), config.model), run.master_shardings)
        logits = jax.jit(lambda params, tokens: merge_model(config, params)(tokens))(params, golden["tokens"][0])
        optimizer = make_optimizer(config, run.table)
        rate, clip_norm = make_learning_rate(config), config.optimizer.clip_norm

        @jax.jit
        def step(state, batch):
            """The real step, and the gradients that it used: one compilation gives both."""
            seen = []

            def value_and_grad(params, batch):
                seen.append(run.value_and_grad(params, batch))
                return seen[0]

            state, metrics = make_train_step(value_and_grad, make_update(optimizer), rate, clip_norm)(state, batch)
            return state, metrics["loss"], seen[0][1]

        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        losses, gradients = [], []
        for number in range(STEPS):
            state, loss, gradient = step(state, batch_of(golden, number, config.num_microbatches))
            losses.append(float(loss))
            gradients.append(gradient)
    result = {"logits": np.asarray(logits), "loss": losses[0], "losses": losses}
    for name, gradient in to_theirs(gradients[0], config.model).items():
        result[f"grad_norm/{name}"] = np.linalg.norm(gradient)
    return result


@pytest.fixture(scope="session")
def live(case, golden):
    """The same results by the installed transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return compute(case, weights_of(golden), golden)


def weights_of(golden):
    return {name.removeprefix("weight/"): x for name, x in golden.items() if name.startswith("weight/")}


def batch_of(golden, step, microbatches):
    """One step's batch in the layout of the train step: [microbatch, sequence, position]."""
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    rows = {"positions": positions, **{name: golden[name][step] for name in ("tokens", "targets", "mask")}}
    return {name: jnp.asarray(x.reshape(microbatches, -1, S)) for name, x in rows.items()}


def check_same(ours, theirs):
    """`ours` agrees with `theirs`, which has the logits of all positions or only of those that golden files store."""
    logits = ours["logits"] if theirs["logits"].shape[1] == S else ours["logits"][LOGITS]
    close = partial(np.testing.assert_allclose, rtol=0)
    close(logits, theirs["logits"], atol=LOGIT_TOLERANCE)
    close(ours["loss"], theirs["loss"], atol=LOSS_TOLERANCE)
    close(ours["losses"], theirs["losses"], atol=TRAINING_LOSS_TOLERANCE)
    norms = {name for name in theirs if name.startswith("grad_norm/")}
    assert norms == {name for name in ours if name.startswith("grad_norm/")}
    for name in norms:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=GRAD_NORM_TOLERANCE, err_msg=name)


def test_golden_files_hold_what_the_cases_say(case, golden):
    weights = weights_of(golden)
    assert {name: x.shape for name, x in weights.items()} == shapes_of_theirs(case_config(case).model)
    assert {name.removeprefix("grad_norm/") for name in golden if name.startswith("grad_norm/")} == set(weights)
    for name, drawn in [*draw_batches(case).items(), *draw_weights(case).items()]:
        np.testing.assert_array_equal(drawn, golden[name] if name in golden else weights[name], err_msg=name)


def test_weights_survive_the_way_there_and_back(case, golden):
    model, weights = case_config(case).model, weights_of(golden)
    returned = to_theirs(to_ours(weights, model), model)
    assert returned.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(returned[name], weight, err_msg=name)


def test_jaxllm_computes_what_the_golden_files_say(ours, golden):
    check_same(ours, golden)


def test_the_golden_files_are_current(live, golden):
    check_same(live, golden)


def test_jaxllm_computes_what_transformers_computes_here(ours, live):
    check_same(ours, live)
