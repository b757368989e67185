"""Grouped matmuls of experts on NVIDIA Hopper, by Pallas kernels.

    y_RF = hopper_grouped_matmul(x_RD, w_EDF, sizes_E)

A thread block computes one tile of a result: 128 rows of one expert, or 128 x 128 numbers of the gradient of its matrix. Which
rows these are XLA computes before. The GPU starts a block wherever one ends, so that experts of unequal sizes keep it busy. Two
blocks fit into a multiprocessor: one multiplies while the other loads its first operands or stores its result.

JAX's example kernels for these products (jax.experimental.pallas.ops.gpu) search all experts in every tile, and their gradient
of the matrices multiplies other experts' rows by 0, which leaves nan of nan.

Letters as in experts.py; T tiles of rows.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import ConfigError
from jaxllm.config.types import EXPERT_UNIT

ROWS = 128
"""Rows of a tile."""

ALIGNED = 8
"""A tile begins at a multiple of this, as swizzled copies do. It may begin with rows of the expert before."""

DEPTH = EXPERT_UNIT
"""What a step multiplies of the dimension that is summed: 128 bytes, the widest swizzle of shared memory."""

STEPS = 3
"""Steps in flight: 32 KiB of shared memory each. Two thread blocks share 227 KiB."""

BAND = 8
"""Tiles of rows that run side by side. They share each column of a matrix in the L2 cache."""


def _why_not_shape(dtype: Any, R: int, D: int, F: int) -> str | None:
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"they multiply bfloat16 or float16, not {jnp.dtype(dtype)}"
    if D % DEPTH or F % DEPTH:
        return f"the sides of a matrix must be multiples of {DEPTH}, and they are {D} and {F}"
    if R % ALIGNED:
        return f"the number of rows must be a multiple of {ALIGNED}, and it is {R}"
    return None


@jax.custom_vjp
def hopper_grouped_matmul(
    x_RD: Float[Array, "R D"], w_EDF: Float[Array, "E D F"], sizes_E: Int[Array, " E"]
) -> Float[Array, "R F"]:
    """A GroupedMatmul (experts.py) with sums in float32, for where every mesh axis is manual. It writes no rows of no expert.

    Raises:
      ConfigError: the dtype or the shape does not suit the kernels.
    """
    if reason := _why_not_shape(x_RD.dtype, len(x_RD), *w_EDF.shape[1:]):
        raise ConfigError(f"The kernels for grouped matmuls on Hopper GPUs cannot run: {reason}.")
    return rows_times_matrices(x_RD, w_EDF, sizes_E, transposed=False)


def _backward(inputs, dy_RF):
    x_RD, w_EDF, sizes_E = inputs
    dx_RD = rows_times_matrices(dy_RF, w_EDF, sizes_E, transposed=True)
    return dx_RD, rows_times_rows(x_RD, dy_RF, sizes_E), None


hopper_grouped_matmul.defvjp(lambda *inputs: (hopper_grouped_matmul(*inputs), inputs), _backward)


def row_tiles(sizes_E: Int[Array, " E"], R: int) -> Int[Array, "4 T"]:
    """For each tile its expert, its first row, how many rows of other experts it begins with, and how many of its own follow.
    T is the most that R rows can need, in full bands; tiles that are not needed come last and have no rows."""
    E = len(sizes_E)
    ends_E = jnp.cumsum(sizes_E)
    begins_E = ends_E - sizes_E
    aligned_E = begins_E // ALIGNED * ALIGNED
    tiles_E = jnp.where(sizes_E > 0, -((aligned_E - ends_E) // ROWS), 0)
    last_E = jnp.cumsum(tiles_E)
    # The last tile of each expert may have one row, and its first ALIGNED - 1 rows of others.
    most = (R + E * (ROWS - 1 + ALIGNED - 1)) // ROWS
    number_T = jnp.arange(most + -most % BAND, dtype=jnp.int32)
    expert_T = jnp.minimum(jnp.sum(last_E[None] <= number_T[:, None], axis=1), E - 1)
    first_T = aligned_E[expert_T] + (number_T - (last_E - tiles_E)[expert_T]) * ROWS
    before_T = jnp.maximum(begins_E[expert_T] - first_T, 0)
    rows_T = jnp.clip(ends_E[expert_T] - first_T, 0, ROWS) - before_T
    return jnp.stack([expert_T, first_T, before_T, jnp.maximum(rows_T, 0)]).astype(jnp.int32)


@partial(jax.jit, static_argnames="transposed")
def rows_times_matrices(x_RK, w, sizes_E, transposed: bool):
    """Each expert's rows times its matrix [K, N], or, transposed, [N, K]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (R, K), N = x_RK.shape, w.shape[1 if transposed else 2]
    columns, tiles_4T = _tile(N), row_tiles(sizes_E, R)

    def one_tile(tiles_4T, x_RK, w, y_RN):
        t, n = _place(BAND, N // columns)
        expert, first, before, rows = (tiles_4T[i, t] for i in range(4))
        first = pl.multiple_of(first, ALIGNED)
        turned = lambda pair: pair[::-1] if transposed else pair  # noqa: E731

        def multiply(sums):
            def step(_, x, w):
                plgpu.wgmma(sums, x, w.transpose((1, 0)) if transposed else w)

            x_block = plgpu.BlockSpec((pl.Element(ROWS), DEPTH), lambda k: (first, k), delay_release=1)
            w_block = plgpu.BlockSpec(turned((DEPTH, columns)), lambda k: turned((k, n)), delay_release=1)
            blocks = [x_block, w_block]
            plgpu.emit_pipeline(step, grid=(K // DEPTH,), in_specs=blocks, max_concurrent_steps=STEPS)(x_RK, w.at[expert])
            return sums[...]

        def store(block, sums):
            block[...] = sums.astype(block.dtype)
            plgpu.commit_smem()
            # A copy has a fixed number of rows. There is one for each bit of the number of rows.
            done = before
            for some in (1 << bit for bit in reversed(range(ROWS.bit_length()))):

                @pl.when(rows & some != 0)
                def _(done=done, some=some):
                    to = y_RN.at[pl.ds(first + done, some), pl.ds(n * columns, columns)]
                    plgpu.copy_smem_to_gmem(block.at[pl.ds(done, some)], to)

                done += rows & some
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(rows > 0)
        def _():
            sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, columns)))
            pl.run_scoped(partial(store, sums=sums), plgpu.SMEM((ROWS, columns), y_RN.dtype))

    out = jax.ShapeDtypeStruct((R, N), x_RK.dtype)
    return _kernel(one_tile, out, tiles_4T.shape[1] * (N // columns))(tiles_4T, x_RK, w)


@jax.jit
def rows_times_rows(x_RD, dy_RF, sizes_E):
    """The gradient of the matrices [E, D, F]: the transpose of each expert's rows times their gradients."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    D, F, E = x_RD.shape[1], dy_RF.shape[1], len(sizes_E)
    tile = (_tile(D), _tile(F))
    shape = (D // tile[0], F // tile[1])
    ends_E = jnp.cumsum(sizes_E)
    bounds_2E = jnp.stack([ends_E - sizes_E, ends_E]).astype(jnp.int32)

    def one_tile(bounds_2E, x_RD, dy_RF, dw_EDF):
        t, f = _place(math.gcd(BAND, shape[0]), shape[1])
        expert, d = jax.lax.div(t, shape[0]), jax.lax.rem(t, shape[0])
        begin, end = bounds_2E[0, expert], bounds_2E[1, expert]
        first = pl.multiple_of(jax.lax.div(begin, ALIGNED) * ALIGNED, ALIGNED)
        steps = jnp.where(begin < end, jax.lax.div(end - first + (DEPTH - 1), DEPTH), 0)

        def multiply(sums):
            def step(indices, x, dy):
                row = first + indices[0] * DEPTH

                @pl.when((row < begin) | (row + DEPTH > end))
                def _():
                    # Other experts' rows, in both factors: 0 times inf or nan would be nan.
                    for block in (x, dy):
                        rows = jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
                        rows = row + plgpu.layout_cast(rows, plgpu.Layout.WGMMA)
                        block[...] = jnp.where((rows >= begin) & (rows < end), block[...], jnp.zeros((), block.dtype))
                    plgpu.commit_smem()

                plgpu.wgmma(sums, x.transpose((1, 0)), dy)

            x_block = plgpu.BlockSpec((pl.Element(DEPTH), tile[0]), lambda r: (first + r * DEPTH, d), delay_release=1)
            dy_block = plgpu.BlockSpec((pl.Element(DEPTH), tile[1]), lambda r: (first + r * DEPTH, f), delay_release=1)
            blocks = [x_block, dy_block]
            plgpu.emit_pipeline(step, grid=(steps,), in_specs=blocks, max_concurrent_steps=STEPS)(x_RD, dy_RF)
            return sums[...]

        def store(block, sums):
            block[...] = sums.astype(block.dtype)
            plgpu.commit_smem()
            to = dw_EDF.at[expert, pl.ds(d * tile[0], tile[0]), pl.ds(f * tile[1], tile[1])]
            plgpu.copy_smem_to_gmem(block, to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        sums = pl.run_scoped(multiply, plgpu.ACC(tile))
        pl.run_scoped(partial(store, sums=sums), plgpu.SMEM(tile, dw_EDF.dtype))

    out = jax.ShapeDtypeStruct((E, D, F), x_RD.dtype)
    return _kernel(one_tile, out, E * shape[0] * shape[1])(bounds_2E, x_RD, dy_RF)


def _place(band: int, columns: int):
    """(row, column) of this block's tile in the result: bands of rows, and in a band column after column. It divides by
    constants: for any other division NVIDIA's assembler makes a call, and waits for each multiplication (C7509)."""
    number = jax.lax.axis_index("tile")
    inside = jax.lax.rem(number, band * columns)
    return jax.lax.div(number, band * columns) * band + jax.lax.rem(inside, band), jax.lax.div(inside, band)


def _kernel(body: Callable, out: jax.ShapeDtypeStruct, blocks: int) -> Callable:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    parameters = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    return plgpu.kernel(body, out_type=out, grid=(blocks,), grid_names=("tile",), compiler_params=parameters)


def _tile(side: int) -> int:
    return 128 if side % 128 == 0 else 64
