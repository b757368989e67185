"""Measurements of benchmarks/gpu.py on one GPU. Each function measures one kind of case and returns its figures.

    echo '{"name": ..., "kind": ..., "options": {...}}' | python benchmarks/gpu_cases.py

reads cases, one per line, and prints the results on standard output as JSON objects, one per line: `name` and the figures known
so far, or `ready` if it waits for the next case. `tell` prints some figures early, so that a crash does not lose them.

Token ids are drawn by Zipf's law over the complete vocabulary, as words in a text are: with only a few ids, the gradient of the
embedding would cost a different amount of work. The loss of the first step is then near ln(vocabulary) on every side.
"""

from __future__ import annotations

import dataclasses
import gc
import gzip
import importlib
import json
import math
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import step
import subprocess_runner
from trace_parts import gpu_planes, kernels_of, trace_parts

import jaxllm
from jaxllm.config import Config, ModelConfig, load_config
from jaxllm.cost_model.flops import attention_flops_per_token, parameter_count, train_flops_per_token
from jaxllm.cost_model.hardware import FIT_SHARE, Gpu, gpu_from_device_kind
from jaxllm.cost_model.kernel_rates import KernelRates, kernel_rates
from jaxllm.cost_model.memory import estimate_memory

Figures = dict[str, Any]
Tell = Callable[..., None]

CHECKOUT = Path(__file__).resolve().parents[1]
BASE = {
    "model": {},
    # Any text works, because its tokens are replaced.
    "data": {"source": "files", "paths": [str(CHECKOUT / "jaxllm" / "**" / "*.py")], "mask_documents": False},
    "parallel": {"data": 1},
    "train": {"steps": 1000},
    "run": {"dir": "runs/gpu"},
}
ADAMW_BYTES = 32
"""Bytes per float32 parameter in an update: the gradient is read twice (once for its norm), the parameter and two moments are
read and written."""
MOST_TIMED_S = 20
LONGEST_CHECKED = 8192
"""Positions up to which the scores of a group of heads fit in float32."""
TRACED_STEPS = 2
PROBED_SHARE = 0.7
"""Assumed memory per sequence of PyTorch's compiled step, as a fraction of its uncompiled step's. Too small a value costs
another compilation; too large a value gives too small a microbatch."""
TORCH_SHARE = 0.95
"""Fraction of the GPU's memory for PyTorch. The rest is for the CUDA context and for fragmentation. Chosen, not measured."""


def config_of(overrides: Sequence[str], **train: int) -> Config:
    """Config for one device. `train`: keys of that section."""
    return load_config(BASE, [*overrides, *(f"train.{key}={value}" for key, value in train.items())]).resolve(1)


def token_rows(config: Config, number: int) -> dict[str, np.ndarray]:
    """Batch `number`: tokens and targets, int32 [sequence, position], equal for both sides."""
    S, G = config.train.sequence_length, config.train.global_batch_sequences
    uniform = np.random.default_rng(number).random((G, S + 1))
    # Log-uniform: the probability of id n is proportional to 1 / n.
    ids = (np.exp(uniform * math.log(config.model.vocab_size)) - 1).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def speed(config: Config, times_s: Sequence[float], device_kind: str) -> Figures:
    """tokens_per_s and the figures that follow from it. MFU is None for a device that cost_model/hardware.py does not know."""
    lower, median, upper = np.percentile(times_s, [25, 50, 75]).tolist()
    model, S = config.model, config.train.sequence_length
    rate = config.step_tokens / median
    causal, full = (rate * train_flops_per_token(model, S, causal=causal) for causal in (True, False))
    gpu = gpu_from_device_kind(device_kind)
    peak = gpu.peak_flops(model.compute_dtype) if gpu else None
    return {
        "device": device_kind,
        "parameters": parameter_count(model),
        "layers": model.num_layers,
        "tokens_per_step": config.step_tokens,
        "step_s": {"median": median, "lower_quartile": lower, "upper_quartile": upper},
        "tokens_per_s": rate,
        "tflops_causal": causal / 1e12,
        "tflops_full_square": full / 1e12,
        "mfu_causal": causal / peak if peak else None,
        "mfu_full_square": full / peak if peak else None,
    }


