"""Every policy computes the same gradients and keeps less than the one before; what is kept is known by name and by bytes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import primitives
from jax.sharding import PartitionSpec as P

from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.config import ATTENTION_RESULTS, BLOCK_INPUT, ConfigError
from jaxllm.config.remat_policy import policy_of
from jaxllm.config.types import BLOCK_TENSORS, LAST_OUTPUT
from jaxllm.cost_model.activations import bytes_per_token_and_layer
from jaxllm.mesh.axes import CONTEXT, MANUAL, axis_sizes, make_mesh
from jaxllm.mesh.sharding import constrainer
from jaxllm.model.blockwise_attention import xla_kernel
from jaxllm.model.layers import Block, Ops, rotary_table, rotate
from jaxllm.model.llama import BlockContext, apply_block
from jaxllm.parallel.kernels import attend_per_tensor_rank, choose_attention, choose_matmul
from jaxllm.parallel.layer_loop import remat
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.ring_attention import ring_attention
from jaxllm.parallel.vjp_residuals import CALLS, extract, kept_names, waits_on_host

needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
POLICIES = ("none", "selective", "full")


def gradients_and_memory(config):
    config = config.resolve(1)
    mesh = make_mesh(config.parallel, jax.devices()[:1])
    rng = np.random.default_rng(0)
    shape = (1, config.train.global_batch_sequences, config.train.sequence_length)
    ids = rng.integers(0, 256, (*shape[:2], shape[2] + 1))
    batch = {
        "tokens": jnp.asarray(ids[..., :-1], jnp.int32),
        "targets": jnp.asarray(ids[..., 1:], jnp.int32),
        "mask": jnp.ones(shape, bool),
        "positions": jnp.broadcast_to(jnp.arange(shape[2], dtype=jnp.int32)[None, None], shape),
    }
    with jax.set_mesh(mesh):
        functions = parallelize(config, mesh)
        params = functions.initialize(jax.random.key(0))
        compiled = jax.jit(functions.value_and_grad).lower(params, batch).compile()
        loss, gradients = compiled(params, batch)
    return loss, gradients, compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module", params=["true", "false"], ids=["scanned", "unrolled"])
def results(tiny_config, request):
    """Six layers and 64 positions, so that activations outweigh the gradients' accumulators."""
    sizes = ("model.num_layers=6", "train.sequence_length=64", f"model.scan_layers={request.param}")
    return {policy: gradients_and_memory(tiny_config(f"parallel.remat={policy}", *sizes)) for policy in POLICIES}


def test_names_pass_through_every_call_of_this_jax():
    """closed_call became eval_jaxpr in JAX 0.12."""
    calls = ("call", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat")
    assert {getattr(primitives, f"{name}_p").name for name in calls} - {"call"} <= CALLS


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_same_loss_and_gradients(results, policy):
    loss, gradients, _ = results[policy]
    expected_loss, expected, _ = results["none"]
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), gradients, expected)


@pytest.mark.parametrize("results", ["true"], indirect=True, ids=["scanned"])
def test_memory_falls_in_the_order_it_should(results):
    """In a loop. Unrolled, the CPU compiler orders work without regard to memory: see the next test."""
    none, selective, full = (results[policy][2] for policy in POLICIES)
    assert full < 0.8 * selective
    assert selective < 0.8 * none


@needs_gpu_compiler
@pytest.mark.parametrize(
    "scan",
    [
        pytest.param("true", marks=pytest.mark.slow, id="scanned"),
        pytest.param("false", marks=pytest.mark.nightly, id="unrolled"),
    ],
)
def test_memory_falls_on_the_gpu_target(tiny_config, scan):
    sizes = ("model.hidden_size=256", "model.intermediate_size=512", "model.num_layers=6", "train.sequence_length=1024")

    def temporary_bytes(policy):
        overrides = (f"parallel.remat={policy}", f"model.scan_layers={scan}", "model.compute_dtype=bfloat16")
        return compile_step(tiny_config(*sizes, *overrides), gpu_devices(1, 1)).memory_analysis().temp_size_in_bytes

    none, selective, full = map(temporary_bytes, POLICIES)
    assert full < 0.8 * selective
    # 0.81 unrolled, where XLA computes much of what autodiff would keep again (JAX 0.10.2).
    assert selective < 0.85 * none


