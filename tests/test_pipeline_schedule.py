"""Pipeline schedules: the cost of the tables, correct results when they run, and that check() finds every fault."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_check import WrongTable, check

from jaxllm.config import ConfigError, load_config
from jaxllm.pipeline_schedule import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    Group,
    ScheduleError,
    forward_only,
    idle_share,
    make_schedule,
    microbatches_for,
)
from jaxllm.plan.pipeline_report import pipeline_report


@st.composite
def pipelines(draw):
    """(name, P, M, V)"""
    P, V = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    if V > 1:
        return INTERLEAVED, P, P * draw(st.integers(1, 6)), V
    return draw(st.sampled_from([GPIPE, ONE_F_ONE_B])), P, draw(st.integers(1, 40)), 1


SMALL = [(GPIPE, 3, 4, 1), (ONE_F_ONE_B, 3, 5, 1), (INTERLEAVED, 2, 2, 2), (INTERLEAVED, 2, 6, 2), (INTERLEAVED, 3, 6, 3)]


# ------------------------------------------------------------------------------------------------------------------ laws


@given(pipelines())
def test_a_backward_pass_has_the_residuals_of_its_microbatch(pipeline):
    """Whether or not its tick is valid: a new ring is undefined, and another microbatch has other documents."""
    schedule = make_schedule(pipeline[0], *pipeline[1:])
    forward, backward = schedule.forward, schedule.backward
    for stage in range(schedule.stages):
        written = {}
        for tick in range(schedule.ticks):
            if forward.valid[tick].any():
                written[int(forward.slot[tick, stage])] = forward.microbatch[tick, stage]
            if backward.valid[tick].any():
                assert written[int(backward.slot[tick, stage])] == backward.microbatch[tick, stage], (tick, stage)


@given(pipelines())
def test_every_table_is_right(pipeline):
    check(make_schedule(*pipeline))
    check(forward_only(*pipeline[1:]))


@pytest.mark.parametrize("pipeline", [(GPIPE, 64, 5, 1), (ONE_F_ONE_B, 64, 200, 1), (INTERLEAVED, 32, 128, 10)])
def test_tables_of_large_pipelines_are_right(pipeline):
    check(make_schedule(*pipeline))
    check(forward_only(*pipeline[1:]))


@given(pipelines())
def test_ticks_and_slots_are_as_in_theory(pipeline):
    name, P, M, V = pipeline
    schedule = make_schedule(*pipeline)
    waiting = P > 1
    assert schedule.forward_units == schedule.backward_units == M * V + P - 1
    if name == GPIPE:
        assert schedule.ticks == 2 * (M + P - 1)
        assert (schedule.slots, schedule.finished_slots) == (M + waiting, M)
        assert (schedule.live.max(axis=0) == M).all()
    else:
        # Warm-up and drain of PV ticks; every other tick has both directions.
        both = schedule.forward.valid.any(axis=1) & schedule.backward.valid.any(axis=1)
        assert schedule.ticks == 2 * P * V + both.sum()
        assert both.sum() == M * V + P - P * V - 1
        assert (schedule.slots, schedule.finished_slots) == (min(M * V + waiting, P * V + P), 1)
        # Live on stage i while chunk 0 is: 2 fewer for each later stage.
        enough = M * V >= P * V + P
        assert not enough or schedule.live.max(axis=0).tolist() == [P * V + P - 2 * i for i in range(P)]
    assert (schedule.live >= 0).all()
    assert (schedule.live[-1] == schedule.backward.valid[-1]).all()
    busy = schedule.forward.valid.sum() + schedule.backward.valid.sum()
    total = P * (schedule.forward_units + schedule.backward_units)
    assert 1 - busy / total == pytest.approx(idle_share(P, M, V))


@given(pipelines(), st.booleans())
def test_running_the_table_gives_every_microbatch_its_loss_and_gradients(pipeline, training):
    """A miniature executor: values are descriptions of themselves, and garbage is the slot's previous value."""
    _, P, M, V = pipeline
    schedule = make_schedule(*pipeline) if training else forward_only(P, M, V)
    forward, backward = schedule.forward, schedule.backward
    arriving, returning, returned = [None] * P, [None] * P, None
    ring, finished = [{} for _ in range(P)], {}
    losses, gradients, embedded = [], [], []
    for t, run in ticks_of(schedule.runs):
        from_head = None
        if run.backward:
            if run.embed:
                embedded.append(returned)
            from_above, returning = returning[1:] + returning[:1], [None] * P
        if run.head and schedule.head_mb[t] >= 0:
            assert finished[schedule.head_slot[t]] == ("h", P * V - 1, schedule.head_mb[t])
            losses.append(schedule.head_mb[t])
            from_head = ("g", P * V, schedule.head_mb[t])
        if run.forward:
            made = []
            for i in range(P):
                k, m = forward.chunk[t, i] * P + i, forward.microbatch[t, i]
                h = ("h", -1, m) if run.embed and k == 0 else arriving[i]
                assert not forward.valid[t, i] or h == ("h", k - 1, m)
                ring[i][forward.slot[t, i]] = (k, m) if forward.valid[t, i] else "garbage"
                made.append(("h", k, m) if forward.valid[t, i] else "garbage")
            arriving = made[-1:] + made[:-1]
            finished[schedule.finished[t]] = made[-1]
        if run.backward:
            for i in np.flatnonzero(backward.valid[t]):
                k, m = backward.chunk[t, i] * P + i, backward.microbatch[t, i]
                assert (from_head if k == P * V - 1 else from_above[i]) == ("g", k + 1, m)
                assert ring[i][backward.slot[t, i]] == (k, m)
                gradients.append((k, m))
                returning[i] = ("g", k, m)
        returned = returning[0] if run.backward and backward.chunk[t, 0] == 0 else None
    assert sorted(losses) == list(range(M))
    assert sorted(gradients) == (list(itertools.product(range(P * V), range(M))) if training else [])
    embedded.append(returned)
    assert [value for value in embedded if value] == ([("g", 0, m) for m in range(M)] if training else [])


