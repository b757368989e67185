"""The work of launch/ssh.sh: python over_ssh.py HOSTS LEAST_HOSTS "VARIABLE ..." [SUPERVISOR OPTION...] -- COMMAND...

For each line of HOSTS one ssh sends a script to a bash there, on standard input so that values of variables do not show in a
list of processes. The script becomes the supervisor (jaxllm/cluster/supervisor.py), which reads the rest of standard input as
orders: TERM, INT or KILL, one per line. ssh forwards no signals, and when it is killed it leaves the other end running; but the
supervisor reacts to a closed standard input.

With LEAST_HOSTS above 0, a host that ssh loses, or does not reach, does not end the run while so many others are left: they
train on (launch.least_hosts), and ssh tries that host again until the run ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, NoReturn

GRACE_S = 60
"""Time for the others to end after a failure: they may be saving a checkpoint."""
CUT_S = 5
"""Time between the order to kill and the end of ssh itself: without it a host that lost power would keep ssh waiting."""
CONTACT_S = 60
LOOK_S = 0.1
RETRY_S = 5.0
"""Between two tries to start the process of a lost host."""
ORDERS = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2), b"TERM\n") | {signal.SIGINT: b"INT\n"}
SSH_FAILED = 255
WORDS = {SSH_FAILED: "ssh cannot reach it, or the connection broke", 75: "stopped by a signal"}

folder = Path(__file__).parent
speaking = threading.Lock()


def say(sentence: str) -> None:
    print(f"jaxllm: {sentence}", file=sys.stderr, flush=True)


def refuse(sentence: str) -> NoReturn:
    say(sentence)
    raise SystemExit(2)


def ssh(*arguments: str) -> list[str]:
    """An ssh command without a terminal, so without questions; a dead connection ends within a minute. Options in SSH come
    first and take precedence.
    """
    options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
    return [*shlex.split(os.environ.get("SSH") or "ssh"), *options, *arguments]


def read_hosts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        refuse(f"the file of hosts {path} cannot be read ({error.strerror}): give one with a host on each line.")
    hosts = [host for line in lines if (host := line.partition("#")[0].strip())]
    for host in hosts:
        if host.startswith("-") or len(host.split()) > 1:
            refuse(f"{path} has the line {host!r}: write one host, or user@host, on each line.")
    if not hosts:
        refuse(f"{path} names no host: write one on each line.")
    return hosts


def script(variables: dict[str, str], command: list[str]) -> str:
    """Script for bash on a host: `command` in this folder, with these variables."""
    lines = [
        f"here={shlex.quote(os.getcwd())} python={shlex.quote(sys.executable)}",
        'refuse() { echo "jaxllm: $HOSTNAME has no $1: $2" >&2; exit 2; }',
        '[[ -x "$python" ]] || refuse "$python" "install jaxllm there at the same place."',
        'cd -- "$here" 2>/dev/null || refuse "folder $here" "start in one that all hosts have."',
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        'export PATH="${python%/*}:$PATH"',
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def coordinator(hosts: list[str]) -> str:
    """host:port of process 0."""
    first = hosts[0]
    command = ssh("-T", first, "exec bash -s")
    try:
        found = subprocess.run(
            command,
            input=script({}, [sys.executable, str(folder / "meeting_point.py")]),
            capture_output=True,
            text=True,
            timeout=CONTACT_S,
        )
    except subprocess.TimeoutExpired:
        refuse(f"{first} does not answer ssh within {CONTACT_S} s: start it, or correct the file of hosts.")
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        if found.returncode != SSH_FAILED:
            print(reason, file=sys.stderr)
            raise SystemExit(found.returncode)
        refuse(f"ssh cannot reach {first} ({reason}): make `{shlex.join(ssh(first, 'true'))}` work without a password.")
    port = found.stdout.strip().rpartition(":")[2]
    name = address_of(first)
    if is_loopback(name) and not all(is_loopback(address_of(host)) for host in hosts):
        refuse(
            f"The first host, {first}, is {name}, which means a different machine on each host: write a name that the others "
            f"reach."
        )
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def address_of(host: str) -> str:
    """The address that ssh connects to: hosts may be aliases."""
    settings = subprocess.run(ssh("-G", host), capture_output=True, text=True, check=True, timeout=CONTACT_S).stdout
    return next(line.split()[1] for line in settings.splitlines() if line.startswith("hostname "))


def is_loopback(name: str) -> bool:
    return name in ("localhost", "::1") or name.startswith("127.")


class Process:
    """One process of the run, on its host."""

    def __init__(self, rank: int, host: str, text: str):
        self.rank, self.host, self.text = rank, host, text
        self.lost_s: float | None = None
        """Time of the last loss; None while ssh runs."""
        self.was_lost = False
        self.start()

    def start(self) -> None:
        self.lost_s, self.started_s = None, time.monotonic()
        self.ssh = subprocess.Popen(
            ssh("-T", self.host, "exec bash -s"),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C reaches it only through this script.
            process_group=0,
        )
        outputs = ((self.ssh.stdout, sys.stdout.buffer), (self.ssh.stderr, sys.stderr.buffer))
        self._threads = [threading.Thread(target=self._mark, args=ends, daemon=True) for ends in outputs]
        for thread in self._threads:
            thread.start()
        self.order(self.text.encode())

    def order(self, text: bytes) -> None:
        try:
            self.ssh.stdin.write(text)
        except OSError:
            # The process is ending, and its exit code says more.
            pass

    def ended(self) -> int | None:
        code = self.ssh.poll()
        return 128 - code if code is not None and code < 0 else code

    def is_there(self) -> bool:
        """Whether its host counts as one that trains. One that was lost proves it by staying."""
        return self.lost_s is None and (not self.was_lost or time.monotonic() > self.started_s + CONTACT_S)

    def lose(self, code: int) -> None:
        if not self.was_lost or self.is_there():
            what = WORDS.get(code, f"failed, exit code {code}")
            say(f"process {self.rank} on {self.host}: {what}; the others train on, and ssh tries it again")
        self.was_lost, self.lost_s = True, time.monotonic()

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(CUT_S)

    def _mark(self, source: BinaryIO, sink: BinaryIO) -> None:
        for line in source:
            with speaking:
                try:
                    sink.write(b"[%d] %s\n" % (self.rank, line.rstrip(b"\r\n")))
                    sink.flush()
                except OSError:
                    # The reader is gone; reading on keeps the run from blocking.
                    pass


def conduct(processes: list[Process], signals: list[int], least_hosts: int) -> int:
    """Runs until all have ended; returns the exit code of the first failure, or 0. `signals` grows as they arrive."""
    running, first_code, kill_at_s = list(processes), 0, None
    tries_again, has_ended = bool(least_hosts), False
    while any(process.lost_s is None for process in running):
        while signals:
            tries_again = False
            for process in running:
                process.order(ORDERS[signals[0]])
            signals.pop(0)
        left = []
        for process in running:
            if process.lost_s is not None:
                if tries_again and time.monotonic() > process.lost_s + RETRY_S:
                    process.start()
                left.append(process)
                continue
            if (code := process.ended()) is None:
                left.append(process)
                continue
            process.finish()
            # ssh says 255 too if a signal ended the supervisor. A host that was lost once is no reason to end the others.
            others = {other.host for other in running if other is not process and other.is_there()}
            if tries_again and code and (code == SSH_FAILED or process.was_lost) and len(others) >= least_hosts:
                process.lose(code)
                left.append(process)
            elif code and not first_code and not has_ended:
                first_code, kill_at_s = code, time.monotonic() + GRACE_S
                what = WORDS.get(code, "failed")
                say(f"process {process.rank} on {process.host}: {what}, exit code {code}; ending the others")
                signals.append(signal.SIGTERM)
            elif tries_again:
                # The run has ended well, whatever becomes of hosts that were about to return.
                tries_again, has_ended, kill_at_s = False, True, time.monotonic() + GRACE_S
        running = left
        if kill_at_s is not None and time.monotonic() > kill_at_s:
            for process in running:
                process.order(b"KILL\n")
                if time.monotonic() > kill_at_s + CUT_S:
                    process.ssh.kill()
        time.sleep(LOOK_S)
    return first_code


def main(arguments: list[str]) -> int:
    path, least_hosts, names, *rest = arguments
    at = rest.index("--")
    options, command = rest[:at], rest[at + 1 :]
    hosts = read_hosts(Path(path))
    if shutil.which(ssh()[0]) is None:
        refuse(f"{ssh()[0]} cannot be run: install an ssh client, or set SSH.")
    signals: list[int] = []
    for number in ORDERS:
        # Under nohup it stays ignored.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, _: signals.append(received))
    variables = {name: os.environ[name] for name in names.split()}
    if not variables.get("JAXLLM_COORDINATOR"):
        variables["JAXLLM_COORDINATOR"] = coordinator(hosts)
    variables["JAXLLM_NUM_PROCESSES"] = str(len(hosts))
    if int(least_hosts):
        variables["JAXLLM_HOSTS"] = ",".join(map(address_of, hosts))
    supervised = [sys.executable, "-m", "jaxllm.cluster.supervisor", *options, "--follow", "stdin", "--", *command]
    processes = [
        Process(rank, host, script(variables | {"JAXLLM_PROCESS_ID": str(rank)}, supervised)) for rank, host in enumerate(hosts)
    ]
    return conduct(processes, signals, int(least_hosts))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
