"""Figures of memory: bars add up to the estimate, and the curve of a step is XLA's own."""

import itertools
import sys

import numpy as np
import pytest
from tiny import SMALL_MODEL

from jaxllm.compile.aot import can_compile_for_gpus
from jaxllm.compile.buffers import BACKWARD, FORWARD, UPDATE, read_dump, step_memory
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.memory import StageMemory, estimate_memory
from jaxllm.plan.estimate import estimate
from jaxllm.plots.memory import (
    ACTIVATIONS,
    GIB,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    candidates_figure,
    estimate_picture,
    frontier,
    group_of,
    grouped,
    over_figure,
    stage_figure,
    variations,
)
from jaxllm.plots.memory_timeline import compile_with_buffers, draw_step, step_figure
from jaxllm.plots.schedule import save

H100 = GPUS["h100-80gb"]
RECIPE = {
    "model": {"name": "llama-3.1-8b"},
    "parallel": {"tensor": 2, "pipe": 4},
    "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 128, "microbatch_sequences": 2},
}
TINY = {
    "model": SMALL_MODEL,
    "parallel": {"tensor": 2},
    "train": {"steps": 2, "sequence_length": 512, "global_batch_sequences": 16, "microbatch_sequences": 2},
}
needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")


@pytest.fixture
def needs_matplotlib():
    pytest.importorskip("matplotlib")


def config(*overrides):
    return load_config(RECIPE, overrides)


def heights(axes):
    """Heights of the stacked bars, one sum for each position."""
    sums = {}
    for patch in axes.patches:
        place = round(patch.get_x() + patch.get_width() / 2, 6)
        sums[place] = sums.get(place, 0) + patch.get_height()
    return [sums[place] for place in sorted(sums)]


def horizontal(axes):
    """y of the lines that cross the complete figure."""
    return [line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1]


# -------------------------------------------------------------------------------------------------------------- stacked


@pytest.mark.usefixtures("needs_matplotlib")
def test_bars_of_stages_add_up_to_the_estimate():
    stages = estimate_memory(config().resolve(16)).stages
    (axes,) = stage_figure(stages, capacity_bytes=H100.capacity_bytes).axes
    drawn = {round(height, 6) for height in heights(axes)}
    assert drawn == {round(stage.total_bytes / GIB, 6) for stage in stages}
    assert horizontal(axes) == [H100.capacity_bytes / GIB]
    assert axes.get_ylabel() == "GiB on one device"
    assert axes.get_ylim()[1] > max(heights(axes))


@pytest.mark.usefixtures("needs_matplotlib")
def test_terms_too_thin_to_see_are_drawn_together():
    terms = {"weights": 1000 * GIB, "lse": GIB, "loss": 2 * GIB, "moments": 10 * GIB}
    (axes,) = stage_figure([StageMemory(0, terms)]).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(names) == ["moments", "other", "weights"]
    assert heights(axes) == [pytest.approx(1013)]


@pytest.mark.usefixtures("needs_matplotlib")
def test_little_is_drawn_in_mib():
    (axes,) = stage_figure([StageMemory(0, {"weights": 3 * 2**20})]).axes
    assert axes.get_ylabel() == "MiB on one device"
    assert heights(axes) == [3]
    # A much larger capacity would leave the bar no height.
    (axes,) = stage_figure([StageMemory(0, {"weights": 3 * 2**20})], capacity_bytes=GIB).axes
    assert heights(axes) == [3]
    assert axes.get_ylim()[1] < 4
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["weights", "capacity 1.0 GiB, above this"]


def test_every_term_of_the_estimate_has_its_group():
    assert [group_of(term) for term in ("weights", "compute_copy", "gradients", "master_weights", "moments", "logits")] == [
        PARAMETERS,
        PARAMETERS,
        GRADIENTS,
        OPTIMIZER,
        OPTIMIZER,
        ACTIVATIONS,
    ]
    terms = estimate_memory(config().resolve(16)).peak_stage.terms_bytes
    assert sum(grouped(terms).values()) == sum(terms.values())
    # The optimizer's state does not depend on the sequence length.
    longer = estimate_memory(config("train.sequence_length=16384").resolve(16)).peak_stage.terms_bytes
    before, after = grouped(terms), grouped(longer)
    assert after[OPTIMIZER] == before[OPTIMIZER]
    assert after[ACTIVATIONS] > before[ACTIVATIONS]


