"""A run with a secret: only its own processes are taken, in the rendezvous and by the heartbeat, and strangers cost nothing."""

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from test_peer_monitor import LIMIT_S, connected, until
from test_rendezvous import VERSIONS, call, come, leading

from jaxllm.cluster import distributed, initialize, peer_monitor, rendezvous, rendezvous_checks
from jaxllm.cluster.host_choice import ALL_REQUIRED
from jaxllm.cluster.launchers import Launch, LaunchInfo, find
from jaxllm.cluster.peer_monitor import PeerMonitor
from jaxllm.cluster.rendezvous import open_port
from jaxllm.cluster.rendezvous_checks import listening_address, missing
from jaxllm.cluster.rendezvous_client import MAGIC, Answer
from jaxllm.cluster.socket_messages import REFUSAL, Channel, Unproven, connect, listen, read_secret
from jaxllm.config import ConfigError

SECRET, OTHER = b"the secret of this run", b"the secret of another"
CONNECTIONS = 10_000
LONGEST_JOIN_S = 5.0
CPU_PER_STRANGER_S = 1e-3
"""CPU time of process 0. It is about 30 microseconds."""


def strip(line: bytes, prefix: str = MAGIC) -> bytes:
    return line.removeprefix(prefix.encode()).removesuffix(b"\n")


def greeted(client_secret=SECRET, server_secret=SECRET, prefix=MAGIC, server_prefix=MAGIC) -> tuple[Channel, Channel]:
    """Both ends of a connection after their hellos."""
    client, server = Channel(client_secret, prefix, is_server=False), Channel(server_secret, server_prefix, is_server=True)
    assert server.open(strip(client.hello(), prefix)) is None
    assert client.open(strip(server.reply, server_prefix)) is None
    server.reply = b""
    return client, server


def lines(channel: Channel, count: int) -> list[bytes]:
    return [strip(channel.line(f"message {number}")) for number in range(count)]


# ----------------------------------------------------------------------------------------------------------------- channel


def test_signed_messages_arrive_in_both_directions():
    client, server = greeted()
    for sender, receiver in ((client, server), (server, client)):
        assert [receiver.open(line) for line in lines(sender, 3)] == [b"message 0", b"message 1", b"message 2"]


def test_without_a_secret_a_line_is_its_message():
    channel = Channel(None, MAGIC, is_server=True)
    assert channel.line('{"start": true}') == b'jaxllm roll call {"start": true}\n'
    assert channel.open(b'{"rank": 1}') == b'{"rank": 1}'
    assert channel.reply == b""


def refuse_first(client: Channel, server: Channel, line: bytes) -> None:
    with pytest.raises(Unproven):
        server.open(line)
    assert (server.refused, server.reply) == (True, f"{MAGIC}{REFUSAL}\n".encode())


def refuse_next(client: Channel, server: Channel, line: bytes) -> None:
    with pytest.raises(ValueError, match="not the next message of this connection"):
        server.open(line)
    assert server.reply == b""


@pytest.mark.parametrize(
    ("attack", "damaged"),
    [
        ("replayed", lambda sent, _: sent[0]),
        ("reordered, or one left out", lambda sent, _: sent[2]),
        ("reflected", lambda _, received: received[1]),
        ("truncated", lambda sent, _: sent[1][:-1]),
        ("longer", lambda sent, _: sent[1] + b"0"),
        ("changed", lambda sent, _: sent[1].replace(b"message 1", b"message 7")),
        ("without a MAC", lambda sent, _: sent[1].partition(b" ")[2]),
        ("another MAC", lambda sent, _: sent[0].partition(b" ")[0] + b" " + sent[1].partition(b" ")[2]),
        ("empty", lambda *_: b""),
        ("bytes that are no text", lambda sent, _: b"\xff" * 64 + sent[1][64:]),
    ],
)
def test_a_message_that_is_not_the_next_one_is_refused(attack, damaged):
    client, server = greeted()
    sent, received = lines(client, 3), lines(server, 3)
    assert server.open(sent[0]) == b"message 0"
    refuse_next(client, server, damaged(sent, received))


