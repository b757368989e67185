"""The rendezvous of a run that may shrink, over real sockets in threads: who leads, who trains, who waits to return."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from jaxllm.cluster import host_choice, initialize, rendezvous, rendezvous_client
from jaxllm.cluster.host_choice import Elastic, complete_hosts, site_of
from jaxllm.cluster.launchers import Launch
from jaxllm.cluster.rendezvous import WaitingRoom, open_port
from jaxllm.cluster.rendezvous_checks import ProcessInfo
from jaxllm.cluster.rendezvous_client import RendezvousError, Visit
from jaxllm.config import ConfigError

HOSTS = tuple(f"127.0.0.{number}" for number in range(1, 5))
SECRET = b"s" * 32
LIMIT_S = 30


def layout(hosts):
    return f"layout of {len(hosts)}"


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(rendezvous, "TURN_S", 0.3)
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.05)
    monkeypatch.setattr(rendezvous, "SLOWEST_RETRY_S", 0.1)
    monkeypatch.setattr(rendezvous, "GATHER_S", 0.5)


@pytest.fixture
def launch():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Launch("variables", HOSTS[0], port, len(HOSTS), 0, start_timeout_s=20, hosts=HOSTS)


def process(launch, rank, **fields):
    host = launch.hosts[rank]
    fields = {"versions": {"jaxllm": "1"}, "flags": [], "cpu": True, "machine": host, "attempt": rank} | fields
    return ProcessInfo(rank=rank, count=launch.num_processes, host=host, pid=100 + rank, **fields)


class Meeting:
    """Processes that come, each in a thread."""

    def __init__(self, launch, **fields):
        self.launch, self.pool, self.rooms, self.came = launch, ThreadPoolExecutor(8), [], []
        self.elastic = Elastic(**({"least_hosts": 2, "wait_s": 0.5, "layout": layout} | fields))

    def come(self, rank, **fields):
        """The future of its answer, or of its error."""
        future = self.pool.submit(self._come, rank, fields)
        self.came.append((rank, future))
        return future

    def _come(self, rank, fields):
        own, place = process(self.launch, rank, **fields), replace(self.launch, process_id=rank)
        try:
            answer, room = rendezvous.meet(own, place, self.elastic)
        except ConfigError as error:
            return error
        for connection in answer.connections.values():
            connection.socket.close()
        if room is not None:
            self.rooms.append(room)
        return answer

    def all(self, ranks):
        futures = [self.come(rank) for rank in ranks]
        return [future.result(timeout=60) for future in futures]


@pytest.fixture
def meeting(launch):
    """meeting(launch, **fields of Elastic)"""
    made = []

    def make(launch=launch, **fields):
        made.append(Meeting(launch, **fields))
        return made[-1]

    yield make
    for one in made:
        for room in one.rooms:
            # Before, they would look for another leader until their limit.
            wait_until(lambda: all(future.done() or rank in room.connections for rank, future in one.came))  # noqa: B023
            room.ended = True
            room.leave()
        one.pool.shutdown()


def wait_until(true):
    until_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_all_are_there(meeting, launch, secret):
    answers = meeting(replace(launch, secret=secret)).all(range(4))
    assert [answer.rank for answer in answers] == [0, 1, 2, 3]
    for answer in answers:
        assert answer.members == [(host, 100 + rank) for rank, host in enumerate(HOSTS)]
        assert answer.address == HOSTS[0]
        assert (answer.absent, answer.layout, answer.attempt) == ([], "", 3)
        assert answer.port != launch.port


@pytest.mark.parametrize("gone", [(0,), (1,), (3,), (0, 2)], ids=str)
def test_some_are_missing(meeting, gone):
    """The process of the lowest rank leads, and has rank 0."""
    left = [rank for rank in range(4) if rank not in gone]
    answers = meeting().all(left)
    assert [answer.rank for answer in answers] == list(range(len(left)))
    for answer in answers:
        assert answer.members == [(HOSTS[rank], 100 + rank) for rank in left]
        assert answer.address == HOSTS[left[0]]
        assert (answer.absent, answer.layout) == ([HOSTS[rank] for rank in gone], f"layout of {len(left)}")
    assert len({answer.port for answer in answers}) == 1


def test_two_that_lead_at_once_become_one(meeting, launch, monkeypatch):
    """The one of higher rank gives way."""
    monkeypatch.setattr(rendezvous, "TURN_S", 0.0)
    connect, scans = rendezvous_client.connect, []

    def blind_at_first(host, port, limit_s):
        scans.append(host)
        if len(scans) <= 2:
            raise ConnectionRefusedError
        return connect(host, port, limit_s)

    monkeypatch.setattr(rendezvous_client, "connect", blind_at_first)
    pair = replace(launch, hosts=HOSTS[:2], num_processes=2)
    answers = meeting(pair, wait_s=0.0, layout=lambda _: None).all([0, 1])
    assert sorted(scans[:2]) == list(HOSTS[:2])
    assert [answer.rank for answer in answers] == [0, 1]
    assert {answer.address for answer in answers} == {HOSTS[0]}


def test_too_few_wait_until_the_limit_and_name_the_missing(meeting, launch):
    (error,) = meeting(replace(launch, start_timeout_s=2)).all([1])
    assert isinstance(error, RendezvousError)
    assert f"Processes 0, 2 and 3 ({HOSTS[0]}, {HOSTS[2]} and {HOSTS[3]}) of 4 did not come to " in str(error)


def test_who_comes_late_is_chosen_at_once(meeting):
    """Too few had come when the wait was over."""
    run, began_s = meeting(least_hosts=3, wait_s=0.3), time.monotonic()
    early = [run.come(rank) for rank in (0, 1)]
    wait_until(lambda: time.monotonic() > began_s + 0.6)
    assert not any(future.done() for future in early)
    late = run.come(2)
    assert [future.result(timeout=LIMIT_S).absent for future in (*early, late)] == 3 * [[HOSTS[3]]]


def test_as_many_hosts_train_as_have_a_layout(meeting):
    """The third is a spare: it waits, and makes the run grow when there is a layout for it."""
    run = meeting(wait_s=0.3, layout=lambda hosts: None if len(hosts) == 3 else layout(hosts))
    first, second, spare = (run.come(rank) for rank in range(3))
    assert first.result(timeout=LIMIT_S).members == [(HOSTS[0], 100), (HOSTS[1], 101)]
    assert second.result(timeout=LIMIT_S).layout == "layout of 2"
    (room,) = run.rooms
    grown = []
    room.grow = grown.append
    wait_until(lambda: 2 in room.connections)
    assert not spare.done()
    assert grown == []
    fourth = run.come(3)
    wait_until(lambda: grown)
    assert grown == [f"{HOSTS[2]}, {HOSTS[3]}"]
    room.ended = True
    room.leave()
    run.rooms.clear()
    for future, rank in ((spare, 2), (fourth, 3)):
        error = future.result(timeout=LIMIT_S)
        assert (
            str(error)
            == f"The run has ended while process {rank} on {HOSTS[rank]} waited to return: there is nothing left to train."
        )
        assert error.exit_code == 0


SIX = tuple(f"127.0.0.{number}" for number in range(1, 7))


def hosts_of(answer):
    return [int(host.rpartition(".")[2]) - 1 for host, _ in answer.members]


@pytest.mark.parametrize(
    ("there", "trains", "waits"),
    [
        # The fourth has lost its neighbour. It waits, though it comes before the others.
        ((0, 1, 3, 4, 5), [0, 1, 4, 5], [3]),
        # So do process 0, and the one that leads in its place: another leads.
        ((0, 2, 3, 4, 5), [2, 3, 4, 5], [0]),
        ((1, 2, 3, 4, 5), [2, 3, 4, 5], [1]),
        # The leader's own network comes first, and each is in consecutive ranks.
        ((1, 0, 2, 3, 4, 5), [0, 1, 2, 3, 4, 5], []),
    ],
    ids=str,
)
def test_hosts_that_a_fast_network_connects_train_together(meeting, launch, there, trains, waits):
    """Three pairs. No layout divides a pair, or puts two halves together."""

    def pairs(hosts):
        sites = [site_of(one[0].rank, 6, 3) for one in hosts]
        return f"layout of {sites}" if all(sites.count(site) == 2 for site in sites) else None

    run = meeting(replace(launch, hosts=SIX, num_processes=6), layout=pairs, sites=3)
    futures = {rank: run.come(rank) for rank in there}
    answers = [futures[rank].result(timeout=LIMIT_S) for rank in trains]
    assert [answer.rank for answer in answers] == list(range(len(trains)))
    assert all(hosts_of(answer) == trains for answer in answers)
    assert not any(futures[rank].done() for rank in waits)


def test_of_a_network_with_a_lost_host_each_gives_way_once(meeting, launch):
    """Two threes. When the second of a three gives way, the first must not lead again: they would take turns for ever."""

    def threes(hosts):
        sites = [site_of(one[0].rank, 6, 2) for one in hosts]
        return f"layout of {sites}" if len(sites) == 3 and len(set(sites)) == 1 else None

    run = meeting(replace(launch, hosts=SIX, num_processes=6), layout=threes, sites=2)
    futures = {rank: run.come(rank) for rank in (0, 1, 3, 4, 5)}
    assert [hosts_of(futures[rank].result(timeout=LIMIT_S)) for rank in (3, 4, 5)] == 3 * [[3, 4, 5]]
    assert not any(futures[rank].done() for rank in (0, 1))


def test_none_gives_way_to_hosts_that_may_not_lead(meeting, launch, monkeypatch):
    monkeypatch.setattr(host_choice, "LEADERS", 2)

    def one_or_threes(hosts):
        return layout(hosts) if len(hosts) == 1 or {one[0].rank for one in hosts} == {3, 4, 5} else None

    run = meeting(replace(launch, hosts=SIX, num_processes=6), layout=one_or_threes, sites=2, wait_s=0.3, least_hosts=1)
    futures = {rank: run.come(rank) for rank in (0, 3, 4, 5)}
    assert hosts_of(futures[0].result(timeout=LIMIT_S)) == [0]


@pytest.mark.parametrize(("late", "most", "trains"), [((0, 2, 4, 5), 5, [3, 2, 0, 4, 5]), ((0, 1, 2), 2, [3, 2])])
def test_ranks_follow_the_leaders_network(meeting, launch, monkeypatch, late, most, trains):
    """Process 3 leads, as the first ones come late; its neighbour has the next rank, and is the first to be taken."""
    leads, opens = threading.Event(), rendezvous.open_port

    def opened(place, own, patience_s):
        port = opens(place, own, patience_s)
        leads.set()
        return port

    monkeypatch.setattr(rendezvous, "open_port", opened)
    fits = lambda hosts: layout(hosts) if len(hosts) <= most and {one[0].rank for one in hosts} >= {2, 3} else None  # noqa: E731
    run = meeting(replace(launch, hosts=SIX, num_processes=6), sites=3, least_hosts=most, wait_s=0.3, layout=fits)
    futures = [run.come(3)]
    assert leads.wait(LIMIT_S)
    futures += [run.come(rank) for rank in late]
    assert hosts_of(futures[0].result(timeout=LIMIT_S)) == trains


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_launch_of_fewer_hosts_than_the_mesh_has_gets_a_layout_at_once(meeting, attempt):
    """As where SLURM starts a job of five or four nodes with four."""
    run = meeting(wait_s=10.0, too_few=lambda hosts: len(hosts) < 5)
    answers = [future.result(timeout=5) for future in [run.come(rank, attempt=attempt) for rank in range(4)]]
    assert [answer.rank for answer in answers] == [0, 1, 2, 3]
    assert {(answer.layout, *answer.absent) for answer in answers} == {("layout of 4",)}
    assert run.rooms == []


def test_hosts_of_such_a_launch_that_no_layout_uses_stay_in_reserve(meeting, launch, caplog):
    run = meeting(
        wait_s=0.3, too_few=lambda hosts: len(hosts) < 5, layout=lambda hosts: layout(hosts) if len(hosts) < 4 else None
    )
    futures = [run.come(rank) for rank in range(4)]
    wait_until(lambda: sum(future.done() for future in futures) == 3)
    (spare,) = (rank for rank, future in enumerate(futures) if not future.done())
    assert {future.result().layout for future in futures if future.done()} == {"layout of 3"}
    assert f"No layout fits 4 hosts: training on 3, without {HOSTS[spare]}." in caplog.text
    (room,) = run.rooms
    room.grow = pytest.fail
    # It is there, all are, and they still are too few.
    wait_until(lambda: spare in room.connections and time.monotonic() > room._grow_at_s + 0.3)
    assert room._thread.is_alive()


def test_a_launch_without_any_layout_is_refused(meeting):
    errors = meeting(wait_s=10.0, too_few=lambda hosts: True, layout=lambda hosts: None).all(range(4))
    assert {str(error) for error in errors} == {
        "No layout fits 4 hosts or fewer, down to launch.least_hosts=2 (the batch does not divide over them, or their memory "
        "is too small), and the launcher started no more."
    }


def test_those_who_have_no_layout_say_so_and_wait(meeting, caplog):
    run = meeting(wait_s=0.3, layout=lambda hosts: None)
    futures = [run.come(rank) for rank in range(3)]
    wait_until(lambda: "or their memory is too small): waiting for more." in caplog.text)
    assert not any(future.done() for future in futures)
    assert {answer.layout for answer in [future.result(timeout=LIMIT_S) for future in (*futures, run.come(3))]} == {""}


def test_a_host_that_is_lost_while_the_leader_plans_makes_all_meet_again(meeting, launch):
    planning, lost = threading.Event(), threading.Event()

    def plans(hosts):
        planning.set()
        assert lost.wait(LIMIT_S)
        return layout(hosts)

    run = meeting(wait_s=1.0, layout=plans)
    others = [run.come(rank) for rank in (0, 1)]
    with joined(launch, 2):
        assert planning.wait(LIMIT_S)
    lost.set()
    for future in others:
        error = future.result(timeout=LIMIT_S)
        assert isinstance(error, RendezvousError)
        assert f"Process 2 on {HOSTS[2]} joined, but was gone when all were there" in str(error)
    assert {answer.layout for answer in run.all([0, 1])} == {"layout of 2"}


def joined(launch, rank):
    """The connection of a process that leader 0 has taken."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return Visit(launch, process(launch, rank), until_s).socket
        except OSError:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_host_trains_with_all_of_its_processes_or_with_none():
    launch = Launch("variables", "a", 1000, 5, 0, hosts=("a", "a", "b", "b", "c"))
    assert complete_hosts(launch, {0, 1, 2, 4}) == [[0, 1], [4]]
    assert [launch.led_by(rank).address for rank in range(5)] == ["a:1000", "a:999", "b:1000", "b:999", "c:1000"]