@pytest.mark.parametrize("over", ["sequence", "microbatch"])
def test_variations_are_estimates_of_the_config_with_another_value(over):
    resolved = config().resolve(16)
    points, own = variations(resolved, over, H100.capacity_bytes)
    key = {"sequence": "train.sequence_length", "microbatch": "train.microbatch_sequences"}[over]
    assert own == {"sequence": 8192, "microbatch": 2}[over]
    assert own in [value for value, _ in points]
    assert [value for value, _ in points] == sorted({value for value, _ in points})
    assert len(points) > 2
    for value, terms in points:
        assert terms == estimate_memory(config(f"{key}={value}").resolve(16)).peak_stage.terms_bytes


@pytest.mark.usefixtures("needs_matplotlib")
def test_bars_over_a_value_are_groups():
    points = [(1, {"weights": GIB, "logits": GIB, "gradient_sum": 2 * GIB}), (2, {"weights": GIB, "logits": 3 * GIB})]
    (axes,) = over_figure(points, x_label="sequences", own=2).axes
    assert heights(axes) == [4, 4]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]
    assert [label.get_fontweight() for label in axes.get_xticklabels()] == ["normal", "bold"]
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == OPTIMIZER


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("over", [None, "sequence", "microbatch"])
def test_pictures_of_an_estimate_are_written(tmp_path, over):
    estimate_picture(estimate(config(), H100, 16), tmp_path / "memory.png", over)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="use sequence, microbatch, step"):
        estimate_picture(estimate(config(), H100, 16), tmp_path / "memory.png", "depth")
    with pytest.raises(ConfigError, match=r"name the kind of GPU, such as --gpu h100-80gb"):
        draw_step(estimate(config(), gpus=16), tmp_path / "memory.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[notebook\]'"):
        estimate_picture(estimate(config(), H100, 16), tmp_path / "memory.png")


# ------------------------------------------------------------------------------------------------------------ one step

ASSIGNMENT = """BufferAssignment:
allocation 0: size 1000, parameter 0, shape |f32[250]| at ShapeIndex {}:
 value: <1 weights @0> (size=1000,offset=0): f32[250]{0}
allocation 1: size 64, thread-local:
 value: <2 inner @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 300, preallocated-temp:
 value: <3 a @0> (size=100,offset=0): f32[25]{0}
 value: <4 b{0} @0> (size=200,offset=100): f32[50]{0}
 value: <5 c (phi) @0> (size=200,offset=100): f32[50]{0}
 value: <6 d @0> (size=60,offset=40): f32[15]{0}
allocation 3: size 50, preallocated-temp:
 value: <7 e @0> (size=50,offset=0): f32[12]{0}
allocation 4: size 5000, color 5, preallocated-temp:
 value: <8 host @5> (size=5000,offset=0): f32[1250]{0:S(5)}

Total bytes used: 6414
"""
LIVES = """HloLiveRange (max 5):
  InstructionSequence:
    0:weights
    1:a
    2:b
    3:c
    4:d
    5:e
  BufferLiveRange:
    weights{}:0-6
    a{}:1-2
    b{0}:2-4
    c{}:3-4
    d{}:2-4
    e{}:5-6
    host{}:1-5
  Live ranges at 2 (peak):
    a{}: 100 bytes (cumulative: 100 bytes)
"""
PROGRAM = """HloModule jit_train_step
ENTRY %main {
  %weights = f32[250]{0} parameter(0), metadata={op_name="state.params"}
  %a = f32[25]{0} fusion(%weights), metadata={op_name="jit(train_step)/jvp()/mul" stack_frame_id=3}
  %b = (f32[50]{0}) fusion(%a), metadata={op_name="jit(train_step)/transpose(jvp())/mul"}
  %c = f32[50]{0} copy(%b)
  %d = f32[15]{0} fusion(%c), metadata={op_name="jit(train_step)/optimizer/add"}
  ROOT %e = f32[12]{0} fusion(%d), metadata={op_name="jit(train_step)/shard_map/psum"}
}
"""


