"""The search: its space is all that Config accepts, its winner is the best, and no configuration is lost."""

import contextlib
import dataclasses
import itertools
import math
import random

import pytest
from choices import choices_of, space
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_stand_ins import HELD, Memory, estimate, gpu_for, small, step_time

from jaxllm.config import ConfigError, all_have_layers, load_config
from jaxllm.config.remat_policy import offloads
from jaxllm.config.types import OFFLOAD_STATES, divisors
from jaxllm.cost_model.hardware import FIT_SHARE, GPUS
from jaxllm.cost_model.hosts import host_bytes_per_gpu
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.plan.fastest_remat import CONFIGURATION, DOES_NOT_FIT, HOST_FULL, MESH
from jaxllm.plan.plan_result import TIE_SHARE, ranked, recipe
from jaxllm.plan.search import KEPT_AWAY, SLOWER, SearchOptions, any_fits, search, why_nothing
from jaxllm.plan.search_text import heading_lines
from jaxllm.plan.space import (
    BEYOND_HOST,
    KEEPABLE,
    MOST_VIRTUAL_STAGES,
    REMATS,
    UNEVEN,
    ZEROS,
    choice_in,
    meshes,
    schedules,
    why_not,
)

H100 = GPUS["h100-80gb"]
AXES = ("pipe", "data", "context", "tensor")


def test_a_choice_with_zero_0_or_1_adds_gradients_in_float32():
    """Config refuses bfloat16 there."""
    found = small("parallel.data=4", "parallel.zero=2", "parallel.reduce_dtype=bfloat16").resolve(4)
    choice = choice_in(found)
    assert choice.applied_to(found).parallel.reduce_dtype == "bfloat16"
    applied = dataclasses.replace(choice, zero=1).applied_to(found)
    assert applied.parallel.reduce_dtype == "float32"
    assert load_config(recipe(applied)).resolve(4) == applied


def find(config, gpu, gpus=8, gpus_per_host=None, *, keep=(), **options):
    given = SearchOptions(**{"estimate": estimate, "step_time": step_time, "keep": (*HELD, *keep), **options})
    return search(config, gpu, gpus, gpus_per_host, given)


def key(config):
    return (*base(config), str(config.parallel.remat))


def base(config):
    """What a search varies beside the remat policy."""
    p = config.parallel
    return (
        *(p.pipe, p.data, p.context, p.tensor, p.zero, p.schedule, p.virtual_stages, p.offload_state),
        config.microbatch_sequences,
    )


def way(config):
    """A configuration as a search counts it: whether activations wait on the host, and all but which."""
    return (*base(config), offloads(config.parallel.remat))


def ways_of(config, gpus, keep=HELD):
    return {way(choice.applied_to(config)) for choice in choices_of(config, gpus, keep=keep)}


# ---------------------------------------------------------------------------------------------------------------- space


def accepted(gpus, overrides):
    """Every mesh, schedule and microbatch of these GPUs that load_config accepts, by brute force."""
    kinds = [("1f1b", 1), ("gpipe", 1), *(("interleaved", virtual) for virtual in range(2, MOST_VIRTUAL_STAGES + 1))]
    sizes = range(1, small(*overrides).train.global_batch_sequences + 1)
    for mesh in itertools.product(divisors(gpus), repeat=4):
        if math.prod(mesh) == gpus:
            axes = [f"parallel.{axis}={size}" for axis, size in zip(AXES, mesh, strict=True)]
            for (schedule, virtual), microbatch in itertools.product(kinds, sizes):
                how = [f"parallel.schedule={schedule}", f"parallel.virtual_stages={virtual}"]
                with contextlib.suppress(ConfigError):
                    small(*overrides, *axes, *how, f"train.microbatch_sequences={microbatch}")
                    yield *mesh, schedule, virtual, microbatch


