"""The gradient noise scale: the estimator against known covariances, its squared norms on every mesh, a small Llama against
brute force, and a run that logs it and is resumed.
"""

import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import Run, assert_close
from run_files import steps_of

import jaxllm
from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.config import ConfigError
from jaxllm.cost_model.flops import parameter_count
from jaxllm.cost_model.noise_reading import NoiseEstimate, reading, wasted_share
from jaxllm.mesh.axes import axis_sizes
from jaxllm.parallel.grad_square_norms import microbatches_between
from jaxllm.parallel.types import NoiseParts
from jaxllm.pipeline_schedule import make_schedule
from jaxllm.run.loop import fit
from jaxllm.run.noise_scale import NoiseScale, student_t
from jaxllm.train.step import estimates

# ---------------------------------------------------------------------------------------------------------- the estimator


class Regression:
    """Least squares at a point where everything is known: x ~ N(0, diag(v)), residual x.e + noise. A "token" is an example.

    The gradient of one is x (x.e + noise): its mean is v e, and by Isserlis' theorem its covariance has the trace
    (e.v e + s^2) sum(v) + |v e|^2.
    """

    def __init__(self, width=30, noise=2.0):
        rng = np.random.default_rng(0)
        self.variance, self.error, self.noise = rng.uniform(0.5, 1.5, width), rng.normal(0, 0.5, width), noise
        g = self.variance * self.error
        self.g2 = float(g @ g)
        self.trace = float((self.error @ g + noise**2) * self.variance.sum() + self.g2)

    def step(self, rng, sizes):
        """Estimates of one step whose parts have this many examples."""
        x = rng.normal(0, np.sqrt(self.variance), (sum(sizes), len(self.variance)))
        gradients = x * (x @ self.error + rng.normal(0, self.noise, len(x)))[:, None]
        of_parts = [part.mean(axis=0) for part in np.split(gradients, np.cumsum(sizes)[:-1])]
        mean_square = sum(n * (g @ g) for n, g in zip(sizes, of_parts, strict=True)) / len(x)
        found = estimates(NoiseParts(mean_square, len(sizes), len(x)), np.linalg.norm(gradients.mean(axis=0)))
        return found["noise_g2"], found["noise_s"]


@pytest.mark.parametrize("sizes", [(4,) * 8, (1, 2, 3, 4, 5, 6, 7, 8), (32, 4)], ids=str)
def test_known_covariance_is_found_within_five_percent(sizes):
    problem, rng, scale = Regression(), np.random.default_rng(1), NoiseScale(window=math.inf)
    steps = np.array([problem.step(rng, sizes) for _ in range(4000)])
    np.testing.assert_allclose(steps.mean(axis=0), [problem.g2, problem.trace], rtol=0.05)
    for g2, s in steps:
        scale.add(g2, s)
    truth = problem.trace / problem.g2
    assert scale.found.tokens == pytest.approx(truth, rel=0.05)
    assert scale.found.tokens == pytest.approx(steps[:, 1].mean() / steps[:, 0].mean())
    assert scale.found.low < scale.found.tokens < scale.found.high < 1.2 * scale.found.low


def test_the_interval_holds_the_truth_as_often_as_it_says():
    problem, rng = Regression(), np.random.default_rng(2)
    truth, held = problem.trace / problem.g2, 0
    for _ in range(300):
        scale = NoiseScale()
        for _ in range(30):
            scale.add(*problem.step(rng, (4,) * 8))
        held += scale.found.low <= truth <= scale.found.high
    # 95% of 300 is 285, with a standard deviation of 4. The estimates are skewed, which costs a little.
    assert 265 <= held <= 298


def test_the_average_forgets():
    """Ten times smaller from step 100 on: after 400 more steps the average has forgotten the start; a plain mean has not."""
    recent, all_alike = NoiseScale(), NoiseScale(window=math.inf)
    for step in range(500):
        for scale in (recent, all_alike):
            scale.add(1.0, 10.0 if step >= 100 else 100.0)
    assert recent.found.tokens == pytest.approx(10, rel=0.3)
    assert all_alike.found.tokens == pytest.approx(28)


def test_what_is_not_finite_is_left_out():
    scale = NoiseScale()
    assert scale.found is None
    assert scale.see({"loss": 1.0}) == {}
    assert scale.see({"noise_g2": math.nan, "noise_s": math.inf}) == {}
    assert scale.see({"noise_g2": 2.0, "noise_s": 6.0}) == {
        "noise_scale_tokens": 3.0,
        "noise_scale_low": 0.0,
        "noise_scale_high": math.inf,
    }
    assert not np.isfinite(estimates(NoiseParts(jnp.float32(3), jnp.float32(1), jnp.float32(8)), jnp.float32(2))["noise_s"])


