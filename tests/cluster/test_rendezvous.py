"""The rendezvous, over real sockets in threads: which processes are released, which are rejected with which message, and which
are waited for.
"""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from jaxllm.cluster import rendezvous, rendezvous_client
from jaxllm.cluster.host_choice import ALL_REQUIRED
from jaxllm.cluster.launchers import Launch
from jaxllm.cluster.rendezvous import open_port
from jaxllm.cluster.rendezvous_checks import (
    ProcessInfo,
    assign_gpus,
    missing,
    parse_process_info,
    spans,
    too_few_gpus,
    why_incompatible,
    why_rejected,
)
from jaxllm.cluster.rendezvous_client import MAGIC, Answer, RendezvousError
from jaxllm.config import ConfigError

VERSIONS = {"jaxllm": "0.1.0", "JAX": "0.10.2"}
FOUR = ["a", "b", "c", "d"]


def call(rank: int, count: int = 3, **fields) -> ProcessInfo:
    """Description of a process on its own host, on the CPU."""
    name = fields.pop("host", f"h{rank}")
    fields = {"versions": VERSIONS, "flags": [], "cpu": True, "machine": name} | fields
    return ProcessInfo(rank=rank, count=count, host=name, pid=100 + rank, **fields)


def with_gpus(*gpus: list[str] | None, hosts: str = "", asked: int | None = None) -> list[ProcessInfo]:
    """One process for each list, each on its own host unless `hosts` gives a letter for each."""
    names = hosts or "uvwxyz"
    return [call(rank, len(gpus), host=names[rank], cpu=False, gpus=seen, gpus_asked=asked) for rank, seen in enumerate(gpus)]


def come(own: ProcessInfo, place: Launch) -> Answer:
    """Takes part in a rendezvous that process 0 leads, and leaves."""
    answer, _ = rendezvous.meet(own, place, ALL_REQUIRED)
    for connection in answer.connections.values():
        connection.socket.close()
    return answer