@pytest.mark.parametrize(
    ("gpus", "overrides"),
    [
        (8, ("train.global_batch_sequences=4",)),
        (6, ("train.global_batch_sequences=6", "model.num_heads=6", "model.num_kv_heads=3", "model.head_dim=16")),
        (4, ("train.global_batch_sequences=6", "train.sequence_length=36", "model.num_layers=5")),
    ],
)
def test_the_space_is_what_config_accepts(gpus, overrides):
    """Except for duplicates: a schedule without a pipeline, ZeRO without ranks to shard over, virtual stages that do not make
    chunks smaller. Each comes with every ZeRO level, remat policy and state on the host that Config accepts.
    """
    config = small(*overrides)
    expected = set()
    for pipe, data, context, tensor, schedule, virtual, microbatch in accepted(gpus, overrides):
        if pipe == 1 and schedule != "1f1b":
            continue
        if virtual > 1 and (schedule, virtual) not in schedules(config.model.num_layers, pipe):
            fewer = [v for _, v in schedules(config.model.num_layers, pipe) if v < virtual]
            layers = config.model.num_layers
            assert any(math.ceil(layers / (pipe * v)) == math.ceil(layers / (pipe * virtual)) for v in fewer)
            continue
        zeros = ZEROS if data * context > 1 else (1,)
        for zero, remat, state in itertools.product(zeros, REMATS, OFFLOAD_STATES):
            if state == "all" and (pipe > 1 or (zero < 3 and data * context > 1)):
                continue
            mesh = (pipe, data, context, tensor)
            expected.add((*mesh, zero, schedule, virtual, state, microbatch, remat))
    assert {key(one) for one in space(config, gpus)} == expected


@pytest.mark.parametrize(
    ("name", "gpus", "per_host", "length", "batch"),
    [
        ("llama-3-8b", 64, None, 8192, 1024),
        ("llama-3-8b", 12, None, 8192, 1024),
        ("llama-3-70b", 512, 4, 131072, 64),
        ("llama-3.1-405b", 1024, None, 8192, 256),
        ("smollm2-135m", 36, 6, 3 * 2048, 360),
        ("llama-3.2-1b", 1, None, 2048, 7),
    ],
)
def test_every_choice_is_a_valid_config(name, gpus, per_host, length, batch):
    """A choice that skips validation equals the same config loaded from YAML."""
    train = {"steps": 1, "sequence_length": length, "global_batch_sequences": batch}
    config = load_config({"model": {"name": name}, "train": train})
    choices = list(choices_of(config, gpus, per_host, across_hosts=True))
    texts = {str(choice) for choice in choices}
    assert len(texts) == len(choices) > 0
    for choice in random.Random(0).sample(choices, min(len(choices), 60)):
        chosen = choice.applied_to(config)
        assert load_config(recipe(chosen)).resolve(gpus) == chosen
        assert choice_in(chosen) == choice


def test_the_space_comes_in_the_same_order():
    """So that a seed draws the same sample on every machine."""
    first, second = (list(choices_of(small(), 8)) for _ in range(2))
    assert first == second
    assert [choice.applied_to(small()) for choice in first] == list(space(small(), 8))


def test_what_is_refused_together_is_not_among_the_choices():
    diloco = small("parallel.data=4", "parallel.replica=2", "train.diloco_steps=2", "train.global_batch_sequences=16")
    assert {choice.offload_state for choice in choices_of(diloco, 8)} == {"none"}


def test_fp8_is_refused_on_meshes_where_config_refuses_it():
    """48 / 4 columns are no multiple of 16."""
    config = small("model.matmul_dtype=fp8", "model.intermediate_size=192", "model.num_kv_heads=4")
    with pytest.raises(ConfigError, match="multiplies 16 numbers at a time"):
        small("model.matmul_dtype=fp8", "model.intermediate_size=96", "model.num_kv_heads=4", "parallel.tensor=4")
    narrow = config.model_copy(update={"model": config.model.model_copy(update={"intermediate_size": 96})})
    assert max(choice.mesh.tensor for choice in choices_of(config, 8)) == 4
    assert max(choice.mesh.tensor for choice in choices_of(narrow, 8)) == 2