def test_a_gradient_that_is_lost_in_the_noise_has_no_upper_end():
    scale = NoiseScale(window=math.inf)
    for number in range(50):
        scale.add(0.1 + 3 * (-1) ** number, 100 + 5 * (-1) ** (number // 2))
    assert math.isinf(scale.found.high)
    # |g|^2 is 0.1 +- 2.01 x 3.03 / sqrt(50) = 0.86, and tr(S) is 100.2.
    assert scale.found.low == pytest.approx(100.2 / 0.96, rel=0.01)
    nothing = NoiseScale(window=math.inf)
    for sign in (1, -1) * 10:
        nothing.add(1.0 * sign, 2.0 * sign)
    assert nothing.found[1:] == (0.0, math.inf)


@pytest.mark.parametrize(("freedom", "expected"), [(2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (200, 1.972)])
def test_students_t(freedom, expected):
    assert student_t(freedom) == pytest.approx(expected, rel=0.04)


def test_the_reading():
    """Steps and tokens to a loss are 1 + b/B and 1 + B/b times the minimum: at B = b half is wasted, and 2 B needs 3/4 of the
    steps and 3/2 of the tokens."""
    for batch, scale in ((1.0, 1.0), (3.0, 1.0), (1.0, 10.0)):
        steps, tokens = (lambda B, b=scale: 1 + b / B), (lambda B, b=scale: 1 + B / b)
        share = wasted_share(batch, scale)
        assert share == pytest.approx(1 - 1 / tokens(batch))
        assert (1 - share) / 2 == pytest.approx(1 - steps(2 * batch) / steps(batch))
        assert share == pytest.approx(tokens(2 * batch) / tokens(batch) - 1)
    assert reading(NoiseEstimate(1e6, 5e5, 2e6), 1e6) == (
        "gradient noise scale 1.0M tokens (500.0k to 2.0M): of a step of 1.0M tokens 50% (33% to 67%) is wasted; twice the "
        "data ranks, with twice the batch, would take 25% fewer steps and 50% more tokens"
    )
    assert reading(NoiseEstimate(math.inf, 9e6, math.inf), 1e6) == (
        "gradient noise scale above 9.0M tokens: of a step of 1.0M tokens at most 10% is wasted; twice the data ranks, with "
        "twice the batch, would take at least 45% fewer steps and at most 10% more tokens"
    )
    assert "about 3.0k tokens: too few" in reading(NoiseEstimate(3e3, 0.0, math.inf), 1e6)


# ------------------------------------------------------------------------------------------------------------- every mesh

PARTS, ROWS, S = 8, 2, 16
"""Eight parts of two sequences on every mesh."""
MESHES = {
    # Sizes of replica, pipe, data, context, tensor, zero; then more overrides.
    "one device": ((1, 1, 1, 1, 1, 1),),
    "one device, tied": ((1, 1, 1, 1, 1, 1), "model.tie_embeddings=true"),
    "data ranks": ((1, 1, 8, 1, 1, 1),),
    "zero 0, tensor": ((1, 1, 2, 1, 4, 0), "model.tie_embeddings=true"),
    "zero 2": ((1, 1, 4, 1, 1, 2),),
    "zero 3, unrolled": ((1, 1, 4, 1, 1, 3), "model.scan_layers=false"),
    "zero 3, tensor": ((1, 1, 4, 1, 2, 3), "model.tie_embeddings=true"),
    "zero 3, context": ((1, 1, 2, 2, 2, 3),),
    "context": ((1, 1, 1, 4, 1, 1), "model.tie_embeddings=true"),
    "pipeline": ((1, 2, 2, 1, 1, 1),),
    "pipeline, tensor": ((1, 2, 1, 1, 2, 1),),
    "pipeline, zero 2, tied": ((1, 2, 2, 1, 2, 2), "model.tie_embeddings=true"),
    "gpipe, tied": ((1, 4, 1, 1, 1, 1), "model.tie_embeddings=true", "parallel.schedule=gpipe", "model.num_layers=4"),
    "interleaved, context, tied": (
        (1, 2, 1, 2, 2, 1),
        *("parallel.schedule=interleaved", "parallel.virtual_stages=2", "model.tie_embeddings=true"),
        "model.num_layers=4",
    ),
    "interleaved, zero 3": (
        (1, 2, 2, 1, 1, 3),
        *("parallel.schedule=interleaved", "parallel.virtual_stages=2", "model.num_layers=4"),
    ),
    "hybrid": ((2, 1, 2, 1, 2, 2),),
    "hybrid, unrolled": ((2, 1, 4, 1, 1, 1), "model.scan_layers=false"),
    "hybrid pipeline": ((2, 2, 2, 1, 1, 1), "model.tie_embeddings=true"),
    "unrolled, offload": ((1, 1, 2, 1, 1, 1), "model.scan_layers=false", "parallel.remat=offload"),
}
FAST = {
    *("one device", "data ranks", "zero 3, tensor", "pipeline, zero 2, tied", "interleaved, context, tied"),
    *("hybrid", "hybrid, unrolled", "zero 3, unrolled"),
}
NIGHTLY = {"gpipe, tied", "interleaved, zero 3", "unrolled, offload"}


def rows_of_parts():
    """[parts x rows, S]: from almost no to all targets, none in the third part; two documents per row."""
    rng = np.random.default_rng(0)
    shape = (PARTS * ROWS, S)
    ids = rng.integers(0, 256, (shape[0], S + 1)).astype(np.int32)
    keep = np.linspace(0.05, 1, shape[0])[:, None]
    keep[2 * ROWS : 3 * ROWS] = 0
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "mask": rng.random(shape) < keep,
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), shape).copy(),
        "segments": (np.arange(S) >= rng.integers(1, S, (shape[0], 1))).astype(np.int32) + 1,
    }


