"""launch/slurm.sbatch: its decisions, with stand-ins for SLURM's programs; and its runs on a real SLURM (slurm_lab.py)."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from outside import free_port
from run_files import saved_state, steps_of
from slurm_lab import cluster, require_slurm, wait_until
from tiny import TINY

from jaxllm.cluster.socket_messages import read_secret
from jaxllm.config import load_config
from jaxllm.run.loop import fit
from jaxllm.run_report import summary
from jaxllm.run_report.history import read_run

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "launch" / "slurm.sbatch"

# ------------------------------------------------------------------------------------------------------ what it decides

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "h[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "main",
    "JAXLLM_VENV": "none",
    "PYTHON": sys.executable,
    "PYTHONPATH": str(CHECKOUT),
}


def plain(**variables: str) -> dict[str, str]:
    """This environment without the variables of a scheduler that may run these tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAXLLM_"))} | variables


def script(*arguments: str, cwd: Path, path: Path = SCRIPT, **variables: str) -> subprocess.CompletedProcess:
    """Runs the batch script as SLURM would."""
    command = ["bash", str(path), *arguments]
    return subprocess.run(command, cwd=cwd, env=plain(**variables), capture_output=True, text=True, timeout=60)


# Until the script has looked for nodes, or has stopped it.
LASTS = '[[ ! "${UNTIL:-}" ]] || for _ in {1..3000}; do [[ -e "$LOG/$UNTIL" ]] && break; sleep 0.01; done; exit "$CODE"'
KEEP = '[[ -z "${JAXLLM_SECRET_FILE:-}" ]] || cp -p "$JAXLLM_SECRET_FILE" "$LOG/kept"'


@pytest.fixture
def slurm(tmp_path):
    """slurm(exit code of srun, what scontrol shows, *command, short_turn_s=..., IDLE=what sinfo shows, UNTIL=the program whose
    call srun waits for) -> (the script's exit code, its lines, srun's arguments and environment, the arguments of scontrol,
    sinfo and scancel).
    """
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in (
        ("srun", 'printf "%s\\n" "$@" >"$LOG/srun"; env >"$LOG/environment"; ' + KEEP + "; " + LASTS),
        ("sinfo", 'echo "$*" >>"$LOG/sinfo"; echo "$IDLE"'),
        ("scancel", 'echo "$*" >>"$LOG/scancel"; sleep "${SCANCEL_S:-0}"; exit "${SCANCEL:-0}"'),
        ("scontrol", '[[ $1 == show ]] && { [[ $SHOWN ]] || exit 1; echo "$SHOWN"; exit; }; echo "$*" >>"$LOG/scontrol"'),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)

    def run(code: int, shown: str, *command: str, short_turn_s: int = 60, grow_after_s: int = 600, **variables: str):
        text = SCRIPT.read_text()
        for line, value in (("short_turn_s=60 ", short_turn_s), ("grow_after_s=600 ", grow_after_s), ("grow_look_s=60 ", 1)):
            assert text.count(f"\n{line}") == 1
            text = text.replace(f"\n{line}", f"\n{line.partition('=')[0]}={value} ")
        edited = tmp_path / "slurm.sbatch"
        edited.write_text(text)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        made_up = {"PATH": path, "LOG": str(tmp_path), "CODE": str(code), "SHOWN": shown}
        result = script(*command or ("jaxllm", "train", "a.yaml"), cwd=tmp_path, path=edited, **JOB | made_up | variables)
        asked = {name: tmp_path / name for name in ("scontrol", "sinfo", "scancel")}
        lines = {name: path.read_text().splitlines() if path.exists() else [] for name, path in asked.items()}
        return SimpleNamespace(
            code=result.returncode,
            said=(result.stdout + result.stderr).splitlines(),
            srun=(tmp_path / "srun").read_text().splitlines(),
            environment=(tmp_path / "environment").read_text().splitlines(),
            asked=lines["scontrol"],
            looked=lines["sinfo"],
            stopped=lines["scancel"],
        )

    return run


def shown(state: str = "RUNNING", restarts: int = 0, comment: str | None = None) -> str:
    """Output of scontrol, with some of the fields around."""
    lines = ["JobId=7 JobName=slurm.sbatch", f"   JobState={state} Reason=None Dependency=(null)"]
    lines += [f"   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0"]
    lines += [] if comment is None else [f"   Comment={comment}"]
    return "\n".join([*lines, "   AdminComment=Restarts=9 ", "   WorkDir=/home"])


@pytest.mark.parametrize("code", [0, 2])
def test_no_requeue_where_another_turn_cannot_help(slurm, code):
    found = slurm(code, shown())
    assert (found.code, found.asked) == (code, [])


def timeless(sentence):
    """Without the seconds that a command took: a loaded machine rounds some up."""
    assert int(re.search(r"after (\d+) s;", sentence)[1]) < 30
    return re.sub(r"after \d+ s;", "after N s;", sentence)


