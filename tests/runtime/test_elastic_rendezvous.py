"""The rendezvous of a run that may shrink, over real sockets in threads: who leads, who trains, who waits at the door."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from jaxllm.config import ConfigError
from jaxllm.runtime import elastic_rendezvous
from jaxllm.runtime.elastic_rendezvous import Elastic, WaitingRoom, at_home, complete_hosts
from jaxllm.runtime.launchers import Launch
from jaxllm.runtime.rendezvous import open_port
from jaxllm.runtime.rendezvous_checks import ProcessInfo
from jaxllm.runtime.rendezvous_client import RendezvousError

HOSTS = tuple(f"127.0.0.{number}" for number in range(1, 5))
SECRET = b"s" * 32


def layout(processes):
    return f"layout of {len(processes)}"


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(elastic_rendezvous, "TURN_S", 0.3)
    monkeypatch.setattr(elastic_rendezvous, "LOOK_S", 0.05)


@pytest.fixture
def launch():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Launch("variables", HOSTS[0], port, len(HOSTS), 0, start_timeout_s=20, hosts=HOSTS)


def process(launch, rank, **fields):
    host = launch.hosts[rank]
    fields = {"versions": {"jaxllm": "1"}, "flags": [], "cpu": True, "machine": host, "attempt": rank} | fields
    return ProcessInfo(rank=rank, count=launch.num_processes, host=host, pid=100 + rank, **fields)


@pytest.fixture
def meet(launch):
    """meet(ranks, **fields of Elastic): what each process gets, an answer or an error, by rank."""
    doors = []

    def come(rank, launch, elastic):
        try:
            answer, door = elastic_rendezvous.meet(process(launch, rank), replace(launch, process_id=rank), elastic, 4321)
            doors.append(door)
            return answer
        except ConfigError as error:
            return error

    def all_of(ranks, launch=launch, **fields):
        elastic = Elastic(**({"least_hosts": 2, "wait_s": 0.5, "layout": layout} | fields))
        with ThreadPoolExecutor(len(ranks)) as pool:
            futures = {rank: pool.submit(come, rank, launch, elastic) for rank in ranks}
            return {rank: future.result(timeout=60) for rank, future in futures.items()}

    yield all_of
    for door in filter(None, doors):
        door.close()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_all_are_there(meet, launch, secret):
    answers = meet(range(4), replace(launch, secret=secret))
    assert {rank: answer.rank for rank, answer in answers.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    for answer in answers.values():
        assert answer.members == [(host, 100 + rank) for rank, host in enumerate(HOSTS)]
        assert (answer.address, answer.monitor_port) == (HOSTS[0], 4321)
        assert (answer.led.absent, answer.led.layout, answer.led.attempt) == ([], "", 3)
        assert answer.led.port != launch.port


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_one_is_missing(meet, gone):
    """The process of the lowest rank leads, and has rank 0."""
    left = [rank for rank in range(4) if rank != gone]
    answers = meet(left)
    assert {rank: answer.rank for rank, answer in answers.items()} == {rank: number for number, rank in enumerate(left)}
    for answer in answers.values():
        assert answer.members == [(HOSTS[rank], 100 + rank) for rank in left]
        assert answer.address == HOSTS[left[0]]
        assert (answer.led.absent, answer.led.layout) == ([HOSTS[gone]], "layout of 3")
    assert len({answer.led.port for answer in answers.values()}) == 1


def test_two_are_missing_at_once(meet):
    first, second = meet([1, 3]).values()
    assert (first.rank, second.rank) == (0, 1)
    assert first.led == second.led
    assert (first.led.absent, first.led.layout) == ([HOSTS[0], HOSTS[2]], "layout of 2")


def test_two_that_lead_at_once_become_one(meet, launch, monkeypatch):
    """The one of higher rank gives way."""
    monkeypatch.setattr(elastic_rendezvous, "TURN_S", 0.0)
    pair = replace(launch, hosts=HOSTS[:2], num_processes=2)
    answers = meet([0, 1], pair, wait_s=0.0, layout=lambda _: None)
    assert [answer.rank for answer in answers.values()] == [0, 1]
    assert {answer.address for answer in answers.values()} == {HOSTS[0]}


def test_too_few_wait_until_the_limit_and_name_the_missing(meet, launch):
    (error,) = meet([1], replace(launch, start_timeout_s=2)).values()
    assert isinstance(error, RendezvousError)
    assert f"Processes 0, 2 and 3 ({HOSTS[0]}, {HOSTS[2]} and {HOSTS[3]}) of 4 did not come to " in str(error)


def test_as_many_hosts_train_as_have_a_layout(launch):
    """The third waits, and is not lost: it is a spare."""
    elastic = Elastic(2, 0.5, lambda processes: None if len(processes) == 3 else layout(processes))
    answers, error = {}, []

    def come(rank):
        try:
            answers[rank] = elastic_rendezvous.meet(process(launch, rank), at(rank), elastic, 4321)
        except RendezvousError as without:
            error.append(without)

    def at(rank):
        return replace(launch, process_id=rank, start_timeout_s=4)

    threads = [threading.Thread(target=come, args=[rank], daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    threads[0].join(20)
    threads[1].join(20)
    answer, door = answers[0]
    with door:
        assert answer.members == [(HOSTS[0], 100), (HOSTS[1], 101)]
        assert (answer.led.absent, answer.led.layout) == ([HOSTS[2], HOSTS[3]], "layout of 2")
        assert 2 not in answers
        assert error == []
    # Nobody leads any more.
    threads[2].join(40)
    assert len(error) == 1


def test_a_host_trains_with_all_of_its_processes_or_with_none():
    launch = Launch("variables", "a", 1000, 5, 0, hosts=("a", "a", "b", "b", "c"))
    assert complete_hosts(launch, {0, 1, 2, 4}) == [[0, 1], [4]]
    assert [launch.address_of(rank) for rank in range(5)] == [("a", 1000), ("a", 999), ("b", 1000), ("b", 999), ("c", 1000)]


def test_a_host_that_returns_waits_until_the_run_grows(launch):
    """One that is there already, and one of another version, are turned away."""
    grown, elastic = [], Elastic(2, 0.5, layout)
    own = process(launch, 1)
    door = open_port(at_home(launch, 1), own)
    room = WaitingRoom(door, own, launch, elastic, [HOSTS[3]], lambda hosts: grown.append(hosts))
    found = []

    def come(rank, **fields):
        try:
            found.append(elastic_rendezvous.meet(process(launch, rank, **fields), at(rank), elastic, 4321))
        except ConfigError as error:
            found.append(str(error))

    def at(rank):
        return replace(launch, process_id=rank, start_timeout_s=2)

    come(3, versions={"jaxllm": "2"})
    assert "Process 3 on 127.0.0.4 has jaxllm 2, process 1 on 127.0.0.2 1: install the same on all hosts" in found.pop()
    assert grown == []
    returned = threading.Thread(target=come, args=[3], daemon=True)
    returned.start()
    until_s = time.monotonic() + 20
    while not grown and time.monotonic() < until_s:
        time.sleep(0.02)
    assert grown == [HOSTS[3]]
    # It waits, longer than its own limit.
    returned.join(3)
    assert returned.is_alive()
    assert found == []
    room.leave()
    returned.join(20)
    assert "Processes 0 to 2" in found.pop()
