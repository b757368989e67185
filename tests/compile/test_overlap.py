"""Simulated overlap of hand-written HLO, and the hidden share of the transfers in the real 4D step."""

import pytest
import scripts

from jaxllm.compile.hlo import Module
from jaxllm.compile.overlap import by_kind, simulate_overlap, total
from jaxllm.compile.report import warnings
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.network import Group, all_gather_s, all_to_all_s, group_of, links_of
from jaxllm.cost_model.step_parts import BANDWIDTH_SHARE, MEASURED

launches_of = scripts.load("benchmarks/hlo_budget.py").launches
H100 = GPUS["h100-80gb"]
AXES = {"pipe": 1, "data": 4, "context": 1, "tensor": 2}
FLOPS_PER_S = 989e12 * MEASURED.hopper_matmul_share
DATA = "replica_groups={{0,2,4,6},{1,3,5,7}}"
GEMM = 'custom_call_target="__cublas$gemm", backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
TURNS = 'backend_config={"known_trip_count":{"n":"5"}}'
# An all-gather of 64 MiB over data behind a matmul of 2 x 8192 x 8192 x 8192 FLOPs; a reduction of 16 MiB behind nothing; and
# in a loop of five iterations an all-gather behind a fusion with a matmul, and another that is synchronous.
TEXT = f"""HloModule made_up, is_scheduled=true

%fused (p.1: bf16[1024,1024], p.2: bf16[1024,1024]) -> bf16[1024,1024] {{
  %p.1 = bf16[1024,1024]{{1,0}} parameter(0)
  %p.2 = bf16[1024,1024]{{1,0}} parameter(1)
  ROOT %d.1 = bf16[1024,1024]{{1,0}} dot(%p.1, %p.2), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%body (c.1: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {{
  %c.1 = (s32[], bf16[1024,1024]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  %h.1 = bf16[1024,1024]{{1,0}} get-tuple-element(%c.1), index=1
  %g.1 = (bf16[1024,1024]{{1,0}}, bf16[4096,1024]{{1,0}}) all-gather-start(%h.1), {DATA}, dimensions={{0}}
  %f.1 = bf16[1024,1024]{{1,0}} fusion(%h.1, %h.1), kind=kCustom, calls=%fused
  %g.2 = bf16[4096,1024]{{1,0}} all-gather-done(%g.1)
  %g.3 = bf16[4096,1024]{{1,0}} all-gather(%f.1), {DATA}, dimensions={{0}}
  ROOT %t.1 = (s32[], bf16[1024,1024]{{1,0}}) tuple(%i.1, %f.1)
}}

%condition (c.2: (s32[], bf16[1024,1024])) -> pred[] {{
  %c.2 = (s32[], bf16[1024,1024]{{1,0}}) parameter(0)
  %i.2 = s32[] get-tuple-element(%c.2), index=0
  ROOT %less = pred[] compare(%i.2, %i.2), direction=LT
}}

ENTRY %main (a.1: bf16[2048,4096], b.1: bf16[8192,8192], e.1: (s32[], bf16[1024,1024])) -> bf16[8192,8192] {{
  %a.1 = bf16[2048,4096]{{1,0}} parameter(0)
  %b.1 = bf16[8192,8192]{{1,0}} parameter(1)
  %e.1 = (s32[], bf16[1024,1024]{{1,0}}) parameter(2)
  %s.1 = (bf16[2048,4096]{{1,0}}, bf16[8192,4096]{{1,0}}) all-gather-start(%a.1), {DATA}, dimensions={{0}}
  %m.1 = (bf16[8192,8192]{{1,0}}, s8[4194304]{{0}}) custom-call(%b.1, %b.1), {GEMM}
  %s.2 = bf16[8192,4096]{{1,0}} all-gather-done(%s.1)
  %r.1 = f32[2048,2048]{{1,0}} all-reduce-start(%s.2), {DATA}, to_apply=%condition
  %r.2 = f32[2048,2048]{{1,0}} all-reduce-done(%r.1)
  %w.1 = (s32[], bf16[1024,1024]{{1,0}}) while(%e.1), condition=%condition, body=%body, {TURNS}
  ROOT %o.1 = bf16[8192,8192]{{1,0}} get-tuple-element(%m.1), index=0
}}
"""
MATMUL, SMALL_MATMUL = 2 * 8192**3, 2 * 1024**3


@pytest.fixture
def played():
    return {
        (t.collective.kind, bool(t.collective.loops), t.collective.asynchronous): t
        for t in simulate_overlap(Module(TEXT, AXES), H100, 8)
    }


def test_flops_are_counted_where_they_lie(played):
    module = Module(TEXT, AXES)
    assert module.flops("fused") == module.flops("body") == SMALL_MATMUL
    assert module.flops(module.entry) == MATMUL + 5 * SMALL_MATMUL
    assert played["all-gather", False, True].collective.flops_behind == MATMUL
    assert played["all-reduce", False, True].collective.flops_behind == 0
    assert played["all-gather", True, True].collective.flops_behind == SMALL_MATMUL


