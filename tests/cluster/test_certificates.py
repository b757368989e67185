"""Mutual TLS of JAX's coordinator by the run's secret: the certificate, and two real processes beside strangers."""

import os
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
import yaml
from outside import environment, free_port
from run_files import records
from test_rendezvous import call
from tiny import TINY

from jaxllm.cluster import certificates, initialize
from jaxllm.cluster.launchers import Launch
from jaxllm.cluster.rendezvous_checks import why_rejected

SECRET, OTHER = b"the secret of this run", b"the secret of another"
LIMIT_S = 300
TAKES_CERTIFICATES = hasattr(jax.config, "jax_mtls_peer_uri_prefix")
"""JAX 0.10 takes none."""


@pytest.fixture
def files(tmp_path):
    """files(secret, salt): paths of a certificate and its key."""

    def write(secret: bytes = SECRET, salt: str = "salt") -> tuple[Path, Path]:
        paths = tmp_path / f"{secret.hex()}-{salt}.pem", tmp_path / f"{secret.hex()}-{salt}.key"
        for path, content in zip(paths, certificates.certificate_and_key(secret, salt), strict=True):
            path.write_bytes(content)
        return paths

    return write


def context(files: tuple[Path, Path] | None, trusted: Path, *, is_server: bool) -> ssl.SSLContext:
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    found.check_hostname = False
    found.verify_mode = ssl.CERT_REQUIRED
    found.load_verify_locations(trusted)
    found.set_alpn_protocols(["h2"])
    if files is not None:
        found.load_cert_chain(*files)
    return found


# ------------------------------------------------------------------------------------------------------------- certificate


def test_a_certificate_is_that_of_its_secret_and_its_salt():
    made = [certificates.certificate_and_key(*one) for one in ((SECRET, "a"), (SECRET, "a"), (SECRET, "b"), (OTHER, "a"))]
    assert made[0] == made[1]
    assert len({part for pair in made for part in pair}) == 6
    assert SECRET not in b"".join(part for pair in made for part in pair)


@pytest.mark.parametrize(("client", "taken"), [(SECRET, True), (OTHER, False), (None, False)], ids=["own", "other", "none"])
def test_openssl_takes_the_certificate_of_this_secret_alone(client, taken, files):
    own = files()
    shown = None if client is None else files(client)
    contexts = context(shown, own[0], is_server=False), context(own, own[0], is_server=True)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = contexts[0].wrap_bio(to_client, to_server), contexts[1].wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in 2 * ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLError:
        assert not taken
    else:
        assert taken
        assert ends[1].getpeercert()["subjectAltName"] == (("URI", certificates.PREFIX),)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has files in memory")
def test_the_files_are_in_memory_and_end_with_the_process():
    given = certificates.arguments(SECRET, "salt")
    expected = certificates.certificate_and_key(SECRET, "salt")
    # JAX reads them again from time to time.
    for _ in range(2):
        assert tuple(Path(given[name]).read_bytes() for name in ("mtls_cert_file", "mtls_key_file")) == expected
    code = "import os, sys; sys.exit(any(map(os.path.exists, sys.argv[1:])))"
    paths = [given["mtls_cert_file"], given["mtls_key_file"]]
    assert subprocess.run([sys.executable, "-c", code, *paths], close_fds=False).returncode == 0
    for path in paths:
        os.close(int(path.rpartition("/")[2]))


# --------------------------------------------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize(
    ("given", "secret", "chosen"),
    [
        ({}, SECRET, "JAXLLM_SECRET"),
        ({}, None, ""),
        ({"jax_mtls_key_file": "/k"}, SECRET, "JAX_MTLS_CERT_FILE"),
        ({"jax_mtls_key_file": "/k"}, None, "JAX_MTLS_CERT_FILE"),
    ],
)
def test_certificates_of_the_user_come_before_those_of_the_secret(given, secret, chosen, monkeypatch):
    launch = Launch("variables", "h0", 29500, 2, 0, secret=secret)
    options = dict.fromkeys(("jax_mtls_cert_file", "jax_mtls_key_file", "jax_mtls_ca_file", "jax_mtls_peer_uri_prefix"))
    monkeypatch.setattr(initialize.jax, "config", type("Options", (), options | given))
    assert initialize._proof_for_jax(launch) == (chosen if hasattr(os, "memfd_create") or given else "")
    # JAX 0.10.
    monkeypatch.setattr(initialize.jax, "config", object())
    assert initialize._proof_for_jax(launch) == ""