def test_tensor_and_context_stay_inside_hosts():
    within = list(choices_of(small("train.sequence_length=256"), 16, 2))
    assert max(choice.mesh.tensor * choice.mesh.context for choice in within) == 2
    across = {choice.mesh for choice in choices_of(small("train.sequence_length=256"), 16, 2, across_hosts=True)}
    assert max(mesh.tensor for mesh in across) == 2
    assert max(mesh.context for mesh in across) == 16
    # A group that crosses hosts fills complete hosts.
    assert all(2 % (m.tensor * m.context) == 0 or m.tensor * m.context % 2 == 0 for m in across)


def test_ranks_that_divide_no_dim_are_offered():
    plan = find(small("train.global_batch_sequences=3"), H100, 3)
    assert {one.config.parallel.zero for one in plan.candidates if one.config.parallel.data == 3} == set(ZEROS)
    assert len(plan.candidates) + sum(one.count for one in plan.rejected if one.unit == CONFIGURATION) == plan.configurations


@given(layers=st.integers(1, 130), pipe=st.integers(1, 64))
def test_schedules_leave_no_chunk_empty(layers, pipe):
    for schedule, virtual in schedules(layers, pipe):
        assert (virtual > 1) == (schedule == "interleaved")
        if virtual > 1:
            assert all_have_layers(layers, pipe * virtual)
            assert pipe * virtual <= layers


@given(st.integers(1, 5000))
def test_divisors(number):
    assert list(divisors(number)) == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize("gpus", [1, 8, 12, 30])
def test_meshes_are_all_products(gpus):
    sizes = range(1, gpus + 1)
    expected = sum(gpus % (p * c * t) == 0 for p, c, t in itertools.product(sizes, repeat=3))
    found = list(meshes(small(), gpus))
    assert len(set(found)) == len(found) == expected