def test_a_session_that_was_recorded_cannot_be_played_again():
    """Nor a part of it, even if the attacker sends the recorded hello."""
    client, _ = greeted()
    recorded = [strip(client.hello()), *lines(client, 2)]
    server = Channel(SECRET, MAGIC, is_server=True)
    assert server.open(recorded[0]) is None
    refuse_first(client, server, recorded[1])


def test_a_message_sent_back_to_its_sender_is_refused():
    """Even by an end that repeats the other's nonce as its own."""
    client = Channel(SECRET, MAGIC, is_server=False)
    assert client.open(strip(client.hello())) is None
    with pytest.raises(Unproven):
        client.open(strip(client.line("message")))


def test_another_secret_and_another_protocol_are_refused():
    client, server = greeted(OTHER)
    refuse_first(client, server, strip(client.line("message")))
    client, server = greeted(prefix="", server_prefix=MAGIC)
    refuse_first(client, server, strip(client.line("message"), ""))


def test_nonces_are_fresh():
    assert len({Channel(SECRET, is_server=True).hello() for _ in range(100)}) == 100


def test_a_line_that_was_not_sent_has_no_number():
    client, server = greeted()
    client.line("lost")
    client.withdraw()
    assert server.open(strip(client.line("sent"))) == b"sent"


# ----------------------------------------------------------------------------------------------------------------- secret


@pytest.fixture
def file(tmp_path):
    def make(content: str, mode: int = 0o600) -> str:
        path = tmp_path / "secret"
        path.write_text(content)
        path.chmod(mode)
        return str(path)

    return make


def test_the_secret_comes_from_the_environment_or_a_file(file):
    assert read_secret({}) is None
    assert read_secret({"JAXLLM_SECRET": f" {SECRET.decode()}\n"}) == SECRET
    assert read_secret({"JAXLLM_SECRET_FILE": file(f"{SECRET.decode()}\n")}) == SECRET
    ours = {"JAXLLM_COORDINATOR": "h0:1", "JAXLLM_NUM_PROCESSES": "2", "JAXLLM_PROCESS_ID": "1"}
    launch = find({**ours, "JAXLLM_SECRET": SECRET.decode(), "JAXLLM_BIND": "h0"})
    assert (launch.secret, launch.bind) == (SECRET, "h0")
    # Launches may be printed.
    assert SECRET.decode() not in repr(launch)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o601])
def test_a_file_that_others_can_open_is_refused(file, mode):
    path = file(SECRET.decode(), mode)
    with pytest.raises(ConfigError) as error:
        read_secret({"JAXLLM_SECRET_FILE": path})
    what = f"JAXLLM_SECRET_FILE={path} is open to other users (mode {mode:o})"
    assert str(error.value) == f"{what}: make a new secret in a file of mode 600."


def test_a_secret_that_is_none_is_refused(file, tmp_path):
    def sentence(**environ: str) -> str:
        with pytest.raises(ConfigError) as error:
            read_secret(environ)
        assert str(error.value).count("\n") == 0
        return str(error.value)

    rule = "bytes: give 16 to 4,096, such as what `openssl rand -hex 32` prints."
    assert sentence(JAXLLM_SECRET="") == f"The secret in JAXLLM_SECRET has 0 {rule}"
    assert sentence(JAXLLM_SECRET="x" * 15 + "\n") == f"The secret in JAXLLM_SECRET has 15 {rule}"
    assert sentence(JAXLLM_SECRET="x" * 10**6) == f"The secret in JAXLLM_SECRET has too many {rule}"
    path = file("\n")
    assert sentence(JAXLLM_SECRET_FILE=path) == f"The secret in JAXLLM_SECRET_FILE={path} has 0 {rule}"
    assert f"{path} has too many {rule}" in sentence(JAXLLM_SECRET_FILE=file("x" * 5000))
    both = {"JAXLLM_SECRET": SECRET.decode(), "JAXLLM_SECRET_FILE": path}
    assert sentence(**both) == "JAXLLM_SECRET and JAXLLM_SECRET_FILE are both set: unset one of them."
    os.mkfifo(tmp_path / "pipe", 0o600)
    where_not = {tmp_path / "none": "No such file or directory", tmp_path / "pipe": "it is not a regular file"}
    for where, why in (where_not | {"": "it is not a regular file"}).items():
        cannot = f"JAXLLM_SECRET_FILE={where} cannot be read ({why}): name a file with the secret, or unset it."
        assert sentence(JAXLLM_SECRET_FILE=str(where)) == cannot


