"""The supervisor: what it restarts and what not, what it kills, and that nothing outlives it. Real processes, in bash."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jaxllm.cluster import exit_codes
from jaxllm.cluster.supervisor import LONGEST_PAUSE_S, NESTED, ONE_OF_SEVERAL, Limits, describe_exit, environment, main

CHECKOUT = Path(__file__).parents[2]
LIMIT_S = 120
VARIABLES = ("JAXLLM_ATTEMPT", "JAXLLM_RESTARTS", "JAXLLM_LAUNCH_ID", "JAXLLM_BEAT_FD", "SLURM_JOB_ID")
BEATS = '(while sleep 0.1; do printf . >&"$JAXLLM_BEAT_FD"; touch beaten-$JAXLLM_ATTEMPT; done) 2>/dev/null & beats=$!\n'
"""bash: a child that sends heartbeats as a thread of jaxllm does."""


@pytest.fixture
def start(tmp_path):
    """start(script, *options) -> the running supervisor of a bash with this script. Nothing of it remains after the test."""
    started = []

    def start(script: str, *options: str, command=("bash", "-c"), **settings) -> subprocess.Popen:
        line = [sys.executable, "-m", "jaxllm.cluster.supervisor", "--backoff-s", "0.05", *options, "--", *command, script]
        clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        process = subprocess.Popen(
            line,
            cwd=tmp_path,
            env=clean | {"PYTHONPATH": str(CHECKOUT)} | settings.pop("variables", {}),
            text=True,
            stderr=subprocess.PIPE,
            **({"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "start_new_session": True} | settings),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        # Its child has its own group, and ends with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)


def ended(process: subprocess.Popen) -> tuple[int, list[str], list[str]]:
    """(exit code, lines of stdout, lines of stderr)."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out.splitlines(), err.splitlines()


def wait_until_gone(pid: int) -> None:
    """Waits until the process is dead or a zombie."""
    until_s = time.monotonic() + LIMIT_S
    with suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < until_s, f"process {pid} lives"
            time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------ restarting


@pytest.mark.parametrize("code", [0, exit_codes.BAD_INPUT])
def test_no_restart_where_another_try_cannot_help(start, code):
    assert ended(start(f"echo once; exit {code}")) == (code, ["once"], [])


@pytest.mark.parametrize(
    ("script", "code", "why"),
    [
        ("exit 1", 1, "an error"),
        (f"exit {exit_codes.RESTART}", exit_codes.RESTART, "stopped by a signal, and saved"),
        (f"exit {exit_codes.LOST}", exit_codes.LOST, "a process was lost, a step was stuck, or a store did not answer"),
        ("kill -KILL $$", 137, "ended by SIGKILL"),
        ("kill -ABRT $$", 134, "ended by SIGABRT"),
    ],
)
def test_everything_else_restarts_within_the_limit(start, script, code, why):
    said = ended(start(f"echo $JAXLLM_ATTEMPT $JAXLLM_RESTARTS; {script}", "--restarts", "2"))
    assert said == (
        code,
        ["0 yes", "1 yes", "2 yes"],
        [
            f"jaxllm: exit code {code} ({why}); restart 1 of at most 2 in 0.05 s",
            f"jaxllm: exit code {code} ({why}); restart 2 of at most 2 in 0.1 s",
            f"jaxllm: exit code {code} ({why}); given up after 2 restarts in a row",
        ],
    )


def test_a_success_ends_it_and_all_attempts_are_one_launch(start):
    code, out, _ = ended(start('echo "$JAXLLM_LAUNCH_ID"; exit $((JAXLLM_ATTEMPT == 1 ? 0 : 7))'))
    assert (code, len(out), len(set(out))) == (0, 2, 1)


def test_without_restarts_the_environment_promises_none(start):
    assert ended(start('echo "${JAXLLM_ATTEMPT-none} ${JAXLLM_RESTARTS-none}"; exit 7', "--restarts", "0")) == (
        7,
        ["none none"],
        [],
    )