def time_steps(tell: Tell, launch: step.Launch, steps: int) -> tuple[float, list[float]]:
    """(loss of the first step, seconds of each of `steps` later ones; if steps are slow, of fewer, at least three). Tells when
    they began and ended, in Unix time."""
    first_loss = float(launch(0))
    (warm_s,) = step.time_block(launch, 1)
    steps = max(min(steps, 3), min(steps, int(MOST_TIMED_S / warm_s)))
    gc.collect()
    gc.disable()
    began = time.time()
    try:
        times_s = step.time_block(launch, steps)
    finally:
        gc.enable()
    tell(timed=[began, time.time()])
    return first_loss, times_s


# ------------------------------------------------------------------------------------------------------------------ jaxllm


def train(
    tell: Tell,
    overrides: Sequence[str],
    steps: int,
    traced: bool = False,
    at_most: int | None = None,
    microbatch: int | None = None,
    xla: Mapping[str, Any] | None = None,
    keep: str | None = None,
    made: Callable[[Any], None] = lambda trainer: None,
) -> Figures:
    """Measures a run's own train step, with the largest microbatch that fits by the estimate.

    Args:
      traced: profile two more steps.
      at_most: limit for the sequences of a microbatch.
      microbatch: its sequences, whether they fit or not.
      xla: options of the compiler, beside a run's own.
      keep: start of the names of two files: the program as this device compiled it (.hlo.gz), and the profile (.xplane.gz).
      made: gets the Trainer.
    """
    from jaxllm.machine import xla_flags
    from jaxllm.run.memory_check import total_bytes

    device = start_jax()
    earlier = peak_bytes(device)
    own_options = xla_flags.compile_options
    with_more = lambda *arguments: own_options(*arguments) | dict(xla or {})  # noqa: E731
    gpu = gpu_from_device_kind(device.device_kind)
    rows = microbatch or largest_microbatch(overrides, capacity_of(device), gpu, at_most)
    tell(microbatch=rows)
    config = config_of(overrides, microbatch_sequences=rows)
    estimate = estimate_memory(config, gpu)
    trainer = jaxllm.Trainer(config)
    made(trainer)
    batches = [batch_of(trainer, number) for number in range(step.BATCHES)]
    with mock.patch.object(xla_flags, "compile_options", with_more):
        launch, compile_s, _ = step.our_side(trainer, batches)
    hlo = trainer.programs.current.as_text() if traced or keep else ""
    if keep:
        Path(f"{keep}.hlo.gz").write_bytes(gzip.compress(hlo.encode()))
    tell(
        microbatches=config.num_microbatches,
        attention=trainer.programs.functions.attention,
        compile_s=compile_s,
        estimate_bytes=estimate.peak_bytes,
        compiled_bytes=total_bytes(trainer.programs.current.memory_analysis()),
    )
    first_loss, times_s = time_steps(tell, launch, steps)
    in_use = peak_bytes(device)
    # The allocator cannot be reset: a step below the peak of an earlier case has no figure.
    found = {
        "first_loss": first_loss,
        "in_use_bytes": in_use if in_use != earlier else None,
        **speed(config, times_s, device.device_kind),
    }
    if traced:
        tell(**found)
        found["trace"] = trace(launch, hlo, kernel_rates(gpu, config.model) if gpu else None, keep)
    trainer.close()
    return found


def start_jax() -> Any:
    """Starts JAX as a run does, and returns the device."""
    import jax

    from jaxllm.cluster import distributed
    from jaxllm.config import RunConfig

    distributed.start(RunConfig())
    return jax.local_devices()[0]


