"""What a plan keeps, offloads and recomputes: the ladder's sums are the models', and no other mapping is better."""

import dataclasses
import itertools
import random
from typing import get_args

import pytest
from plan_stand_ins import gpu_for, small

from jaxllm.config import load_config
from jaxllm.config.remat_policy import SHORT, offloads, remat_text
from jaxllm.config.types import BLOCK_TENSORS, LAST_OUTPUT, OFFLOAD_STATES, Remat
from jaxllm.cost_model.hardware import GPUS, HOST_MEMORY_SHARE
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import MEASURED, StepTime
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.plan.advice import COSTS, REMAT_LADDER
from jaxllm.plan.fastest_remat import LEAN, Fitting, Trial
from jaxllm.plan.plan_result import TIE_SHARE, Candidate, ranked
from jaxllm.plan.remat_ladder import GRAIN, PARTS, Ladder, LeastStep, layer_of
from jaxllm.plan.search import GAINS_NOTHING, SLOWER, SearchOptions, best_with_fp8, search
from jaxllm.plan.space import KEEPABLE, REMATS, groups, meshes, why_not

H100 = GPUS["h100-80gb"]
EIGHT_B = {
    "model": {"name": "llama-3.1-8b"},
    "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 64},
}
LAYERS = {
    "one rank": ["parallel.data=8", "train.microbatch_sequences=2"],
    "a ring over tensor": ["parallel.data=2", "parallel.tensor=4", "train.microbatch_sequences=4"],
    "context": ["parallel.data=4", "parallel.context=2", "train.microbatch_sequences=1"],
}


def model_of(*overrides, remat="selective", kind=StepModel, config=None):
    config = config or load_config(EIGHT_B, overrides).resolve(8)
    parallel = config.parallel.model_copy(update={"remat": remat})
    return kind(config.model_copy(update={"parallel": parallel}), H100, 8, MEASURED)


def test_policies_and_tensors_have_all_their_rows():
    """A new policy or named tensor is missing here first (CONTRIBUTING)."""
    names = set(get_args(get_args(get_args(Remat)[0])[0]))
    assert set(REMATS) == set(REMAT_LADDER) == names
    assert {key.removeprefix("parallel.remat=") for key in COSTS if key.startswith("parallel.remat=")} == names - {"none"}
    # attention_lse goes with attention_output.
    tensors = {*BLOCK_TENSORS, LAST_OUTPUT} - {"attention_lse"}
    assert set(SHORT) == tensors
    assert sorted(name for part in PARTS for name in part) == sorted(tensors)


def mappings():
    """All that can be done with a block's tensors."""
    names = [name for name in BLOCK_TENSORS if name not in ("block_input", "attention_lse")]
    for actions in itertools.product(("keep", "recompute", "offload"), repeat=len(names)):
        chosen = dict(zip(names, actions, strict=True))
        for first in ("keep", "offload"):
            yield {"block_input": first, **chosen, "attention_lse": chosen["attention_output"]}


