"""FLOPs and executions counted from jaxprs, against known products."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxpr_walk import walk

from jaxllm.compile.jaxpr_flops import dot_flops, matmul_flops
from jaxllm.model.grouped_matmul import hopper_grouped_matmul

N = 8
ONE = 2 * N**3  # FLOPs of a product of two N x N matrices
x = jax.ShapeDtypeStruct((N, N), jnp.float32)


def flops(function, *arguments):
    return matmul_flops(jax.make_jaxpr(function)(*(arguments or (x,))))


def square(x):
    return x @ x


def scanned(x, turns, body=square):
    return jax.lax.scan(lambda x, _: (body(x), None), x, length=turns)[0]


def test_a_product_counts_two_for_each_multiplication():
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((5, 3, 2, 7), (5, 7, 11)))
    assert flops(lambda a, b: jnp.einsum("bijk,bkl->bijl", a, b), a, b) == 2 * 5 * 3 * 2 * 11 * 7
    assert flops(lambda a: jnp.sin(a) * a.sum(), a) == 0


def test_scans_multiply_out_and_keep_their_lengths():
    def nested(x):
        return square(scanned(x, 3, lambda x: scanned(square(x), 5)))

    assert flops(nested) == (1 + 3 + 3 * 5) * ONE
    program = jax.make_jaxpr(nested)(x)
    dots = [visit for visit in walk(program) if visit.equation.primitive.name == "dot_general"]
    assert [(visit.executed, visit.loops) for visit in dots] == [(3, (3,)), (15, (3, 5)), (1, ())]
    assert sum(visit.executed * dot_flops(visit.equation) for visit in dots) == matmul_flops(program.jaxpr)


def test_calls_are_entered():
    @jax.custom_vjp
    def own(x):
        return square(x)

    own.defvjp(lambda x: (own(x), x), lambda x, g: (square(square(g)),))
    assert flops(jax.jit(jax.checkpoint(own))) == ONE
    # The forward, and its custom backward.
    assert flops(jax.grad(lambda x: own(x).sum())) == 3 * ONE


def test_rematerialised_products_count_again():
    """For y = sin(x x) x: 2 products forward, 2 for each of them backward; x x once more for sin's derivative, but not y."""

    def loss(x):
        return (jnp.sin(square(x)) @ x).sum()

    assert flops(jax.grad(loss)) == 6 * ONE
    assert flops(jax.grad(jax.checkpoint(loss))) == 7 * ONE


def test_of_branches_the_dearest_counts():
    def branches(x):
        return jax.lax.switch(x[0, 0].astype(int), [lambda x: x, square, lambda x: scanned(x, 4)], x)

    assert flops(branches) == 4 * ONE
    assert sum(v.executed for v in walk(jax.make_jaxpr(branches)(x)) if v.equation.primitive.name == "dot_general") == 1 + 4


def test_a_product_that_runs_nobody_knows_how_often_is_an_error():
    def loop(body):
        return lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 1, body, x)

    assert flops(loop(lambda x: x + 1)) == 0
    with pytest.raises(ValueError, match="in a `while` loop"):
        flops(loop(square))
    inside = [v for v in walk(jax.make_jaxpr(loop(square))(x)) if v.equation.primitive.name == "dot_general"]
    assert [(visit.executed, visit.loops) for visit in inside] == [(1, (None,))]


def test_manual_regions_count_for_each_of_their_ranks():
    """Rows over data are manual, and inside, columns of the second product over tensor; the first is unsharded over tensor.
    Together the FLOPs are those of the products computed once."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def columns(a, b):
        mesh = jax.sharding.get_abstract_mesh()
        specs = {"in_specs": (P(), P(None, "tensor")), "out_specs": P(None, "tensor")}
        return jax.shard_map(jnp.matmul, mesh=mesh, axis_names={"tensor"}, check_vma=False, **specs)(a, b)

    def region(a, b):
        return columns(a @ b, b)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(region, axis_names={"data"}, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
        program = jax.make_jaxpr(mapped)(x, x)
    assert matmul_flops(program) == 2 * ONE
    dots = [visit for visit in walk(program) if visit.equation.primitive.name == "dot_general"]
    assert [(visit.ranks, dot_flops(visit.equation)) for visit in dots] == [(2, ONE // 2), (8, ONE // 8)]


def test_matmuls_with_scales_for_blocks_count():
    e4m3, e8m0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    operands = [((1, 32, 64), e4m3), ((1, 96, 64), e4m3), ((1, 32, 2), e8m0), ((1, 96, 2), e8m0)]
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    assert matmul_flops(jax.make_jaxpr(jax.nn.scaled_matmul)(*shapes)) == 2 * 32 * 96 * 64


def test_branches_count_by_their_share_of_the_runs():
    shapes = [jnp.zeros((8, n)) for n in (4, 16)]

    def switch(kind, x, y):
        return jax.lax.switch(kind, [lambda x, y: (x @ x.T).sum(), lambda x, y: (y @ y.T).sum()], x, y)

    program = jax.make_jaxpr(switch)(0, *shapes)
    few, many = 2 * 8 * 8 * 4, 2 * 8 * 8 * 16
    assert (matmul_flops(program), matmul_flops(program, (0.75, 0.25))) == (many, 0.75 * few + 0.25 * many)
    assert [visit.branches for visit in walk(program) if visit.equation.primitive.name == "dot_general"] == [
        ((0, 2),),
        ((1, 2),),
    ]


def test_experts_rows_count_once_whatever_their_experts():
    """A GPU's kernels and XLA's grouped matmul: the product and both gradients."""
    x, w, sizes = jnp.zeros((256, 128), jnp.bfloat16), jnp.zeros((4, 128, 64), jnp.bfloat16), jnp.full(4, 64, jnp.int32)
    for matmul in (hopper_grouped_matmul, jax.lax.ragged_dot):
        gradients = jax.grad(lambda x, w, of=matmul: of(x, w, sizes).astype(jnp.float32).sum(), argnums=(0, 1))
        assert matmul_flops(jax.make_jaxpr(gradients)(x, w)) == 3 * 2 * 256 * 128 * 64