def capacity_of(device: Any) -> int | None:
    from jaxllm.run.memory_check import capacity_of

    return capacity_of(device)


def peak_bytes(device: Any) -> int | None:
    """The most that this process has had in use on the device at once."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def largest_microbatch(
    overrides: Sequence[str], capacity_bytes: int | None, gpu: Gpu | None, at_most: int | None = None
) -> int:
    """Largest number of sequences, a divisor of the batch, whose estimate leaves the planner's margin. 1 if none does; at most
    2 if the capacity is not known.
    """
    batch = config_of(overrides).train.global_batch_sequences
    limit = at_most if capacity_bytes else min(at_most or 2, 2)
    sizes = [b for b in range(batch, 0, -1) if batch % b == 0 and b <= (limit or batch)]
    if capacity_bytes is None:
        return sizes[0]
    fits = lambda b: (  # noqa: E731
        estimate_memory(config_of(overrides, microbatch_sequences=b), gpu).peak_bytes <= FIT_SHARE * capacity_bytes
    )
    return next((b for b in sizes if fits(b)), 1)


def batch_of(trainer: Any, number: int) -> dict[str, Any]:
    """A batch of the run with other tokens. If documents are masked, they end where the run's own text has ends."""
    import jax

    batch = trainer.train_batch(number)
    for name, ids in token_rows(trainer.config, number).items():
        batch[name] = jax.device_put(ids.reshape(batch[name].shape), batch[name].sharding)
    return batch


# ------------------------------------------------------------------------------------------------------------------- a trace

ATTENTION = re.compile(r"cudnn|sdpa|fmha|flash", re.IGNORECASE)
BACKWARD = re.compile(r"bprop|bwd|backward|dgrad|dot_do_o|convert_dq|reduce_head", re.IGNORECASE)
MATMUL = re.compile(r"gemm|nvjet|cutlass|wgmma|xmma|cublas|dot", re.IGNORECASE)
"""Pattern for names of matmul kernels: those of cuDNN and cuBLAS, and those that XLA generates."""