# ------------------------------------------------------------------------------------------------------ names and bytes

MAPPINGS = {
    "some kept": {"query": "keep", "mlp_up": "offload"},
    "input away": {"block_input": "offload", "attention_output": "offload", "attention_lse": "keep"},
    "nothing named": {},
}
REMATS = {**{name: name for name in ("selective", "full", "offload")}, **MAPPINGS}
MESHES = {
    "one": (),
    "tensor": ("parallel.tensor=2",),
    "replicated keys": ("parallel.tensor=4",),
    "ring": ("parallel.context=2",),
}
NETWORKS = {
    "llama": (),
    "qwen": ("model.qk_norm=head", "model.qkv_bias=true"),
    "olmo": ("model.qk_norm=width", "model.block_norms=after"),
    "gemma": ("model.qk_norm=head", "model.block_norms=both"),
}


def one_block(config, function):
    """function(block, weights, h, side), traced where blocks run: in a region that is manual but for tensor. As an output of
    that region, shapes of a rank's arrays and, per array, what function says.
    """
    parallel, model = config.parallel, config.model
    size = parallel.tensor * parallel.context
    config = config.resolve(size)
    mesh = make_mesh(config.parallel, jax.devices()[:size])
    _, attend = choose_attention(config, mesh.devices.flat[0])
    if config.data.mask_documents:
        attend = ring_attention(xla_kernel(), CONTEXT, parallel.context)
    attend = attend_per_tensor_rank(attend, model.num_kv_heads, parallel.tensor)
    matmul = choose_matmul(model, parallel.tensor)
    ops = Ops(attend=attend, matmul=matmul, constrain=constrainer(axis_sizes(config.parallel)))
    shape = (2, config.train.sequence_length // parallel.context)
    found = []

    def region(positions_BS):
        with nnx.use_eager_sharding(False):
            graph, weights = nnx.split(Block(model, rngs=nnx.Rngs(0)))
        weights = jax.tree.map(lambda w: w.astype(model.compute_dtype), nnx.to_pure_dict(weights))
        h_BSD = jnp.zeros((*shape, model.hidden_size), model.compute_dtype)
        side = BlockContext(rotary_table(model, positions_BS), positions_BS if config.data.mask_documents else None)
        found.append(function(partial(apply_block, graph, ops), weights, h_BSD, side))
        return positions_BS

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(region, axis_names=set(MANUAL), in_specs=P(), out_specs=P(), check_vma=False)
        jax.eval_shape(mapped, jax.ShapeDtypeStruct(shape, jnp.int32))
    return found[0]


@pytest.mark.parametrize("remat_name", REMATS)
@pytest.mark.parametrize(("blockwise", "network"), [(False, "llama"), (True, "llama"), (True, "olmo")])
def test_residuals_are_known_by_name(tiny_config, blockwise, network, remat_name):
    """Square weights, and an MLP as wide as the heads together: shapes would not tell a key from a value, nor gate from up."""
    sizes = ("model.intermediate_size=32", "model.num_kv_heads=4", *NETWORKS[network])
    config = tiny_config(f"data.mask_documents={str(blockwise).lower()}", *sizes)
    policy = policy_of(REMATS[remat_name], config.model)
    names = one_block(config, lambda block, *at: kept_names(remat(policy, block, True), *at, policy))
    attention = set() if blockwise else set(ATTENTION_RESULTS)
    assert set(jax.tree.leaves(names)) == {*policy.keep, *policy.offload} - attention
    assert None not in jax.tree.leaves(names, is_leaf=lambda x: x is None)
    assert set(policy.offload) - set(jax.tree.leaves(names)) == attention & set(policy.offload)
    assert names[0] == BLOCK_INPUT
    assert sum(waits_on_host(names, policy)) == len(set(policy.offload) - attention)


@pytest.mark.parametrize("mesh", ["one", "tensor"])
def test_networks_beside_llama_keep_the_same_tensors(tiny_config, mesh):
    """By name, and no others, but for what norms read: queries and keys as they are before, and the MLP's output."""
    for network in NETWORKS.values():
        config = tiny_config("data.mask_documents=false", *MESHES[mesh], *network)
        policy = policy_of("selective", config.model)
        assert ("mlp_down" in policy.keep) == (config.model.block_norms != "before")
        names = one_block(config, lambda block, *at, policy=policy: kept_names(remat(policy, block, True), *at, policy))
        assert set(jax.tree.leaves(names)) == {*policy.keep} - set(ATTENTION_RESULTS)
        assert None not in jax.tree.leaves(names, is_leaf=lambda x: x is None)


def test_gradients_of_biases_and_norms_are_summed_in_float32(tiny_config):
    """A sum over thousands of tokens in bfloat16 would lose what little is left of a key bias's gradient."""
    model = tiny_config("model.compute_dtype=bfloat16", *NETWORKS["qwen"]).model
    with nnx.use_eager_sharding(False):
        graph, weights = nnx.split(Block(model, rngs=nnx.Rngs(1)))
    weights = jax.tree.map(lambda w: w.astype(model.compute_dtype), nnx.to_pure_dict(weights))
    h_BSD = jnp.zeros((2, 16, 32), model.compute_dtype)
    side = BlockContext(rotary_table(model, jnp.tile(jnp.arange(16)[None], (2, 1))), None)
    block = lambda weights: apply_block(graph, Ops(), weights, h_BSD, side)[0].astype(jnp.float32).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(block))(weights))
    sums = re.findall(r":(\w+)\[[\d,]*\] = reduce_sum", text)
    assert len(sums) > 5
    assert set(sums) == {"f32"}