def test_what_is_kept_is_not_searched():
    overrides = ["parallel.pipe=2", "parallel.schedule=gpipe", "parallel.zero=2", "parallel.remat=full"]
    overrides += ["parallel.offload_state=optimizer"]
    config = small(*overrides, "parallel.tensor=2", "train.microbatch_sequences=2", "parallel.data=2")
    everything = list(choices_of(config, 8))
    values = {
        "pipe": lambda choice: choice.mesh.pipe,
        "data": lambda choice: choice.mesh.data,
        "context": lambda choice: choice.mesh.context,
        "tensor": lambda choice: choice.mesh.tensor,
        # With a single rank to shard over, all levels are equal.
        "zero": lambda choice: choice.zero if choice.mesh.data * choice.mesh.context > 1 else None,
        "remat": lambda choice: choice.remat,
        "microbatch_sequences": lambda choice: choice.microbatch_sequences,
        # Without a pipeline there is no schedule to keep.
        "schedule": lambda choice: choice.schedule if choice.mesh.pipe > 1 else "gpipe",
        "offload_state": lambda choice: choice.offload_state,
        # A model without experts has them on one rank (tests/cost_model/test_mixtures.py).
        "expert": lambda choice: choice.expert,
    }
    assert set(values) == set(KEEPABLE)
    for name, value in values.items():
        mine = value(choice_in(config.resolve(8)))
        kept = list(choices_of(config, 8, keep=[name]))
        assert [c for c in kept if value(c) is not None] == [c for c in everything if value(c) == mine] != []


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [
        ("tenser", "--keep=tenser is not a searched setting: did you mean tensor?"),
        ("colour", "schedule, remat, microbatch_sequences, offload_state."),
        ("data", "--keep=data needs a number: set parallel.data"),
        ("microbatch_sequences", "set train.microbatch_sequences, or leave out this --keep."),
    ],
)
def test_what_cannot_be_kept_is_refused(keep, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        list(choices_of(small(), 8, keep=[keep]))


def test_a_mapping_of_ones_own_is_searched_too():
    own = {"query": "keep", "mlp_up": "offload"}
    config = small("parallel.remat={query: keep, mlp_up: offload}")
    remats = [choice.remat for choice in choices_of(config, 2)]
    assert remats.count(own) == remats.count("full") > 0


def test_a_recipe_for_the_cpu_becomes_one_for_gpus():
    chosen = next(space(small("run.cpu_devices=8", "run.dir=somewhere"), 4))
    assert chosen.run.cpu_devices is None
    assert chosen.run.dir == "somewhere"


# --------------------------------------------------------------------------------------------------------------- search

TIGHT = estimate(small().resolve(8)).peak_bytes // 2
"""Bytes that some of the small model's configurations need, and others exceed."""


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("share", [0.4, 1, 1000])
def test_the_winner_is_the_best_of_all(share, remat):
    gpu, config = gpu_for(share * TIGHT), small(f"parallel.remat={remat}")
    limit = FIT_SHARE * gpu.capacity_bytes
    plan = find(config, gpu, keep=["remat"])
    speeds = {
        key(one): step_time(one, gpu, 8).tokens_per_s_per_gpu
        for one in space(config, 8, keep=[*HELD, "remat"])
        if estimate(one).peak_bytes <= limit
    }
    assert {key(one.config): one.tokens_per_s_per_gpu for one in plan.candidates} == speeds
    if speeds:
        assert plan.best == plan.candidates[0].config
        assert plan.candidates[0].tokens_per_s_per_gpu >= (1 - TIE_SHARE) * max(speeds.values())


@pytest.mark.parametrize("share", [0.2, 1, 1000])
@pytest.mark.parametrize("prune", [True, False])
def test_nothing_is_lost(share, prune):
    config = small("model.num_layers=7", "train.global_batch_sequences=8")
    plans = [(find(config, gpu_for(share * TIGHT), prune=prune), HELD)]
    if prune:
        plans.append((search(config, gpu_for(share * TIGHT), 8, options=SearchOptions(best=5)), ()))
        assert SLOWER in {line.reason for line in plans[1][0].rejected}
    for plan, keep in plans:
        by_unit = {unit: sum(line.count for line in plan.rejected if line.unit == unit) for unit in (MESH, CONFIGURATION)}
        every = ways_of(config, 8, keep)
        uneven = sum(line.count for line in plan.rejected if line.reason == UNEVEN)
        assert by_unit[MESH] + len({one[:4] for one in every}) == plan.meshes == len(list(meshes(config, 8)))
        assert by_unit[CONFIGURATION] + len(plan.candidates) == plan.configurations == len(every) + uneven
        assert uneven > 0


@pytest.mark.parametrize(("gpus", "sequences", "share"), [(2, 4, 0.1), (2, 4, 0.6), (2, 16, 0.6), (4, 16, 1), (4, 16, 3)])
def test_pruning_changes_nothing_but_the_work(gpus, sequences, share):
    """Where larger microbatches and remat that keeps more never need less. Of the cases two fit nothing, one by far, and the
    last fits all. What is not pruned has a hundred estimates for each configuration: one GPU more is seconds more."""
    calls = []

    def counted(config):
        calls.append(config)
        return estimate_memory(config)

    config = small(f"train.global_batch_sequences={sequences}")
    gpu = gpu_for(share * estimate_memory(config.resolve(gpus)).peak_bytes)
    pruned = find(config, gpu, gpus, estimate=counted)
    few = len(calls)
    calls.clear()
    whole = find(config, gpu, gpus, estimate=counted, prune=False)
    # Where little fits; where all does, there is nothing to skip.
    assert few < len(calls) or share > 1
    assert pruned.candidates == whole.candidates
    assert [(line.reason, line.count) for line in pruned.rejected] == [(line.reason, line.count) for line in whole.rejected]


@settings(deadline=None, max_examples=8)
@given(st.floats(0.05, 5), st.floats(1, 3))
def test_more_memory_is_never_slower(share, times):
    config = small("train.global_batch_sequences=4")
    some, more = (
        find(config, gpu_for(TIGHT * factor), 4, estimate=estimate_memory).candidates for factor in (share, share * times)
    )
    assert {way(one.config) for one in some} <= {way(one.config) for one in more}
    fastest = [max((one.tokens_per_s_per_gpu for one in found), default=0) for found in (some, more)]
    assert fastest[1] >= fastest[0]


def test_every_reason_has_its_rule():
    """Everything counted under a reason breaks that rule, by Config's own validation if it has the rule."""
    config = small("model.num_layers=5", "train.sequence_length=48", "train.global_batch_sequences=6")
    plan = find(config, H100, 32, gpus_per_host=16)
    found = {line.reason: line.count for line in plan.rejected if line.unit == MESH}
    every = list(meshes(config, 32))
    left = [mesh for mesh in every if 16 % mesh.tensor == 0]
    assert found["tensor reaches beyond a host"] == len(every) - len(left)
    heads = [mesh for mesh in left if 4 % mesh.tensor]
    assert found["4 attention heads do not divide over tensor"] == len(heads)
    sentences = {"sequence_length=48": "train.sequence_length=48 does not divide", "5 layers": "without a layer"}
    sentences["global_batch_sequences=6"] = "train.global_batch_sequences=6 does not divide"
    for start, sentence in sentences.items():
        (line,) = (line for line in plan.rejected if line.reason.startswith(start))
        axes = dict(part.split() for part in line.example.split(" x "))
        with pytest.raises(ConfigError, match=sentence):
            load_config(config.model_dump(mode="json"), [f"parallel.{axis}={size}" for axis, size in axes.items()])
    assert BEYOND_HOST not in found or found[BEYOND_HOST] > 0


def test_the_largest_microbatch_comes_first_if_asked():
    plan = find(small(), gpu_for(TIGHT), largest_microbatch=True)
    sizes = [one.config.microbatch_sequences for one in plan.candidates]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == max(one.config.microbatch_sequences for one in find(small(), gpu_for(TIGHT)).candidates)
    first = [one for one in plan.candidates if one.config.microbatch_sequences == sizes[0]]
    assert tuple(first) == ranked(first)


def test_context_leaves_the_host_only_where_nothing_fits_otherwise():
    config = small("train.sequence_length=1024", "train.global_batch_sequences=1")
    assert not find(config, H100, 16, gpus_per_host=2, across_hosts=False, keep=["pipe"]).candidates
    plan = find(config, H100, 16, gpus_per_host=2, keep=["pipe"])
    assert {one.config.parallel.context * one.config.parallel.tensor for one in plan.candidates} == {16}
    roomy = find(small("train.sequence_length=1024"), H100, 16, gpus_per_host=2)
    assert max(one.config.parallel.context * one.config.parallel.tensor for one in roomy.candidates) == 2


def test_a_mesh_of_which_keep_leaves_nothing_is_counted_too():
    """Three sequences divide no share of sixteen. Interleaving needs a pipeline with more than one layer per stage."""
    plan = find(small("train.microbatch_sequences=3"), H100, keep=["microbatch_sequences"])
    assert not plan.candidates
    assert plan.meshes == sum(line.count for line in plan.rejected)
    assert KEPT_AWAY in why_nothing(plan, SearchOptions(estimate=estimate))
    config = small("parallel.pipe=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "model.num_layers=7")
    plan = find(config, H100, keep=["schedule"])
    (line,) = (line for line in plan.rejected if line.reason == KEPT_AWAY)
    without = [mesh for mesh in meshes(config, 8) if mesh.pipe > 1 and len(schedules(7, mesh.pipe)) == 2]
    assert line.unit == MESH
    assert line.count == sum(why_not(config, mesh, 8) is None for mesh in without) > 0
    divide = plan.meshes - sum(line.count for line in plan.rejected if line.unit == MESH)
    assert divide == len({choice.mesh for choice in choices_of(config, 8, keep=["schedule"])})


def test_the_bytes_there_are_may_be_said():
    plan = find(small(), H100, device_bytes=TIGHT)
    assert {way(one.config) for one in plan.candidates} == {
        way(config) for config in space(small(), 8, keep=HELD) if estimate(config).peak_bytes <= TIGHT
    }
    assert max(one.estimate_bytes for one in plan.candidates) <= TIGHT


def test_an_interrupted_search_gives_what_it_has():
    calls = itertools.count()

    def stopped(config):
        if next(calls) == 200:
            raise KeyboardInterrupt
        return estimate(config)

    whole, part = find(small(), H100), find(small(), H100, estimate=stopped)
    assert part.interrupted
    assert not whole.interrupted
    assert {key(one.config) for one in part.candidates} < {key(one.config) for one in whole.candidates}
    assert len(part.candidates) > 50
    left_out = {unit: sum(line.count for line in part.rejected if line.unit == unit) for unit in (MESH, CONFIGURATION)}
    assert part.configurations == len(part.candidates) + left_out[CONFIGURATION] < whole.configurations
    assert part.meshes == whole.meshes
    assert part.candidates == ranked(part.candidates)


def test_the_host_has_an_end_too():
    """Offloaded activations use host memory; the search continues without configurations that exceed it."""

    def with_host(config):
        return Memory(estimate(config).peak_bytes, 1000 * config.microbatch_sequences * (config.parallel.remat == "offload"))

    for prune in (True, False):
        plan = find(
            small("parallel.remat=offload"), H100, estimate=with_host, host_bytes_per_gpu=2500, prune=prune, keep=["remat"]
        )
        assert {one.config.microbatch_sequences for one in plan.candidates} == {1, 2}
        (line,) = (line for line in plan.rejected if line.reason == HOST_FULL)
        larger = [c for c in choices_of(small(), 8, keep=HELD) if c.remat == "offload" and c.microbatch_sequences > 2]
        assert line.count == len(larger)
        assert line.example == str(larger[0])
        assert (
            len(plan.candidates) + sum(one.count for one in plan.rejected if one.unit == CONFIGURATION) == plan.configurations
        )


def test_a_host_that_is_too_small_is_said_beside_the_gpu():
    def with_host(config):
        moved = config.parallel.remat == "offload"
        return Memory(1000 if moved else 2000, 500 if moved else 0)

    limits = {"device_bytes": 1500, "host_bytes_per_gpu": 400}
    options = SearchOptions(**limits, keep=HELD, estimate=with_host, step_time=step_time, prune=False)
    plan = search(small(), H100, 2, options=options)
    (row,) = (row for row in plan.rejected if row.reason == HOST_FULL)
    assert f"; {row.count:,} that may fit there need more than 400 B of the host (--host-gib-per-gpu)" in why_nothing(
        plan, options
    )


def test_more_gpus_than_a_host_of_the_kind_has_share_its_memory():
    assert H100.gpus_per_host == 8
    assert host_bytes_per_gpu(H100, 4) == host_bytes_per_gpu(H100) == 2 * host_bytes_per_gpu(H100, 16)
    keep = [name for name in KEEPABLE if name != "microbatch_sequences"]
    assert search(small("parallel.data=16"), H100, 16, 16, SearchOptions(keep=keep)).host_bytes_per_gpu == host_bytes_per_gpu(
        H100, 16
    )


@pytest.mark.parametrize(("gpus", "state"), [(4, "none"), (1, "all")])
def test_a_batch_schedule_has_the_figures_of_its_largest_batch(gpus, state):
    """That is the second of three batches; the run ends before the last. A microbatch divides all of them."""
    schedule = ("train.batch_schedule=[[512, 16], [100000, 64]]", "train.global_batch_sequences=8")
    options = SearchOptions(keep=["offload_state"], prune=False)
    growing, constant = (
        search(small(*keys, f"parallel.offload_state={state}"), H100, gpus, options=options) for keys in (schedule, ())
    )
    expected = {key(one.config): one for one in constant.candidates}
    assert growing.candidates
    for one in growing.candidates:
        other = expected[key(one.config)]
        assert (one.estimate_bytes, one.host_bytes) == (other.estimate_bytes, other.host_bytes)
        assert one.predicted == other.predicted
        assert one.config.train.batch_schedule
    assert "16 sequences of 64 tokens a step, the largest batch;" in "\n".join(heading_lines(growing))


def test_progress_counts_meshes():
    seen = []
    plan = find(small(), H100, progress=lambda *call: seen.append(call))
    looked_at = plan.configurations - sum(line.count for line in plan.rejected if line.reason == UNEVEN)
    assert seen[: plan.meshes] == [("meshes", number, plan.meshes) for number in range(1, plan.meshes + 1)]
    assert seen[-1] == ("configurations", looked_at, looked_at)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.6, 1, 3])