@pytest.mark.parametrize("code", [1, 76, 134, 137, 139])
def test_failures_are_requeued_and_counted_behind_the_users_words(slurm, code):
    found = slurm(code, shown(comment="for Ada (a)"))
    assert found.code == code
    comment = "update JobId=7 Comment=for Ada (a)(jaxllm: 1 failures in a row)"
    assert found.asked == [comment, "requeue Incomplete 7", "update JobId=7 StartTime=now+30"]
    assert timeless(found.said[-1]) == f"jaxllm: exit code {code} after N s; requeue 1 of at most 5 in a row, in 30 s"


def test_each_failure_in_a_row_waits_longer_until_the_last(slurm):
    found = slurm(76, shown(restarts=6, comment="(jaxllm: 3 failures in a row)"), SLURM_RESTART_COUNT="6")
    comment = "update JobId=7 Comment=(jaxllm: 4 failures in a row)"
    assert found.asked == [comment, "requeue Incomplete 7", "update JobId=7 StartTime=now+240"]
    found = slurm(76, shown(restarts=8, comment="(jaxllm: 5 failures in a row)"), SLURM_RESTART_COUNT="8")
    assert timeless(found.said[-1]) == "jaxllm: exit code 76 after N s; given up after 5 requeues in a row"
    assert (found.code, len(found.asked)) == (76, 3)


def test_a_preempted_run_is_requeued_at_once_and_forgets_its_failures(slurm):
    before = shown(restarts=40, comment="x (jaxllm: 5 failures in a row)")
    found = slurm(75, before, short_turn_s=0, SLURM_RESTART_COUNT="40")
    assert found.asked == ["update JobId=7 Comment=x (jaxllm: 0 failures in a row)", "requeue Incomplete 7"]
    assert found.said[-1] == "jaxllm: stopped by a signal, and saved; requeued"


def test_turns_that_are_stopped_as_soon_as_they_begin_are_failures(slurm):
    """The job's time limit is shorter than its warning."""
    found = slurm(75, shown(restarts=1, comment="(jaxllm: 1 failures in a row)"), SLURM_RESTART_COUNT="1")
    assert timeless(found.said[-1]) == "jaxllm: exit code 75 after N s; requeue 2 of at most 5 in a row, in 60 s"
    assert found.asked[1:] == ["requeue Incomplete 7", "update JobId=7 StartTime=now+60"]


@pytest.mark.parametrize(
    ("answer", "state"),
    [(shown("COMPLETING"), "COMPLETING"), (shown("RUNNING", restarts=1), "RUNNING"), ("", "out of reach")],
    ids=["ended by SLURM", "runs elsewhere by now", "no answer"],
)
def test_what_slurm_decided_already_is_left_to_it(slurm, answer, state):
    found = slurm(75, answer)
    assert (found.code, found.asked) == (75, [])
    assert found.said[-1] == f"jaxllm: exit code 75; not requeued from here: the job is {state}"


SMALLER = {"JAXLLM_GROW_TO": "4", "SLURM_JOB_NUM_NODES": "3"}
LOOKS = "jaxllm: 3 nodes of at most 4: looks for idle nodes after {} s, to be requeued for them"


def test_a_turn_with_fewer_nodes_ends_for_an_idle_one(slurm):
    """Soon after its begin, and the comment has failures: none counts."""
    before = shown(comment="for Ada (jaxllm: 2 failures in a row)")
    found = slurm(75, before, grow_after_s=0, UNTIL="scancel", IDLE="drained \nidle ", **SMALLER)
    assert found.code == 75
    assert found.stopped == ["--signal=TERM 7"]
    assert set(found.looked) == {"--noheader --partition=main --states=idle --format=%T"}
    comment = "update JobId=7 Comment=for Ada (jaxllm: 0 failures in a row, 1 requeues to grow)"
    assert found.asked == [comment, "requeue Incomplete 7"]
    assert LOOKS.format(0) in found.said
    assert "jaxllm: a node of partition main is idle: the run saves, to be requeued" in found.said
    assert re.fullmatch(r"jaxllm: saved, after \d+ s on 3 nodes; requeued for up to 4", found.said[-1])


@pytest.mark.parametrize(("scancel", "end"), [(0, "; requeued for up to 4"), (1, " 1 of at most 5 in a row, in 30 s")])
def test_a_run_that_ends_before_scancel_does_is_judged_by_what_scancel_says(slurm, scancel, end):
    more = {"UNTIL": "scancel", "IDLE": "idle", "SCANCEL_S": "0.5", "SCANCEL": str(scancel), **SMALLER}
    found = slurm(75, shown(), grow_after_s=0, **more)
    assert found.stopped == ["--signal=TERM 7"]
    assert found.said[-1].endswith(end)


@pytest.mark.parametrize("idle", ["", "idle*", "idle~", "drained", "planned\nmixed"])
def test_nodes_that_slurm_would_not_give_end_no_turn(slurm, idle):
    found = slurm(75, shown(), grow_after_s=0, short_turn_s=0, UNTIL="sinfo", IDLE=idle, **SMALLER)
    assert found.looked
    assert (found.stopped, found.said[-1]) == ([], "jaxllm: stopped by a signal, and saved; requeued")