def test_hosts_that_waited_wait_for_the_others_when_the_run_starts_again(meeting):
    """They are enough to train by themselves, and there first."""
    run = meeting(wait_s=1.5)
    for future in [run.come(rank) for rank in (1, 2)]:
        future.result(timeout=LIMIT_S)
    room = run.rooms.pop()
    waiting = [run.come(rank) for rank in (0, 3)]
    wait_until(lambda: set(room.connections) == {0, 3})
    # Longer than their own wait.
    wait_until(lambda: time.monotonic() > room._grow_at_s)
    room.leave()
    again = [run.come(rank, attempt=1) for rank in (1, 2)]
    answers = [future.result(timeout=LIMIT_S) for future in (*waiting, *again)]
    assert [answer.rank for answer in answers] == [0, 3, 1, 2]
    assert {tuple(answer.absent) for answer in answers} == {()}


@pytest.mark.parametrize("other", [{"versions": {"jaxllm": "2"}}, {"cpu": False}, {"flags": ["--xla_one"]}], ids=str)
def test_a_host_that_does_not_fit_is_left_out_and_asks_nobody_to_stop(meeting, other):
    run = meeting(wait_s=0.3)
    futures = [run.come(rank, attempt=1, **(other if rank == 3 else {})) for rank in range(4)]
    answers = [future.result(timeout=LIMIT_S) for future in futures[:3]]
    assert [answer.absent for answer in answers] == 3 * [[HOSTS[3]]]
    (room,) = run.rooms
    room.grow = pytest.fail
    again = run.come(3, **other)
    if "cpu" in other:
        wait_until(lambda: 3 in room.connections)
    else:
        assert "Process 3 on 127.0.0.4 has " in str(again.result(timeout=LIMIT_S))
    wait_until(lambda: time.monotonic() > room._grow_at_s + 0.3)
    assert room._thread.is_alive()