def test_the_secret_is_not_among_the_variables_that_doctor_prints(monkeypatch):
    monkeypatch.setenv("JAXLLM_SECRET", SECRET.decode())
    monkeypatch.setenv("JAXLLM_VENV", "none")
    assert distributed.environment()["JAXLLM_VENV"] == "none"
    assert SECRET.decode() not in str(distributed.environment())


# --------------------------------------------------------------------------------------------------------------- rendezvous


@pytest.fixture
def place():
    """place(rank, count=3, secret=SECRET): a Launch on one free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def launch(rank: int, count: int = 3, secret: bytes | None = SECRET, **fields) -> Launch:
        return Launch("variables", "127.0.0.1", port, count, rank, **{"start_timeout_s": 60, "secret": secret} | fields)

    return launch


def serving(pool: ThreadPoolExecutor, launch: Launch):
    return leading(pool, call(0, launch.num_processes), launch)


def joining(pool: ThreadPoolExecutor, launch: Launch, **fields):
    return pool.submit(come, replace(call(launch.process_id, launch.num_processes), **fields), launch)


def test_processes_with_the_same_secret_meet(place):
    with ThreadPoolExecutor(3) as pool:
        answers = [serving(pool, place(0)), joining(pool, place(1)), joining(pool, place(2))]
        assert [answer.result(timeout=30).members for answer in answers] == [[("h0", 100), ("h1", 101), ("h2", 102)]] * 3


@pytest.mark.parametrize(
    ("zero", "one"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)], ids=["another", "none", "only one"]
)
def test_another_secret_is_one_sentence_on_each_side_and_disturbs_nothing(place, zero, one, caplog):
    caplog.set_level(logging.WARNING, "jaxllm")
    with ThreadPoolExecutor(4) as pool:
        met = [serving(pool, place(0, secret=zero))]
        for _ in range(3):
            with pytest.raises(ConfigError) as error:
                joining(pool, place(1, secret=one)).result(timeout=30)
            assert str(error.value) == (
                f"Process 0 at {place(0).address} has another secret than process 1 on h1, or one of the two has none: set the "
                f"same JAXLLM_SECRET or JAXLLM_SECRET_FILE for all processes."
            )
            assert error.type is ConfigError
        # What it says of itself was not looked at: it would have ended the run.
        with pytest.raises(ConfigError, match="has another secret"):
            joining(pool, place(1, secret=one), versions=VERSIONS | {"JAX": "9"}).result(timeout=30)
        with pytest.raises(ConfigError, match=r"is taken on this host \(process 0 of a run with another secret, or with none"):
            open_port(place(0, secret=one), call(0))
        met += [joining(pool, place(rank, secret=zero)) for rank in (1, 2)]
        assert {len(answer.result(timeout=30).members) for answer in met} == {3}
    assert [record.getMessage() for record in caplog.records] == [
        "A process at 127.0.0.1 was turned away: its secret is not that of this run (JAXLLM_SECRET, JAXLLM_SECRET_FILE)."
    ]


def test_a_listener_without_the_secret_is_not_process_0(place):
    """It answers with a hello, and invents members."""
    with socket.create_server(("127.0.0.1", place(0).port)) as listener, ThreadPoolExecutor(1) as pool:
        joined = joining(pool, place(1))
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(f"{MAGIC}hello {'0' * 64}\n".encode())
            connection.recv(65536)
            fake = json.dumps({"all": {"members": [["evil", 1]] * 3, "port": 4321}})
            connection.sendall(f"{MAGIC}{'0' * 64} {fake}\n".encode())
            with pytest.raises(ConfigError, match="has another secret than process 1 on h1"):
                joined.result(timeout=30)


def relay(listener: socket.socket, port: int, recorded: list[bytes]) -> None:
    """Passes one connection on, and records what its client says."""
    inner, outer = listener.accept()[0], socket.create_connection(("127.0.0.1", port))

    def pump(source, sink, record):
        while data := source.recv(65536):
            record.append(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=pump, args=(outer, inner, []), daemon=True)
    back.start()
    pump(inner, outer, recorded)
    back.join()
    inner.close()
    outer.close()


def test_a_process_that_was_overheard_cannot_be_imitated(place):
    """An attacker records all that process 1 says, and says it again to the next rendezvous on this port."""
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as pool:
        zero, between = serving(pool, place(0, 2)), pool.submit(relay, listener, place(0).port, recorded)
        one = joining(pool, replace(place(1, 2), port=listener.getsockname()[1]))
        assert zero.result(timeout=30).members == one.result(timeout=30).members
        between.result(timeout=30)
        zero = serving(pool, place(0, 2))
        with socket.create_connection(("127.0.0.1", place(0).port), timeout=LIMIT_S) as attacker:
            attacker.sendall(b"".join(recorded))
            heard = b""
            while received := attacker.recv(65536):
                heard += received
        assert heard.endswith(f"{MAGIC}{REFUSAL}\n".encode())
        assert b"h0" not in heard
        one = joining(pool, place(1, 2))
        assert zero.result(timeout=30).members == one.result(timeout=30).members


def flood(port: int) -> subprocess.Popen:
    program = Path(__file__).with_name("strangers.py")
    command = [sys.executable, str(program), "127.0.0.1", str(port), str(CONNECTIONS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_ten_thousand_strangers_do_not_disturb_the_rendezvous(place):
    count, spent = 9, []
    own, launch = call(0, count), place(0, count)

    def zero(*_):
        began = time.thread_time()
        answer = come(own, launch)
        spent.append(time.thread_time() - began)
        return answer

    with ThreadPoolExecutor(count) as pool, ExitStack() as stack:
        met = [leading(pool, own, launch, zero), joining(pool, place(1, count))]
        strangers = stack.enter_context(flood(launch.port))
        # The first came before the flood, the last comes behind it.
        met += [joining(pool, place(rank, count)) for rank in range(2, count - 1)]
        told = json.loads(strangers.communicate(timeout=60)[0])
        began = time.monotonic()
        met.append(joining(pool, place(count - 1, count)))
        assert {tuple(answer.result(timeout=60).members) for answer in met} == {
            tuple((f"h{rank}", 100 + rank) for rank in range(count))
        }
        assert time.monotonic() - began < LONGEST_JOIN_S
    assert told["opened"] == CONNECTIONS
    # They learned that jaxllm listens there, and no more.
    assert set(told["heard"].split()) <= set(f"{MAGIC}hello NONCE {MAGIC}{REFUSAL}".split())
    assert spent[0] < CPU_PER_STRANGER_S * CONNECTIONS


@pytest.mark.parametrize(
    "word", ["", f"{MAGIC}hello {'0' * 64}\n", f"{MAGIC}hello"], ids=["silent", "hello only", "half a hello"]
)
def test_a_stranger_has_little_time_to_say_who_it_is(place, monkeypatch, word):
    monkeypatch.setattr(rendezvous, "INTRODUCTION_S", 0.3)
    with ThreadPoolExecutor(2) as pool:
        zero = serving(pool, place(0, 2))
        with socket.create_connection(("127.0.0.1", place(0).port), timeout=LIMIT_S) as stranger:
            stranger.sendall(word.encode())
            while stranger.recv(4096):
                pass
        assert joining(pool, place(1, 2)).result(timeout=30).members == zero.result(timeout=30).members


# ---------------------------------------------------------------------------------------------------------------- heartbeat


@pytest.fixture
def monitors(monkeypatch):
    """monitors(rank): the monitor of one of three processes that have met."""
    monkeypatch.setattr(peer_monitor, "BEAT_S", 0.1)
    monkeypatch.setattr(peer_monitor, "LEAVE_S", 0.3)
    hosts = ["h0", "h1", "h2"]
    pairs = {rank: connected(*greeted()) for rank in (1, 2)}
    made = []

    def make(rank: int) -> PeerMonitor:
        to = {0: pairs[rank][0]} if rank else {other: server for other, (_, server) in pairs.items()}
        made.append(PeerMonitor(rank, hosts, to, 30, end=make.ended.append, printer=make.ended.append))
        return made[-1]

    make.ended = []
    yield make
    for monitor in made:
        monitor.close()


def test_signed_heartbeats_and_notices_are_heard(monitors):
    zero, one, _ = map(monitors, range(3))
    until(lambda: set(zero._seen) == {1, 2}, "both are heard")
    one.announce_failure("ValueError: no", 2)
    until(lambda: len(monitors.ended) == 4, "both others say it and end")
    assert sorted(map(str, monitors.ended)) == ["2", "2", *2 * ["process 1 on h1 failed: ValueError: no"]]


def test_messages_of_two_threads_keep_their_order(monitors):
    """The monitor's own thread beats while another sends: a number that is sent too late would end the run."""
    zero, one, _ = map(monitors, range(3))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: [one._beat() for _ in range(500)])
    last = time.monotonic()
    until(lambda: zero._links[0].heard_s > last, "the connection still stands")
    assert not monitors.ended