def test_any_fits_is_the_search_in_short(share):
    gpu = gpu_for(share * TIGHT)
    assert any_fits(small(), gpu, 8, options=SearchOptions(estimate=estimate, keep=HELD)) == bool(find(small(), gpu).candidates)


# --------------------------------------------------------------------------------------------------------- nothing fits


def least_bytes(config, gpus):
    return min(estimate(one).peak_bytes for one in space(config, gpus, across_hosts=True))


def room_for(size):
    return gpu_for(size / FIT_SHARE + 2)


def test_more_gpus_are_advised_where_they_do():
    config = small("model.num_layers=8")
    gpu = room_for(least_bytes(config, 4))
    plan = find(config, gpu, 1)
    sentence = why_nothing(plan, SearchOptions(estimate=estimate, keep=HELD))
    assert not plan.candidates
    assert "of those that the GPU is too small for, the leanest takes " in sentence
    assert "of the host" not in sentence
    assert "--gpus=4 or train.sequence_length=" in sentence or "--gpus=4." in sentence
    assert "--gpus=2" not in sentence
    with pytest.raises(ConfigError, match="Nothing fits on 1 x mine: use more GPUs"):
        _ = plan.best


def test_with_all_on_the_host_there_is_no_pipeline_and_only_zero_3():
    """A single rank has one level."""
    config = small("parallel.offload_state=all")
    plan = find(config, H100, 4)
    found = {(one.config.parallel.pipe, one.config.parallel.zero, one.config.parallel.tensor) for one in plan.candidates}
    assert {pipe for pipe, _, _ in found} == {1}
    assert {zero for _, zero, tensor in found if tensor < 4} <= {3}


