"""The report of the process that the others wait for."""

import json
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.cluster import distributed, progress
from jaxllm.run import stragglers
from jaxllm.run.stragglers import Stragglers, Times, straggler_sentences, usual_times


def times(rank: int, own_s: float = 0.1, data_s: float = 0.0, probe_s: float | None = None) -> Times:
    return Times(f"h{rank}", 1.0, own_s, data_s, probe_s)


def test_no_process_is_named_within_a_tenth_of_a_step():
    assert straggler_sentences({}) == straggler_sentences({0: times(0, 5.0)}) == {}
    assert straggler_sentences({rank: times(rank, own_s) for rank, own_s in enumerate((0.1, 0.11, 0.12, 0.199))}) == {}
    assert straggler_sentences({rank: times(rank, probe_s=s) for rank, s in enumerate((0.002, 0.002, 0.00219))}) == {}


def test_the_busiest_is_named_with_what_it_does():
    found = {rank: times(rank, own_s, data_s) for rank, own_s, data_s in ((0, 0.02, 0.0), (1, 0.6, 0.55), (2, 0.04, 0.01))}
    assert straggler_sentences(found) == {
        1: "slowest host: h1 (process 1) is busy by itself for 0.60 s of each step (0.55 s of it waiting for data), the others "
        "for 30.0 ms; steps take 1.00 s"
    }


def test_a_slow_device_is_named_though_all_take_the_same_time():
    found = {rank: times(rank, probe_s=probe_s) for rank, probe_s in enumerate((0.002, 0.0026, 0.002, None))}
    assert straggler_sentences(found) == {
        1: "slowest host: h1 (process 1) computes 30% slower than the others (hot, throttled, or shared?); steps take 1.00 s"
    }
    found[1] = times(1, 0.5, 0.4, 0.0026)
    assert straggler_sentences(found) == {
        1: "slowest host: h1 (process 1) is busy by itself for 0.50 s of each step (0.40 s of it waiting for data), the others "
        "for 0.10 s and computes 30% slower than the others (hot, throttled, or shared?); steps take 1.00 s"
    }


def test_in_rounds_the_slowest_replica_is_named():
    """By the busiest of its processes. Replicas of two processes; those of one replica take the same time."""

    def of(*steps_s):
        return {rank: times(rank, rank / 100)._replace(step_s=s, replica=rank // 2) for rank, s in enumerate(steps_s)}

    assert straggler_sentences(of(1.0, 1.0, 1.09, 1.09, 1.0, 1.0)) == {}
    slow = of(1.0, 1.0, 1.5, 1.5, 1.02, 1.02)
    assert straggler_sentences(slow) == {
        3: "slowest host: h3 (process 3) trains replica 1, whose inner steps take 1.50 s, those of the others 1.01 s; "
        "steps take 1.50 s"
    }
    # Outside rounds all take the same time, up to noise.
    assert straggler_sentences({rank: one._replace(replica=None) for rank, one in slow.items()}) == {}


def test_a_process_has_a_replica_if_all_its_devices_are_in_it(monkeypatch):
    def replica(sizes, process_of):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        grid = np.array([SimpleNamespace(process_index=process_of(k)) for k in range(8)], object).reshape(sizes)
        names = ("replica", "data")[-grid.ndim :]
        return stragglers.replica_here(SimpleNamespace(axis_names=names, devices=grid))

    assert replica((4, 2), lambda k: k // 2) == 1
    assert replica((2, 4), lambda k: k // 2) == 0
    assert replica((4, 2), lambda k: k // 4) is None
    assert replica((8,), lambda k: k // 4) is None


def test_a_process_s_times_are_medians_of_its_steps(monkeypatch):
    steps = [progress.StepTime(1, 0.25, 0.5)] * 4
    monkeypatch.setattr(progress, "last_steps", lambda: list(steps))
    assert usual_times() is None
    steps.append(progress.StepTime(60, 30, 0.5))
    assert usual_times(0.002)[1:] == (1.25, 0.75, 0.25, 0.002, None)


@pytest.fixture
def said(monkeypatch):
    """Runs Stragglers as process 0 of two: its lines, minute by minute, while process 1 reports the times `peer`."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(progress, "last_steps", lambda: [progress.StepTime(1.0, 0.0, 0.9)] * 5)
    clock, board = [0.0], {}
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    shared = SimpleNamespace(put=board.__setitem__, read=lambda: dict(board))
    monkeypatch.setattr(distributed, "Board", lambda: shared)

    def minutes(count: int, peer: Times) -> list[str]:
        lines: list[str] = []
        watch = Stragglers(lines.append)
        board["1"] = json.dumps(peer)
        for _ in range(count):
            watch.look()
            clock[0] += 60
        watch.look()
        return lines

    return minutes


def test_the_fixed_work_needs_no_other_device(monkeypatch):
    monkeypatch.setattr(stragglers, "PROBE_SIZE", 8)
    devices = tuple(jax.local_devices())
    work, matrix = stragglers._work.__wrapped__(devices)
    compiled = work.lower(matrix).compile().as_text()
    assert "while" in compiled
    assert not [word for word in ("all-", "permute", "reduce-scatter") if word in compiled]
    result = work(matrix)
    assert result.sharding.device_set == set(devices)
    # The values neither grow nor vanish in a chain of any length.
    np.testing.assert_array_equal(result, matrix)
    assert devices[0].platform != "cpu" or stragglers.probe() is None


def test_the_same_process_is_named_every_ten_minutes(said):
    assert said(5, times(1)) == []
    assert [line.split(" is busy")[0] for line in said(12, times(1, 0.9, 0.8))] == ["slowest host: h1 (process 1)"] * 2


def test_a_run_of_one_process_has_no_stragglers(monkeypatch):
    monkeypatch.setattr(stragglers, "straggler_sentences", lambda found: pytest.fail("looked"))
    monkeypatch.setattr(stragglers, "LOOK_EVERY_S", 0.0)
    alone = Stragglers(pytest.fail)
    alone.look()
    alone.measure()