def ticks_of(groups: tuple[Group, ...]):
    for group in groups:
        for repetition in range(group.repeat):
            for run in group.runs:
                for step in range(run.length):
                    yield run.start + repetition * group.length + step, run


def test_runs_of_an_interleaved_schedule_are_few_and_fold():
    def shapes(schedule):
        words = np.array(["forward", "backward", "embed", "head"])
        return [(group.repeat, [(run.length, *words[list(run.work)]) for run in group.runs]) for group in schedule.runs]

    assert shapes(make_schedule(INTERLEAVED, 4, 16, 3)) == [
        (1, [(12, "forward", "embed")]),
        (3, [(4, "forward", "backward", "embed", "head"), (8, "forward", "backward")]),
        (1, [(3, "forward", "backward", "embed", "head")]),
        (1, [(1, "backward", "embed", "head")]),
        (1, [(11, "backward", "embed")]),
    ]
    assert shapes(make_schedule(ONE_F_ONE_B, 4, 8)) == [
        (1, [(4, "forward", "embed")]),
        (1, [(7, "forward", "backward", "embed", "head")]),
        (1, [(1, "backward", "embed", "head")]),
        (1, [(3, "backward", "embed")]),
    ]
    assert shapes(make_schedule(GPIPE, 4, 8)) == [
        (1, [(11, "forward", "embed")]),
        (1, [(8, "backward", "embed", "head")]),
        (1, [(3, "backward", "embed")]),
    ]
    assert len(make_schedule(INTERLEAVED, 8, 512, 4).runs) == 5
    assert shapes(forward_only(2, 4))[-1] == (1, [(1, "head")])


@given(st.floats(0.002, 1), st.integers(1, 16), st.integers(1, 4))
def test_microbatches_for_an_idle_share_are_the_least(idle, P, V):
    M = microbatches_for(idle, P, V)
    multiple = P if V > 1 else 1
    assert M % multiple == 0
    assert idle_share(P, M, V) < idle
    assert multiple >= M or idle_share(P, M - multiple, V) >= idle


# ----------------------------------------------------------------------------------------------------- check() can fail