@pytest.mark.parametrize("mesh", ["one", "tensor", "replicated keys"])
def test_fp8_keeps_the_same_tensors(tiny_config, mesh):
    """No rounded copy, no scale, and no weight: those would fill a pipeline's ring."""
    sizes = ("model.hidden_size=64", "data.mask_documents=false", *MESHES[mesh])
    policy = policy_of("selective", tiny_config().model)
    for chosen in ("compute_dtype", "fp8"):
        config = tiny_config(*sizes, f"model.matmul_dtype={chosen}")
        names = one_block(config, lambda block, *at: kept_names(remat(policy, block, True), *at, policy))
        assert set(jax.tree.leaves(names)) == {*policy.keep} - set(ATTENTION_RESULTS)
        assert None not in jax.tree.leaves(names, is_leaf=lambda x: x is None)


def test_a_residual_is_the_tensor_it_is_named_for(tiny_config):
    """By value: the names of kept_names on the residuals of a block that runs, against the block's own tensors."""
    model = tiny_config("model.num_kv_heads=4").model
    policy = policy_of("selective", model)
    with nnx.use_eager_sharding(False):
        graph, weights = nnx.split(Block(model, rngs=nnx.Rngs(1)))
    weights = nnx.to_pure_dict(weights)
    h_BSD = jax.random.normal(jax.random.key(2), (2, 16, 32))
    side = BlockContext(rotary_table(model, jnp.tile(jnp.arange(16)[None], (2, 1))), None)
    block = remat(policy, partial(apply_block, graph, Ops()), True)
    names = kept_names(block, weights, h_BSD, side, policy)
    kept = dict(zip(jax.tree.leaves(names), jax.tree.leaves(extract(jax.vjp(block, weights, h_BSD, side)[1])), strict=True))
    x_BSD = nnx.merge(graph, weights).attention_norm(h_BSD)
    attention, mlp = weights["attention"], weights["mlp"]
    expected = {
        "block_input": h_BSD,
        "query": rotate(jnp.einsum("BSD,DNH->BSNH", x_BSD, attention["query"]), side[0]),
        "key": rotate(jnp.einsum("BSD,DNH->BSNH", x_BSD, attention["key"]), side[0]),
        "value": jnp.einsum("BSD,DNH->BSNH", x_BSD, attention["value"]),
    }
    middle_BSD = nnx.merge(graph, weights).mlp_norm(h_BSD + kept["attention_out"])
    expected |= {"mlp_gate": middle_BSD @ mlp["gate"], "mlp_up": middle_BSD @ mlp["up"]}
    for name, array in expected.items():
        np.testing.assert_allclose(kept[name], array, atol=1e-6, err_msg=name)