def test_a_heartbeat_that_is_not_the_next_message_is_a_loss(monitors):
    """As one that another connection has carried."""
    zero, one, _ = map(monitors, range(3))
    until(lambda: set(zero._seen) == {1, 2}, "both are heard")
    other, _ = greeted()
    one._links[0].connection.socket.send(other.line('{"bye": true}'))
    lost = "process 1 on h1 is lost (its connection closed)"
    until(lambda: any(str(one).startswith(lost) for one in monitors.ended), "process 1 counts as lost")


def test_strangers_crowd_out_those_of_their_own_address(monkeypatch):
    """First those that have not answered, the oldest first."""
    monkeypatch.setattr(rendezvous, "STRANGERS", 3)
    with listen(0, "127.0.0.1") as listener, ExitStack() as stack:
        meeting = rendezvous.Rendezvous(
            listener, call(0, count=1), Launch("variables", "", 1, 1, 0, secret=SECRET), ALL_REQUIRED
        )
        stack.callback(meeting.close)
        dropped, drop = [], meeting.drop
        monkeypatch.setattr(meeting, "drop", lambda stranger: (dropped.append(stranger), drop(stranger)))
        ports = []
        for address in ("127.0.0.2", *6 * ("127.0.0.3",)):
            source = (address, 0)
            client = stack.enter_context(
                socket.create_connection(listener.getsockname(), timeout=LIMIT_S, source_address=source)
            )
            ports.append(client.getsockname()[1])
            if len(ports) == 3:
                client.sendall(Channel(SECRET, MAGIC, is_server=False).hello())
            meeting.take_strangers()
            if len(ports) == 3:
                greeted = list(meeting._strangers)[-1]
                until(lambda: greeted.receive() == [] and greeted.channel.greeted, "its hello comes")  # noqa: B023
        left = list(meeting._strangers)
        assert [stranger.address for stranger in left] == ["127.0.0.2", "127.0.0.3", "127.0.0.3"]
        assert [ports.index(stranger.socket.getpeername()[1]) for stranger in left] == [0, 2, 6]
        assert {stranger.address for stranger in dropped} == {"127.0.0.3"}