def changed(schedule, table, place, value):
    """A copy of the schedule with one entry of one table changed; `table` such as forward.slot or finished."""
    *way, name = table.split(".")
    owner = getattr(schedule, way[0]) if way else schedule
    array = getattr(owner, name).copy()
    array[place] = value
    owner = dataclasses.replace(owner, **{name: array})
    return dataclasses.replace(schedule, **{way[0]: owner}) if way else owner


@pytest.mark.parametrize("pipeline", SMALL)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_no_entry_of_a_unit_can_be_changed_unseen(pipeline, way):
    schedule = make_schedule(*pipeline)
    _, _, M, V = pipeline
    units, faults = getattr(schedule, way), 0
    for place in map(tuple, np.argwhere(np.ones_like(units.valid))):
        wrong = [("valid", not units.valid[place])]
        if units.valid[place]:
            limits = {"chunk": V, "microbatch": M, "slot": schedule.slots}
            wrong += [(name, v) for name, n in limits.items() for v in range(-1, n + 1) if v != getattr(units, name)[place]]
        for name, value in wrong:
            with pytest.raises(WrongTable, match=r"[Tt]ick \d|[Ss]tage \d"):
                check(changed(schedule, f"{way}.{name}", place, value))
            faults += 1
    assert faults > 100 * (M * V > 4)


@pytest.mark.parametrize("pipeline", SMALL)
def test_what_a_waiting_stage_writes_may_hit_no_live_slot(pipeline):
    schedule = make_schedule(*pipeline)
    written = schedule.forward.valid.any(axis=1)
    hits = 0
    for t, i in np.argwhere(~schedule.forward.valid & written[:, None]):
        live = live_slots(schedule, t, i)
        for slot in range(schedule.slots):
            mutated = changed(schedule, "forward.slot", (t, i), slot)
            if slot in live:
                hits += 1
                with pytest.raises(WrongTable, match=rf"Tick {t}, stage {i}, .*overwritten before their backward"):
                    check(mutated)
            else:
                check(mutated)
    assert hits


def live_slots(schedule, tick, stage):
    """Slots with residuals that were written before this tick and are read in it or later, by brute force."""
    live = set()
    for t in range(tick, schedule.ticks):
        if schedule.backward.valid[t, stage]:
            unit = schedule.backward.chunk[t, stage], schedule.backward.microbatch[t, stage]
            same = (schedule.forward.chunk[:, stage] == unit[0]) & (schedule.forward.microbatch[:, stage] == unit[1])
            if np.flatnonzero(same & schedule.forward.valid[:, stage])[0] < tick:
                live.add(int(schedule.backward.slot[t, stage]))
    return live


def test_outputs_of_the_last_stage_are_guarded():
    schedule = make_schedule(GPIPE, 3, 4)
    with pytest.raises(WrongTable, match=r"Tick 3, stage 2, chunk 0, microbatch 0: the output in .* is overwritten"):
        check(changed(schedule, "finished", 3, 0))
    with pytest.raises(WrongTable, match="Tick 7, stage 2, chunk 0, microbatch 1: the head finds no output"):
        check(changed(schedule, "head_slot", 7, 3))
    with pytest.raises(WrongTable, match="Tick 5: finished is 3, not from 0 to 2"):
        check(dataclasses.replace(schedule, finished_slots=3))
    evaluation = forward_only(2, 3)
    with pytest.raises(WrongTable, match="Tick 1: finished is 1, not from 0 to 0"):
        check(changed(evaluation, "finished", 1, 1))


@pytest.mark.parametrize("pipeline", [p for p in SMALL if p[0] != GPIPE])
def test_a_slot_too_few_and_swapped_slots_are_seen(pipeline):
    schedule = make_schedule(*pipeline)
    with pytest.raises(WrongTable, match=rf"slot is {schedule.slots - 1}, not from 0 to {schedule.slots - 2}"):
        check(dataclasses.replace(schedule, slots=schedule.slots - 1))
    fewer = {way: dataclasses.replace(u, slot=u.slot % (schedule.slots - 1)) for way, u in directions(schedule)}
    with pytest.raises(WrongTable, match="overwritten"):
        check(dataclasses.replace(schedule, slots=schedule.slots - 1, **fewer))
    slots = schedule.forward.slot
    swapped = changed(changed(schedule, "forward.slot", (0, 0), slots[1, 0]), "forward.slot", (1, 0), slots[0, 0])
    with pytest.raises(WrongTable, match="finds no residuals"):
        check(swapped)