def test_an_attempt_that_lasted_resets_the_count(start):
    """Attempts 0, 1, 3 and 4 fail at once and 2 does not: two in a row each time, never three."""
    script = "echo $JAXLLM_ATTEMPT; ((JAXLLM_ATTEMPT != 2)) || sleep 3; exit 7"
    code, out, err = ended(start(script, "--restarts", "2", "--anew-after", "3"))
    assert (code, out) == (7, ["0", "1", "2", "3", "4"])
    assert [line.split("; ")[1].split(" of")[0] for line in err[:-1]] == ["restart 1", "restart 2", "restart 1", "restart 2"]


def test_pauses_double_up_to_five_minutes():
    pauses_s = [Limits(backoff_s=5).pause_s(n) for n in range(10_000)]
    assert pauses_s[:7] == [5, 10, 20, 40, 80, 160, LONGEST_PAUSE_S]
    assert set(pauses_s[6:]) == {LONGEST_PAUSE_S}


def test_attempts_of_a_launch_only_go_up():
    outer = {"JAXLLM_ATTEMPT": "2", "JAXLLM_LAUNCH_ID": "night"}
    assert environment(outer, Limits()) == {
        "JAXLLM_ATTEMPT": str(2 * NESTED),
        "JAXLLM_RESTARTS": "yes",
        "JAXLLM_LAUNCH_ID": "night",
    }
    assert environment(outer, Limits(restarts=0)) == outer


@pytest.mark.parametrize("name", ONE_OF_SEVERAL)
def test_a_supervisor_of_one_of_several_makes_no_name_for_the_launch(name):
    assert "JAXLLM_LAUNCH_ID" not in environment({name: "1"}, Limits())
    assert environment({}, Limits())["JAXLLM_LAUNCH_ID"]


@pytest.mark.parametrize("name", ONE_OF_SEVERAL)
def test_a_supervisor_of_a_complete_launch_makes_its_secret(name):
    assert "JAXLLM_SECRET" not in environment({name: "1"}, Limits())
    made = [environment({}, Limits())["JAXLLM_SECRET"] for _ in range(2)]
    assert ([len(one) for one in made], made[0] != made[1]) == ([64, 64], True)
    for given in ({"JAXLLM_SECRET": "mine"}, {"JAXLLM_SECRET_FILE": "/mine"}):
        found = environment(given, Limits())
        assert {name: value for name, value in found.items() if name.startswith("JAXLLM_SECRET")} == given


def test_exit_codes_are_described():
    assert (describe_exit(128 + 15), describe_exit(255), describe_exit(1)) == ("ended by SIGTERM", "an error", "an error")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--restarts", "2"],
            "supervise: there is no command; write python -m jaxllm.cluster.supervisor [OPTION ...] -- COMMAND...",
        ),
        (["--restarts", "-1", "--", "true"], "argument --restarts: -1 is not valid: give a whole number of at least 0"),
        (["--silent-after", "nan", "--", "true"], "argument --silent-after: nan is not valid: give a number of at least 0"),
        (["--", "/missing"], "/missing cannot be started (No such file or directory): correct the command"),
    ],
)
def test_refusals(arguments, sentence):
    command = [sys.executable, "-m", "jaxllm.cluster.supervisor", *arguments]
    result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (result.returncode, result.stdout) == (exit_codes.BAD_INPUT, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("jaxllm: ")
    assert sentence in line


@pytest.mark.parametrize("attempt", ["x", "-1", "1.5", "9" * 5000, str(10**13)], ids=lambda text: text[:20])
def test_an_attempt_that_is_no_number_is_refused(attempt, capfd, monkeypatch):
    monkeypatch.setenv("JAXLLM_ATTEMPT", attempt)
    with pytest.raises(SystemExit) as ended:
        main(["--", "true"])
    assert ended.value.code == exit_codes.BAD_INPUT
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(r"jaxllm: supervise: JAXLLM_ATTEMPT='.{1,80}' is not valid: it should be a whole number from 0 to", line)


def test_it_starts_no_jax():
    words = "import sys; from jaxllm.cluster import supervisor; print({'jax', 'numpy', 'pydantic'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", words], cwd=CHECKOUT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stdout == "set()\n"