def test_processes_with_other_proofs_do_not_meet():
    zero, one = replace(call(0, 2), proof="JAXLLM_SECRET"), replace(call(1, 2), proof="JAX_MTLS_CERT_FILE")
    launch = Launch("variables", "h0", 29500, 2, 0)
    assert why_rejected(one, zero, launch, None) == (
        "Process 1 on h1 proves who it is to JAX by JAX_MTLS_CERT_FILE, process 0 on h0 by JAXLLM_SECRET: set "
        "JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE and JAX_MTLS_CA_FILE for all processes, or for none."
    )
    assert "by nothing, process 0 on h0 by JAXLLM_SECRET:" in why_rejected(replace(one, proof=""), zero, launch, None)


# -------------------------------------------------------------------------------------------------------------- processes

# Meets, says by which salt, and trains when it is told to.
PROGRAM = """
import sys
import jaxllm
from jaxllm.cluster import distributed
from jaxllm.run.loop import fit

config = jaxllm.load_config(sys.argv[1])
try:
    distributed.start(config.run)
except jaxllm.ConfigError as error:
    raise SystemExit(f"jaxllm: {error}")
print(distributed._meeting.answer.salt, flush=True)
sys.stdin.readline()
fit(config)
"""
# What knows the address and the number of a process, and no secret.
STRANGER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], 2, 1, initialization_timeout=5, cluster_detection_method="deactivate")
print("joined")
"""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a client of HTTP/2, which gRPC is: RFC 9113, 3.4, and an empty frame SETTINGS."""
SETTINGS = 4


def answers_http2(port: int, tls: ssl.SSLContext | None = None) -> bool:
    """Whether the coordinator answers a client with its settings."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            with tls.wrap_socket(connection) if tls else connection as stream:
                stream.sendall(PREFACE)
                frame = b""
                while len(frame) < 9 and (came := stream.recv(9 - len(frame))):
                    frame += came
                return len(frame) == 9 and frame[3] == SETTINGS
        except (ssl.SSLError, ConnectionError):
            return False


@pytest.mark.launcher
def test_a_run_trains_under_tls_and_takes_no_process_without_the_secret(tmp_path, text_file, files):
    """With JAX 0.10 the coordinator is open to all who reach its port, as it was."""
    port, recipe = free_port(), tmp_path / "tiny.yaml"
    config = {"data": {"source": "files", "paths": [str(text_file)]}, "run": {"cpu_devices": 1, "dir": str(tmp_path / "run")}}
    recipe.write_text(yaml.safe_dump(TINY | config | {"parallel": {"data": 2}}))
    started = []

    def start(*command, **variables) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", *map(str, command)], env=environment(**variables), **pipes))
        return started[-1]

    def of_the_run(rank: int, secret: bytes = SECRET) -> subprocess.Popen:
        ours = {"JAXLLM_COORDINATOR": f"127.0.0.1:{port}", "JAXLLM_NUM_PROCESSES": "2", "JAXLLM_PROCESS_ID": str(rank)}
        return start(PROGRAM, recipe, **ours, JAXLLM_SECRET=secret.decode())

    try:
        zero, other = of_the_run(0), of_the_run(1, OTHER)
        _, said = other.communicate(timeout=LIMIT_S)
        assert said.splitlines()[-1].startswith("jaxllm: Process 0 at 127.0.0.1:")
        assert "has another secret than process 1 on" in said
        one = of_the_run(1)
        salts = {process.stdout.readline().strip() for process in (zero, one)}
        assert len(salts) == 1
        own, foreign = files(SECRET, *salts), files(OTHER, *salts)
        for shown, trusted in ((None, own), (foreign, own), (own, own)):
            is_answered = answers_http2(port, context(shown, trusted[0], is_server=False))
            assert is_answered is (TAKES_CERTIFICATES and shown == own)
        assert answers_http2(port) is not TAKES_CERTIFICATES
        if TAKES_CERTIFICATES:
            stranger = start(STRANGER, f"127.0.0.1:{port}")
            out, _ = stranger.communicate(timeout=LIMIT_S)
            assert stranger.returncode != 0
            assert "joined" not in out
        for process in (zero, one):
            process.stdin.write("\n")
            process.stdin.flush()
        for process in (zero, one):
            out, error = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out + error
            assert SECRET.decode() not in out + error
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert len([line for line in records(tmp_path / "run") if "loss" in line]) > 0
