"""Grouped matmuls of a mixture of experts on one GPU: do JAX's Mosaic GPU kernels reach 60% of the dense rate?

Each expert multiplies its own rows, which are stored together. A case measures one product of one model: `forward` (rows
times the expert's matrix), `dgrad` (rows times its transpose) or `wgrad` (an expert's inputs, transposed, times its rows of
gradients). Beside jaxllm's kernels and those that are examples in the JAX package, it times one dense matmul of the same
FLOPs, and a batched matmul with a fixed capacity per expert, without the work that fills it. The numbers of a few experts are
compared with float32.

On a CPU the kernels are interpreted, which gives numbers and no seconds. `jax.lax.ragged_dot` is timed there alone: on a GPU
it multiplies every row by all experts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from jaxllm.model.grouped_matmul import rows_times_matrices, rows_times_rows

Part = dict[str, Any]

MODELS = {"OLMoE": (64, 2048, 1024), "Qwen3-30B-A3B": (128, 2048, 768)}
"""Experts, hidden size D, size F of an expert. A token chooses 8 experts."""
PRODUCTS = ("forward", "dgrad", "wgrad")
EINSUMS = {"forward": "td,df->tf", "dgrad": "tf,df->td", "wgrad": "td,tf->df"}
CAPACITY_FACTOR = 1.25
THRESHOLD = 0.60
"""Share of the dense rate from which the kernels are worth using."""
CORRECT = 5e-3
"""Largest relative error. Rounding to bfloat16 alone gives 1.7e-3."""

DENSE_FLOPS, COPY_BYTES = 715e12, 3.02e12
"""Rates of an H100, per second (gpu_h100.jsonl): the middle of 686 to 743 TFLOP/s, and a copy."""
EXPECTED_SHARE = {"dense": 1.0, "capacity": 0.9, "forward": 0.70, "dgrad": 0.60, "wgrad": 0.55}
"""Expected share of DENSE_FLOPS, before blocks that are not full. Triton's kernels, with SwiGLU inside, reach 501 TFLOP/s
forward and 413 over all products on an H100, for Qwen3-30B-A3B with 32,768 tokens (github.com/linkedin/Liger-Kernel/pull/1294):
0.70, and 0.53 for the backward's. Alone, those should be a little faster. The share of `capacity` is a guess."""

CONFIG = ("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n")
HANGS_S = 60
"""A part that takes longer ends the process."""