# --------------------------------------------------------------------------------------------------------------- frozen


@pytest.mark.launcher
def test_a_frozen_process_is_killed_and_started_again(start):
    """The process stops its whole group, as a hypervisor or a debugger would."""
    process = start(
        BEATS
        + "until [[ -e beaten-$JAXLLM_ATTEMPT ]]; do sleep 0.05; done; "
        + "((JAXLLM_ATTEMPT)) || kill -STOP 0; echo $JAXLLM_ATTEMPT; kill $beats",
        "--silent-after",
        "2",
    )
    code, out, err = ended(process)
    assert (code, out) == (0, ["1"])
    assert err[0].startswith("jaxllm: process ")
    assert err[0].endswith(" is frozen, no sign of life for 2 s: killing it")
    assert err[1:] == ["jaxllm: exit code 137 (ended by SIGKILL); restart 1 of at most 10 in 0.05 s"]


@pytest.mark.launcher
def test_a_process_that_sends_heartbeats_or_never_did_is_not_frozen(start):
    steady = start(BEATS + "sleep 4; echo done; kill $beats", "--silent-after", "2")
    silent = start("sleep 2; echo done", "--silent-after", "0.5")
    assert [ended(process) for process in (steady, silent)] == [(0, ["done"], [])] * 2


# -------------------------------------------------------------------------------------------------------------- stopping

STOPS = 'for name in TERM INT; do trap "echo $name; exit 75" $name; done; echo ready; while :; do sleep 0.05; done'


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("sent", "received"), [("TERM", "TERM"), ("INT", "INT"), ("HUP", "TERM"), ("USR1", "TERM"), ("USR2", "TERM")]
)
def test_signals_are_passed_on_and_end_it(start, sent, received):
    process = start(STOPS)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[f"SIG{sent}"])
    # bash may print about its sleep on stderr, as that is in the same group.
    assert ended(process)[:2] == (exit_codes.RESTART, [received])


@pytest.mark.launcher
def test_a_signal_between_two_attempts_asks_for_a_restart(start):
    process = start("echo failing; exit 7", "--backoff-s", "60")
    assert "in 60 s" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (exit_codes.RESTART, ["failing"], [])


@pytest.mark.launcher
@pytest.mark.parametrize(("restarts", "code"), [("1", exit_codes.RESTART), ("0", 128 + signal.SIGTERM)])
def test_a_signal_before_handlers_are_set_asks_for_a_restart_under_a_supervisor(start, restarts, code):
    process = start("echo ready; exec sleep 60", "--restarts", restarts)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (code, [], [])


@pytest.mark.launcher
def test_a_signal_while_it_ends_announces_no_restart(start):
    assert ended(start('trap "" TERM; kill -TERM $PPID; kill -KILL $$')) == (137, [], [])


@pytest.mark.launcher
def test_what_a_failed_attempt_leaves_behind_is_killed(start):
    process = start("((JAXLLM_ATTEMPT)) && exit 0; sleep 60 >/dev/null 2>&1 & echo $!; exit 1")
    code, (left,), _ = ended(process)
    assert code == 0
    wait_until_gone(int(left))


@pytest.mark.launcher
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process end with its parent")
def test_a_command_whose_supervisor_was_killed_before_it_began_does_not_begin():
    lives = "import os; from jaxllm.cluster.supervisor import die_with_parent; die_with_parent(os.getppid())"
    # No process can have this number (proc(5), pid_max).
    dies = f"print('lives', flush=True); die_with_parent({2**22 + 1}); print('outlives it')"
    result = subprocess.run(
        [sys.executable, "-c", f"{lives}; {dies}"],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, "lives\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process end with its parent")