@pytest.mark.parametrize(("kind", "way"), [("all-gather", all_gather_s), ("all-to-all", all_to_all_s)])
@pytest.mark.parametrize(
    ("groups", "group"),
    [("{{0,2},{4,6},{1,3},{5,7}}", Group(2, 1)), ("{{0,4},{2,6},{1,5},{3,7}}", Group(1, 2)), (None, Group(2, 2))],
)
def test_groups_of_a_part_of_an_axis_are_timed_by_their_ranks(kind, way, groups, group):
    """As those of parallel.expert are. On hosts of four GPUs."""
    text = (TEXT if groups is None else TEXT.replace(DATA, f"replica_groups={groups}")).replace("all-gather", kind)
    found = next(
        t for t in simulate_overlap(Module(text, AXES), H100, 4) if t.collective.kind == kind and not t.collective.loops
    )
    assert found.collective.axes == ("data",)
    assert found.sent_bytes == (group.size - 1) / group.size * 64 * 2**20
    assert found.transfer_s == way(64 * 2**20, group, links_of(H100, BANDWIDTH_SHARE))


def test_a_loop_of_unknown_turns_is_said():
    """If it has collectives; everything in it counts once."""
    unknown = Module(TEXT.replace(f", {TURNS}", ""), AXES)
    assert Module(TEXT, AXES).loops_without_trip_count() == 0
    assert unknown.loops_without_trip_count() == 1
    assert unknown.flops(unknown.entry) == MATMUL + SMALL_MATMUL
    without = unknown.text.replace("all-gather-start(%h.1)", "copy-start(%h.1)").replace("all-gather(%f.1)", "copy(%f.1)")
    assert Module(without, AXES).loops_without_trip_count() == 0
    (sentence,) = warnings(None, [], "", None, None, 1)
    assert sentence.startswith("XLA gives no trip count for a loop with collectives: transfers in it count once")
    assert not list(warnings(None, [], "", None, None, 0))


def test_fp8_counts_as_any_other():
    text = TEXT.replace("%b.1 = bf16[8192,8192]", "%b.1 = f8e4m3fn[8192,8192]").replace("$gemm", "$lt$matmul$f8")
    assert Module(text, AXES).flops("main") == MATMUL + 5 * SMALL_MATMUL
    faster = {t.collective.flops_behind: t for t in simulate_overlap(Module(text, AXES), H100, 8, fp8=True)}
    assert faster[SMALL_MATMUL].exposed_s > 0
    assert faster[MATMUL].exposed_s == 0


@pytest.mark.parametrize(("mask", "half"), [("CAUSAL", 2), ("PADDING_CAUSAL", 2), ("NO_MASK", 1), ("PADDING", 1)])
def test_fused_attention_is_counted_by_its_shapes(mask, half):
    """The backward recomputes the scores: five products instead of the forward's two. This text has spaces, as XLA writes it
    here."""
    scores = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "512", "256"]}'
    config = f'backend_config={{"cudnn_fmha_backend_config": {{{scores}, "mask_type": "{mask}"}}}}'
    lines = ["  %q = bf16[2,512,4,128]{3,2,1,0} parameter(0)"]
    for name in ("fmhaSoftmax", "fmhaSoftmaxBackward"):
        result = "(bf16[2,4,512,128]{3,1,2,0}, u8[0]{0})"
        lines.append(f'  %{name} = {result} custom-call(%q, %q), custom_call_target="__cudnn${name}", {config}')
    text = "\n".join(["HloModule attention", "ENTRY %main (q: bf16[2,512,4,128]) -> bf16[2,4,512,128] {", *lines, "}"])
    module = Module(text, AXES)
    assert module.flops("main") == (4 + 10) * 2 * 4 * 512 * 256 * 128 // half


def test_time_behind_a_matmul_is_hidden(played):
    outside, inside = played["all-gather", False, True], played["all-gather", True, True]
    expected_s = all_gather_s(2 * 8192 * 4096, group_of(4, 2, 8), links_of(H100, BANDWIDTH_SHARE))
    assert outside.transfer_s == pytest.approx(expected_s)
    assert outside.transfer_s < MATMUL / FLOPS_PER_S
    assert outside.exposed_s == 0
    assert inside.exposed_s == pytest.approx(max(0, inside.transfer_s - SMALL_MATMUL / FLOPS_PER_S))
    assert inside.exposed_s > 0


def test_time_behind_nothing_shows(played):
    for key in (("all-reduce", False, True), ("all-gather", True, False)):
        assert played[key].exposed_s == pytest.approx(played[key].transfer_s)
        assert played[key].transfer_s > 0


