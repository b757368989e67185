"""launch/ssh.sh with a real sshd on loopback, whose addresses simulate two hosts: what it refuses, what it forwards, that
nothing remains, and a run that survives a killed process and a broken connection.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import real_launches
from outside import free_port
from real_launches import LIMIT_S, launch, launched, pid_of, processes_of_launch, wait_until

from jaxllm.cluster import exit_codes

pytestmark = pytest.mark.launcher
NUMBERS = (1, 2, 3, 4)
STOPS = 'for name in TERM INT; do trap "echo $name; exit 75" $name; done; echo ready; while :; do sleep 0.05; done'


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """An `ssh` for SSH that knows the hosts h1 (127.0.0.1) to h4 (127.0.0.4) and nobody (a port without sshd)."""
    real_launches.require(sshd="openssh-server", ssh="openssh-client")
    folder = tmp_path_factory.mktemp("ssh")
    folder.chmod(0o700)
    if os.geteuid() == 0:
        # sshd locks itself in there before a login.
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True, capture_output=True, timeout=LIMIT_S)
    port = free_port()
    (folder / "sshd_config").write_text(
        "".join(f"ListenAddress 127.0.0.{n}:{port}\n" for n in NUMBERS) + f"HostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user.pub\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        "StrictModes no\nUsePAM no\n"
    )
    known = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"[127.0.0.{n}]:{port} {known}" for n in NUMBERS))
    (folder / "config").write_text(
        "".join(f"Host h{n}\n  HostName 127.0.0.{n}\n" for n in NUMBERS) + "Host far\n  HostName 192.0.2.1\n"
        f"Host nobody\n  HostName 127.0.0.1\n  Port {free_port()}\n"
        f"Host *\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n"
    )
    with (folder / "log").open("w") as log:
        # By its full path, or it cannot restart itself for each connection.
        command = [shutil.which("sshd"), "-D", "-e", "-f", folder / "sshd_config"]
        daemon = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(port), "an answer of sshd")
        yield f"ssh -F {folder}/config"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait(LIMIT_S)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.2", port), timeout=1):
        return True
    return False


@pytest.fixture
def hosts(tmp_path):
    """hosts("h1", ...) -> a file of them."""

    def write(*names: str) -> Path:
        path = tmp_path / "hosts.txt"
        path.write_text("# of the test\n\n" + "".join(f"{name}  # here\n" for name in names))
        return path

    return write


def ready(process: subprocess.Popen, count: int) -> None:
    assert {process.stdout.readline() for _ in range(count)} == {f"[{rank}] ready\n" for rank in range(count)}


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give a file of hosts and the command to run"),
        (("hosts.txt",), "give a file of hosts and the command to run"),
        (("--restarts",), "--restarts needs a value"),
        (("missing.txt", "true"), "missing.txt cannot be read (No such file or directory): give one with a host on each line"),
        (("empty.txt", "true"), "empty.txt names no host"),
        (("two.txt", "true"), "two.txt has the line 'h1 h2': write one host, or user@host, on each line"),
        (("option.txt", "true"), "option.txt has the line '-oProxyCommand=true'"),
    ],
)
def test_usage_is_refused_in_a_sentence(arguments, sentence, tmp_path):
    for name, text in (("empty", "# h1\n"), ("two", "h1 h2\n"), ("option", "-oProxyCommand=true\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    code, out, err = launch("ssh.sh", *arguments, cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_a_first_host_that_cannot_be_is_refused(ssh, hosts, tmp_path):
    def refused(*names: str, **variables: str) -> str:
        code, out, err = launch("ssh.sh", hosts(*names), "true", cwd=tmp_path, **{"SSH": ssh} | variables)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    assert "ssh cannot reach nobody (ssh: connect to host 127.0.0.1" in refused("nobody", "h1")
    assert "The first host, h1, is 127.0.0.1, which means a different machine on each host" in refused("h1", "far")
    assert "no-such-ssh cannot be run: install an ssh client, or set SSH" in refused("h1", SSH="no-such-ssh -v")


def test_a_host_that_cannot_be_reached_ends_the_others(ssh, hosts, tmp_path):
    code, out, err = launch("ssh.sh", hosts("h1", "nobody"), "bash", "-c", STOPS, cwd=tmp_path, SSH=ssh)
    assert code == 255
    # The signal came before, during, or after its first words.
    assert out in ("", "[0] TERM\n", "[0] ready\n", "[0] ready\n[0] TERM\n")
    assert "jaxllm: process 1 on nobody: ssh cannot reach it, or the connection broke, exit code 255; ending the others" in err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("s,^here=[^ ]*,here=/missing,", "has no folder /missing: start in one that all hosts have."),
        ("s, python=.*, python=/missing,", "has no /missing: install jaxllm there at the same place."),
    ],
)
def test_a_host_that_has_not_what_this_one_has_is_named(change, sentence, hosts, tmp_path):
    """The stand-in for ssh connects to no host, and edits the script that it receives."""
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/bash\nexec bash -s < <(sed -u {shlex.quote(change)} 2>/dev/null)\n")
    program.chmod(0o755)
    variables = {"SSH": str(program), "JAXLLM_COORDINATOR": "host-0:29500"}
    code, out, err = launch("ssh.sh", hosts("h1"), "true", cwd=tmp_path, **variables)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"[0] jaxllm: {socket.gethostname()} {sentence}",
        "jaxllm: process 0 on h1: failed, exit code 2; ending the others",
    ]


# --------------------------------------------------------------------------------------------------- what is passed on


def test_processes_find_each_other_in_the_callers_folder(ssh, hosts, tmp_path):
    words = 'echo "$JAXLLM_PROCESS_ID of $JAXLLM_NUM_PROCESSES in $PWD, $XLA_FLAGS"; echo "$JAXLLM_COORDINATOR" >&2; printf end'
    odd = "--first='1 2' --second=\"$HOME\"\n--third"
    code, out, err = launch("ssh.sh", hosts("h1", "h2", "h1"), "bash", "-c", words, cwd=tmp_path, SSH=ssh, XLA_FLAGS=odd)
    assert code == 0, err
    said = [(rank, f"{rank} of 3 in {tmp_path}, --first='1 2' --second=\"$HOME\"") for rank in range(3)]
    expected = [f"[{rank}] {line}" for rank, first in said for line in (first, "--third", "end")]
    assert sorted(out.splitlines()) == sorted(expected)
    # Beside what a login shell of the machine may print.
    coordinators = re.findall(r"^\[\d\] (127\.0\.0\.1:\d+)$", err, re.MULTILINE)
    assert len(coordinators) == 3, err
    assert len(set(coordinators)) == 1


def test_the_first_failure_that_is_final_ends_the_others(ssh, hosts, tmp_path):
    fails = "until [[ -e up ]]; do sleep 0.05; done; echo $JAXLLM_ATTEMPT; exit 7"
    stops = STOPS.replace("75", "5").replace("echo ready", "echo ready; touch up")
    words = f"if ((JAXLLM_PROCESS_ID)); then {fails}; fi; {stops}"
    options = ("--restarts", "1", "--backoff-s", "0.1")
    code, out, err = launch("ssh.sh", *options, hosts("h1", "h2"), "bash", "-c", words, cwd=tmp_path, SSH=ssh)
    assert code == 7
    assert sorted(out.splitlines()) == ["[0] TERM", "[0] ready", "[1] 0", "[1] 1"]
    assert "[1] jaxllm: exit code 7 (an error); given up after 1 restarts in a row" in err
    assert "jaxllm: process 1 on h2: failed, exit code 7; ending the others" in err


@pytest.mark.parametrize(("sent", "received"), [("TERM", "TERM"), ("INT", "INT")])
def test_signals_are_passed_on(ssh, hosts, tmp_path, sent, received):
    with launched("ssh.sh", hosts("h1", "h2"), "bash", "-c", STOPS, cwd=tmp_path, SSH=ssh) as process:
        ready(process, 2)
        process.send_signal(signal.Signals[f"SIG{sent}"])
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == exit_codes.RESTART
    assert sorted(out.splitlines()) == [f"[0] {received}", f"[1] {received}"]


def test_the_list_of_processes_shows_no_secret(ssh, hosts, tmp_path):
    with launched("ssh.sh", hosts("h1"), "bash", "-c", STOPS, cwd=tmp_path, SSH=ssh, WANDB_API_KEY="hunter2") as process:
        ready(process, 1)
        found = list(processes_of_launch())
        assert "hunter2" in {variables.get("WANDB_API_KEY") for *_, variables in found}
        assert not [command for _, command, _ in found if any("hunter2" in word for word in command)]
        (made,) = {variables["JAXLLM_SECRET"] for *_, variables in found if "JAXLLM_SECRET" in variables}
        assert len(made) == 64
        assert not [command for _, command, _ in found if any(made in word for word in command)]


def test_nothing_outlives_a_killed_launcher(ssh, hosts, tmp_path):
    """And the rest of the run may still save."""
    words = STOPS.replace("exit 75", "echo >saved-$JAXLLM_PROCESS_ID; exit 75")
    with launched("ssh.sh", hosts("h1", "h2"), "bash", "-c", words, cwd=tmp_path, SSH=ssh) as process:
        ready(process, 2)
        process.kill()
        wait_until(lambda: not list(processes_of_launch()), "the end of all processes")
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.slow
def test_a_run_goes_through_a_kill_and_a_broken_connection_to_the_losses_of_one_process(ssh, hosts, text_file, tmp_path):
    run = real_launches.Run(tmp_path, text_file)
    line = ("ssh.sh", "--restarts", "3", "--backoff-s", "0.1", hosts("h1", "h2"))
    with launched(*line, *run.command(), cwd=tmp_path, SSH=ssh) as process:
        run.wait_for(3, process)
        os.kill(pid_of("slowly.py", rank=1), signal.SIGKILL)
        # No process gets there alone.
        run.wait_for(7, process)
        (connection,) = (pid for pid, command, _ in processes_of_launch() if command[0] == "ssh" and "h2" in command)
        os.kill(connection, signal.SIGKILL)
        run.go_on_quickly()
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGKILL, out + err
    assert "[1] jaxllm: exit code 137 (ended by SIGKILL); restart 1 of at most 3 in 0.1 s" in err
    assert "by SIGTERM; saved" in out
    code, out, err = launch(*line, *run.command(step_s=0), cwd=tmp_path, SSH=ssh)
    assert code == 0, out + err
    assert "[0] resumed from step" in out
    run.assert_losses_of_one_process()


@pytest.mark.slow
def test_a_run_trains_on_without_lost_hosts_and_with_one_of_them_again(ssh, hosts, text_file, tmp_path):
    """Four hosts lose two at once, that of process 0 among them; it returns, the other does not. Samples and losses are those
    of a run that lost none."""
    options = ("train.global_batch_sequences=12", "train.microbatch_sequences=1", "parallel.data=4", "parallel.zero=3")
    run = real_launches.Run(tmp_path, text_file, "launch.wait_s=10", *options, steps=240)
    power = tmp_path / "ssh"
    without = f'for word; do if [[ -e "{tmp_path}/down-$word" ]]; then exit 255; fi; done'
    power.write_text(f'#!/bin/bash\n{without}\nexec {ssh} "$@"\n')
    power.chmod(0o755)
    line = ("ssh.sh", "--least-hosts", "2", "--backoff-s", "0.1", hosts("h1", "h2", "h3", "h4"))

    with launched(*line, *run.command(), cwd=tmp_path, SSH=str(power)) as process:
        run.wait_for(4, process)
        for host in ("h1", "h3"):
            (tmp_path / f"down-{host}").touch()
        for pid, _, variables in list(processes_of_launch()):
            if variables.get("JAXLLM_PROCESS_ID") in ("0", "2"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wait_until(lambda: any(start.get("absent_hosts") == 2 for start in run.starts()), "a start without two hosts")
        (tmp_path / "down-h1").unlink()
        wait_until(lambda: run.starts()[-1].get("absent_hosts") == 1, "a start with one of them again")
        run.go_on_quickly()
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    starts = [(start["devices"], start.get("absent_hosts", 0)) for start in run.starts()]
    # On a busy machine the run may start once more with two.
    assert (starts[0], starts[1], starts[-1]) == ((4, 0), (2, 2), (3, 1)), out + err
    for rank, host in ((0, "h1"), (2, "h3")):
        lost = f"jaxllm: process {rank} on {host}: ssh cannot reach it, or the connection broke; the others train on, and ssh"
        assert err.count(lost) == 1
    assert "127.0.0.1, 127.0.0.3 are missing: training on without" in out
    assert f"in {run.dir}" in out.partition("resumed from step ")[2]
    assert "by the return of 127.0.0.1; saved" in out
    assert "127.0.0.3 is missing: training on without" in out
    run.assert_losses_of_one_process()