def test_a_rank_that_comes_again_takes_the_place_of_the_first(meeting):
    """As after a cut cable, when the launcher has started it again."""
    run = meeting(wait_s=0.3)
    for future in [run.come(rank) for rank in range(3)]:
        future.result(timeout=LIMIT_S)
    (room,) = run.rooms
    first = run.come(3)
    wait_until(lambda: 3 in room.connections)
    before = room.connections[3]
    second = run.come(3)
    error = first.result(timeout=LIMIT_S)
    assert isinstance(error, RendezvousError)
    assert "Process 3 on 127.0.0.4 came again, with process id 103: it takes the place of this one" in str(error)
    wait_until(lambda: room.connections.get(3) not in (None, before))
    assert not second.done()


def test_one_that_trains_is_not_taken_twice(launch):
    own = process(launch, 1)
    infos = {rank: process(launch, rank) for rank in (0, 1, 2)}
    room = WaitingRoom(open_port(launch.led_by(1), own), own, launch, Elastic(2, 0.0, layout), infos)
    room.grow = pytest.fail
    place = replace(launch, process_id=2, start_timeout_s=1)
    with pytest.raises(RendezvousError, match="did not come to"):
        rendezvous.meet(process(launch, 2), place, Elastic(4, 0.2, layout))
    assert room._thread.is_alive()
    room.leave()


