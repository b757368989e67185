"""Finds the host that the others wait for.

In a step all processes wait for each other, so all take the same time, and the log of one does not show which is slow. Two
measures do: the time of each step that a process spends on its own, reading data or in Python, rather than waiting for its
devices; and, on GPUs, a fixed piece of work that needs no other process, run where the run pauses anyway, before a save. Each
process publishes its medians once a minute; process 0 compares them, and reports a process that is far from the rest.

In DiLoCo's rounds replicas wait for each other in outer steps alone. So there the usual time of a step, which is an inner one,
tells which replica is slow, whatever the cause.
"""

import functools
import json
import logging
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.cluster import distributed, progress
from jaxllm.mesh.axes import REPLICA
from jaxllm.run.hooks import Run
from jaxllm.untrusted import Whole, checked, parse_json

LOOK_EVERY_S = 60.0
AGAIN_S = 600.0
"""Minimum time between two reports about the same process."""
SLOW_SHARE = 0.1
"""Reported above the others' median by this share: of a step for a process's own time, of the work for a device's speed."""
MIN_STEPS = 5
PROBE_SIZE, PROBE_PRODUCTS = 2048, 64
"""24 MB, and 1.1 TFLOP: about 2 ms on an H100. Less would measure the launch, more might not fit."""

log = logging.getLogger(__name__)


class Times(NamedTuple):
    """Medians over the last steps of a process, in seconds a step."""

    host: str
    step_s: float
    """The whole step."""
    own_s: float
    """Time without waiting for devices. Processes with less of it wait for the one with most."""
    data_s: float
    """Part of own_s: the wait for data."""
    probe_s: float | None = None
    """Time of the work that needs no other process, on the slowest device of this one. None: not measured."""
    replica: Whole | None = None
    """The replica that this process trains alone or with others. None: its steps wait for all processes."""


class Stragglers:
    """Compares processes. Every process constructs one at the same point, and calls `look` after each step.

    Args:
      printer: prints process 0's lines.
      replica: gives Times.replica.
    """

    def __init__(self, printer: Callable[[str], None], replica: Callable[[], int | None] = lambda: None):
        self._print, self._replica = printer, replica
        self._board = distributed.Board()
        self._alone = jax.process_count() == 1
        self._next_s = time.monotonic() + LOOK_EVERY_S
        self._probe_s: float | None = None
        self._reported_s: dict[int, float] = {}

    def look(self) -> None:
        now_s = time.monotonic()
        if self._alone or now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_EVERY_S
        if (mine := usual_times(self._probe_s)) is not None:
            self._board.put(str(jax.process_index()), json.dumps(mine._replace(replica=self._replica())))
        if not distributed.is_main_process():
            return
        found = {int(rank): checked(parse_json(text), Times) for rank, text in self._board.read().items()}
        for rank, sentence in straggler_sentences(found).items():
            if now_s - self._reported_s.get(rank, -AGAIN_S) >= AGAIN_S:
                self._reported_s[rank] = now_s
                self._print(sentence)

    def measure(self) -> None:
        """Measures the devices' speed. All processes call it while no step is running. A few milliseconds; on the first call a
        second to compile.
        """
        if not self._alone:
            self._probe_s = probe()


def register(run: Run) -> None:
    trainer = run.trainer
    found = Stragglers(run.console.say, replica=lambda: trainer.programs.rounds and replica_here(trainer.mesh))
    run.on("begun", lambda _: found.look())
    run.when(lambda moment: run.is_due("save", moment) and not moment.last, lambda _: found.measure())


def replica_here(mesh: Mesh) -> int | None:
    """The replica that all of this process's devices belong to; None if there are several, or the mesh has none."""
    if REPLICA not in mesh.axis_names:
        return None
    here = [number for number, own in enumerate(mesh.devices) if any(d.process_index == jax.process_index() for d in own.flat)]
    return here[0] if len(here) == 1 else None


def usual_times(probe_s: float | None = None) -> Times | None:
    """Medians of this process; None before it has done MIN_STEPS."""
    steps = progress.last_steps()
    if len(steps) < MIN_STEPS:
        return None
    whole = statistics.median(one.step_s + one.data_s for one in steps)
    own = statistics.median(one.step_s + one.data_s - one.wait_s for one in steps)
    return Times(socket.gethostname(), whole, own, statistics.median(one.data_s for one in steps), probe_s)


def straggler_sentences(found: Mapping[int, Times]) -> dict[int, str]:
    """By rank, a sentence about the process with the most time of its own, one about the process with the slowest device, and
    in rounds one about the busiest process of the slowest replica, if it is far from the rest; about one process, one sentence.
    """
    parts_by_rank: dict[int, list[str]] = {}
    own_s = {rank: times.own_s for rank, times in found.items()}
    slow, others_s = _slowest(own_s)
    if slow is not None and own_s[slow] - others_s > SLOW_SHARE * found[slow].step_s:
        parts_by_rank.setdefault(slow, []).append(
            f"is busy by itself for {_s(own_s[slow])} of each step ({_s(found[slow].data_s)} of it waiting for data), the "
            f"others for {_s(others_s)}"
        )
    probed = {rank: times.probe_s for rank, times in found.items() if times.probe_s is not None}
    slow, others_s = _slowest(probed)
    if slow is not None and probed[slow] > (1 + SLOW_SHARE) * others_s:
        percent = 100 * (probed[slow] / others_s - 1)
        parts_by_rank.setdefault(slow, []).append(
            f"computes {percent:.0f}% slower than the others (hot, throttled, or shared?)"
        )
    steps_s: dict[int, float] = {}
    for number in {times.replica for times in found.values() if times.replica is not None}:
        steps_s[number] = statistics.median(times.step_s for times in found.values() if times.replica == number)
    slow, others_s = _slowest(steps_s)
    if slow is not None and steps_s[slow] > (1 + SLOW_SHARE) * others_s:
        rank = max((rank for rank in found if found[rank].replica == slow), key=own_s.__getitem__)
        parts_by_rank.setdefault(rank, []).append(
            f"trains replica {slow}, whose inner steps take {_s(steps_s[slow])}, those of the others {_s(others_s)}"
        )
    return {
        rank: f"slowest host: {found[rank].host} (process {rank}) {' and '.join(parts)}; steps take {_s(found[rank].step_s)}"
        for rank, parts in parts_by_rank.items()
    }


def _slowest(seconds: Mapping[int, float]) -> tuple[int | None, float]:
    """The key with the most seconds, and the median of the others; None if there are none."""
    if len(seconds) < 2:
        return None, 0.0
    slow = max(seconds, key=seconds.__getitem__)
    return slow, statistics.median(each for key, each in seconds.items() if key != slow)


def probe() -> float | None:
    """Seconds for a chain of matrix products on all local devices at once, the best of three; None on CPUs, whose cores are
    shared.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return None
    try:
        work, matrix = _work(tuple(devices))
        best_s = np.inf
        for _ in range(4):
            began_s = time.perf_counter()
            work(matrix).block_until_ready()
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s
    except jax.errors.JaxRuntimeError as error:
        log.debug("the devices' speed was not measured: %s", error)
        return None


@functools.cache
def _work(devices: tuple[jax.Device, ...]):
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    matrix = jax.device_put(np.full((len(devices), PROBE_SIZE, PROBE_SIZE), 1 / PROBE_SIZE, jnp.bfloat16), sharding)

    def products(x):
        return jax.lax.fori_loop(0, PROBE_PRODUCTS, lambda _, y: x @ y, x)

    return jax.jit(products, in_shardings=sharding, out_shardings=sharding), matrix


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