def test_offloading_the_state_is_advised_first_where_it_is_kept():
    def with_offload(config):
        kept = {"none": 1.0, "optimizer": 0.6, "optimizer_and_master": 0.4, "all": 0.4}[config.parallel.offload_state]
        return Memory(round(estimate(config).peak_bytes * kept))

    gpu = room_for(least_bytes(small(), 4) * 0.7)
    sentence = why_nothing(find(small(), gpu, 4, estimate=with_offload), SearchOptions(estimate=with_offload, keep=HELD))
    assert sentence.endswith("use parallel.offload_state=optimizer.")
    searched = search(small(), gpu, 4, options=SearchOptions(estimate=with_offload, step_time=step_time))
    assert "none" not in {one.choice.offload_state for one in searched.candidates} != set()


@pytest.mark.parametrize(
    ("asked", "also"),
    [((), ()), (("parallel.pipe=2",), ("parallel.pipe=1",)), (("parallel.data=2", "parallel.zero=1"), ("parallel.zero=3",))],
)
def test_where_all_on_the_host_is_advised_so_is_what_it_needs(asked, also):
    def with_offload(config):
        return Memory(round(estimate(config).peak_bytes * (0.01 if config.parallel.offload_state == "all" else 1)))

    gpu, options = room_for(least_bytes(small(), 8) * 0.5), SearchOptions(estimate=with_offload, keep=HELD)
    sentence = why_nothing(find(small(*asked), gpu, estimate=with_offload), options)
    keys = ("parallel.offload_state=all", *also)
    assert sentence.endswith(f"use {' '.join(keys)}.")
    assert small(*asked, *keys).parallel.offload_state == "all"