def test_what_cannot_be_offloaded_is_an_error(tiny_config):
    policy = policy_of({"mlp_up": "offload"}, tiny_config().model)
    with pytest.raises(RuntimeError, match="is its mlp_up"):
        kept_names(lambda w, h, side: jnp.sin(w * h), jnp.ones(3), jnp.ones(3), None, policy)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("remat_name", REMATS)
@pytest.mark.parametrize(("blockwise", "network"), [(False, "llama"), (True, "llama"), (True, "gemma")])
def test_closed_form_is_what_the_vjp_holds(tiny_config, mesh, remat_name, blockwise, network):
    documents = f"data.mask_documents={str(blockwise).lower()}"
    config = tiny_config(*MESHES[mesh], *NETWORKS[network], documents, "model.compute_dtype=bfloat16")
    policy, parallel = policy_of(REMATS[remat_name], config.model), config.parallel

    def sizes(block, *at):
        block = remat(policy, block, True)
        kept = jax.eval_shape(lambda *at: extract(jax.vjp(block, *at)[1]), *at)
        return dict(zip(jax.tree.leaves(kept_names(block, *at, policy)), jax.tree.leaves(kept), strict=True))

    # Shapes are those of a context rank with all its tensor ranks: theirs are split, but for keys that do not divide.
    t = parallel.tensor
    whole = {"key", "value"} if config.model.num_kv_heads % t else set()
    found = {n: x.size * x.dtype.itemsize / (1 if n in whole else t) for n, x in one_block(config, sizes).items()}
    in_blocks = blockwise or parallel.context > 1
    held = bytes_per_token_and_layer(policy, config, blockwise=in_blocks)
    assert {n: 2 * config.train.sequence_length * size for n, size in {**held.kept, **held.offloaded}.items()} == found
    assert not held.kept.keys() & held.offloaded.keys()


def test_names_in_the_config_are_the_models():
    assert (BLOCK_INPUT, "query", "key", "value", *ATTENTION_RESULTS, "attention_out", "mlp_gate", "mlp_up") == BLOCK_TENSORS
    assert LAST_OUTPUT == "mlp_down"


REFUSALS = {
    "parallel.remat={qery: keep}": "parallel.remat.qery is not a tensor of a block: did you mean query?",
    "parallel.remat={zzz: keep}": "parallel.remat.zzz is not a tensor of a block: the tensors of a block are block_input, ",
    "parallel.remat.query=kep": "parallel.remat.query=kep is not one of the choices: use keep, recompute, offload.",
    "parallel.remat.block_input=recompute": "is impossible, as all starts from it: use keep or offload.",
    "parallel.remat.attention_output=keep": "gains nothing alone: keep or offload attention_lse too.",
    "parallel.remat=fulll": "parallel.remat=fulll is not one of the choices: use ",
    "parallel.remat={mlp_down: keep}": "parallel.remat.mlp_down has no effect with model.block_norms=before, as no backward ",
    "parallel.remat=3": "parallel.remat=3 is not ",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_mistakes_are_refused(tiny_config, override):
    with pytest.raises(ConfigError) as error:
        tiny_config(override)
    assert REFUSALS[override] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mapping_can_be_given_on_the_command_line(tiny_config):
    config = tiny_config("parallel.remat={query: keep, mlp_up: keep}", "parallel.remat.mlp_up=offload")
    assert config.parallel.remat == {"query": "keep", "mlp_up": "offload"}
    policy = policy_of(config.parallel.remat, config.model)
    assert (policy.keep, policy.offload) == (("block_input", "query"), ("mlp_up",))
    assert set(policy.recompute) == set(BLOCK_TENSORS) - {"block_input", "query", "mlp_up"}


@pytest.mark.parametrize(("network", "names"), [("llama", BLOCK_TENSORS), ("olmo", (*BLOCK_TENSORS, LAST_OUTPUT))])
def test_policies_name_the_tensors_of_the_network(tiny_config, network, names):
    model = tiny_config(*NETWORKS[network]).model
    assert policy_of("offload", model).offload == policy_of("selective", model).keep == policy_of("none", model).keep == names
    assert policy_of("full", model).recompute == names[1:]
    assert policy_of({}, model).recompute == names[1:]
