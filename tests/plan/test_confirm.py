"""Confirmation by compiling: the outcome does not depend on the order of compilations, and a crash rejects one candidate
only."""

import dataclasses
import itertools
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from plan_stand_ins import HELD, Compiled, estimate, gpu_for, small, step_time

from jaxllm.compile.confirm import COMPILE_REFUSED, COMPILED_ABOVE, HOST_COMPILED_ABOVE, TRIES, confirm
from jaxllm.config import ConfigError
from jaxllm.cost_model.hardware import GPUS
from jaxllm.plan.search import SearchOptions, search
from jaxllm.plan.space import choice_in


@pytest.fixture(scope="module")
def plan():
    gpu = gpu_for(estimate(small().resolve(8)).peak_bytes)
    return search(small(), gpu, 8, options=SearchOptions(keep=HELD, estimate=estimate, step_time=step_time))


def key(config):
    return str(choice_in(config))


def rank(plan, config):
    return next(n for n, one in enumerate(plan.candidates) if one.config == config)


class Compiler:
    """Returns bytes by a candidate's rank: within the capacity and the host's share, except for the listed ones; and exposed
    seconds by rank."""

    def __init__(self, plan, above=(), host_above=(), refused=(), wait=None, transfers_s=None):
        self.plan, self.above, self.host_above, self.refused, self.wait = plan, above, host_above, refused, wait
        self.transfers_s = transfers_s or {}
        self.compiled = []

    def __call__(self, config):
        number = rank(self.plan, config)
        if self.wait is not None:
            self.wait(number)
        self.compiled.append(number)
        if number in self.refused:
            raise ConfigError(f"number {number} cannot be.")
        capacity = self.plan.capacity_bytes
        size = capacity + 1 if number in self.above else capacity - number
        on_host = self.plan.host_bytes_per_gpu + (number in self.host_above)
        return Compiled(size, on_host, self.transfers_s.get(number))


def test_the_best_are_confirmed(plan):
    compiler = Compiler(plan)
    found = confirm(plan, 3, compiler)
    assert compiler.compiled == [0, 1, 2]
    assert [one.config for one in found.candidates] == [one.config for one in plan.candidates]
    sizes = [plan.capacity_bytes - number for number in range(3)]
    assert [one.compiled_bytes for one in found.candidates[:4]] == [*sizes, None]
    assert found.confirmed == 3
    assert found.unconfirmed_because is None
    assert found.rejected == plan.rejected


def test_those_that_are_confirmed_are_ranked_by_their_schedules(plan):
    """The first waits a second for transfers and the second not at all; the third's are not known."""
    first, second, third, fourth = plan.candidates[:4]
    found = confirm(plan, 3, Compiler(plan, transfers_s={0: 1.0, 1: 0.0}))
    assert [one.config for one in found.candidates[:4]] == [one.config for one in (second, third, first, fourth)]
    assert [one.config for one in found.candidates[4:]] == [one.config for one in plan.candidates[4:]]
    assert [one.scheduled_transfers_s for one in found.candidates[:4]] == [0.0, None, 1.0, None]
    without, as_predicted, late, _ = found.candidates[:4]
    assert late.step_s == pytest.approx(first.step_s - first.predicted.transfers_s + 1.0)
    assert without.step_s == pytest.approx(second.step_s - second.predicted.transfers_s)
    assert without.tokens_per_s_per_gpu * without.step_s == pytest.approx(second.tokens_per_s_per_gpu * second.step_s)
    assert as_predicted.time == third.time
    assert late.predicted == first.predicted
    # What was not confirmed stays behind, whatever it is predicted to be.
    assert late.tokens_per_s_per_gpu < fourth.tokens_per_s_per_gpu


def test_the_largest_microbatch_stays_first():
    options = SearchOptions(keep=HELD, estimate=estimate, step_time=step_time, largest_microbatch=True)
    largest = search(small(), GPUS["h100-80gb"], 8, options=options)
    sizes = [one.config.microbatch_sequences for one in largest.candidates]
    count = sizes.index(next(size for size in sizes if size < sizes[0])) + 2
    found = confirm(largest, count, Compiler(largest, transfers_s={0: 9.0, count - 1: 0.0}))
    assert [one.config.microbatch_sequences for one in found.candidates] == sizes
    assert found.candidates[count - 3].config == largest.candidates[0].config
    assert found.candidates[count - 2].config == largest.candidates[count - 1].config


def test_what_takes_too_much_makes_way_for_the_next(plan):
    compiler = Compiler(plan, above=(0, 2), host_above=(4,), refused=(3,))
    found = confirm(plan, 3, compiler)
    assert compiler.compiled == [0, 1, 2, 3, 4, 5, 6]
    left = [number for number in range(len(plan.candidates)) if number not in (0, 2, 3, 4)]
    assert [one.config for one in found.candidates] == [plan.candidates[number].config for number in left]
    assert found.best == plan.candidates[1].config
    added = {line.reason: line for line in found.rejected[len(plan.rejected) :]}
    counts = {COMPILED_ABOVE: 2, HOST_COMPILED_ABOVE: 1, COMPILE_REFUSED: 1}
    assert {reason: line.count for reason, line in added.items()} == counts
    assert added[COMPILED_ABOVE].example.startswith(str(plan.candidates[0].choice))
    assert added[HOST_COMPILED_ABOVE].example == f"{plan.candidates[4].choice}: 224.0 GiB"
    assert added[COMPILE_REFUSED].example.endswith("number 3 cannot be.")
    rejected = sum(line.count for line in found.rejected if line.unit == "configuration")
    assert len(found.candidates) + rejected == found.configurations