def test_bytes_in_use_are_those_that_any_live_buffer_covers():
    curve = step_memory(ASSIGNMENT, LIVES, PROGRAM)
    # b and c share memory; d overlaps a; host memory, parameters and a kernel's own buffers do not count.
    assert curve.used_bytes.tolist() == [0, 100, 300, 260, 260, 50]
    assert (curve.used_bytes.max(), curve.allocated_bytes) == (300, 350)
    assert curve.phases == (FORWARD, FORWARD, BACKWARD, BACKWARD, UPDATE, UPDATE)
    assert list(curve.spans()) == [(FORWARD, 0, 2), (BACKWARD, 2, 4), (UPDATE, 4, 6)]
    # XLA computes scalars of the update at the start, which does not begin there.
    early = PROGRAM.replace('"state.params"', '"jit(train_step)/optimizer/sub"')
    assert step_memory(ASSIGNMENT, LIVES, early).phases == curve.phases


def test_without_a_dump_there_is_no_curve(tmp_path):
    with pytest.raises(FileNotFoundError, match="No buffer assignment"):
        read_dump(tmp_path)


@pytest.mark.usefixtures("needs_matplotlib")
def test_the_curve_stands_on_what_is_held_beside_the_estimate():
    curve, stage = step_memory(ASSIGNMENT, LIVES, PROGRAM), StageMemory(1, {"moments": 700, "logits": 600})
    axes, beside = step_figure(curve, 1000, stage, capacity_bytes=1500).axes
    drawn = max(patch.get_data().values.max() for patch in axes.patches if hasattr(patch, "get_data"))
    assert drawn * 2**20 == pytest.approx(1000 + curve.used_bytes.max())
    assert sorted(round(y * 2**20) for y in horizontal(axes)) == [1300, 1350, 1500]
    assert [height * 2**20 for height in heights(beside)] == [pytest.approx(1300)]


@needs_gpu_compiler
def test_the_curve_of_a_compiled_step_peaks_where_xla_says():
    """Gaps between buffers are a hundredth at most; nothing else is allocated."""
    curve, memory = compile_with_buffers(load_config(TINY).resolve(2), H100, 2)
    assert curve.allocated_bytes == memory.temp_size_in_bytes
    assert 0.99 * curve.allocated_bytes <= curve.used_bytes.max() <= curve.allocated_bytes
    assert len(curve.phases) == len(curve.used_bytes)
    firsts = [curve.phases.index(phase) for phase in (FORWARD, BACKWARD, UPDATE)]
    assert firsts == sorted(firsts)
    # The maximum is where the backward's own buffers join the residuals of the forward.
    assert curve.phases[int(np.argmax(curve.used_bytes))] == BACKWARD


# -------------------------------------------------------------------------------------------------------- many configs


def test_nothing_beats_the_frontier_and_all_else_is_beaten():
    rng = np.random.default_rng(0)
    points = [(float(m), float(s)) for m, s in rng.integers(0, 30, (200, 2))]
    best = frontier(points)
    beats = lambda a, b: a[0] <= b[0] and a[1] >= b[1] and a != b  # noqa: E731
    for i, point in enumerate(points):
        beaten = any(beats(other, point) for other in points)
        assert beaten == (point not in [points[j] for j in best]), i
    assert all(points[a][0] < points[b][0] and points[a][1] < points[b][1] for a, b in itertools.pairwise(best))


@pytest.mark.usefixtures("needs_matplotlib")
def test_candidates_are_at_their_compiled_bytes_if_there_are_some(tmp_path):
    mesh = {"pipe": 1, "data": 4, "context": 1, "tensor": 2, "zero": 1, "microbatch_sequences": 2, "remat": "full"}
    candidates = [
        {**mesh, "estimate_bytes": 10 * GIB, "compiled_bytes": 12 * GIB, "tokens_per_s_per_gpu": 900.0},
        {**mesh, "estimate_bytes": 20 * GIB, "compiled_bytes": None, "tokens_per_s_per_gpu": 800.0},
    ]
    figure = candidates_figure(candidates, capacity_bytes=70 * GIB)
    (axes,) = figure.axes
    estimated, compiled, best = (collection.get_offsets().tolist() for collection in axes.collections)
    assert (estimated, compiled, best) == ([[20, 800]], [[12, 900]], [[12, 900]])
    assert [text.get_text() for text in axes.texts] == ["fastest: data 4, tensor 2; ZeRO 1, microbatch 2, remat full"]
    save(figure, tmp_path / "candidates.svg")
    assert b"<svg" in (tmp_path / "candidates.svg").read_bytes()