def leading(pool: ThreadPoolExecutor, own: ProcessInfo, place: Launch, comes=come):
    """The future of the answer of process 0, whose port is open."""
    future, until_s = pool.submit(comes, own, place), time.monotonic() + 20
    while True:
        with suppress(ConnectionRefusedError):
            socket.create_connection((place.host, place.port)).close()
            return future
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.fixture
def launch():
    """launch(rank, **fields): a Launch on one free port. The limit is 20 s, which no test reaches."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return lambda rank, count=3, **fields: Launch(
        "variables", "127.0.0.1", port, count, rank, **{"start_timeout_s": 20} | fields
    )


@pytest.fixture
def meet(launch):
    """meet(*calls): processes arrive in this order; returns the result of each, an answer or an error."""

    def comes(own: ProcessInfo, **fields):
        try:
            return come(own, launch(own.rank, own.count, **fields))
        except ConfigError as error:
            return error

    def all_of(*calls: ProcessInfo, pause_s: float = 0.0, **fields):
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = []
            for own in calls:
                futures.append(pool.submit(comes, own, **fields))
                time.sleep(pause_s)
            return [future.result(timeout=60) for future in futures]

    return all_of


def sentences(results) -> list[str]:
    assert all(isinstance(result, ConfigError) for result in results), results
    return [str(result) for result in results]


# ------------------------------------------------------------------------------------------------------------------ together


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_know_the_same_once_all_are_there(meet, launch, order):
    calls = {rank: call(rank, attempt=rank, launch_id="x") for rank in range(3)}
    answers = dict(zip(order, meet(*(calls[rank] for rank in order), pause_s=0.05), strict=True))
    for rank, answer in answers.items():
        assert answer.members == [("h0", 100), ("h1", 101), ("h2", 102)]
        assert (answer.port, answer.devices) == (launch(0).port, None)
        assert (answer.address, answer.rank) == ("127.0.0.1", rank)


def test_the_port_is_free_when_all_are_let_go(meet, launch):
    meet(call(0), call(1), call(2))
    rendezvous.listen(launch(0).port).close()


def test_many_come_at_once(meet):
    answers = meet(*(call(rank, 40) for rank in range(40)))
    assert {len(answer.members) for answer in answers} == {40}


def test_processes_of_one_host_share_its_gpus_in_the_order_of_their_ranks(meet):
    answers = meet(*with_gpus(FOUR, FOUR, hosts="uu"))
    assert [answer.devices for answer in answers] == [[0, 1], [2, 3]]


def test_a_restarted_process_replaces_its_first_try(launch):
    """Process 0 sees that the first try is gone, in whatever order it reads its connections."""
    place = launch(0)
    with ThreadPoolExecutor(3) as pool:
        zero = leading(pool, call(0), place)
        with socket.create_connection(("127.0.0.1", place.port)) as first:
            first.sendall(f"{MAGIC}{json.dumps(vars(call(1)) | {'pid': 7})}\n".encode())
            assert b"wait_s" in first.recv(1000)
        others = [pool.submit(come, call(rank), launch(rank)) for rank in (1, 2)]
        assert zero.result(timeout=30).members[1] == ("h1", 101)
        assert [other.result(timeout=30).members[1] for other in others] == [("h1", 101)] * 2


def test_other_programs_at_the_port_disturb_nothing(launch):
    place = launch(0)
    with ThreadPoolExecutor(3) as pool, socket.socket() as silent, socket.socket() as browser:
        zero = leading(pool, call(0), place)
        for stray in (silent, browser):
            stray.connect(("127.0.0.1", place.port))
        browser.sendall(b"GET / HTTP/1.1\r\nHost: h0\r\n\r\n")
        assert browser.recv(100) == b""
        odd = [vars(call(1)) | change for change in ({"versions": 1}, {"flags": None}, {"rank": "1"}, {"rank": -2})]
        for content in ("[" * 60_000, '{"a":' * 10_000, "[]", '{"rank": NaN}', *map(json.dumps, odd)):
            with socket.create_connection(("127.0.0.1", place.port)) as stray:
                stray.sendall(f"{MAGIC}{content}\n".encode())
                assert stray.recv(100) == b""
        many = [socket.create_connection(("127.0.0.1", place.port)) for _ in range(rendezvous.STRANGERS + 20)]
        assert [stray.recv(100) for stray in many[:15]] == [b""] * 15
        others = [pool.submit(come, call(rank), launch(rank)) for rank in (1, 2)]
        assert zero.result(timeout=30).members == others[0].result(timeout=30).members
        for stray in many:
            stray.close()


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 3},
        {"rank": -1},
        {"rank": "1"},
        {"rank": True},
        {"rank": 1.0},
        {"rank": [1]},
        {"rank": 10**30},
        {"count": 10**9},
        {"count": 0, "rank": 0},
        {"host": 5},
        {"host": "h" * 300},
        {"host": "\ud800"},
        {"machine": None},
        {"pid": 10**12},
        {"versions": ["0.1.0"]},
        {"flags": [5, "--xla_a=1"]},
        {"flags": "--xla_a=1"},
        {"launch_id": 7},
        {"attempt": -1},
        {"cpu": "yes"},
        {"gpus": [0, 1]},
        {"gpus_asked": 1e300},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_description_of_other_types_is_none(change):
    assert parse_process_info(json.loads(json.dumps(vars(call(1)) | change)), call(0).versions) is None


def test_control_characters_of_a_description_are_not_printed():
    message = vars(call(1)) | {"host": "h1\x1b[2J", "versions": {"jaxllm": "\x1b[31mred\n", "JAX": "9"}}
    sentence = why_rejected(parse_process_info(message, call(0).versions), call(0), Launch("variables", "h", 1, 3, 0), None)
    assert sentence.startswith(r"Process 1 on h1\x1b[2J has jaxllm \x1b[31mred\n and JAX 9, process 0")


REPLIES = (
    '{"wait_s": "soon"}',
    '{"wait_s": 1e300}',
    '{"wait_s": -1}',
    '{"wait_s": NaN}',
    '{"refused": 5}',
    '{"other": ["x"]}',
    '{"all": {"members": [["h0", 100]], "port": 4321}, "devices": null}',
    '{"all": {"members": [["h0", "100"], ["h1", 1], ["h2", 2]], "port": 4321}}',
    '{"all": {"members": [["h0", 100], ["h1", 1], ["h2", 2]], "port": 70000}}',
    '{"all": {"members": [["h0", 100], ["h1", 1], ["h2", 2]], "port": 4321}, "devices": [-1]}',
    "[" * 60_000,
)


def test_a_reply_of_other_types_is_something_else(launch):
    """Each of these replies at a port of its own, six at a time: all wait for the last try."""

    def joined(reply):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            own = joins.submit(come, call(1), replace(launch(1, start_timeout_s=2), port=listener.getsockname()[1]))
            listener.settimeout(0.1)
            while not own.done():
                with suppress(TimeoutError, ConnectionError), listener.accept()[0] as connection:
                    connection.sendall(f"{MAGIC}{reply}\n".encode())
                    connection.recv(65536)
            return own.exception()

    with ThreadPoolExecutor(6) as joins, ThreadPoolExecutor(6) as pool:
        for reply, error in zip(REPLIES, pool.map(joined, REPLIES, timeout=60), strict=True):
            assert isinstance(error, RendezvousError), reply[:60]
            assert "after 2 s (something else answers there; 127.0.0.1 is h1 itself)" in str(error), reply[:60]


def test_a_sentence_of_process_0_is_one_printable_line(launch):
    place = launch(1)
    with socket.create_server(("127.0.0.1", place.port)) as listener, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(come, call(1), place)
        with listener.accept()[0] as connection:
            connection.sendall((MAGIC + json.dumps({"refused": "no\x1b[2J\n" + "x" * 10**6}) + "\n").encode())
            with pytest.raises(ConfigError) as error:
                joined.result(timeout=30)
    assert str(error.value).startswith(r"no\x1b[2J\nxxx")
    assert len(str(error.value)) < 5000


# -------------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            call(1, versions=VERSIONS | {"JAX": "0.11.2"}),
            "Process 1 on h1 has JAX 0.11.2, process 0 on h0 0.10.2: install the same on all hosts",
        ),
        (
            call(1, count=4),
            "Process 1 on h1 was started as one of 4 processes, process 0 on h0 as one of 3: give all the same JAXLLM_NUM_PROC",
        ),
        (call(1, flags=["--xla_a=1"]), "Process 1 on h1 has other XLA_FLAGS than process 0 on h0 (--xla_a=1 only for 1)"),
    ],
)
def test_all_that_came_learn_why_one_is_rejected(meet, other, sentence):
    """At once: process 2 never comes, and none waits for it."""
    started = time.monotonic()
    words = sentences(meet(call(0), other))
    assert words[0] == words[1]
    assert sentence in words[0]
    assert time.monotonic() - started < 10


def test_one_rank_twice_names_both_hosts(meet):
    words = sentences(meet(call(0), call(1), replace(call(1), host="h7", pid=9), pause_s=0.6))
    assert set(words) == {
        "Process 1 was started twice, with process id 101 on h1 and 9 on h7: give each process its own JAXLLM_PROCESS_ID."
    }


def test_two_processes_0_on_one_host_name_each_other(meet):
    words = sentences(meet(call(0), replace(call(0), pid=9), pause_s=0.6))
    assert set(words) == {
        "Process 0 was started twice, with process id 100 on h0 and 9 on h0: give each process its own JAXLLM_PROCESS_ID."
    }


def test_what_is_wrong_once_all_are_there_is_known_to_all(meet):
    words = sentences(meet(call(0), call(1, cpu=False, gpus=FOUR), call(2)))
    assert set(words) == {
        "Process 0 on h0 runs on the CPU, but not process 1 on h1: give all the same run.cpu_devices and JAX_PLATFORMS."
    }


def test_another_launch_on_this_port_is_named(launch):
    place = launch(0)
    with ThreadPoolExecutor(1) as pool:
        zero = leading(pool, call(0, launch_id="old"), place)
        own = call(0, launch_id="new")
        with pytest.raises(ConfigError, match=f"Port {place.port} of JAXLLM_COORDINATOR is taken on this host"):
            open_port(place, own)
        with pytest.raises(RendezvousError, match=r"after 2 s \(process 0 of another launch, old, is there"):
            come(call(1, launch_id="new"), launch(1, start_timeout_s=2))
        # Nor was the other launch disturbed.
        with ThreadPoolExecutor(2) as others:
            found = [others.submit(come, call(rank, launch_id="old"), launch(rank)) for rank in (1, 2)]
            answers = [one.result(timeout=30).members for one in found]
        assert answers == [zero.result(timeout=30).members] * 2


def test_a_port_that_something_else_holds(launch):
    place = launch(0)
    with socket.create_server(("0.0.0.0", place.port)), pytest.raises(ConfigError) as error:
        open_port(place, call(0))
    what = f"Port {place.port} of JAXLLM_COORDINATOR is taken on this host"
    assert str(error.value) == f"{what}: choose another for all, with JAXLLM_COORDINATOR=host:port."
    assert error.type is ConfigError


def test_after_a_restart_it_waits_for_a_taken_port(launch):
    """A holder that keeps it longer may be gone at the next restart."""
    place = launch(0)
    holder = socket.create_server(("0.0.0.0", place.port))
    with pytest.raises(RendezvousError, match="is taken on this host: choose another for all"):
        open_port(place, call(0), patience_s=0.1)
    threading.Timer(0.3, holder.close).start()
    open_port(place, call(0), patience_s=20).close()


# ------------------------------------------------------------------------------------------------------------------ time limits


def test_who_is_missing_and_who_came(meet):
    words = sentences(meet(call(0, 5), call(2, 5), start_timeout_s=1))
    assert words[0] == words[1]
    assert "Processes 1, 3 and 4 of 5 did not come to 127.0.0.1:" in words[0]
    assert "within 1 s (there: 0 on h0 and 2 on h2; only processes of this host reach 127.0.0.1)" in words[0]


def test_one_that_came_and_went_is_named(launch):
    place = launch(0, start_timeout_s=1)
    with ThreadPoolExecutor(1) as pool:
        zero = leading(pool, call(0), place)
        with socket.create_connection(("127.0.0.1", place.port)) as other:
            other.sendall(f"{MAGIC}{json.dumps(vars(call(2)))}\n".encode())
            other.recv(1000)
        with pytest.raises(
            RendezvousError, match=r"Processes 1 and 2 of 3 did not come .*, where process 2 on h2 disconnected again"
        ):
            zero.result(timeout=30)


def test_process_0_killed_after_some_have_come_ends_them_at_the_limit(launch):
    """It may be restarted until then."""
    place = launch(1, start_timeout_s=1)
    listener = socket.create_server(("127.0.0.1", place.port))
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(come, call(1), place)
        with listener.accept()[0] as connection:
            assert connection.recv(65536)
            connection.sendall(f'{MAGIC}{{"wait_s": 300}}\n'.encode())
            listener.close()
        with pytest.raises(RendezvousError, match=r"Process 1 cannot reach process 0 at .* after 1 s \(Connection refused"):
            joined.result(timeout=30)
    assert time.monotonic() - began < 5


def test_one_that_is_frozen_when_all_are_there_is_named(launch, monkeypatch):
    monkeypatch.setattr(rendezvous, "GRACE_S", 1.0)
    place = launch(0)
    with ThreadPoolExecutor(2) as pool:
        zero = leading(pool, call(0), place)
        with socket.create_connection(("127.0.0.1", place.port)) as other:
            other.sendall(f"{MAGIC}{json.dumps(vars(call(2)))}\n".encode())
            one = pool.submit(come, call(1), launch(1))
            for result in (zero, one):
                with pytest.raises(RendezvousError, match="Process 2 on h2 joined, but did not answer for 1 s"):
                    result.result(timeout=30)


def test_a_connection_to_itself_is_none(monkeypatch):
    """Linux makes one if the free port of the target happens to be chosen for the connecting end too."""
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: itself)
    with pytest.raises(ConnectionRefusedError):
        rendezvous_client.connect("127.0.0.1", 1, 1.0)


@pytest.mark.parametrize("answers", [b"", b"HTTP/1.1 400\r\n\r\n"], ids=["nobody", "something else"])
def test_process_0_is_not_there(launch, answers):
    place = launch(1, start_timeout_s=2)
    why = r"Connection refused" if not answers else "something else answers there"
    listener = socket.create_server(("127.0.0.1", place.port)) if answers else None

    def answer():
        while True:
            try:
                with listener.accept()[0] as connection:
                    connection.sendall(answers)
                    connection.recv(65536)
            except OSError:
                return

    if listener:
        threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(
        RendezvousError, match=rf"Process 1 cannot reach process 0 at 127.0.0.1:{place.port} after 2 s \({why}; 127.0.0.1"
    ):
        come(call(1), place)
    if listener:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_listener_that_sends_nothing_is_tried_again(launch, monkeypatch):
    """Until the limit: another process 0 may listen there by then."""
    monkeypatch.setattr(rendezvous_client, "FIRST_REPLY_S", 0.2)
    place = launch(1, start_timeout_s=1)
    with socket.create_server(("127.0.0.1", place.port)) as silent:
        with pytest.raises(RendezvousError, match=r"after 1 s \(it does not answer; 127.0.0.1 is h1 itself\)"):
            come(call(1), place)
        silent.settimeout(0.1)
        for _ in range(2):
            silent.accept()[0].close()


def test_hosts_that_the_launcher_named_are_named():
    launch = Launch("slurm", "localhost", 1, 4, 0, hosts=("g1", "g2", "g3", "g4"))
    words = missing(launch, {0: call(0, 4, host="g1")}, {0})
    assert words.startswith("Processes 1 to 3 (g2, g3 and g4) of 4 did not come to localhost:1 within 300 s (there: 0 on g1")


def test_process_0_on_another_host_than_said():
    launch = Launch("variables", "192.0.2.1", 1, 2, 0)
    assert "(there: 0 on h0; 192.0.2.1 is not an address of h0, where process 0 waits)" in missing(launch, {0: call(0, 2)}, {0})


def test_who_is_missing_where_another_process_leads():
    launch = Launch("variables", "192.0.2.1", 1, 3, 1, hosts=("192.0.2.1", "192.0.2.2", "192.0.2.3"))
    words = missing(launch.led_by(1), {1: call(1, 3, host="h1")}, {1})
    assert words.startswith("Processes 0 and 2 (192.0.2.1 and 192.0.2.3) of 3 did not come to 192.0.2.2:1 within 300 s")
    assert words.endswith("(there: 1 on h1): start the missing ones, or set JAXLLM_START_TIMEOUT_S to wait longer.")


def test_long_lists_are_cut():
    launch = Launch("variables", "h0", 1, 2000, 0)
    words = missing(launch, {rank: call(rank, 2000) for rank in range(0, 1000, 2)}, set(range(0, 1000, 2)))
    assert len(words) < 500
    assert "Processes 1, 3, 5, 7, 9, 11, 13, 15 and 1492 more of 2000 did not come" in words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([0], "0"), ([0, 1], "0 and 1"), ([0, 1, 2, 5], "0 to 2 and 5"), ([1, 2, 4, 6, 7, 8], "1, 2, 4 and 6 to 8")],
)
def test_spans(numbers, words):
    assert spans(numbers) == words


# ------------------------------------------------------------------------------------------------------------------------ GPUs


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (with_gpus(FOUR, FOUR), [None, None]),
        (with_gpus(FOUR, FOUR, FOUR, FOUR, hosts="uvuv"), [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (with_gpus(["a"], ["b"], hosts="uu"), [None, None]),
        (with_gpus([], [], hosts="uu"), [None, None]),
        (with_gpus(None, None, hosts="uu"), [None, None]),
    ],
)
def test_shares_that_work(calls, expected):
    assert why_incompatible(calls) == ""
    assert assign_gpus(calls) == expected


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        (with_gpus(FOUR, FOUR[:3]), "Process 1 on v would drive 3 GPUs, process 0 on u 4 GPUs: give all the same number"),
        (with_gpus(FOUR, []), "Process 1 on v would drive no GPU, process 0 on u 4 GPUs"),
        (with_gpus(FOUR, FOUR, FOUR, hosts="uuu"), "3 processes on u cannot share 4 GPUs evenly"),
        (with_gpus(["a"], ["a"], hosts="uu"), "2 processes on u cannot share 1 GPU evenly: start one for each host"),
        (with_gpus(["a", "b"], ["b", "c"], hosts="uu"), "Processes 0 and 1 on u both see b, but their other GPUs differ"),
        (
            with_gpus(["a"], ["b"], asked=8),
            "u was given 8 GPUs for this run, but its processes see only 1: check CUDA",
        ),
        (
            with_gpus([], [], asked=2),
            "u was given 2 GPUs for this run, but no NVIDIA driver answers there: check nvidia-smi",
        ),
    ],
)
def test_gpus_that_are_missing_or_claimed_twice(calls, sentence):
    assert sentence in why_incompatible(calls)


def test_each_of_eight_processes_sees_its_own_of_eight_gpus():
    assert why_incompatible(with_gpus(*([letter] for letter in "abcdefgh"), hosts="uuuuuuuu", asked=8)) == ""


def test_one_process_alone_may_see_too_few():
    assert too_few_gpus("h1", ["a"], 8).startswith("h1 was given 8 GPUs for this run, but its processes see only 1")
    assert too_few_gpus("h1", ["a"], 1) == too_few_gpus("h1", [], None) == ""


def test_a_host_whose_own_name_is_a_loopback_address():
    """Collectives between CPUs would use that address."""
    calls = [call(0, 2, host_address="10.0.0.1"), call(1, 2, host_address="127.0.1.1")]
    assert "On h1 the host's own name resolves to 127.0.1.1, where no other host can reach process 1 on h1" in why_incompatible(
        calls
    )
    # GPUs use their own network, and on one host the address does not matter.
    assert why_incompatible([replace(one, cpu=False, gpus=FOUR) for one in calls]) == ""
    assert why_incompatible([replace(one, machine="same") for one in calls]) == ""


def test_another_version_may_send_other_fields():
    """Fields come and go; the versions are always compared first."""
    message = {name: value for name, value in vars(call(1)).items() if name != "host_address"} | {"news": 1}
    message |= {"versions": {"jaxllm": "9", "news": 5}, "attempt": None, "gpus": 4, "machine": []}
    understood = parse_process_info(message, call(0).versions)
    assert "Process 1 on h1 has jaxllm 9 and JAX of another kind" in why_rejected(
        understood, call(0), Launch("variables", "h", 1, 3, 0), None
    )