def configs_of(product: str, D: int, F: int) -> list[list[int]]:
    """Parameters of the kernels, by CONFIG: none for jaxllm's own, which have no others, then JAX's, the default first. All
    compile for an H100. grid_block_n covers the complete width: blocks of the same rows run together, and read them from memory
    once."""
    N = D if product == "dgrad" else F
    wide = 192 if N == 768 else 256
    last = [128, 128, 128, 3, N // 128] if product == "wgrad" else [192, 128, 64, 5, N // 128]
    default, deeper = ([128, 128, 64, steps, N // 128] for steps in (4, 6))
    return [[], default, deeper, [64, 256, 64, 5, N // 256], [128, wide, 64, 4, N // wide], last]


def cases(dry: bool) -> list[dict[str, Any]]:
    """The cases, the most important first: each product with the default parameters, then with others."""
    first = {"draws": ["unequal", "equal"], "beside": ["dense", "capacity"]}
    if dry:
        tiny = {**first, "beside": [*first["beside"], "ragged_dot"], "configs": [[], [64, 64, 64, 2, 1]]}
        return [_case("tiny", (8, 128, 64), product, tokens=[16], most_s=60, **tiny) for product in PRODUCTS]
    # 150 s in all.
    first |= {"tokens": [8192, 32768], "most_s": 15}
    tuning = {**first, "draws": ["unequal"], "beside": [], "most_s": 9}
    of = [(model, shape, product, configs_of(product, *shape[1:])) for model, shape in MODELS.items() for product in PRODUCTS]
    return [
        *(_case(*one, configs=found[:2], **first) for *one, found in of),
        *(_case(*one, configs=found[1:], **tuning) for *one, found in of),
    ]


def _case(model: str, shape: Sequence[int], product: str, **options: Any) -> dict[str, Any]:
    name = f"grouped, {model}, {product}{', tuning' if not options['beside'] else ''}"
    return {"name": name, "kind": "grouped", "options": {"model": model, "shape": list(shape), "product": product, **options}}


def grouped(
    tell: Callable[..., None],
    model: str,
    shape: Sequence[int],
    product: str,
    tokens: Sequence[int],
    configs: Sequence[Sequence[int]],
    draws: Sequence[str],
    beside: Sequence[str],
    most_s: float,
    top_k: int = 8,
) -> dict[str, Any]:
    """Times one product. Of several numbers of tokens, the later ones get the fastest of `configs` only.

    Args:
      shape: experts, D, F.
      draws: how the rows are divided among the experts: unequal, equal.
      beside: what to time beside the kernels: dense, capacity, ragged_dot.
      most_s: it begins no part after this time.
    """
    from gpu_cases import start_jax

    device, ends, found = start_jax(), time.monotonic() + most_s, []
    tell(threshold=THRESHOLD)
    for T in tokens:
        work = Work(product, *shape, T * top_k)
        tell(**{f"capacity_drops_{T}": work.dropped()})
        plain = [(partial(_plain, work, draws), {"way": way}) for way in beside]
        kernels = [(partial(_kernel, work, draws), {"way": "mosaic", "config": list(config)}) for config in configs]
        for measure, about in [*plain, *kernels]:
            part: Part = {"tokens": T, "flops": work.flops, **about, "predicted_s": work.predicted_s(**about)}
            found.append(part)
            # What is predicted is told before it is measured, and a crash leaves it as the last part.
            tell(grouped=found)
            if time.monotonic() > ends:
                part["skipped"] = f"no time after {most_s} s"
            else:
                _measure(partial(measure, device), part, device)
            tell(grouped=found)
        timed = [part for part in found if "config" in part and "seconds" in part]
        if timed:
            configs = [min(timed, key=lambda part: part["seconds"][draws[0]])["config"]]
    return {"device": device.device_kind}


def _measure(measure: Callable[[Part], None], part: Part, device: Any) -> None:
    """Adds to the part what it measures, or why not. A kernel that hangs, or takes the device with it, ends the process: the
    next case has a new one."""
    import jax

    def end(why: str) -> None:
        print(f"{why}: {part}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(HANGS_S, end, [f"It took more than {HANGS_S} s"])
    timer.daemon = True
    timer.start()
    try:
        measure(part)
    except Exception as error:
        part["error"] = f"{type(error).__name__}: {error}"[-300:]
        try:
            jax.block_until_ready(jax.device_put(np.ones(8), device) + 1)
        except Exception:
            end("It lost the device")
    finally:
        timer.cancel()


# ------------------------------------------------------------------------------------------------------------------ the work


@dataclass(frozen=True)
class Work:
    """A product and its sizes."""

    product: str
    E: int
    D: int
    F: int
    rows: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.D * self.F

    @property
    def capacity(self) -> int:
        return -(-int(CAPACITY_FACTOR * self.rows) // self.E)

    @functools.cached_property
    def operands(self) -> tuple[Any, Any]:
        return self.operands_of(self.rows, matrices=(self.E,))

    def operands_of(self, *rows: int, matrices: tuple[int, ...] = ()) -> tuple[Any, Any]:
        """Random numbers that no earlier call had: results left in memory must not pass for new ones."""
        from gpu_cases import normal

        x = lambda n: normal(time.time_ns() % 2**31, *rows, n)  # noqa: E731
        if self.product == "wgrad":
            return x(self.D), x(self.F)
        matrix = normal(time.time_ns() % 2**31, *matrices, self.D, self.F)
        return x(self.D if self.product == "forward" else self.F), matrix

    def sizes(self, draw: str) -> np.ndarray:
        """Rows of each expert, int32 [E]. `unequal`: the most loaded has about three times the mean. `edges`: the first, the
        last and one in the middle have none, and the second has one."""
        if draw == "equal":
            return np.full(self.E, self.rows // self.E, np.int32)
        random = np.random.default_rng(7)
        weights, given = random.lognormal(0, 0.5, self.E), np.zeros(self.E, np.int32)
        if draw == "edges":
            weights[[0, 1, self.E // 2, -1]], given[1] = 0, 1
        return given + random.multinomial(self.rows - given.sum(), weights / weights.sum()).astype(np.int32)

    def dropped(self) -> float:
        """Share of the rows that the capacity drops from the unequal draw."""
        return float(np.maximum(self.sizes("unequal") - self.capacity, 0).sum() / self.rows)

    def predicted_s(self, way: str, config: Sequence[int] = ()) -> float | None:
        """Seconds on an H100 by EXPECTED_SHARE, counting blocks that are not full; at least the time of reading and writing."""
        if way == "ragged_dot":
            return None
        more = CAPACITY_FACTOR if way == "capacity" else 1.0
        if way == "mosaic":
            block = 64 if self.product == "wgrad" else 128
            if config:
                block = config[2] if self.product == "wgrad" else config[0]
            more = (-(-self.rows // block) + self.E - 1) * block / self.rows
        share = EXPECTED_SHARE[self.product if way == "mosaic" else way]
        moved = 2 * (self.rows * (self.D + self.F) + (1 if way == "dense" else self.E) * self.D * self.F)
        return max(more * self.flops / (share * DENSE_FLOPS), moved / COPY_BYTES)


def _plain(work: Work, draws: Sequence[str], device: Any, part: Part) -> None:
    """XLA's own matmuls."""
    import jax
    import jax.numpy as jnp
    from gpu_cases import seconds_of

    multiply, way = partial(jnp.einsum, EINSUMS[work.product]), part["way"]
    if way == "ragged_dot":
        multiply = jax.jit(partial(_ragged_dot, work.product))
        operands = (*work.operands, work.sizes(draws[0]))
        part["errors"] = {draws[0]: error_of(work, draws[0], multiply(*operands))}
    elif way == "capacity":
        multiply, operands = jax.vmap(multiply), work.operands_of(work.E, work.capacity, matrices=(work.E,))
    else:
        operands = work.operands_of(work.rows)
    part["seconds"] = {"any": seconds_of(jax.jit(multiply), *operands)}


def _ragged_dot(product: str, left: Any, right: Any, sizes: Any) -> Any:
    import jax

    contracted = {"forward": ((1,), (1,)), "dgrad": ((1,), (2,)), "wgrad": ((0,), (0,))}[product]
    numbers = jax.lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], [] if product == "wgrad" else [0])
    return jax.lax.ragged_dot_general(left, right, sizes, numbers)


def _kernel(work: Work, draws: Sequence[str], device: Any, part: Part) -> None:
    """JAX's Mosaic GPU kernel. Sizes are data, so one compilation serves all draws."""
    import jax
    from gpu_cases import seconds_of

    on_gpu = device.platform == "gpu"
    if on_gpu and str(device.compute_capability) != "9.0":
        part["skipped"] = f"the kernels are for Hopper, not for {device.device_kind}"
        return
    try:
        multiply, context = mosaic(work.product, *part["config"]), contextlib.nullcontext() if on_gpu else interpreted()
    except (ImportError, AttributeError) as error:
        part["skipped"] = f"JAX {jax.__version__}: {error}"
        return
    sizes = {draw: jax.device_put(work.sizes(draw)) for draw in dict.fromkeys(["edges", *draws])}
    run = lambda draw: multiply(*work.operands, group_sizes=sizes[draw])  # noqa: E731
    with context:
        jax.block_until_ready(work.operands)
        started = time.perf_counter()
        out = jax.block_until_ready(run("edges"))
        part["compile_s"] = time.perf_counter() - started
        part["errors"] = {"edges": error_of(work, "edges", out), draws[0]: error_of(work, draws[0], run(draws[0]))}
        if on_gpu:
            part["seconds"] = {draw: seconds_of(partial(run, draw)) for draw in draws}


@functools.cache
def mosaic(product: str, *config: int) -> Callable[..., Any]:
    """The kernel of a product: a compiled function of (left, right, group_sizes)."""
    import jax

    if not config:
        by_matrices = partial(rows_times_matrices, transposed=product == "dgrad")
        multiply = rows_times_rows if product == "wgrad" else by_matrices
        return jax.jit(lambda left, right, group_sizes: multiply(left, right, group_sizes))
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    kernels = {"forward": ragged_dot, "dgrad": partial(ragged_dot, transpose_rhs=True), "wgrad": transposed_ragged_dot}
    return jax.jit(partial(kernels[product], **dict(zip(CONFIG, config, strict=True))))


def interpreted() -> contextlib.AbstractContextManager[Any]:
    """Interprets the kernels that are traced inside. wgrad asks the first device for its multiprocessors."""
    import jax
    from jax.experimental.pallas import mosaic_gpu

    stack = contextlib.ExitStack()
    stack.enter_context(mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()))
    stack.enter_context(mock.patch.object(jax, "devices", return_value=[SimpleNamespace(core_count=4)]))
    return stack


def error_of(work: Work, draw: str, out: Any) -> float:
    """Relative error by norm against float32, over the experts with the fewest and the most rows and three others."""
    sizes = work.sizes(draw)
    ends = np.cumsum(sizes, dtype=np.int32)
    chosen = np.asarray([0, 1, np.argmin(sizes), np.argmax(sizes), work.E - 1], np.int32)
    # One window for all, so that one program is compiled.
    window = max(int(work.sizes(each).max()) for each in ("unequal", "edges"))
    return float(_compare(work.product, work.rows, window)(*work.operands, out, (chosen, (ends - sizes)[chosen], ends[chosen])))


@functools.cache
def _compare(product: str, rows: int, window: int) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    by_rows = product == "wgrad"

    def squares(left: Any, right: Any, out: Any, expert: Any) -> Any:
        number, start, end = expert
        at = jnp.minimum(start, rows - window)
        row = at + jnp.arange(window)
        inside = ((row >= start) & (row < end))[:, None]
        cut = lambda x: jnp.where(inside, jax.lax.dynamic_slice_in_dim(x, at, window).astype("float32"), 0)  # noqa: E731
        matrix = cut(right) if by_rows else right[number].astype("float32")
        expected = jnp.einsum(EINSUMS[product], cut(left), matrix, precision="highest")
        difference = (out[number].astype("float32") if by_rows else cut(out)) - expected
        return jnp.sum(difference**2), jnp.sum(expected**2)

    def compare(left: Any, right: Any, out: Any, experts: Any) -> Any:
        differences, all_expected = jax.lax.map(partial(squares, left, right, out), experts)
        return jnp.sqrt(differences.sum() / all_expected.sum())

    return jax.jit(compare)


# ----------------------------------------------------------------------------------------------------------------- the table

HEADER = ("grouped", "tokens", "way", "groups", "ms", "predicted", "TFLOP/s", "of dense", "of capacity", "error", "verdict")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of this kind as text: rates, shares of the dense rate and of the capacity's, and the verdict."""
    parts = [(row["options"], part) for row in rows if row["kind"] == "grouped" for part in row.get("grouped", [])]
    at = lambda of, part: (of["model"], of["product"], part["tokens"])  # noqa: E731
    plain_s = {
        (*at(of, part), part["way"]): part.get("seconds", {}).get("any", 0) for of, part in parts if "config" not in part
    }
    lines = []
    for of, part in parts:
        what = [f"{of['model']}, {of['product']}", f"{part['tokens']:,}"]
        what.append(" ".join([part["way"], "x".join(map(str, part.get("config", [])))]).strip())
        seconds = part.get("seconds", {})
        shares = {
            draw: [plain_s.get((*at(of, part), way), 0) / s for way in ("dense", "capacity")] for draw, s in seconds.items()
        }
        lines += [[*what, *_cells(part, draw, shares.get(draw, [0, 0]))] for draw in seconds or ["-"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEADER, ["---"] * len(HEADER), *lines]) if lines else ""


def _cells(part: Part, draw: str, shares: Sequence[float]) -> list[str]:
    s, predicted_s = part.get("seconds", {}).get(draw), part["predicted_s"]
    ms = [f"{1e3 * each:.3f}" if each else "-" for each in (s, predicted_s)]
    rate = f"{part['flops'] / s / 1e12:.0f}" if s else "-"
    # NaN is the worst of all.
    worst = max(part.get("errors", {}).values(), default=None, key=lambda error: error if error < CORRECT else math.inf)
    return [
        *(draw, *ms, rate, *(f"{100 * share:.0f}%" if share else "-" for share in shares)),
        *("-" if worst is None else f"{worst:.1e}", verdict(part, worst, shares[0])),
    ]


def verdict(part: Part, worst: float | None, of_dense: float) -> str:
    if why := part.get("error") or part.get("skipped"):
        return why.replace("\n", " ").replace("|", "/")
    if worst is not None and not worst < CORRECT:
        return "WRONG"
    if part["way"] != "mosaic" or not of_dense:
        return "-"
    return "met" if of_dense >= THRESHOLD else "MISSED"