# -------------------------------------------------------------------------------------------------------- where it listens


@pytest.mark.parametrize(
    ("host", "found", "expected"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
        ("ip6-localhost", ["::1"], "::1"),
        ("10.0.0.7", ["10.0.0.7"], "10.0.0.7"),
        ("h0", ["10.0.0.7"], "10.0.0.7"),
        ("h0", ["fd00::7"], "fd00::7"),
        ("h0", ["10.0.0.7", "fd00::7"], ""),
        ("h0", ["10.0.0.7", "10.1.0.7"], ""),
        ("h0", ["127.0.1.1"], ""),
        ("service", ["10.96.0.1"], ""),
        ("0.0.0.0", ["0.0.0.0"], ""),
        ("unknown", [], ""),
    ],
)
def test_process_0_listens_where_the_others_look_for_it(monkeypatch, host, found, expected):
    monkeypatch.setattr(rendezvous_checks, "addresses", lambda _: found)
    monkeypatch.setattr(rendezvous_checks, "_is_own", lambda address: address != "10.96.0.1")
    assert listening_address(Launch("variables", host, 29500, 2, 0)) == expected


def test_jaxllm_bind_chooses_an_address():
    def at(bind: str) -> str:
        return listening_address(Launch("variables", "127.0.0.1", 29500, 2, 0, bind=bind))

    assert (at("127.0.0.2"), at("0.0.0.0"), at("::")) == ("127.0.0.2", "", "")
    for bind in ("192.0.2.1", "no such host", "eth\x1b0", "h" * 300):
        with pytest.raises(ConfigError, match=r"^JAXLLM_BIND=.* is not one address of this host: give an address or a name of"):
            at(bind)


