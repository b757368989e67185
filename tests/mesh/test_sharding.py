"""Rules match strictly: each refusal names parameter, shape and axis."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.config import ConfigError
from jaxllm.mesh.sharding import Parameter, layout, match, unstack_layout, vocab_rows, weight_rules
from jaxllm.parallel.parameters import parameter_table

SIZES = {"pipe": 1, "data": 2, "context": 1, "tensor": 4}
RULES = {"embed": (), "heads": ("tensor",), "mlp": ("tensor",), "vocab": ("pipe", "tensor")}

REFUSALS = {
    (("embed", "heds"), (8, 8)): "no sharding rule for 'heds'; add one, or use one of embed, heads, mlp, vocab.",
    (("heads", "mlp"), (8, 8)): "dims 'heads' and 'mlp' are both sharded over 'tensor'; change one rule.",
    (("embed", "heads"), (8, 9)): "heads=9 does not divide over tensor=4; change parallel.tensor or the size.",
    (("embed",), (8, 8)): "1 dims are declared for 2; name every dim.",
}


@pytest.mark.parametrize(("dims", "shape"), REFUSALS)
def test_refusals_name_parameter_shape_and_axis(dims, shape):
    with pytest.raises(ConfigError) as error:
        match("layers.attention.query", shape, dims, RULES, SIZES)
    assert f"Parameter layers.attention.query with dims {dims} and shape {shape}" in str(error.value)
    assert REFUSALS[dims, shape] in str(error.value)


def test_a_typo_in_an_axis_is_refused():
    with pytest.raises(
        ConfigError, match="'tensro' in the rule for 'heads' is not a mesh axis; use one of pipe, data, context, tensor"
    ):
        match("x", (8,), ("heads",), {"heads": ("tensro",)}, SIZES)


def test_nine_heads_on_two_ranks_are_refused(tiny_config):
    with pytest.raises(ConfigError, match=r"model.num_heads=9 cannot be split over parallel.tensor=2: use one of \[1, 3, 9\]"):
        tiny_config("model.num_heads=9", "model.num_kv_heads=3", "model.head_dim=16", "parallel.tensor=2")
    with pytest.raises(ConfigError, match=r"num_kv_heads=3 can be neither split over parallel.tensor=2 nor repeated evenly"):
        tiny_config("model.num_heads=6", "model.num_kv_heads=3", "model.head_dim=16", "parallel.tensor=2")


def test_zero_cuts_a_dim_that_nothing_else_splits(tiny_config):
    """It pads what does not divide; a norm's scale that does not is replicated."""
    parallel = tiny_config("parallel.data=4", "parallel.tensor=2").parallel
    rules = weight_rules(tiny_config().model, parallel)

    def cut(dims, shape, is_matrix=True):
        return layout(Parameter("p", shape, "float32", dims, is_matrix), rules, parallel)

    assert cut(("layers", "embed", "mlp"), (2, 32, 64)).master == P("pipe", ("data", "context"), "tensor")
    assert cut(("heads", "head_dim", "embed"), (4, 8, 30)).zero_dim == 1
    assert cut(("layers", "embed"), (2, 30), is_matrix=False).zero_dim is None
    padded = cut(("layers", "embed", "mlp"), (2, 30, 64))
    assert (padded.master, padded.padding) == (P("pipe", ("data", "context"), "tensor"), 2)
    assert padded.padded_shape((2, 30, 64)) == (2, 32, 64)
    assert unstack_layout(padded, 1).padded_shape((30, 64)) == (32, 64)


def test_every_parameter_of_the_model_has_a_rule(tiny_config):
    config = tiny_config("parallel.data=2", "parallel.tensor=4")
    rules = weight_rules(config.model, config.parallel)
    _, table = parameter_table(config)
    specs = {p.path: layout(p, rules, config.parallel).compute for p in jax.tree.leaves(table)}
    assert specs["layers.attention.query"] == P("pipe", None, "tensor", None)
    # Two key-value heads on four ranks: replicated.
    assert specs["layers.attention.key"] == P("pipe", None, None, None)
    assert specs["embedding"] == P(("pipe", "tensor"), None)


def test_vocabulary_is_padded_to_what_divides(tiny_config):
    for tensor, rows in ((1, 258), (2, 258), (4, 260)):
        config = tiny_config("model.vocab_size=258", f"parallel.tensor={tensor}")
        assert vocab_rows(config.model, config.parallel) == rows