def test_a_shorter_sequence_is_advised_where_it_is_the_activations():
    def activations_alone(config):
        return Memory(config.train.sequence_length * 1000)

    gpu = room_for(16 * 1000)
    sentence = why_nothing(find(small(), gpu, estimate=activations_alone), SearchOptions(estimate=activations_alone))
    assert sentence.endswith("use train.sequence_length=16.")


def test_where_nothing_would_do_it_says_so():
    def hopeless(config):
        return Memory(10**15)

    sentence = why_nothing(find(small(), H100, estimate=hopeless), SearchOptions(estimate=hopeless))
    assert sentence.endswith("use a smaller model.")
    assert sentence.count("\n") == 0


def test_where_keep_leaves_no_mesh_it_says_so():
    config = small("parallel.tensor=16", "model.num_heads=16", "model.num_kv_heads=16", "model.head_dim=4")
    plan = find(config, H100, 8, keep=["tensor"])
    sentence = why_nothing(plan, SearchOptions(estimate=estimate))
    assert sentence == "--keep leaves no configuration of 8 GPUs: change --gpus, or keep less."


def test_where_no_mesh_divides_the_rule_is_named():
    plan = find(small("train.global_batch_sequences=3"), H100, 7, keep=["pipe"])
    sentence = why_nothing(plan, SearchOptions(estimate=estimate))
    assert sentence.startswith("No configuration for 7 x h100-80gb is possible, mostly because ")
    assert "global_batch_sequences=3 does not divide over data" in " ".join(line.reason for line in plan.rejected)
    assert DOES_NOT_FIT not in [line.reason for line in plan.rejected]