@pytest.mark.parametrize("overrides", LAYERS.values(), ids=LAYERS)
def test_a_rung_has_the_bytes_and_seconds_of_the_models(overrides):
    """Where no transfer but those of the layer shows: the difference of two steps is that of two rungs."""
    whole = model_of(*overrides, "parallel.zero=3", kind=StepModel)
    ladder = Ladder(whole)
    ticks, first = whole.M * whole.config.chunk_layers, ladder.rung_of("selective")
    # The slowest GPU is slower by a share of all compute.
    exposed = {"data", "offload", "slowest_gpu"}
    for rung in ladder.rungs[:: len(ladder.rungs) // 12]:
        model = model_of(*overrides, "parallel.zero=3", remat=rung.remat)
        terms, full = model.time().terms_s, whole.time().terms_s
        longer = sum(terms[name] - full.get(name, 0) for name in terms if name not in exposed)
        assert longer == pytest.approx(ticks * (rung.spent_s - first.spent_s), rel=1e-6, abs=1e-9)
        assert rung.offloaded == pytest.approx(model.offloaded_bytes())
        held = model.bytes_per_token
        assert rung.kept == pytest.approx(model.rows * model.c * sum(held.kept.values()))


@pytest.mark.parametrize("overrides", LAYERS.values(), ids=LAYERS)
def test_no_mapping_beats_the_ladder(overrides):
    """In bytes kept, bytes offloaded and seconds together, within a family and but for a grain of each part."""
    ladder = Ladder(model_of(*overrides))
    grains = 3
    for mapping in random.Random(0).sample(list(mappings()), 300):
        one = ladder.rung_of(mapping)
        assert any(
            rung.family == one.family
            and rung.kept <= one.kept + 1
            and rung.offloaded <= one.offloaded + grains * GRAIN * ladder.whole
            and rung.spent_s <= one.spent_s + grains * ladder.grain_s
            for rung in ladder.rungs
        ), mapping


def test_less_is_kept_down_the_ladder():
    rungs = Ladder(model_of(*LAYERS["one rank"])).on_device
    assert rungs[0].remat == "selective"
    assert rungs[-1].remat == "full"
    for family in {rung.family for rung in rungs}:
        for before, after in itertools.pairwise(rung for rung in rungs if rung.family == family):
            assert after.kept < before.kept
            assert after.spent_s > before.spent_s


def test_of_equal_rungs_the_one_that_offloads_less_comes_first():
    model = model_of(*LAYERS["one rank"], kind=LeastStep)
    model.time()
    rungs = Ladder(model).to_host(model)
    assert rungs[0].offloaded == min(rung.offloaded for rung in rungs if rung.again_s == 0)
    assert all(rung.offloaded for rung in rungs)
    out_s = model.free_s[0] / model.config.chunk_layers
    assert rungs[0].offloaded / model.one_way < out_s < rungs[-1].offloaded / model.one_way * 3


def test_layers_with_arrays_of_their_own_keep_their_products():
    model = model_of("parallel.data=8", "parallel.zero=1", "train.microbatch_sequences=1")
    assert model.has_own_layers
    for rung in Ladder(model, own=True).rungs:
        assert not rung.offloaded
        assert rung.spent_s == rung.again_s
        assert model_of("parallel.data=8", "parallel.zero=1", "train.microbatch_sequences=1", remat=rung.remat).has_own_layers


def test_the_last_output_of_a_block_is_on_the_ladder_where_a_norm_reads_it():
    config = load_config({**EIGHT_B, "model": {"name": "olmo-2-7b"}}, ["parallel.data=8"]).resolve(8)
    rungs = Ladder(model_of(config=config)).rungs
    texts = {remat_text(rung.remat) for rung in rungs}
    assert len(texts) == len(rungs)
    for rung in rungs[::20]:
        load_config({**EIGHT_B, "model": {"name": "olmo-2-7b"}, "parallel": {"remat": rung.remat}})


@pytest.mark.parametrize(
    ("remat", "text"),
    [
        ("selective", "selective"),
        ({}, "recompute all"),
        ({"query": "keep", "key": "keep"}, "keep q k"),
        ({"block_input": "offload"}, "recompute the rest; host input"),
        (dict.fromkeys(BLOCK_TENSORS[1:-1], "keep"), "recompute up"),
        (dict.fromkeys(BLOCK_TENSORS[1:-1], "keep") | {"mlp_up": "offload"}, "keep q k v attn out gate; host up"),
        (dict.fromkeys(BLOCK_TENSORS[1:-2], "offload") | {"mlp_gate": "keep"}, "recompute up; host q k v attn out"),
    ],
)
def test_a_mapping_is_said_shortly(remat, text):
    assert remat_text(remat) == text


def test_a_ladder_is_shared_only_where_recomputation_costs_the_same():
    """Chunks in a ring (parallel.tensor_ring) leave less of a transfer exposed."""
    overrides = ["parallel.pipe=2", "parallel.tensor=2", "parallel.data=2", "train.microbatch_sequences=1"]
    models = [model_of(*overrides, f"parallel.tensor_ring={value}") for value in ("false", "true")]
    costs = [tuple(rung.spent_s for rung in Ladder(model).rungs) for model in models]
    assert costs[0] != costs[1]
    assert layer_of(models[0]) != layer_of(models[1])


# ------------------------------------------------------------------------------------------------------------ the search


def peaks_of(gpu, *overrides):
    """A function from a remat to the estimated bytes on the device of a large microbatch."""
    shape = {"steps": 1, "sequence_length": 16384, "global_batch_sequences": 16}
    config = load_config({"model": {"name": "llama-3.2-1b"}, "train": shape}, ["parallel.zero=3", *overrides]).resolve(8)

    def peak(remat):
        parallel = config.parallel.model_copy(update={"remat": remat})
        return estimate_memory(config.model_copy(update={"parallel": parallel}), gpu).peak_bytes

    return peak


@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("pipe", [1, 2])
def test_no_mapping_needs_less_than_all_lean_ones(name, tensor, pipe):
    every, rng = list(mappings()), random.Random(0)
    for layers in (4, 16):
        data = 8 // (tensor * pipe)
        sizes = [f"parallel.tensor={tensor}", f"parallel.pipe={pipe}", f"parallel.data={data}", "train.microbatch_sequences=2"]
        peak = peaks_of(GPUS[name], f"model.num_layers={layers}", *sizes)
        for host, lean in LEAN.items():
            some = rng.sample([mapping for mapping in every if offloads(mapping) is host], 60)
            assert min(map(peak, some)) >= min(map(peak, lean))


@pytest.mark.parametrize("prune", [True, False])
def test_a_long_sequence_fits_with_the_second_output_on_the_host(prune):
    train = {"steps": 1, "sequence_length": 241664, "global_batch_sequences": 1}
    config = load_config({"model": {"name": "llama-3.2-1b"}, "train": train})
    assert search(config, GPUS["a100-40gb"], 1, options=SearchOptions(prune=prune)).candidates


TINY = small("model.num_layers=4", "train.global_batch_sequences=8", "train.sequence_length=256")
"""Its compute is as short as its copies, so that all settings matter."""
TINY_GPU = gpu_for(0.6 * estimate_memory(TINY.resolve(4)).peak_bytes)


def test_nothing_drawn_at_random_is_faster(draws):
    """Those that fit of 500 random configs over every setting."""
    plan = search(TINY, TINY_GPU, 4)
    best = max(one.tokens_per_s_per_gpu for one in plan.candidates)
    configs = draws.drawn(TINY, 4, 4, random.Random(1))
    found = [one for _ in range(500) if (one := draws.candidate(next(configs), TINY_GPU, 4)) is not None]
    assert len(found) > 20
    assert best >= max(one.tokens_per_s_per_gpu for one in found) * (1 - GRAIN)
    assert plan.candidates[0].tokens_per_s_per_gpu >= best * (1 - TIE_SHARE)


@pytest.fixture
def draws(monkeypatch):
    import sys
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import random_plans

    yield random_plans
    sys.modules.pop("random_plans")


@pytest.mark.slow
def test_what_is_left_out_is_slower(monkeypatch):
    """A bounded search finds the fastest of a search of all, and each of its best, or the same with less on the host."""
    bounded = search(TINY, TINY_GPU, 4, options=SearchOptions(best=5))
    whole = search(TINY, TINY_GPU, 4, options=SearchOptions(prune=False))
    assert {SLOWER, GAINS_NOTHING} <= {line.reason for line in bounded.rejected}
    assert bounded.configurations == whole.configurations

    def bases(plan):
        found = {}
        for one in plan.candidates:
            choice = one.choice
            key = (choice.mesh, choice.zero, choice.schedule, choice.virtual_stages)
            key += (choice.microbatch_sequences,)
            found[key] = max(found.get(key, 0), one.tokens_per_s_per_gpu)
        return found

    some, every = bases(bounded), bases(whole)
    fifth = sorted((one.tokens_per_s_per_gpu for one in bounded.candidates), reverse=True)[4]
    for key, speed in every.items():
        assert some.get(key, 0) == pytest.approx(speed) or speed < fifth


def test_no_remat_is_faster_than_the_least_time():
    options = SearchOptions()
    fitting = Fitting(TINY, H100, 4, options)
    rng, every = random.Random(0), list(mappings())
    for mesh in meshes(TINY, 4):
        if why_not(TINY, mesh, 4) is None:
            for group in groups(TINY, mesh, 8):
                size = rng.choice(group.microbatches or (0,))
                if not size:
                    continue
                least_s = fitting.least_s(group, size)
                for remat in (*group.remats, rng.choice(every)):
                    state = rng.choice(group.offload_states)
                    config = Trial(group, size, state, offloads(remat)).choice(remat).applied_to(TINY)
                    assert estimate_step_time(config, H100, 4).step_s >= least_s[state] * (1 - 1e-9)


@pytest.mark.parametrize(("tensor", "microbatch", "gib"), [(4, 2, 20.5), (4, 2, 23.5), (2, 4, 47.5)])
def test_nothing_is_skipped_where_xla_turns_stacks(tensor, microbatch, gib):
    """With tensor ranks and several sequences a rung that keeps less may need more, and one that keeps more less."""
    sizes = [f"parallel.data={8 // tensor}", f"parallel.tensor={tensor}", f"train.microbatch_sequences={microbatch}"]
    config = load_config(EIGHT_B, [*sizes, "parallel.zero=3"])
    keep = [name for name in KEEPABLE if name != "remat"]
    plans = [
        search(config, H100, 8, options=SearchOptions(device_bytes=gib * 2**30, prune=prune, keep=keep))
        for prune in (True, False)
    ]
    pruned, whole = (min(one.step_s for one in plan.candidates) for plan in plans)
    assert pruned == whole


def test_8b_on_one_gpu_is_planned_with_its_state_on_the_host():
    config = load_config(EIGHT_B, ["train.global_batch_sequences=1024"])
    plan = search(config, H100, 1)
    assert plan.candidates[0].choice.offload_state in OFFLOAD_STATES[2:]
    assert plan.without_host is None
    kept = search(config, H100, 1, options=SearchOptions(keep=["offload_state"]))
    assert not kept.candidates


@pytest.mark.slow
def test_the_best_without_the_host_is_beside_one_that_uses_it():
    config = load_config(EIGHT_B, ["train.global_batch_sequences=1024"])
    plan = search(config, H100, 8)
    best, other = plan.candidates[0], plan.without_host
    assert best.uses_host
    assert not other.uses_host
    assert other.host_bytes == 0 < best.host_bytes
    alone = search(config, H100, 8, options=SearchOptions(host_bytes_per_gpu=0))
    # Without the host it tries other mappings, and may miss the best by a fraction of a percent (0.2% here).
    assert alone.candidates[0].tokens_per_s_per_gpu == pytest.approx(other.tokens_per_s_per_gpu, rel=0.005)
    assert alone.without_host is None
    values = plan.to_json()["without_host"]
    assert values["winner_faster"] == pytest.approx(best.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu - 1)


def test_fp8_is_apart_and_only_where_the_chip_has_it():
    config = load_config(EIGHT_B)
    plan = search(config, H100, 8, options=SearchOptions(best=1))
    best = best_with_fp8(plan)
    assert best.config.model.matmul_dtype == "fp8"
    assert best.tokens_per_s_per_gpu > plan.candidates[0].tokens_per_s_per_gpu
    assert not any(one.config.model.multiplies_fp8 for one in plan.candidates)
    assert best_with_fp8(search(config, GPUS["a100-80gb"], 8, options=SearchOptions(best=1))) is None
    asked = load_config(EIGHT_B, ["model.matmul_dtype=fp8"])
    assert best_with_fp8(search(asked, H100, 8, options=SearchOptions(best=1))) is None


def test_the_gpus_of_a_host_share_its_memory():
    """At a quarter of its bandwidth eight GPUs get their part of it instead of their links; one GPU does not notice."""
    narrow = dataclasses.replace(H100, host_memory_bandwidth_bytes_per_s=H100.host_memory_bandwidth_bytes_per_s / 4)
    link, part = (StepModel(load_config(EIGHT_B).resolve(8), gpu, 8, MEASURED).one_way for gpu in (H100, narrow))
    assert part == HOST_MEMORY_SHARE * narrow.host_memory_bandwidth_bytes_per_s / 8 < link
    for gpus, slower in ((1, 1.0), (8, link / part)):
        config = load_config(EIGHT_B, ["parallel.offload_state=optimizer", "parallel.remat=offload"]).resolve(gpus)
        some, fewer = (estimate_step_time(config, gpu, gpus).terms_s["offload_state"] for gpu in (H100, narrow))
        assert fewer / some == pytest.approx(slower)


# ------------------------------------------------------------------------------------------------------------------ ties


def tied(speed, sent_s, size=1, microbatch=1):
    config = small(f"train.microbatch_sequences={microbatch}").resolve(1)
    return Candidate(config, size, 0, StepTime({"matmuls": 1.0, "data": sent_s}, {"offload": sent_s}, speed, 1.0))


def test_ties_go_to_what_sends_least_then_to_fewer_bytes():
    """A tie reaches as far as the fastest of it says, so that a chain of small steps does not end in a slow winner."""
    first, close, far = tied(1000, 3.0), tied(996, 1.0), tied(992, 0.0)
    assert ranked([far, first, close]) == (close, first, far)
    small_one, large_one = tied(999, 1.0, size=1), tied(1000, 1.0, size=2)
    assert ranked([large_one, small_one]) == (small_one, large_one)
    assert close.sent_s == 2.0


def test_the_order_is_that_of_any_permutation():
    rng = random.Random(0)
    every = [tied(1000 - rng.random() * 20, rng.random(), number, rng.choice((1, 2))) for number in range(40)]
    for largest in (False, True):
        order = ranked(every, largest)
        assert ranked(rng.sample(every, len(every)), largest) == order
        assert not largest or [one.config.microbatch_sequences for one in order] == sorted(
            (one.config.microbatch_sequences for one in every), reverse=True
        )