def trace(launch: step.Launch, hlo: str, rates: KernelRates | None, keep: str | None = None) -> Figures:
    """Profile of a step: seconds per step by kind of kernel and, on a GPU, by part of the kernel account; the longest kernels,
    and the time in which any kernel runs.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        # Tracing Python's calls would slow the launches down.
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        for number in range(TRACED_STEPS):
            loss = launch(number % step.BATCHES)
        float(loss)
        jax.profiler.stop_trace()
        file = next(Path(folder).rglob("*.xplane.pb"))
        if keep:
            Path(f"{keep}.xplane.gz").write_bytes(gzip.compress(file.read_bytes()))
        profile = jax.profiler.ProfileData.from_file(str(file))
    kernels, op_name_of = list(kernels_of(profile)), op_names(hlo)
    seconds, calls, by_kind = Counter(), Counter(), Counter()
    for name, op, start, end in kernels:
        kind = kind_of(name, op_name_of.get(op, ""))
        by_kind[kind] += end - start
        seconds[name, kind] += end - start
        calls[name, kind] += 1
    spans = [(start, end) for *_, start, end in kernels]
    whole = max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)
    a_step = 1e-9 / TRACED_STEPS
    return {
        "span_s": whole * a_step,
        "busy_s": covered(spans) * a_step,
        "by_kind_s": {kind: total * a_step for kind, total in by_kind.most_common()},
        "named": sum(op in op_name_of for _, op, *_ in kernels) / max(len(kernels), 1),
        "longest": [
            {"kernel": name[:120], "kind": kind, "s": total * a_step, "calls": calls[name, kind] / TRACED_STEPS}
            for (name, kind), total in seconds.most_common(40)
        ],
        **(trace_parts(hlo, profile, TRACED_STEPS, rates) if gpu_planes(profile) else {}),
    }


def kind_of(kernel: str, op_name: str) -> str:
    if ATTENTION.search(kernel):
        return "attention_backward" if BACKWARD.search(kernel) else "attention_forward"
    if MATMUL.search(kernel):
        return "matmul"
    if kernel.lower().startswith(("memcpy", "memset")):
        return "copy"
    return "optimizer" if "optimizer" in op_name else "other"


def op_names(hlo: str) -> dict[str, str]:
    """Name of an instruction -> its origin in the traced program."""
    return dict(re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="((?:[^"\\]|\\.)*)"', hlo, re.MULTILINE))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# ------------------------------------------------------------------------------------------------------------ parts, alone


def seconds_of(function: Callable[..., Any], *arguments: Any, least_s: float = 0.1, blocks: int = 5) -> float:
    """Seconds of one call: the median over blocks of calls that are dispatched without waiting."""
    import jax

    jax.block_until_ready(function(*arguments))
    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    calls = max(1, min(30, round(least_s / (time.perf_counter() - started))))
    times_s = []
    for _ in range(blocks):
        started = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        times_s.append((time.perf_counter() - started) / calls)
    return float(np.median(times_s))


def normal(number: int, *shape: int, dtype: str = "bfloat16") -> Any:
    """Random numbers, because a GPU computes products of zeros with less power, and faster."""
    import jax

    return jax.jit(partial(jax.random.normal, shape=shape, dtype=dtype))(jax.random.key(number))


def ceilings(tell: Tell, copy_bytes: int, matmul_sizes: Sequence[int]) -> Figures:
    """Ceilings of this GPU: bytes per second of a large copy, counting both read and write, and FLOP/s of a square bfloat16
    matmul of random numbers.
    """
    import jax

    device = start_jax()
    x = normal(0, 2, copy_bytes // 4)
    copies = {"copy": lambda x: x.copy(), "fusion": lambda x: -x}
    rates = {name: 2 * x.nbytes / seconds_of(jax.jit(function), x) for name, function in copies.items()}
    del x
    multiply, flops = jax.jit(lambda a, b: a @ b), {}
    for n in matmul_sizes:
        flops[str(n)] = 2 * n**3 / seconds_of(multiply, normal(1, n, n), normal(2, n, n))
    return {
        "device": device.device_kind,
        "jax": f"{jax.__version__}, {device.client.platform_version.splitlines()[0]}",
        "capacity_bytes": capacity_of(device),
        "copy_bytes_per_s": max(rates.values()),
        "copies": rates,
        "matmul_flops": max(flops.values()),
        "matmuls": flops,
    }


def parts(tell: Tell, overrides: Sequence[str], sequences: int, head_chunks: Sequence[int] = ()) -> Figures:
    """Parts of a step alone, with the shapes of a microbatch of `sequences`: attention, each matmul forward and both backward
    products, a norm, the head with its loss at several chunk sizes, and the complete optimizer.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxllm.model.layers import RMSNorm
    from jaxllm.model.loss import cross_entropy
    from jaxllm.parallel.kernels import choose_attention

    device, config = start_jax(), config_of(overrides)
    model, S = config.model, config.train.sequence_length
    D, H, T = model.hidden_size, model.head_dim, sequences * S
    kernel, attend = choose_attention(config, device)
    dtype = model.compute_dtype

    q, k, v, do = (
        normal(n, sequences, S, heads, H, dtype=dtype)
        for n, heads in enumerate((model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads))
    )
    forward_s = seconds_of(jax.jit(attend), q, k, v)
    both_s = seconds_of(jax.jit(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do)), q, k, v, do)
    forward_flops = T * attention_flops_per_token(model, S, causal=True) // model.num_layers
    attention = {"kernel": kernel, "forward_s": forward_s, "forward_backward_s": both_s, "forward_flops": forward_flops}
    del q, k, v, do
    tell(tokens=T, attention=attention)
    tell(matmuls=matmuls(model, T))
    chunk = min(config.train.loss_chunk_tokens, T)
    tell(head_products=products(chunk, D, model.vocab_size, dtype, sums="float32"))

    with nnx.use_eager_sharding(False):
        norm = RMSNorm(model, "layers.mlp_norm", rngs=nnx.Rngs(0))
    graph, scale = nnx.split(norm)
    apply = lambda scale, x: nnx.merge(graph, scale)(x)  # noqa: E731
    x, dy = normal(0, sequences, S, D, dtype=dtype), normal(1, sequences, S, D, dtype=dtype)
    tell(
        norm={
            "forward_s": seconds_of(jax.jit(apply), scale, x),
            "forward_bytes": 2 * x.nbytes,
            "backward_s": seconds_of(jax.jit(lambda scale, x, dy: jax.vjp(apply, scale, x)[1](dy)), scale, x, dy),
            "backward_bytes": 3 * x.nbytes,
        }
    )
    del dy

    head, ids = normal(2, model.vocab_size, D, dtype=dtype), jnp.zeros((sequences, S), jnp.int32)
    weights, heads = jnp.full((sequences, S), 1 / T), {}
    for chunk in head_chunks:
        loss = lambda h, head, chunk=chunk: cross_entropy(h, head, ids, weights, model.vocab_size, chunk, 0.0)[0]  # noqa: E731
        heads[str(chunk)] = seconds_of(jax.jit(jax.grad(loss, argnums=(0, 1))), x, head)
    tell(head_s=heads, head_flops=6 * T * D * model.vocab_size)
    del x, head
    return {"device": device.device_kind, "optimizer": optimizer(config)}