def in_microbatches(microbatches):
    """The `batch` of a Run: parts in the order of microbatches, and within each of data ranks."""
    return lambda seed=0: {name: a.reshape(microbatches, -1, S) for name, a in rows_of_parts().items()}


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(mesh, *more):
        replica, pipe, data, context, tensor, zero = mesh
        axes = {"replica": replica, "pipe": pipe, "data": data, "context": context, "tensor": tensor, "zero": zero}
        sizes = (f"train.global_batch_sequences={PARTS * ROWS}", f"train.microbatch_sequences={ROWS}", "model.vocab_size=258")
        layers = () if any(line.startswith("model.num_layers") for line in more) else ("model.num_layers=3",)
        parallel = (f"parallel.{key}={value}" for key, value in axes.items())
        return Run(tiny_config(*parallel, *sizes, *layers, *more), in_microbatches(PARTS // (replica * data)))

    return make


@pytest.fixture(scope="module")
def one_by_one(make_run):
    """variant -> (targets, mean loss, its gradients) of each part, by separate calls on one device."""
    cache = {}

    def measure(*variant):
        if variant not in cache:
            run = make_run((1, 1, 1, 1, 1, 1), *variant)
            gradient, found = jax.jit(run.functions.value_and_grad), []
            with jax.set_mesh(run.mesh):
                for part in range(PARTS):
                    arrays = {name: a[None, part * ROWS : (part + 1) * ROWS] for name, a in rows_of_parts().items()}
                    loss, gradients = gradient(run.state.params, run.place(arrays))
                    found.append((int(arrays["mask"].sum()), float(loss), run.plain(gradients)))
            cache[variant] = found
        return cache[variant]

    return measure


def joined(parts):
    """(mean square, number of parts, loss, gradients) of the step with these parts."""
    parts = [part for part in parts if part[0]]
    shares = np.array([targets for targets, _, _ in parts]) / sum(targets for targets, _, _ in parts)
    squares = [sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(part[2])) for part in parts]
    gradients = jax.tree.map(lambda *g: sum(w * x for w, x in zip(shares, g, strict=True)), *(part[2] for part in parts))
    return shares @ squares, len(parts), shares @ [loss for _, loss, _ in parts], gradients


def variant_of(more):
    return tuple(line for line in more if line.startswith(("model.tie_embeddings", "model.num_layers")))


def mesh_cases():
    for name in MESHES:
        mark = pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow
        yield name if name in FAST else pytest.param(name, marks=mark)


@pytest.mark.parametrize("name", mesh_cases())
def test_parts_are_the_same_on_every_mesh(make_run, one_by_one, name):
    """Accumulation, data, pipeline, ZeRO, tensor, context and replicas: parts and their sum match separate gradients."""
    mesh, *more = MESHES[name]
    run = make_run(mesh, *more)
    mean_square, count, expected_loss, expected = joined(one_by_one(*variant_of(more)))
    with jax.set_mesh(run.mesh):
        measure = jax.jit(run.functions.value_grad_and_parts)
        loss, gradients, parts = measure(run.state.params, run.place(run.batch()))
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert_close(run.plain(gradients), expected, 5e-6)
    assert (parts.count, parts.tokens) == (count, PARTS * ROWS * S)
    np.testing.assert_allclose(parts.mean_square, mean_square, rtol=2e-5)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(expected)))
    whole = estimates(NoiseParts(mean_square, count, PARTS * ROWS * S), norm)
    found = estimates(parts, np.float64(norm))
    np.testing.assert_allclose(float(found["noise_s"]), whole["noise_s"], rtol=1e-4)