def directions(schedule):
    return [("forward", schedule.forward), ("backward", schedule.backward)]


@pytest.mark.parametrize("pipeline", SMALL)
@pytest.mark.parametrize(("way", "place"), [("forward", lambda s: s.stages), ("backward", lambda s: s.ticks - 1)])
def test_a_value_that_waits_is_seen(pipeline, way, place):
    """An empty tick, while stages fill or drain, keeps the order of everything and loses the messages in flight."""
    schedule = make_schedule(*pipeline)
    wider = each_table(schedule, lambda table: np.insert(table, place(schedule), 0, axis=0))
    with pytest.raises(WrongTable, match=rf"{way} takes what stage \d made in tick \d+, not one tick before"):
        check(wider)


def each_table(schedule, change):
    """A copy of the schedule with change(table) in place of each table."""
    units = {way: type(u)(*map(change, vars(u).values())) for way, u in directions(schedule)}
    return dataclasses.replace(schedule, **units, finished=change(schedule.finished), head_slot=change(schedule.head_slot))


def test_work_done_twice_or_never_is_named():
    schedule = make_schedule(ONE_F_ONE_B, 2, 3)
    with pytest.raises(WrongTable, match="Tick 3, stage 0, chunk 0, microbatch 0: forward again, after tick 0"):
        check(changed(schedule, "forward.valid", (3, 0), True))
    with pytest.raises(WrongTable, match="Stage 1, chunk 0, microbatch 0: backward in no tick"):
        check(changed(schedule, "backward.valid", (2, 1), False))
    with pytest.raises(WrongTable, match="Stage 1, chunk 0, microbatch 2: no head takes finished slot 0"):
        check(each_table(forward_only(2, 3), lambda table: table[:-1]))


def test_a_backward_in_the_tick_of_its_forward_is_seen():
    schedule = make_schedule(ONE_F_ONE_B, 1, 2)
    sooner = type(schedule.backward)(*(np.roll(array, -1, axis=0) for array in vars(schedule.backward).values()))
    with pytest.raises(WrongTable, match="Tick 0, stage 0, chunk 0, microbatch 0: backward finds no residuals of an earlier"):
        check(dataclasses.replace(schedule, backward=sooner))


@pytest.mark.parametrize("pipeline", [(GPIPE, 4, 8, 1), (ONE_F_ONE_B, 4, 8, 1), (INTERLEAVED, 4, 8, 2), (INTERLEAVED, 2, 8, 4)])
def test_runs_that_leave_out_work_are_seen(pipeline):
    schedule, faults = make_schedule(*pipeline), 0
    for g, group in enumerate(schedule.runs):
        for r, run in enumerate(group.runs):
            dropped = [{word: False} for word in ("forward", "backward", "embed", "head") if getattr(run, word)]
            for change in [*dropped, {"length": run.length + 1}, {"length": run.length - 1}, {"start": run.start + 1}]:
                runs = list(group.runs)
                runs[r] = dataclasses.replace(run, **change)
                groups = list(schedule.runs)
                groups[g] = Group(group.repeat, tuple(runs))
                copy = dataclasses.replace(schedule)
                vars(copy)["runs"] = tuple(groups)
                with pytest.raises(WrongTable, match=r"Tick \d+"):
                    check(copy)
                faults += 1
    assert faults > 15


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((INTERLEAVED, 4, 6, 2), "6 is not a multiple of 4 stages: make it 4 or 8 "),
        ((INTERLEAVED, 4, 3, 2), "3 is not a multiple of 4 stages: make it 4 "),
        ((INTERLEAVED, 4, 8), "needs virtual_stages of at least 2: set that, or schedule=1f1b"),
        ((ONE_F_ONE_B, 4, 8, 2), "virtual_stages=2 belongs to schedule=interleaved, not 1f1b"),
        ((GPIPE, 4, 8, 2), "virtual_stages=2 belongs to schedule=interleaved, not gpipe"),
        (("zero_bubble", 4, 8), "There is no pipeline schedule zero_bubble: use gpipe, 1f1b, interleaved."),
        ((GPIPE, 4, 0), "stages=4, virtual_stages=1, microbatches=0 is not a pipeline"),
    ],
)
def test_impossible_pipelines_are_refused_in_a_sentence(arguments, sentence):
    with pytest.raises(ScheduleError) as error:
        make_schedule(*arguments)
    assert sentence in str(error.value)