def test_jax_listens_there_too(place, monkeypatch):
    started = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: started.update(options))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    info = LaunchInfo("variables", 0, None, False, None)
    for environ, bind in (({}, f"127.0.0.1:{place(0).port}"), ({"JAX_COORDINATOR_BIND_ADDRESS": "[::]:1"}, None)):
        one = initialize._process_info(place(1, 2), info, {}, True, "", None)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(come, one, place(1, 2))
            meeting = initialize.initialize(place(0, 2), info, environ, cpu=True, flags="", peer_timeout_s=60)
            assert joined.result(timeout=30).members == meeting.answer.members
        for connection in meeting.answer.connections.values():
            connection.socket.close()
        assert started["coordinator_bind_address"] == bind


@pytest.mark.parametrize(
    ("secret", "hosts", "warned"), [(None, ["h0", "h1"], 1), (None, ["h0", "h0"], 0), (SECRET, ["h0", "h1"], 0)]
)
def test_a_run_on_several_hosts_without_a_secret_is_a_warning(caplog, secret, hosts, warned):
    launch = Launch("variables", "h0", 29500, 2, 0, secret=secret)
    initialize._warn_if_open(launch, Answer([(host, 7) for host in hosts], 1))
    sentence = (
        "The processes of this run share no secret: anyone who reaches port 29500 of h0 can stop it; set JAXLLM_SECRET or "
    )
    assert [record.getMessage() for record in caplog.records] == warned * [f"{sentence}JAXLLM_SECRET_FILE for all."]


def test_no_other_address_is_open(place):
    with open_port(place(0), call(0)) as port:
        assert port.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", place(0).port), timeout=5)
    with open_port(place(0, bind="0.0.0.0"), call(0)) as port:
        socket.create_connection(("127.0.0.2", port.getsockname()[1]), timeout=5).close()


def test_missing_processes_hint_at_the_address(monkeypatch):
    monkeypatch.setattr(rendezvous_checks, "addresses", lambda _: ["10.0.0.7"])
    monkeypatch.setattr(rendezvous_checks, "_is_own", lambda _: True)
    words = missing(Launch("variables", "h0", 29500, 2, 0), {0: call(0, 2)}, {0})
    assert "process 0 listens at 10.0.0.7 alone, and at all addresses of its host with JAXLLM_BIND=0.0.0.0)" in words


def test_a_connection_that_the_other_end_resets_at_once_is_closed(monkeypatch):
    made, create = [], socket.create_connection

    def reset(*arguments, **options):
        made.append(create(*arguments, **options))
        taken, _ = listener.accept()
        # Nothing lingers: closing resets the connection.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        taken.close()
        with suppress(ConnectionResetError):
            made[0].recv(1)
        return made[0]

    with listen(0, "127.0.0.1") as listener:
        monkeypatch.setattr(socket, "create_connection", reset)
        with pytest.raises(OSError):  # macOS and Linux have different ones
            connect("127.0.0.1", listener.getsockname()[1], 5.0)
    assert made[0].fileno() < 0