def test_an_island_on_its_own_measures_its_own(make_run, one_by_one):
    """DiLoCo with two replicas of two data ranks and two microbatches: replica k has every second pair of parts."""
    run = make_run((2, 1, 2, 1, 1, 1), "train.diloco_steps=2")
    both = jax.jit(
        lambda params, batch: run.functions.value_grad_and_parts(
            jax.tree.map(lambda p: jnp.broadcast_to(p[None], (2, *p.shape)), params), batch
        )
    )
    with jax.set_mesh(run.mesh):
        loss, _, parts = both(run.state.params, run.place(run.batch()))
    everyone = one_by_one()
    for replica in (0, 1):
        own = [part for number, part in enumerate(everyone) if number // 2 % 2 == replica]
        mean_square, count, expected_loss, _ = joined(own)
        np.testing.assert_allclose(loss[replica], expected_loss, rtol=2e-6)
        np.testing.assert_allclose(parts.mean_square[replica], mean_square, rtol=2e-5)
        assert (parts.count[replica], parts.tokens[replica]) == (count, PARTS * ROWS * S // 2)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "virtual_stages"),
    [("1f1b", 2, 8, 1), ("1f1b", 4, 2, 1), ("gpipe", 4, 9, 1), ("interleaved", 4, 16, 3), ("interleaved", 2, 2, 2)],
)
def test_what_a_tied_head_keeps_is_there_until_the_embedding_reads_it(name, stages, microbatches, virtual_stages):
    schedule = make_schedule(name, stages, microbatches, virtual_stages)
    slots, kept = microbatches_between(schedule), {}
    assert 1 <= slots <= min(microbatches, stages * virtual_stages + 1)
    for tick, returned in enumerate(schedule.embed_backward_mb):
        if returned >= 0:
            assert kept.pop(returned % slots) == returned
        head = schedule.head_mb[tick] if tick < schedule.ticks else -1
        if head >= 0:
            assert head % slots not in kept
            kept[head % slots] = head
    assert not kept


WIDE = (
    *("model.num_layers=4", "model.hidden_size=512", "model.intermediate_size=1024", "model.num_heads=8"),
    *("model.num_kv_heads=4", "model.vocab_size=2048", "model.compute_dtype=bfloat16"),
    *("train.sequence_length=1024", "train.global_batch_sequences=32"),
)
COMPILED = {
    "zero 1, tensor": (4, "parallel.zero=1", "parallel.tensor=2"),
    "zero 3, tensor": (4, "parallel.zero=3", "parallel.tensor=2"),
    "pipeline": (2, "parallel.pipe=2", "parallel.tensor=2"),
}


@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if "zero 3" in name else pytest.mark.slow) for name in COMPILED]
)
def test_measuring_sends_next_to_nothing(tiny_config, name):
    """Compiled for eight H100s with four microbatches: in addition to the plain step it needs a few numbers and a pipeline's
    final norm. ZeRO 2 and 3 need no memory either; below them a microbatch's gradients exist apart from the sums.
    """
    data, *axes = COMPILED[name]
    sent, memory = {}, {}
    for every in ("null", "1"):
        batch = (f"parallel.data={data}", f"train.microbatch_sequences={32 // (4 * data)}", f"log.noise_scale_every={every}")
        config = tiny_config(*WIDE, *axes, *batch)
        compiled = compile_step(config, gpu_devices(hosts=1, gpus_per_host=8))
        collectives = Module(compiled.as_text(), axis_sizes(config.parallel)).collectives()
        sent[every] = sum(c.elements * c.executed for c in collectives)
        memory[every] = compiled.memory_analysis().temp_size_in_bytes
    assert sent["1"] - sent["null"] < 0.002 * parameter_count(config.model)
    if config.parallel.pipe == 1:
        apart = 0 if config.parallel.zero >= 2 else 4 * parameter_count(config.model) / config.parallel.tensor
        assert memory["1"] < 1.02 * memory["null"] + apart


# ------------------------------------------------------------------------------------------------------- a small Llama