@pytest.mark.parametrize(("grown", "after_s"), [(0, 600), (1, 1200), (3, 4800), (40, 38400)])
def test_each_requeue_that_brought_too_few_nodes_makes_the_next_turn_look_later(slurm, grown, after_s):
    before = f"(jaxllm: 1 failures in a row, {grown} requeues to grow)" if grown else None
    found = slurm(1, shown(comment=before), **SMALLER)
    assert LOOKS.format(after_s) in found.said
    assert (found.looked, found.stopped) == ([], [])
    more = f", {grown} requeues to grow" if grown else ""
    assert found.asked[0] == f"update JobId=7 Comment=(jaxllm: {2 if grown else 1} failures in a row{more})"


def test_a_turn_with_all_nodes_looks_for_none_and_forgets_how_often_it_grew(slurm):
    before = shown(comment="x (jaxllm: 1 failures in a row, 3 requeues to grow)")
    found = slurm(0, before, grow_after_s=0, JAXLLM_GROW_TO="2", IDLE="idle")
    assert found.asked == ["update JobId=7 Comment=x (jaxllm: 1 failures in a row)"]
    assert (found.looked, found.stopped) == ([], [])
    assert slurm(0, shown(), IDLE="idle", SLURM_JOB_NUM_NODES="1").looked == []


@pytest.mark.parametrize("code", [0, 76])
def test_what_ends_a_run_that_should_grow_counts_as_ever(slurm, code):
    """It was at its last step, or lost a peer while it saved."""
    found = slurm(code, shown(), grow_after_s=0, UNTIL="scancel", IDLE="idle", **SMALLER)
    assert found.stopped == ["--signal=TERM 7"]
    assert [line for line in found.asked if "Comment" in line] == (
        ["update JobId=7 Comment=(jaxllm: 1 failures in a row)"] if code else []
    )


def test_a_command_that_does_not_go_on_where_it_left_off_has_one_turn(slurm):
    found = slurm(1, shown(), "jaxllm", "doctor")
    assert (found.code, found.asked) == (1, [])
    assert found.srun[found.srun.index("--restarts") + 1] == "0"
    assert "JAXLLM_RESTARTS=yes" not in found.environment


def test_each_host_runs_the_command_under_a_supervisor(slurm):
    found = slurm(0, shown(), "jaxllm", "train", "a b.yaml", "run.dir=c d")
    supervised = [sys.executable, "-m", "jaxllm.cluster.supervisor", "--restarts", "10", "--"]
    assert found.srun[-10:] == [*supervised, sys.executable, "-m", "jaxllm.cli", "train", "a b.yaml", "run.dir=c d"][-10:]
    assert {"JAXLLM_RESTARTS=yes", "JAXLLM_LAUNCH_ID=7"} <= set(found.environment)
    # It would end a process that is saving when another is done.
    assert {"--kill-on-bad-exit=0", "--ntasks-per-node=1"} <= set(found.srun)
    assert "--ntasks-per-node=8" in slurm(0, shown(), SLURM_NTASKS_PER_NODE="8").srun


def secrets_of(environment: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in environment if line.startswith("JAXLLM_SECRET"))


def test_each_turn_has_a_secret_in_a_file_of_its_own(slurm, tmp_path):
    made = []
    for turn in range(2):
        found = slurm(76, shown(restarts=turn), SLURM_RESTART_COUNT=str(turn))
        assert secrets_of(found.environment) == {"JAXLLM_SECRET_FILE": f"{tmp_path}/.jaxllm-secret-7-{turn}"}
        kept = tmp_path / "kept"
        assert kept.stat().st_mode & 0o777 == 0o600
        made.append(read_secret({"JAXLLM_SECRET_FILE": str(kept)}))
        assert not list(tmp_path.glob(".jaxllm-secret-*"))
    assert [len(one) for one in made] == [64, 64]
    assert made[0] != made[1]


def test_a_folder_that_cannot_keep_a_secret_and_a_secret_that_is_given(slurm, tmp_path):
    taken = tmp_path / ".jaxllm-secret-7-0"
    taken.write_text("another user's")
    taken.chmod(0o644)
    ((name, secret),) = secrets_of(slurm(0, shown()).environment).items()
    assert (name, len(secret), taken.read_text()) == ("JAXLLM_SECRET", 64, "another user's")
    given = {"JAXLLM_SECRET_FILE": "/mine"}
    assert secrets_of(slurm(0, shown(), **given).environment) == given


PREPARE = ("jaxllm", "data", "prepare", "x", "--out", "y", "--tokenizer", "bytes")
ARRAY = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_COUNT": "4"}


def test_a_task_of_an_array_prepares_its_part(slurm):
    found = slurm(0, shown(), *PREPARE, **ARRAY, SLURM_JOB_NUM_NODES="1")
    assert found.srun[-9:] == [*PREPARE[1:], "--shard", "2/4"]