def matmuls(model: ModelConfig, tokens: int) -> list[Figures]:
    """For each matrix shape of a layer: the result of `products`, and how often a layer has the shape."""
    D, F, H = model.hidden_size, model.intermediate_size, model.head_dim
    keys, queries = model.num_kv_heads * H, model.num_heads * H
    shapes = Counter([(D, queries), (D, keys), (D, keys), (queries, D), (D, F), (D, F), (F, D)])
    return [{"count": count, **products(tokens, *shape, model.compute_dtype)} for shape, count in shapes.items()]


def products(tokens: int, inputs: int, outputs: int, dtype: str, sums: str | None = None) -> Figures:
    """FLOPs of one product with a matrix [inputs, outputs], and its seconds: forward, backward for the input, backward for the
    weight. `sums`: dtype of the results of the first and the last, if another.
    """
    import jax
    import jax.numpy as jnp

    ways = {
        "forward_s": lambda x, w, dy: jnp.einsum("TK,KN->TN", x, w, preferred_element_type=sums),
        "input_s": lambda x, w, dy: jnp.einsum("TN,KN->TK", dy, w),
        "weight_s": lambda x, w, dy: jnp.einsum("TK,TN->KN", x, dy, preferred_element_type=sums),
    }
    shapes = ((tokens, inputs), (inputs, outputs), (tokens, outputs))
    x, w, dy = (normal(number, *shape, dtype=dtype) for number, shape in enumerate(shapes))
    times = {way: seconds_of(jax.jit(function), x, w, dy) for way, function in ways.items()}
    return {"shape": [tokens, inputs, outputs], "flops": 2 * tokens * inputs * outputs, **times}


def optimizer(config: Config) -> Figures:
    """Times the optimizer of a step: gradient norm, skip decision, clipping and AdamW, by the step's own functions."""
    import jax
    import jax.numpy as jnp

    from jaxllm.mesh.axes import make_mesh
    from jaxllm.train.build import build_training
    from jaxllm.train.optimizer import make_learning_rate, make_optimizer
    from jaxllm.train.step import make_train_step, make_update

    mesh = make_mesh(config.parallel)
    with jax.set_mesh(mesh):
        training = build_training(config, mesh)
        state = training.create_state(0)
        gradients = jax.jit(lambda params: jax.tree.map(lambda p: 0.01 * p + 1e-4, params))(state.params)
        given = lambda params, batch: (jnp.zeros(()), batch)  # noqa: E731
        update = make_update(make_optimizer(config, training.functions.table, mesh=mesh))
        apply = make_train_step(given, update, make_learning_rate(config), config.optimizer.clip_norm)
        apply = jax.jit(apply, donate_argnums=0)

        def once() -> Any:
            nonlocal state
            state, metrics = apply(state, gradients)
            return metrics["grad_norm"]

        update_s = seconds_of(once)
    elements = sum(x.size for x in jax.tree.leaves(state.params))
    return {"s": update_s, "bytes": ADAMW_BYTES * elements}