@pytest.mark.parametrize(
    ("elastic", "hosts", "sentence"),
    [
        (
            Elastic(2, 1.0, layout),
            (),
            "launch.least_hosts=2 needs the hosts of all processes, and the launcher does not tell them",
        ),
        (Elastic(5, 1.0, layout), HOSTS, "launch.least_hosts=5 is more than the 4 hosts of this run: set at most 4."),
        (
            Elastic(2, 20.0, layout),
            HOSTS,
            "launch.wait_s=20 is not below JAXLLM_START_TIMEOUT_S=20, after which processes stop",
        ),
    ],
)
def test_what_cannot_shrink_is_refused(launch, elastic, hosts, sentence):
    with pytest.raises(ConfigError, match="^" + sentence.replace(".", r"\.")):
        initialize._check_elastic(replace(launch, hosts=hosts), elastic)


def test_the_room_closes_if_its_thread_fails(launch, caplog):
    """The run is not concerned."""
    own = process(launch, 0)

    def fails(hosts):
        raise ZeroDivisionError

    infos = {rank: process(launch, rank) for rank in (0, 1)}
    room = WaitingRoom(open_port(launch, own), own, launch, Elastic(2, 0.0, fails), infos)
    room.grow = pytest.fail
    waits = threading.Thread(target=lambda: quietly(launch), daemon=True)
    waits.start()
    room._thread.join(LIMIT_S)
    assert not room._thread.is_alive()
    assert "Hosts that return are not let in any more." in caplog.text
    room.leave()
    waits.join(LIMIT_S)


def quietly(launch):
    place = replace(launch, process_id=2, start_timeout_s=1)
    with pytest.raises(ConfigError):
        rendezvous.meet(process(launch, 2), place, Elastic(4, 0.2, layout))