def test_a_task_of_an_array_is_requeued_alone(slurm):
    """One of the tasks has the array's number."""
    found = slurm(1, shown(), *PREPARE, **ARRAY, SLURM_JOB_NUM_NODES="1", SLURM_ARRAY_JOB_ID="7")
    assert found.asked[1:] == ["requeue Incomplete 7_2", "update JobId=7_2 StartTime=now+30"]


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (("jaxllm",), {"SLURM_JOB_ID": ""}, "this is a job script: sbatch launch/slurm.sbatch jaxllm train CONFIG"),
        ((), {}, "give the command to run: sbatch launch/slurm.sbatch jaxllm train CONFIG [section.key=value ...]"),
        (
            ("jaxllm",),
            {"JAXLLM_GROW_TO": "3-4"},
            "JAXLLM_GROW_TO=3-4 is no number of nodes: give the end of the range, 4 for sbatch",
        ),
        (("jaxllm",), {"JAXLLM_GROW_TO": "08"}, "JAXLLM_GROW_TO=08 is no number of nodes"),
        (("jaxllm",), {"PYTHON": "/bin/false"}, "/bin/false has no jaxllm: submit from a checkout with an environment"),
        (("jaxllm",), {"JAXLLM_VENV": "here"}, "/here/bin/python has no jaxllm: submit from a checkout with"),
        (PREPARE, ARRAY, "the parts of an array need a node each: give sbatch --nodes=1."),
        (PREPARE, ARRAY | {"SLURM_ARRAY_TASK_MIN": "1"}, "--array must number the parts from 0, such as --array=0-15"),
        (PREPARE, ARRAY | {"SLURM_ARRAY_TASK_MAX": "4"}, "--array must number the parts from 0, such as --array=0-15"),
    ],
)
def test_refusals_are_a_sentence(arguments, variables, sentence, tmp_path):
    result = script(*arguments, cwd=tmp_path, **JOB | variables)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert sentence in line


# ------------------------------------------------------------------------------------------------------------- containers

SUPERVISED = ["python", "-m", "jaxllm.cluster.supervisor", "--restarts", "10", "--"]
TRAIN = ["python", "-m", "jaxllm.cli", "train", "a b.yaml", "run.dir=c d"]