def test_nothing_outlives_a_killed_supervisor(start):
    process = start('trap "" TERM; echo $$; sleep 60 >/dev/null 2>&1')
    child = int(process.stdout.readline())
    process.kill()
    wait_until_gone(child)


# ------------------------------------------------------------------------------------------------------ under a launcher


@pytest.mark.launcher
@pytest.mark.parametrize("order", ["TERM", "INT"])
def test_orders_on_standard_input(start, order):
    process = start(STOPS, "--follow", "stdin", stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.stdin.write(f"nonsense\n{order}\n")
    process.stdin.flush()
    assert process.wait(LIMIT_S) == exit_codes.RESTART
    assert process.stdout.read() == f"{order}\n"


@pytest.mark.launcher
def test_the_order_to_kill(start):
    process = start('trap "" TERM; echo ready; while :; do sleep 0.05; done', "--follow", "stdin", stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    assert process.communicate("KILL\n", timeout=LIMIT_S)[0] == ""
    assert process.returncode == 137


@pytest.mark.launcher
def test_a_run_whose_launcher_is_gone_may_still_save(start, tmp_path):
    """The output has no reader any more, and a shell whose write fails stops under `set -e`."""
    script = (
        'set -e; trap "stop=yes" TERM; echo ready; while [[ -z "$stop" ]]; do sleep 0.05 || true; done; '
        "echo said; echo >saved; exit 75"
    )
    process = start(script, "--follow", "stdin", stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    for end in (process.stdout, process.stderr, process.stdin):
        end.close()
    assert process.wait(LIMIT_S) == exit_codes.RESTART
    assert (tmp_path / "saved").exists()
    process.stdout = process.stderr = process.stdin = None


@pytest.mark.launcher
def test_a_run_that_ignores_its_launchers_end_is_killed(start):
    process = start(
        'trap "" TERM; echo ready; while :; do sleep 0.05; done', "--follow", "stdin", "--hang-up", "0.5", stdin=subprocess.PIPE
    )
    assert process.stdout.readline() == "ready\n"
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (137, "jaxllm: the launcher is gone; stopping\n")


@pytest.mark.launcher
def test_a_parent_that_is_gone_ends_it(tmp_path):
    (tmp_path / "child").write_text('trap "echo >saved; exit 75" TERM; echo $$; while :; do sleep 0.05; done')
    # Not the last of its commands, or bash would replace itself with it.
    line = ["bash", "-c", f"{sys.executable} -m jaxllm.cluster.supervisor --follow parent -- bash child; true"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    parent = subprocess.Popen(line, cwd=tmp_path, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        supervisor = parent_of(child)
        assert parent_of(supervisor) == parent.pid
        parent.kill()
        wait_until_gone(supervisor)
        wait_until_gone(child)
    assert (tmp_path / "saved").exists()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.launcher
@pytest.mark.parametrize("follow", ["stdin", "parent"])
def test_what_a_launcher_gives_is_no_terminal_to_the_command(start, follow):
    leader, terminal = pty.openpty()
    process = start("[[ ! -t 1 ]] && echo none", "--follow", follow, stdin=subprocess.PIPE, stdout=terminal)
    os.close(terminal)
    assert process.wait(LIMIT_S) == 0
    assert os.read(leader, 100).split() == [b"none"]
    os.close(leader)


@pytest.mark.launcher
def test_output_without_a_reader_does_not_block_it(start, tmp_path):
    start("head -c 9000000 /dev/zero; echo >written", "--follow", "stdin", stdin=subprocess.PIPE)
    until_s = time.monotonic() + LIMIT_S
    while not (tmp_path / "written").exists():
        assert time.monotonic() < until_s
        time.sleep(0.05)