@pytest.mark.parametrize("idle", [0, -1, math.nan])
def test_no_pipeline_is_never_idle(idle):
    with pytest.raises(ScheduleError, match="ask for more than 0"):
        microbatches_for(idle, 4)


# ---------------------------------------------------------------------------------------------------------- of a config


def test_report_of_a_config(tiny_config):
    """parallel.data divides the batch: as set, as run.cpu_devices leaves it, or as 1, with a note."""
    batch = ["parallel.pipe=2", "parallel.schedule=gpipe", "train.global_batch_sequences=12", "train.microbatch_sequences=1"]
    three = pipeline_report(tiny_config(*batch, "parallel.data=3", "run.cpu_devices=null", "model.compute_dtype=bfloat16"))
    six = pipeline_report(tiny_config(*batch, "parallel.data=auto", "run.cpu_devices=12"))
    one = pipeline_report(tiny_config(*batch, "parallel.data=auto", "run.cpu_devices=null"))
    assert [(r.data, r.schedule.microbatches) for r in (three, six, one)] == [(3, 4), (6, 2), (1, 12)]
    assert [any("parallel.data=auto counts as 1" in line for line in r.lines()) for r in (three, six, one)] == [
        False,
        False,
        True,
    ]
    assert list(three.lines()) == [
        "gpipe: 2 stages, 4 microbatches a step",
        "  ticks        10; forward in 5, backward in 5",
        "  idle         20.0% of the step; below 10% from 10 microbatches",
        "  slots        5 on each stage, each for one microbatch's residuals",
        "  most in use  4 4  (stage 0 first)",
        "  memory       46.2 KiB of residuals on each device",
    ]
    # With documents masked by cuDNN, its output and its float32 log-sum-exp are kept too.
    assert three.slot_bytes == 16 * (2 * (4 * 32 + 2 * 16 + 2 * 64) + 4 * 4)
    # float32 excludes cuDNN.
    assert one.slot_bytes == 16 * 4 * (3 * 32 + 2 * 16 + 2 * 64)
    away = pipeline_report(tiny_config(*batch, "parallel.data=3", "parallel.remat=offload", "model.attention=xla"))
    assert (away.slot_bytes, away.offloaded_slot_bytes) == (0, 16 * 4 * (3 * 32 + 2 * 16 + 2 * 64))
    assert list(away.lines())[-1] == "  memory       0 B of residuals on each device, and 80.0 KiB on its host"
    everything = pipeline_report(tiny_config(*batch, "parallel.data=3", "parallel.remat=none"))
    assert everything.slot_bytes is None
    with pytest.raises(ConfigError, match=r"set parallel\.pipe to the number of stages"):
        pipeline_report(tiny_config())


def test_identity_layers_are_idle_as_waiting_is():
    """With 7 layers on each of 5 stages, 3 of 35 are zeros, in a step that waits for 4 of 84 ticks."""
    sizes = ["model.num_layers=32", "parallel.pipe=5", "parallel.data=2", "train.global_batch_sequences=160"]
    uneven = pipeline_report(load_config("mesh-demo", [*sizes, "train.microbatch_sequences=1", "run.cpu_devices=null"]))
    assert uneven.waiting_share == pytest.approx(4 / 84)
    assert uneven.idle_share == pytest.approx(1 - 80 / 84 * 32 / 35)
    assert "  idle         12.9% of the step, 4.8% without 3 identity layers of 35" in list(uneven.lines())
    values = uneven.to_json()
    assert (values["idle_share"], values["identity_layers"]) == (uneven.idle_share, 3)
    even = pipeline_report(load_config("mesh-demo", ["parallel.pipe=4", "train.microbatch_sequences=1"]))
    assert (even.idle_share, even.identity_layers) == (even.waiting_share, 0)