@pytest.fixture
def nodes(tmp_path):
    """nodes(container, srun's help, code=..., variables) -> how a node ran the job: the arguments of stand-ins for srun and for
    the container's program, and those, the folder and the variables of the command inside.
    """
    programs, image = tmp_path / "programs", tmp_path / "image.sif"
    programs.mkdir()
    image.touch()
    log = 'printf "%s\\n" "$@" >"$LOG/{}"'
    # Each runs what it was given: srun what follows its options, a container what follows its image.
    outside = 'while [[ $1 == --* ]]; do shift; done; "$@"'
    inside = '[[ " $* " == *" $IMAGE "* ]]; while [[ "$1" != "$IMAGE" ]]; do shift; done; shift; cd /; exec "$@"'
    bodies = {
        "srun": f'[[ $1 != --help ]] || {{ echo "$HELP"; exit; }}; {log.format("srun")}; {outside}',
        "apptainer": f"{log.format('container')}; {inside}",
        "enroot": f"{log.format('container')}; {inside}",
        "python": f'{log.format("command")}; pwd >"$LOG/folder"; env >"$LOG/environment"; exit "$CODE"',
        "scontrol": "exit 1",
    }
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)

    def run(container: str, helped: str = "", code: int = 0, **variables: str):
        container = container.replace("IMAGE", str(image))
        made_up = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "LOG": str(tmp_path),
            "CODE": str(code),
            "HELP": helped,
        }
        made_up |= {"JAXLLM_CONTAINER": container, "IMAGE": str(image), "JAXLLM_VENV": "/no/such/venv"}
        result = script("jaxllm", "train", "a b.yaml", "run.dir=c d", cwd=tmp_path, **JOB | made_up | variables)
        written = {
            name: (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []
            for name in ("srun", "container", "command", "folder", "environment")
        }
        return SimpleNamespace(code=result.returncode, said=result.stderr.splitlines(), image=str(image), **written)

    return run


def test_pyxis_is_asked_by_sruns_options(nodes, tmp_path):
    found = nodes("pyxis:nvcr.io#a/b:1", "  --container-image=IMAGE  [pyxis]", JAXLLM_MOUNTS="/usr,/var")
    assert found.code == 0
    (mounts,) = (word for word in found.srun if word.startswith("--container-mounts="))
    assert mounts == f"--container-mounts={tmp_path}:{tmp_path},/usr:/usr,/var:/var"
    wanted = {"--container-image=nvcr.io#a/b:1", f"--container-workdir={tmp_path}", "--container-mount-home"}
    assert wanted | {"--container-env=HOME,USER"} <= set(found.srun)
    assert found.srun[-12:] == [*SUPERVISED, *TRAIN]
    assert found.command == [*SUPERVISED, *TRAIN][1:]


def test_apptainer_runs_the_supervisor(nodes, tmp_path):
    found = nodes("apptainer:IMAGE", JAXLLM_MOUNTS="/usr", code=2)
    assert found.code == 2
    begin = ["exec", "--nv", "--bind", f"{tmp_path}:{tmp_path},/usr:/usr", "--pwd", str(tmp_path), found.image]
    assert found.container == [*begin, *SUPERVISED, *TRAIN]
    assert found.command == [*SUPERVISED, *TRAIN][1:]
    assert not any(word.startswith("--container") for word in found.srun)


def test_enroot_gets_the_variables_the_mounts_and_the_folder(nodes, tmp_path):
    """By itself it passes no variable on and begins in the image's own folder. PATH is the image's."""
    found = nodes("enroot:IMAGE", HOME="/root", SLURM_PROCID="3", NCCL_DEBUG="INFO")
    assert found.code == 0
    at = found.container.index(found.image)
    options = list(zip(found.container[1:at:2], found.container[2:at:2], strict=True))
    assert found.container[0] == "start"
    assert [value for name, value in options if name == "--mount"] == [f"{tmp_path}:{tmp_path}", "/root:/root"]
    passed = {value for name, value in options if name == "--env"}
    assert {"SLURM_PROCID", "SLURM_JOB_ID", "NCCL_DEBUG", "JAXLLM_LAUNCH_ID", "JAXLLM_RESTARTS", "HOME"} <= passed
    assert "PATH" not in passed
    assert found.command == [*SUPERVISED, *TRAIN][1:]
    assert found.folder == [str(tmp_path)]


def test_the_nodes_python_does_not_reach_into_a_container(nodes):
    found = nodes("apptainer:IMAGE", PYTHONPATH="/opt/site", PYTHONHOME="/opt")
    assert not [line for line in found.environment if line.startswith(("PYTHONPATH=", "PYTHONHOME="))]


@pytest.mark.parametrize(
    ("container", "variables", "sentence"),
    [
        ("docker:x", {}, "JAXLLM_CONTAINER=docker:x is not valid: write pyxis:IMAGE, enroot:FILE.sqsh or apptainer:FILE.sif."),
        ("image.sif", {}, "JAXLLM_CONTAINER=image.sif is not valid"),
        ("pyxis:x", {}, "JAXLLM_CONTAINER=pyxis:x needs SLURM's plugin pyxis, which srun does not have here"),
        ("singularity:x", {}, "JAXLLM_CONTAINER=singularity:x needs singularity, which is not on this node."),
        ("apptainer:/no/file.sif", {}, "JAXLLM_CONTAINER=apptainer:/no/file.sif: there is no file /no/file.sif."),
        (
            "apptainer:IMAGE",
            {"JAXLLM_MOUNTS": "/usr,data"},
            "JAXLLM_MOUNTS=/usr,data: data is no absolute path of a folder here, without",
        ),
        ("apptainer:IMAGE", {"JAXLLM_MOUNTS": "/no/folder"}, "JAXLLM_MOUNTS=/no/folder: /no/folder is no absolute path of"),
    ],
)
def test_a_container_that_cannot_run_is_refused_before_srun(nodes, container, variables, sentence):
    """A failure of srun would be requeued."""
    found = nodes(container, **variables)
    assert (found.code, found.srun) == (2, [])
    (line,) = found.said
    assert sentence in line


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_finds_nothing():
    result = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_options_stand_before_the_first_command():
    """SLURM stops reading options there."""
    lines = SCRIPT.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert sum(bool(re.match(r"#SBATCH .* # [123]\. ", line)) for line in lines) == 3


# --------------------------------------------------------------------------------------------------------- a real SLURM

NODES, APART = 10, 4
"""Nodes of a run that shall not find others are apart."""
STEPS, LONG = 40, 200
"""Steps of a run; and of one that must outlive the minute until its successor comes, at a step a second."""
SHRINKS = (
    *("launch.least_hosts=3", "parallel.zero=3", "train.global_batch_sequences=12", "train.microbatch_sequences=1"),
    "optimizer.schedule=constant",
)
JAX_START_S = 180
"""Limit for a start while nine processes compile on two busy cores."""
SMALL_S = 120
"""Limit for anything that SLURM and bash do on such a machine; they need seconds."""
DOWN_S = 90
"""From a cut to the turn elsewhere: slurmctld checks its nodes every few seconds, and takes 26 to 45."""

# Steps of a second that cost no CPU, in the first turns: a fault must find the run in progress.
PACED = """
import os, time
from jaxllm.cli import app as cli
from jaxllm.run.trainer import Trainer

advance = Trainer.advance

def paced(self):
    time.sleep(1)
    return advance(self)

if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < int(os.environ.get("PACED_TURNS", "1")):
    Trainer.advance = paced
cli.main()
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    require_slurm()
    with cluster(tmp_path_factory.mktemp("slurm") / "lab", NODES, APART) as lab:
        yield lab


@pytest.fixture(scope="module")
def place(tmp_path_factory, text_file):
    """A folder with a recipe, the batch script after a user edited it, and a Python with slow steps."""
    folder = tmp_path_factory.mktemp("jobs")
    train = TINY["train"] | {"steps": STEPS}
    data = {"source": "files", "paths": [str(text_file)], "held_out_fraction": 0.0}
    checkpoint = {"every_steps": 5}
    recipe = TINY | {"train": train, "data": data, "checkpoint": checkpoint, "run": {"cpu_devices": 1, "peer_timeout_s": 10}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    text = SCRIPT.read_text()
    # Limits that a test can wait for.
    for line, edited in (
        ("#SBATCH --gpus-per-node=8 ", "#SBATCH --gpus-per-node=1 "),
        ("#SBATCH --time=1-00:00:00 ", "#SBATCH --time=10 "),
        ("failures_in_a_row=5\n", "failures_in_a_row=1\n"),
        ("backoff_s=30 ", "backoff_s=1 "),
        ("short_turn_s=60 ", "short_turn_s=0 "),
        ("grow_after_s=600 ", "grow_after_s=0 "),
        ("grow_look_s=60 ", "grow_look_s=1 "),
    ):
        assert text.count(line) == 1
        text = text.replace(line, edited)
    (folder / "slurm.sbatch").write_text(text)
    (folder / "paced.py").write_text(PACED)
    paced = f'if [[ "$1 $2" == "-m jaxllm.cli" ]]; then set -- {folder}/paced.py "${{@:3}}"; fi'
    (folder / "python").write_text(f'#!/bin/bash\n{paced}\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def submit(lab, place):
    """submit(*options, command=[...], script=..., variables) -> Job"""
    environment = {"JAXLLM_VENV": "none", "PYTHON": str(place / "python"), "PYTHONPATH": str(CHECKOUT)}

    def submit(*options: str, command: list, script: str = "slurm.sbatch", **variables: str):
        return lab.submit(*options, script, *command, cwd=place, **environment | variables)

    return submit


def figures(folder: Path) -> dict[str, list]:
    """Contents of metrics.jsonl for each step."""
    return {key: [line[key] for line in steps_of(folder)] for key in ("step", "loss", "grad_norm")}


def assert_same_run(folder: Path, reference: Path, steps: int) -> None:
    assert figures(folder) == figures(reference)
    assert figures(folder)["step"] == list(range(1, steps + 1))
    jax.tree.map(np.testing.assert_array_equal, saved_state(folder, steps), saved_state(reference, steps))


# ------------------------------------------------------------------------------------------------------ jobs without JAX

SAVES = 'trap "echo saved; exit 75" TERM; ((SLURM_RESTART_COUNT)) && exit 0; echo ready; while :; do sleep 0.1; done'
"""A program that saves on a signal to stop, and in its second turn has nothing to do."""


@pytest.fixture(scope="module")
def small(submit, place):
    """Jobs of one node without JAX, all at once."""
    text = (place / "slurm.sbatch").read_text()
    assert text.count("restarts=10\n") == 1
    (place / "no-restarts.sbatch").write_text(text.replace("restarts=10\n", "restarts=0\n"))
    lines = (json.dumps({"text": f"document {number} " * 9}) for number in range(16_000))
    (place / "text.jsonl").write_text("\n".join(lines))
    prepare = ["jaxllm", "data", "prepare", "text.jsonl", "--tokenizer", "bytes", "--workers", "1", "--shard-megabytes", "1"]
    one = ("--nodes=1", "--gpus-per-node=0")
    return SimpleNamespace(
        limited=submit("--nodes=1", "--time=1", command=["bash", "-c", SAVES]),
        failing=submit(*one, "--comment=for Ada", script="no-restarts.sbatch", command=["bash", "-c", "echo failing; exit 7"]),
        refused=submit(*one, command=["jaxllm", "train", "tiny.yaml", "train.stepz=1"]),
        cancelled=submit(*one, command=["bash", "-c", SAVES]),
        array=submit(*one, "--array=0-1", command=[*prepare, "--out", "parts"]),
        prepare=prepare,
    )


@pytest.mark.launcher
@pytest.mark.slow
def test_scancel_ends_a_job_for_good(lab, small):
    small.cancelled.wait_for("ready", SMALL_S)
    lab.user("scancel", small.cancelled.number)
    small.cancelled.wait("CANCELLED", limit_s=SMALL_S)
    assert "0: saved" in small.cancelled.output
    assert "exit code 75; not requeued from here: the job is COMPLETING" in small.cancelled.output
    assert small.cancelled.show("Restarts") == "0"


@pytest.mark.launcher
@pytest.mark.slow
def test_bad_input_ends_a_job_at_once(small):
    assert small.refused.wait("FAILED", "COMPLETED", limit_s=SMALL_S) == "FAILED"
    assert (small.refused.show("ExitCode"), small.refused.show("Restarts")) == ("2:0", "0")
    assert "train.stepz" in small.refused.output


@pytest.mark.launcher
@pytest.mark.slow
def test_the_tasks_of_an_array_make_the_folder_of_one_process(lab, small, place):
    def completed() -> int:
        return lab.user("scontrol", "show", "job", small.array.number).count("JobState=COMPLETED")

    wait_until(lambda: completed() == 2, SMALL_S, "both tasks are done")
    command = [sys.executable, "-m", "jaxllm.cli", *small.prepare[1:], "--out", "whole"]
    subprocess.run(command, cwd=place, env=plain(PYTHONPATH=str(CHECKOUT)), check=True, capture_output=True, timeout=SMALL_S)
    parts, whole = ({path.name: path.read_bytes() for path in (place / name).iterdir()} for name in ("parts", "whole"))
    assert parts == whole
    assert len(parts) > 4


@pytest.mark.launcher
@pytest.mark.slow
def test_a_job_that_fails_is_given_up_after_so_many_turns(small):
    small.failing.wait("FAILED", limit_s=SMALL_S)
    assert (small.failing.show("ExitCode"), small.failing.show("Restarts")) == ("7:0", "1")
    assert small.failing.output.count("0: failing\n") == 2
    assert re.search("exit code 7 after \\d+ s; requeue 1 of at most 1 in a row, in 1 s", small.failing.output)
    assert re.search("exit code 7 after \\d+ s; given up after 1 requeues in a row", small.failing.output)


# ----------------------------------------------------------------------------------------------------- training, disturbed


class Run:
    """`jaxllm train` as a job, and its output folder.

    Args:
      steps: train.steps.
      processes: one on each node.
      options: sbatch's, in place of so many nodes.
      more: overrides of the config.
      variables: more of the job's environment.
    """

    def __init__(self, submit, place: Path, name: str, steps: int, processes: int, *options: str, more=(), **variables: str):
        self.folder, self.processes = place / name, processes
        self.command = ["jaxllm", "train", "tiny.yaml", f"train.steps={steps}", f"parallel.data={processes}", *more]
        options = options or (f"--nodes={processes}",)
        self.job = submit(*options, command=[*self.command, f"run.dir={name}"], **variables)
        self.nodes: list[str] = []
        """Nodes of the first turn, once `wait_until_saved` has returned."""

    def wait_until_saved(self) -> None:
        """Waits until it has a checkpoint to resume from."""
        saved = self.folder / "checkpoints"
        # Any: while another run is waited for, the first may be deleted.
        there = lambda: saved.is_dir() and any(path.name.isdecimal() for path in saved.iterdir())  # noqa: E731
        wait_until(there, JAX_START_S, lambda: f"a checkpoint in {self.folder}\n{self.job.output}")
        self.nodes = self.job.nodes

    def resumed_from(self) -> int:
        """The step at which its second turn began."""
        return int(re.search(r"0: resumed from step (\d+) in ", self.job.output)[1])

    @property
    def undisturbed(self) -> Path:
        """Output folder of the same run without SLURM and without a fault."""
        return self.folder.with_name(f"{self.folder.name}-undisturbed")

    def run_undisturbed(self) -> None:
        coordinator = f"127.0.0.1:{free_port()}"
        several = {"JAXLLM_COORDINATOR": coordinator, "JAXLLM_NUM_PROCESSES": str(self.processes), "PYTHONPATH": str(CHECKOUT)}
        command = [sys.executable, "-m", "jaxllm.cli", *self.command[1:], f"run.dir={self.undisturbed}"]
        # Saving changes only the time.
        command.append("checkpoint.every_steps=null")
        processes = [
            subprocess.Popen(
                command,
                cwd=self.folder.parent,
                env=plain(**several, JAXLLM_PROCESS_ID=str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(self.processes)
        ]
        try:
            for process in processes:
                output, _ = process.communicate(timeout=JAX_START_S)
                assert process.returncode == 0, output
        finally:
            for process in processes:
                process.kill()


@pytest.fixture(scope="module")
def runs(lab, place, submit):
    """Four runs, each disturbed as soon as it has a checkpoint, all at once: most of the time is spent waiting for SLURM.

    The first is preempted; the second loses one of two nodes; the third, of one process, loses its node's network, behind which
    it lives on: with steps of a second it has not ended before another turn begins elsewhere. The last loses one of four nodes,
    that of process 0, and there is no other.
    """
    paced = {"PACED_TURNS": "2", "JAXLLM_GROW_TO": "4"}
    runs = SimpleNamespace(
        preempted=Run(submit, place, "preempted", STEPS, 2),
        powerless=Run(submit, place, "powerless", STEPS, 2),
        cut_off=Run(submit, place, "cut-off", LONG, 1),
        shrinking=Run(submit, place, "shrinking", STEPS, 4, "--nodes=3-4", "--partition=apart", more=SHRINKS, **paced),
    )
    runs.preempted.wait_until_saved()
    lab.user("scancel", "--signal=TERM", runs.preempted.job.number)
    runs.powerless.wait_until_saved()
    # The batch script's node stays, so that a process in the middle of a step loses the other.
    lab.power_off(runs.powerless.nodes[1])
    runs.cut_off.wait_until_saved()
    lab.unplug(runs.cut_off.nodes[0])
    runs.shrinking.wait_until_saved()
    lab.power_off(runs.shrinking.nodes[0])
    for run in (runs.preempted, runs.cut_off):
        run.run_undisturbed()
    return runs


# First: its second turn lasts for little more than half a minute.
@pytest.mark.launcher
@pytest.mark.slow
def test_a_run_trains_on_with_fewer_nodes_and_takes_one_back(lab, runs):
    """The loss of each step is that of a run that lost none."""
    run = runs.shrinking

    def starts() -> list[dict]:
        return [line for line in steps_of(run.folder) if "start_unix_s" in line]

    wait_until(lambda: len(starts()) == 2, DOWN_S + JAX_START_S, lambda: f"a start with three nodes\n{run.job.output}")
    shrunk = yaml.safe_load((run.folder / "config.yaml").read_text())["parallel"]
    assert (shrunk["data"], shrunk["zero"]) == (3, 3)
    assert len(run.job.nodes) == 3
    lab.power_on(run.nodes[0])
    assert run.job.wait("COMPLETED", "FAILED", limit_s=DOWN_S + JAX_START_S) == "COMPLETED", run.job.output
    said = run.job.output
    assert [(start["devices"], start.get("absent_hosts", 0)) for start in starts()] == [(4, 0), (3, 1), (4, 0)], said
    assert run.job.show("Restarts") == "2"
    # Nothing of it was a failure.
    assert run.job.show("Comment") == "(jaxllm:"
    assert "0 failures in a row)" in lab.user("scontrol", "show", "job", run.job.number)
    assert "jaxllm: 3 nodes of at most 4: looks for idle nodes after 0 s" in said
    assert "0: 1 host is missing: training on without, the same batches in 1 microbatch, not 3; with all again when" in said
    assert re.search(r"jaxllm: saved, after \d+ s on 3 nodes; requeued for up to 4\n", said)
    (sentence,) = summary.shrunk(read_run(run.folder))
    assert "without 1 host, on 3 of 4 devices" in sentence
    mesh = ("run.cpu_devices=8", "parallel.tensor=2", f"run.dir={run.undisturbed}")
    fit(load_config(run.folder.parent / "tiny.yaml", [*run.command[3:], *mesh]))
    found, expected = figures(run.folder), figures(run.undisturbed)
    assert found["step"] == expected["step"] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.launcher
@pytest.mark.slow
def test_a_preempted_run_resumes_in_another_turn(runs):
    run = runs.preempted
    assert run.job.wait("COMPLETED", "FAILED", limit_s=DOWN_S + JAX_START_S) == "COMPLETED", run.job.output
    assert run.job.show("Restarts") == "1"
    (stopped,) = re.findall(r"0: stopped at step (\d+) by SIGTERM; saved", run.job.output)
    assert 5 <= int(stopped) == run.resumed_from() < STEPS
    assert_same_run(run.folder, run.undisturbed, STEPS)


@pytest.mark.launcher
@pytest.mark.slow
def test_a_run_whose_node_loses_power_resumes_elsewhere(runs):
    run = runs.powerless
    assert run.job.wait("COMPLETED", "FAILED", limit_s=DOWN_S + JAX_START_S) == "COMPLETED", run.job.output
    assert run.job.show("Restarts") == "1"
    assert run.nodes[1] not in run.job.nodes
    assert run.resumed_from() >= 5
    assert re.search(rf"0: jaxllm: process 1 on {run.nodes[1]} is lost \(", run.job.output)
    assert_same_run(run.folder, runs.preempted.undisturbed, STEPS)


@pytest.mark.launcher
@pytest.mark.slow
def test_a_process_behind_a_cut_cable_cannot_damage_the_run(runs):
    run = runs.cut_off
    assert run.job.wait("COMPLETED", "FAILED", limit_s=DOWN_S + JAX_START_S) == "COMPLETED", run.job.output
    (old,), (new,) = run.nodes, run.job.nodes
    assert new != old
    # It continued alone behind the cut, and its successor resumed from there.
    assert run.resumed_from() > 10
    run.job.wait_for(f"on {old} writes nothing more there", SMALL_S)
    # Its supervisor restarts it: it is refused, or has nothing left to do.
    assert re.search(rf"0: jaxllm: run\.dir=\S+ was taken over by pid \d+ on {new}: pid \d+ on {old} writes", run.job.output)
    assert_same_run(run.folder, run.undisturbed, LONG)


# Last: its job, submitted with the first, waits for half a minute.
@pytest.mark.launcher
@pytest.mark.slow
def test_a_job_whose_time_ends_saves_and_resumes_in_another_turn(small):
    assert small.limited.wait("COMPLETED", "TIMEOUT", "FAILED", limit_s=2 * SMALL_S) == "COMPLETED"
    assert small.limited.show("Restarts") == "1"
    assert "0: saved" in small.limited.output
    assert "stopped by a signal, and saved; requeued" in small.limited.output