def test_where_all_that_are_confirmed_use_the_host_one_without_is_compiled_too(plan):
    """After the others, and the next one in the place of one that is refused."""
    on_host = [one for one in plan.candidates if one.uses_host]
    without = [one for one in plan.candidates if not one.uses_host]
    sorted_by_host = dataclasses.replace(plan, candidates=(*on_host[:5], *without))
    compiler = Compiler(sorted_by_host, above=(5,))
    found = confirm(sorted_by_host, 2, compiler)
    assert compiler.compiled == [0, 1, 5, 6]
    assert found.confirmed == 3
    confirmed = {key(one.config) for one in found.candidates if one.compiled_bytes is not None}
    assert confirmed == {key(one.config) for one in (*on_host[:2], without[1])}
    assert found.unconfirmed_because is None
    enough = Compiler(sorted_by_host)
    confirm(sorted_by_host, 6, enough)
    assert enough.compiled == list(range(6))


def test_one_more_without_the_host_does_not_hide_that_too_few_were_confirmed(plan):
    on_host = [one for one in plan.candidates if one.uses_host]
    without = [one for one in plan.candidates if not one.uses_host]
    first = dataclasses.replace(plan, candidates=(*on_host[: 2 * TRIES], *without))
    found = confirm(first, 2, Compiler(first, above=range(2 * TRIES - 1)))
    assert found.confirmed == 2
    assert found.unconfirmed_because == "5 of 7 that were compiled need too much memory or cannot be compiled"


@pytest.mark.parametrize("late", itertools.permutations(range(3)))
def test_the_outcome_does_not_depend_on_who_ends_first(plan, late):
    """Candidates wait for each other in an order of their own."""
    ended = [threading.Event() for _ in late]
    before = {second: first for first, second in itertools.pairwise(late)}

    def wait(number):
        if number in before:
            ended[before[number]].wait(timeout=5)

    class Ending(Compiler):
        def __call__(self, config):
            try:
                return super().__call__(config)
            finally:
                number = rank(self.plan, config)
                if number < len(ended):
                    ended[number].set()

    with ThreadPoolExecutor(3) as pool:
        found = confirm(plan, 3, Ending(plan, above=(1,), wait=wait), lambda: pool, workers=3)
    assert found == confirm(plan, 3, Compiler(plan, above=(1,)))


def test_no_more_is_compiled_than_a_few_times_what_is_asked_for(plan):
    compiler = Compiler(plan, above=range(10**6))
    found = confirm(plan, 2, compiler)
    assert compiler.compiled == list(range(2 * TRIES))
    assert found.confirmed == 0
    assert (
        found.unconfirmed_because == f"{2 * TRIES} of {2 * TRIES} that were compiled need too much memory or cannot be compiled"
    )
    assert found.best == plan.candidates[2 * TRIES].config


def test_few_candidates_are_all_confirmed(plan):
    few = dataclasses.replace(plan, candidates=plan.candidates[:2])
    found = confirm(few, 8, Compiler(few, above=(0,)))
    assert found.confirmed == len(found.candidates) == 1
    assert found.unconfirmed_because is None


def test_ctrl_c_leaves_what_was_confirmed(plan):
    def stop(number):
        if number == 2:
            raise KeyboardInterrupt

    found = confirm(plan, 4, Compiler(plan, wait=stop))
    assert found.interrupted
    assert found.confirmed == 2
    assert found.unconfirmed_because == "interrupted after 2 of 4 were confirmed"
    assert [one.config for one in found.candidates] == [one.config for one in plan.candidates]


def test_a_compiler_that_dies_takes_its_candidate_alone(plan):
    """Candidate 1 kills its process, and all compilations in it."""
    started = []

    class Pool(Executor):
        def __init__(self):
            self.futures, self.dead = [], False
            started.append(self)

        def submit(self, fn, /, *args, **kwargs):
            future = Future()
            self.futures.append(future)
            number = rank(plan, args[0])
            self.dead = self.dead or number == 1
            if self.dead:
                for one in self.futures:
                    if not one.done():
                        one.set_exception(BrokenProcessPool("died"))
            elif number != 0 or len(started) > 1:
                # The first is still busy when the second dies.
                future.set_result(fn(*args))
            return future

    found = confirm(plan, 3, Compiler(plan), Pool, workers=2)
    assert [one.compiled_bytes is not None for one in found.candidates[:4]] == [True, True, True, False]
    left = [0, *range(2, len(plan.candidates))]
    assert [one.config for one in found.candidates] == [plan.candidates[number].config for number in left]
    assert found.rejected[-1].example == f"{plan.candidates[1].choice}: the compiler died of it"
    assert len(started) == 3


def test_progress_counts_what_is_confirmed(plan):
    seen = []
    confirm(plan, 2, Compiler(plan, above=(0,)), progress=lambda *call: seen.append(call))
    assert seen == [("compiled", 0, 2), ("compiled", 1, 2), ("compiled", 2, 2)]


def test_a_real_kind_has_the_capacity_that_counts():
    found = search(small(), GPUS["a100-40gb"], 8, options=SearchOptions(keep=HELD, estimate=estimate, step_time=step_time))
    assert found.capacity_bytes == GPUS["a100-40gb"].capacity_bytes