def ring(tell: Tell, overrides: Sequence[str], ranks: Sequence[int]) -> Figures:
    """One rank's program of a ring without its transfers, and one fused call over the complete sequence. With zigzag all ranks
    do the same work, so c ranks cost c times as much. Divided by the fused call's time, this is the cost of blocks.
    """
    import jax

    from jaxllm.model.blockwise_attention import xla_kernel
    from jaxllm.model.cudnn_attention import cudnn_kernel
    from jaxllm.parallel.kernels import choose_attention
    from jaxllm.parallel.ring_attention import ring_attention

    device, config = start_jax(), config_of(overrides)
    model, S = config.model, config.train.sequence_length
    name, whole = choose_attention(config, device)
    kernel = cudnn_kernel() if name.startswith("cudnn") else xla_kernel()

    def times(attend: Callable[..., Any], length: int) -> Figures:
        q, k, v, do = (
            normal(n, 1, length, heads, model.head_dim, dtype=model.compute_dtype)
            for n, heads in enumerate((model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads))
        )
        both = jax.jit(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do))
        return {"forward_s": seconds_of(jax.jit(attend), q, k, v), "forward_backward_s": seconds_of(both, q, k, v, do)}

    tell(
        device=device.device_kind,
        kernel="cudnn" if name.startswith("cudnn") else "xla",
        sequence_length=S,
        whole=times(whole, S),
    )
    played = []
    for c in ranks:
        stay = mock.patch.object(jax.lax, "ppermute", lambda x, axis_name, perm: x)
        # The rank in the middle. It is read from memory as on a ring: with a constant rank the compiler could drop the work
        # that `where` does not select.
        at = jax.device_put(np.int32(c // 2))
        here = mock.patch.object(jax.lax, "axis_index", lambda axis_name, at=at: jax.lax.optimization_barrier(at))
        with stay, here:
            rank = times(ring_attention(kernel, "context", c), S // c)
        played.append({"ranks": c, **rank})
    return {"played": played}


def attention(tell: Tell, shapes: Sequence[Sequence[int]], documents: int) -> Figures:
    """cuDNN's attention alone, forward and backward: causal, and over packed documents of one length, in its packed layout and
    by halves. Errors are relative, against float32 attention of XLA, for the first two heads.

    Args:
      shapes: of (sequences, positions, query heads, key heads, head's size).
      documents: in each sequence.
    """
    import jax
    import jax.numpy as jnp

    from jaxllm.model.attention import xla_attention
    from jaxllm.model.blockwise_attention import xla_kernel
    from jaxllm.model.cudnn_attention import cudnn_kernel
    from jaxllm.parallel.ring_attention import ring_attention

    device, found = start_jax(), []
    on_gpu = device.platform == "gpu"
    for B, S, N, K, H in shapes:
        q, k, v, do = (normal(n, B, S, heads, H) for n, heads in enumerate((N, K, K, N)))
        ids = jnp.repeat(jnp.arange(documents, dtype=jnp.int32), S // documents)[None].repeat(B, 0)
        for way, most, segments in (("causal", None, None), ("packed", documents, ids), ("halves", None, ids)):
            kernel = cudnn_kernel(most) if on_gpu else xla_kernel()
            attend = partial(_in_order, ring_attention(kernel, "context", 1), segments)
            both = lambda q, k, v, do, attend=attend: jax.vjp(attend, q, k, v)[1](do)  # noqa: E731
            row = {"shape": [B, S, N, K, H], "way": way, "documents": 1 if segments is None else documents}
            try:
                row["forward_s"] = seconds_of(jax.jit(attend), q, k, v)
                row["forward_backward_s"] = seconds_of(jax.jit(both), q, k, v, do)
                # Half of the square: two products forward, five backward.
                row["forward_flops"] = 2 * B * N * S * (S // row["documents"]) * H
                if S <= LONGEST_CHECKED:
                    first = None if segments is None else segments[:1]
                    sides = (ring_attention(kernel, "context", 1), xla_attention)
                    row["errors"] = _attention_errors(*(partial(_in_order, side, first) for side in sides), q, k, v, do)
            except Exception as error:
                row["error"] = str(error)[-300:]
            tell(attention=[*found, row])
            found.append(row)
    return {"device": device.device_kind}


def _in_order(attend: Any, segments: Any, q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v, segments)


def _attention_errors(ours: Any, reference: Any, q: Any, k: Any, v: Any, do: Any) -> dict[str, float]:
    """Relative errors of the output and the gradients, of the first sequence's first group of heads."""
    import jax
    import jax.numpy as jnp

    group = q.shape[2] // k.shape[2]
    cut = [x[:1, :, :n] for x, n in ((q, group), (k, 1), (v, 1), (do, group))]

    def results(attend: Any, dtype: str) -> list[Any]:
        inputs = [x.astype(dtype) for x in cut]
        out, pullback = jax.vjp(attend, *inputs[:3])
        return [x.astype("float32") for x in (out, *pullback(inputs[3]))]

    with jax.default_matmul_precision("highest"):
        theirs = jax.jit(partial(results, reference, "float32"))()
    mine = jax.jit(partial(results, ours, "bfloat16"))()
    norms = [float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in zip(mine, theirs, strict=True)]
    return dict(zip(("out", "dq", "dk", "dv"), norms, strict=True))


# ----------------------------------------------------------------------------------------------------------- transformers


def transformers(
    tell: Tell,
    overrides: Sequence[str],
    steps: int,
    kernel: str | None = "flash",
    compiled: bool = True,
    float32_weights: bool = False,
    liger: bool = False,
    loss_chunk: int | None = None,
    first: int | None = None,
) -> Figures:
    """Trains the same model and batches in PyTorch, with the largest microbatch that fits, and with gradient checkpointing if
    not even one sequence fits without it.

    Args:
      first: the microbatch to try first, instead of one by the memory of an uncompiled step.
    """
    import torch
    from transformers import __version__ as version

    config = config_of(overrides)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = step.Theirs(compiled, kernel, float32_weights, liger, loss_chunk)
    network, adamw = step.their_network(config, device, theirs)
    rows = [token_rows(config, number) for number in range(step.BATCHES)]

    def launch_of(b: int, theirs: step.Theirs, sequences: int | None = None) -> step.Launch:
        """Steps in microbatches of b, over complete batches or their first sequences."""
        cut = [{name: ids[:sequences].reshape(-1, b, ids.shape[1]) for name, ids in row.items()} for row in rows]
        marked = [{**row, "mask": np.ones(row["tokens"].shape, bool)} for row in cut]
        return step.their_launch(config, network, adamw, marked, device, theirs)

    def measure(b: int) -> Figures:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        launch = launch_of(b, theirs)
        # On a GPU the weights are not fresh, because the search for the microbatch takes steps too.
        first_loss = float(launch(0))
        compile_s = time.perf_counter() - started
        window: Figures = {}
        _, times_s = time_steps(window.update, launch, steps)
        return {
            **window,
            "microbatch": b,
            "microbatches": batch // b,
            "checkpointing": checkpointing,
            "first_loss": first_loss,
            "compile_s": compile_s,
            "in_use_bytes": torch.cuda.max_memory_allocated() if gpu else None,
            **speed(config, times_s, torch.cuda.get_device_name() if gpu else "cpu"),
        }

    gpu, batch = device == "cuda", config.train.global_batch_sequences
    sizes = [b for b in range(1, batch + 1) if batch % b == 0]
    if first is not None or not gpu:
        at, checkpointing, fixed_bytes = first or min(2, batch), False, state_bytes(network)
    else:
        at, checkpointing, fixed_bytes = probe(sizes, network, adamw, launch_of, theirs)
    b, best, too_large = at, None, batch + 1
    while True:
        try:
            found = measure(b)
        except torch.cuda.OutOfMemoryError:
            if b == 1:
                raise
            found, too_large = None, b
        # Outside the exception handler, which keeps the failed step's memory alive.
        adamw.zero_grad()
        if compiled:
            torch.compiler.reset()
        if gpu:
            forget(torch)
        if found is None and best is None:
            b = max(size for size in sizes if size < b)
            continue
        if found is not None:
            if best is None or found["tokens_per_s"] > best["tokens_per_s"]:
                best = found
            tell(**best)
            larger = next((size for size in sizes if b < size < too_large), None)
            # By the memory per sequence, one size more may fit.
            if gpu and larger and fixed_bytes + larger * (found["in_use_bytes"] - fixed_bytes) / b <= torch_room(torch):
                b = larger
                continue
        return {**best, "torch": torch.__version__, "transformers": version}


def torch_room(torch: Any) -> float:
    return TORCH_SHARE * torch.cuda.mem_get_info()[1]


def probe(
    sizes: Sequence[int], network: Any, adamw: Any, launch_of: Callable[..., step.Launch], theirs: step.Theirs
) -> tuple[int, bool, int]:
    """(first microbatch, whether with gradient checkpointing, bytes independent of the microbatch), from the memory of the
    uncompiled step with one sequence.
    """
    import torch

    plain = dataclasses.replace(theirs, compiled=False)
    checkpointing = False
    while True:
        torch.cuda.reset_peak_memory_stats()
        try:
            launch = launch_of(1, plain, 1)
            for number in range(2):
                float(launch(number))
            break
        except torch.cuda.OutOfMemoryError:
            if checkpointing:
                raise
        launch, checkpointing = None, True
        network.gradient_checkpointing_enable()
        adamw.zero_grad()
        forget(torch)
    peak = torch.cuda.max_memory_allocated()
    adamw.zero_grad()
    launch = None
    forget(torch)
    fixed = state_bytes(network)
    fits = (torch_room(torch) - fixed) / max(PROBED_SHARE * (peak - fixed), 1)
    return max((size for size in sizes if size <= fits), default=1), checkpointing, fixed


def state_bytes(network: Any) -> int:
    """Weights, gradients and two moments, all in the weights' dtype."""
    return 4 * sum(p.nbytes for p in network.parameters())


def forget(torch: Any) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------------------------------------------------------ the cases

KINDS = {
    "ceilings": ceilings,
    "train": train,
    "parts": parts,
    "ring": ring,
    "attention": attention,
    "transformers": transformers,
}
ELSEWHERE = ("pretend", "grouped", "limit", "real_run", "peers")
"""Kinds that are functions of the module gpu_<kind>."""


def measure(kind: str) -> Callable[..., Figures]:
    return getattr(importlib.import_module(f"gpu_{kind}"), kind) if kind in ELSEWHERE else KINDS[kind]


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)

        def tell(name: str = case["name"], **figures: Any) -> None:
            print(json.dumps({"name": name, **figures}), flush=True)

        try:
            tell(**measure(case["kind"])(tell, **case["options"]))
        except Exception:
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            tell(error=subprocess_runner.reason(text))
        # The state of one case must be gone before the next.
        gc.collect()
        print(json.dumps({"ready": True}), flush=True)


if __name__ == "__main__":
    main()