def test_a_small_llama_agrees_with_512_separate_gradients(tiny_config):
    """64 steps of 8 sequences with constant weights. Some ids are frequent, so that there is something to learn."""
    sequences = 512
    frequency = 1 / np.arange(1, 257)
    ids = np.random.default_rng(0).choice(256, (sequences, S + 1), p=frequency / frequency.sum()).astype(np.int32)
    everything = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "mask": np.ones((sequences, S), bool),
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), (sequences, S)).copy(),
    }

    def batch(seed):
        return {name: a[8 * seed : 8 * seed + 8].reshape(8, 1, S) for name, a in everything.items()}

    one_each = (
        "parallel.data=1",
        "train.global_batch_sequences=8",
        "train.microbatch_sequences=1",
        "data.mask_documents=false",
    )
    run = Run(tiny_config(*one_each, "model.initializer_std=0.1"), batch)
    separate, measure = jax.jit(run.functions.value_and_grad), jax.jit(run.functions.value_grad_and_parts)
    scale, gradients, params = NoiseScale(window=math.inf), [], run.state.params
    with jax.set_mesh(run.mesh):
        for step in range(sequences // 8):
            _, whole, parts = measure(params, run.place(batch(step)))
            norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(jax.device_get(whole))))
            found = estimates(parts, norm)
            scale.add(float(found["noise_g2"]), float(found["noise_s"]))
        for number in range(sequences):
            _, own = separate(params, run.place({name: a[None, number : number + 1] for name, a in everything.items()}))
            gradients.append(np.concatenate([np.asarray(g).reshape(-1) for g in jax.tree.leaves(own)]))
    gradients = np.array(gradients, np.float64)
    mean = gradients.mean(axis=0)
    trace = np.sum(np.square(gradients - mean)) / (sequences - 1)
    truth = S * trace / (mean @ mean - trace / sequences)
    assert scale.found.low < truth < scale.found.high < 4 * scale.found.low


# --------------------------------------------------------------------------------------------------------------- a run

NAMES = {"noise_g2", "noise_s", "noise_scale_tokens", "noise_scale_low", "noise_scale_high"}
RUN = ("run.cpu_devices=8", "parallel.data=8", "log.noise_scale_every=2", "train.steps=6")


@pytest.mark.slow
def test_a_run_logs_it_and_goes_on_with_it(tiny_config, tmp_path, capsys):
    """Every second step, by its own program. Averages continue after a resume."""
    kept = ("checkpoint.every_steps=4", "log.baselines=false")
    whole = fit(tiny_config(*RUN, *kept, f"run.dir={tmp_path / 'whole'}"))
    assert whole.programs.traces == 2
    # As if the run had been killed after the fifth step.
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "6")
    resumed = fit(tiny_config(*RUN, *kept, f"run.dir={tmp_path / 'halves'}"))
    # With each save: two averages, and one.
    assert capsys.readouterr().out.count("gradient noise scale") == 3
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert resumed.metrics.noise.found == whole.metrics.noise.found
    lines, others = steps_of(tmp_path / "whole"), steps_of(tmp_path / "halves")
    for line, other in zip(lines, others, strict=True):
        assert NAMES & line.keys() == (NAMES if line["step"] % 2 == 0 else set())
        assert {name: line[name] for name in NAMES & line.keys()} == {name: other[name] for name in NAMES & line.keys()}
    assert lines[-1]["noise_s"] > 0
    # With 8 parts their variance cannot be negative, and the unbiased square is below the biased one.
    assert lines[-1]["noise_g2"] < lines[-1]["grad_norm"] ** 2


def test_clipping_comes_after_and_every_step_takes_one_program(tiny_config):
    found = {}
    for clip in ("null", "1e-3"):
        trainer = jaxllm.Trainer(tiny_config(*RUN, "log.noise_scale_every=1", f"optimizer.clip_norm={clip}"))
        (first, second) = trainer.steps(2)
        assert trainer.programs.traces == 1
        assert first.keys() & second.keys() >= NAMES
        found[clip] = first["noise_g2"], first["noise_s"]
        trainer.close()
    assert found["null"] == pytest.approx(found["1e-3"], rel=1e-4)


def test_a_step_of_one_part_is_refused(tiny_config):
    one = (
        r"log.noise_scale_every=1 compares the parts of a step, and 8 sequences .* set train.microbatch_sequences to 4 or less"
    )
    with pytest.raises(ConfigError, match=one):
        tiny_config("log.noise_scale_every=1", "parallel.data=1")
    with pytest.raises(ConfigError, match=one):
        tiny_config("log.noise_scale_every=1").resolve(1)
    tiny_config("log.noise_scale_every=1").resolve(8)
    tiny_config("log.noise_scale_every=1", "train.microbatch_sequences=4").resolve(1)
    with pytest.raises(ConfigError, match=r"make train.global_batch_sequences larger"):
        tiny_config("log.noise_scale_every=3", "train.global_batch_sequences=1", "parallel.data=1")