def test_sums_are_of_a_step():
    lines = by_kind(simulate_overlap(Module(TEXT, AXES), H100, 8))
    gathers = next(line for line in lines if line.kind == "all-gather")
    assert gathers.count == 1 + 2 * 5
    inside = 3 / 4 * 2 * 4096 * 1024
    assert gathers.sent_bytes == pytest.approx(3 / 4 * 2 * 8192 * 4096 + 2 * 5 * inside)
    assert gathers.bare_bytes == pytest.approx(5 * inside)
    assert gathers.flops_behind == MATMUL + 5 * SMALL_MATMUL
    every = total(lines)
    assert every.sent_bytes == sum(line.sent_bytes for line in lines)
    assert every.bare_share < every.exposed_share < 1


def test_two_transfers_over_one_link_take_turns():
    """The second begins when the first ends: compute behind both hides at most one of them."""
    start = "  %s.9 = (bf16[2048,4096]{1,0}, bf16[8192,4096]{1,0}) all-gather-start(%a.1), " + DATA + ", dimensions={0}\n"
    done = "  %s.8 = bf16[8192,4096]{1,0} all-gather-done(%s.9)\n"
    text = TEXT.replace("  %m.1 =", start + "  %m.1 =").replace("  %r.1 =", done + "  %r.1 =")
    first, second = [t for t in simulate_overlap(Module(text, AXES), H100, 8) if t.collective.flops_behind == MATMUL]
    assert first.exposed_s == 0
    assert second.exposed_s == pytest.approx(max(0, 2 * second.transfer_s - MATMUL / FLOPS_PER_S))


def test_kernels_are_counted_once_and_as_often_as_they_run():
    launches = launches_of(Module(TEXT, AXES))
    ops = sorted(op for op, _ in launches)
    # The condition's comparison is a kernel too.
    assert ops == sorted(
        ["all-gather-start", "custom-call", "all-reduce-start", "all-gather-start", "fusion", "all-gather", "compare"]
    )
    assert sum(executed for _, executed in launches) == 3 + 5 * 4


# ----------------------------------------------------------------------------------------------------------- the real step

CHUNK, M = 7, 12
"""Layers of a rank and microbatches: only a loop over layers has 7 iterations, or 6 if XLA has peeled one off."""
WIDTHS = {"hidden_size": 512, "intermediate_size": 1408, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 2048}
STEPS = {
    "8 GPUs": (8, WIDTHS, {"data": 4, "context": 2, "zero": 3}),
    # Messages between stages overlap depending on their size: this is that of Llama 3.1 8B. With ZeRO 2 both of a tick are
    # exposed.
    "64 GPUs": (64, {"name": "llama-3.1-8b"}, {"pipe": 4, "data": 2, "context": 2, "tensor": 4, "zero": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_what_travels_in_loops_lies_behind_matmuls(name):
    """A layer's weights and gradients, keys and values, and a tick's two messages between stages. Exceptions: hidden states
    over tensor, for which their own layer waits, sums over pipe for embedding and head, and transfers at both ends of a loop
    over layers or ticks. benchmarks/RESULTS.md lists them."""
    from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
    from jaxllm.config import load_config
    from jaxllm.mesh.axes import axis_sizes

    if not can_compile_for_gpus():
        pytest.skip("the extra aot is not installed")
    gpus, model, parallel = STEPS[name]
    length = 8192
    train = {"steps": 1, "sequence_length": length, "global_batch_sequences": M * parallel["data"], "microbatch_sequences": 1}
    # Two iterations of the head's loop.
    train["loss_chunk_tokens"] = length // parallel["context"] // 2
    sections = {
        "model": {**model, "num_layers": CHUNK * parallel.get("pipe", 1), "attention": "cudnn"},
        "parallel": {**parallel, "context_method": "ring", "remat": "selective"},
        "train": train,
        "data": {"mask_documents": False},
    }
    config = load_config(sections).resolve(gpus)
    text = compile_step(config, gpu_devices(gpus // 8, 8)).as_text()
    looped = [c for c in Module(text, axis_sizes(config.parallel)).collectives() if c.loops]
    in_layers = [c for c in looped if c.loops[-1] in (CHUNK, CHUNK - 1)]

    def bare(among, kind, *axes):
        found = [c for c in among if (c.kind, c.axes) == (kind, axes)]
        assert found
        return sum(c.executed for c in found if not c.flops_behind) / sum(c.executed for c in found)

    if parallel["zero"] == 3:
        assert bare(in_layers, "all-gather", "data", "context") == 0
        assert bare(in_layers, "reduce-scatter", "data", "context") == 0
    assert bare(in_layers, "collective-permute", "context") == 0
    if "pipe" in parallel:
        messages = [c for c in looped if (c.kind, c.axes) == ("collective-permute", ("pipe",))]
        most = max(c.executed for c in messages)
        assert len(steady := [c for c in messages if c.executed == most]) == 2
        assert all(c.flops_behind for c in steady)