# ----------------------------------------------------------------------------------------------- the estimates themselves

EIGHT = load_config(
    {
        "model": {"name": "llama-3.2-1b"},
        "parallel": {"remat": "full"},
        "train": {"steps": 1, "sequence_length": 4096, "global_batch_sequences": 16},
    }
)


def bytes_and_speed(config):
    memory, time = estimate_memory(config), estimate_step_time(config, H100, 8)
    return memory.peak_bytes, memory.host_bytes, time.tokens_per_s_per_gpu


@pytest.fixture(scope="module")
def everything():
    """Bytes and speed of a twentieth of the configurations of a 1B model on eight GPUs, with named policies."""
    return {key(config): bytes_and_speed(config) for config in itertools.islice(space(EIGHT, 8), 0, None, 20)}


@pytest.mark.parametrize("gib", [4, 6, 10, 20, 60])
def test_the_winner_is_the_best_of_all_by_the_real_estimates(everything, gib):
    gpu = gpu_for(gib * 2**30)
    plan = search(EIGHT, gpu, 8)
    limit, host_limit = FIT_SHARE * gpu.capacity_bytes, host_bytes_per_gpu(gpu)
    fit = {name: speed for name, (peak, host, speed) in everything.items() if peak <= limit and host <= host_limit}
    fastest = max(one.tokens_per_s_per_gpu for one in plan.candidates)
    assert fastest >= max(fit.values())
    assert plan.candidates[0].tokens_per_s_per_gpu >= (1 - TIE_SHARE) * fastest
    assert all(one.estimate_bytes <= limit and one.host_bytes <= host_limit for one in plan.candidates)


def test_a_candidate_has_the_figures_of_estimate():
    plan = search(EIGHT, H100, 8, options=SearchOptions(keep=["zero", "remat", "context"]))
    for one in plan.candidates[::20]:
        assert (one.estimate_bytes, one.host_bytes, one.tokens_per_s_per_gpu) == bytes_and_speed(one.config)
