"""What a store of each kind may do at each stage of a run, and at each request of a copy: no checkpoint is lost or half taken.

The checkpoints are made here, of a few bytes and without a model.
"""

import errno
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import unquote

import pytest
from outside import wait_until
from store_servers import committed, gcs_door, s3_door

from jaxllm.checkpoint import store, stored_checkpoints
from jaxllm.checkpoint.files import describe_files, describe_run
from jaxllm.checkpoint.store import Store, StoreLock
from jaxllm.checkpoint.stored_checkpoints import StoredCheckpoints, hold_store
from jaxllm.cluster import distributed, exit_codes
from jaxllm.config import ConfigError
from jaxllm.data import buckets

pytest.importorskip("obstore")
pytest.importorskip("moto")
# Clients of the libraries are left to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
KINDS = ("s3", "gs")


@pytest.fixture(scope="module")
def doors():
    with s3_door("runs") as s3, gcs_door("runs") as gs:
        yield {"s3": s3, "gs": gs}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def door(doors, kind):
    door = doors[kind]
    behind = door.behind
    yield door
    door.rule, door.behind = None, behind


@pytest.fixture
def place(door, kind, request):
    """An empty store."""
    return Store(f"{kind}://runs/" + re.sub(r"\W", "-", request.node.name))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two tries of ours, and two of the libraries without pauses."""
    monkeypatch.setattr(stored_checkpoints, "WAITS_S", (0.01,))
    monkeypatch.setattr(buckets, "TRIES", 2)
    monkeypatch.setattr(buckets, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def here(tiny_config, tmp_path):
    """The run directory of a run with checkpoints 2 and 4."""
    for step in (2, 4):
        make_checkpoint(tmp_path / "here", step, tiny_config())
    return tmp_path / "here"


def make_checkpoint(run_dir, step, config, data=b"") -> Path:
    folder = run_dir / "checkpoints" / str(step)
    for name, content in (
        ("state/manifest.ocdbt", b"%d" % step),
        ("state/d/1", data or b"array %d" % step),
        ("meta/metadata", json.dumps(describe_run(config, step, "text")).encode()),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    describe_files(folder)
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in range(1, step + 1)))
    return folder


def contents(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def copier(place, run_dir, config, **changes):
    """Copies of a run's checkpoints, and the lock."""
    lock = StoreLock(place)
    lock.take()
    stored = StoredCheckpoints(place, lock, run_dir, config.checkpoint.model_copy(update=changes))
    try:
        yield stored
    finally:
        stored.close()
        lock.release()


def copy(stored, *steps):
    for step in steps:
        stored.offer(step)
        assert stored.wait() is None


def assert_a_new_machine_takes(step, place, here, config, folder):
    """And that it has the bytes that the first one saved."""
    with copier(place, folder, config) as stored:
        assert stored.fetch(newer_than=-1) == (step, [f"took checkpoint {step} from {place.address}"])
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(step)]
    assert contents(folder / f"checkpoints/{step}") == contents(here / f"checkpoints/{step}")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == step


class Fault:
    """A rule of a server that fails: requests of these methods whose path has a word.

    Attributes:
      met: the number of these requests so far.
    """

    def __init__(self, door, kind, fault, methods, word):
        self._door, self._fault, self._methods, self._word, self.met = door, fault, methods, word, 0
        self._over = threading.Event()
        quota = QUOTA if kind == "s3" else GOOGLE_QUOTA
        self._answers = {"busy": 503, "busy once": (503, SLOW_DOWN), "refused": 403, "full": 507, "full by quota": (403, quota)}

    def __call__(self, method, path):
        if self._over.is_set() or method not in self._methods or self._word not in unquote(path):
            return None
        self.met += 1
        if self._fault == "dead":
            # Nothing listens there: connections break off, from now on.
            self._door.behind = 1
        if self._fault == "silent":
            self._over.wait(60)
        return None if self._fault == "busy once" and self.met > 1 else self._answers.get(self._fault)

    def end(self):
        self._over.set()


# The words of S3, Ceph and Google.
SLOW_DOWN = b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>SlowDown</Code></Error>"
QUOTA = b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>QuotaExceeded</Code><BucketName>runs</BucketName></Error>"
GOOGLE_QUOTA = b'{"error": {"code": 403, "message": "Quota exceeded for the project."}}'
WRITES, ALL = ("PUT", "POST"), ("GET", "HEAD", "PUT", "POST", "DELETE")
STAGES = {"begin": (ALL, ""), "copy": (WRITES, "/4/"), "retention": (("DELETE",), "/2/"), "restore": (("GET",), "/4/state")}
FAULTS = {
    "busy": ("it does not answer as it should, .* 503 .*", exit_codes.LOST),
    "dead": ("it does not answer as it should, HTTP error: .*", exit_codes.LOST),
    "silent": ("it does not answer as it should, TimeoutError", exit_codes.LOST),
    "refused": ("access is refused", exit_codes.BAD_INPUT),
    "full": ("it is full", exit_codes.BAD_INPUT),
    "full by quota": ("it is full", exit_codes.BAD_INPUT),
}


@contextmanager
def broken(door, kind, fault, stage, monkeypatch):
    behind, (methods, word) = door.behind, STAGES[stage]
    if fault.startswith("full"):
        # It still deletes and reads.
        methods = WRITES
    rule = door.rule = Fault(door, kind, fault, methods, word)
    with monkeypatch.context() as patch:
        if fault == "silent":
            patch.setattr(store, "ANSWER_S", 0.2)
        try:
            yield
        finally:
            rule.end()
            door.rule, door.behind = None, behind
    assert rule.met > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_at_the_start_is_named_with_the_right_exit_code(
    place, door, kind, here, tiny_config, monkeypatch, fault
):
    config, (reason, code) = tiny_config(f"checkpoint.store={place.address}").checkpoint, FAULTS[fault]
    with (
        broken(door, kind, fault, "begin", monkeypatch),
        pytest.raises(ConfigError, match=rf"^checkpoint.store={place.address} cannot be used \({reason}\): \w.*\.$") as error,
        hold_store(here, config),
    ):
        pass
    assert error.value.exit_code == code
    with hold_store(here, config) as (_, has_one):
        assert not has_one


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_that_fails_leaves_the_checkpoint_before(
    place, door, kind, here, tiny_config, tmp_path, caplog, monkeypatch, fault
):
    config, (reason, code) = tiny_config(), FAULTS[fault]
    with copier(place, here, config) as stored:
        copy(stored, 2)
        with broken(door, kind, fault, "copy", monkeypatch):
            stored.offer(4)
            failure = stored.wait()
        sentence = (
            rf"Checkpoint 4 could not be copied to {place.address} \({reason}\): it is safe in {here}/checkpoints; remove "
        )
        assert re.match(sentence, str(failure)), failure
        assert failure.exit_code == code
        assert len(re.findall(rf"Checkpoint 4 is not in {place.address} \({reason}\): training continues.", caplog.text)) == 1
        assert committed(place) == [2]
    assert_a_new_machine_takes(2, place, here, config, tmp_path / "new")
    # The same process, or the next one, copies it.
    with copier(place, here, config) as stored:
        stored.offer_local(latest=4)
        assert stored.wait() is None
    assert committed(place) == [2, 4]
    assert_a_new_machine_takes(4, place, here, config, tmp_path / "newer")


@pytest.mark.parametrize("fault", ["busy", "dead", "silent", "refused"])
def test_what_cannot_be_deleted_is_no_failure_of_the_copy(
    place, door, kind, here, tiny_config, tmp_path, caplog, monkeypatch, fault
):
    config, (reason, _) = tiny_config(), FAULTS[fault]
    with copier(place, here, config, keep=1) as stored:
        copy(stored, 2)
        with broken(door, kind, fault, "retention", monkeypatch):
            copy(stored, 4)
        assert re.search(
            rf"Older checkpoints in {place.address} are not deleted \({reason}\): the next copy tries again.", caplog.text
        )
        assert "training continues" not in caplog.text
    assert_a_new_machine_takes(4, place, here, config, tmp_path / "new")
    with copier(place, here, config, keep=1) as stored:
        copy(stored, 4)
    assert list(place.steps()) == [4]


@pytest.mark.parametrize("fault", ["busy", "dead", "silent", "refused"])
def test_a_restore_that_fails_leaves_nothing_half_and_passes_over_nothing(
    place, door, kind, here, tiny_config, tmp_path, monkeypatch, fault
):
    config, (reason, code), new = tiny_config(), FAULTS[fault], tmp_path / "new"
    with copier(place, here, config) as stored:
        copy(stored, 2, 4)
    before = place.steps()
    with copier(place, new, config) as stored:
        with (
            broken(door, kind, fault, "restore", monkeypatch),
            pytest.raises(ConfigError, match=rf"^checkpoint.store={place.address} cannot be used \({reason}\): ") as error,
        ):
            stored.fetch(newer_than=-1)
        assert error.value.exit_code == code
        assert contents(new) == {}
        # Checkpoint 4 is not damaged: it is not the one before that a restart takes.
        assert stored.damaged == {}
    assert place.steps() == before
    assert_a_new_machine_takes(4, place, here, config, new)


@pytest.mark.parametrize("stage", STAGES)
def test_a_store_that_is_busy_for_a_moment_changes_nothing(
    place, door, kind, here, tiny_config, tmp_path, caplog, monkeypatch, stage
):
    config = tiny_config()

    def moment(now):
        return broken(door, kind, "busy once", stage, monkeypatch) if now == stage else nullcontext()

    with moment("begin"), copier(place, here, config, keep=1) as stored:
        copy(stored, 2)
        with moment("copy"), moment("retention"):
            copy(stored, 4)
    with moment("restore"):
        assert_a_new_machine_takes(4, place, here, config, tmp_path / "new")
    assert list(place.steps()) == [4]
    assert [record.message for record in caplog.records if record.name.startswith("jaxllm")] == []


def test_a_store_that_throttles_each_request_once_and_is_slow_is_only_slower(place, door, here, tiny_config, tmp_path, caplog):
    """All requests of a run: lock, copies, retention, and the restore on a new machine."""
    config, asked, gate = tiny_config(), Counter(), threading.Lock()

    def rule(method, path):
        time.sleep(0.02)
        with gate:
            asked[method, path] += 1
            return (503, SLOW_DOWN) if asked[method, path] % 2 else None

    door.rule = rule
    with copier(place, here, config, keep=1) as stored:
        copy(stored, 2, 4)
    assert_a_new_machine_takes(4, place, here, config, tmp_path / "new")
    assert list(place.steps()) == [4]
    assert len(asked) > 10
    assert [record.message for record in caplog.records if record.name.startswith("jaxllm")] == []


def test_a_store_that_dies_at_any_request_of_a_copy_has_a_whole_checkpoint(place, door, here, tiny_config, tmp_path):
    """As a kill of the run, as seen by the store: nothing comes after the n-th request. Checkpoint 4 replaces 2."""
    config = tiny_config()

    def copy_four(address, at_most=None) -> int:
        with copier(Store(address), here, config, keep=1) as stored:
            copy(stored, 2)
            count, gate = 0, threading.Lock()

            def rule(method, path):
                nonlocal count
                with gate:
                    count += 1
                    return 503 if at_most is not None and count > at_most else None

            door.rule = rule
            stored.offer(4)
            stored.wait()
            done, door.rule = count, None
        return done

    requests, seen = copy_four(f"{place.address}/undisturbed"), set()
    assert requests > 10
    for number in range(requests):
        one = Store(f"{place.address}/{number}")
        copy_four(one.address, number)
        step = max(committed(one))
        seen.add((step, *one.steps()))
        assert_a_new_machine_takes(step, one, here, config, tmp_path / str(number))
        with copier(one, here, config, keep=1) as stored:
            copy(stored, 4)
        assert list(one.steps()) == [4]
        assert_a_new_machine_takes(4, one, here, config, tmp_path / f"{number}-then")
    # Each state between was met: 4 not begun, begun, there beside 2, and beside what is left of 2.
    assert seen >= {(2, 2), (2, 2, 4), (4, 2, 4)}


COPY = """
import sys
from pathlib import Path
from jaxllm.checkpoint.store import Store, StoreLock
from jaxllm.checkpoint.stored_checkpoints import StoredCheckpoints
from jaxllm.config import CheckpointConfig

place = Store(sys.argv[1])
lock = StoreLock(place)
lock.take()
stored = StoredCheckpoints(place, lock, Path(sys.argv[2]), CheckpointConfig())
stored.offer(4)
stored.wait()
"""


def test_a_kill_inside_a_file_of_several_parts_leaves_nothing_that_is_taken_for_whole(
    place, door, kind, here, tiny_config, tmp_path
):
    config, content = tiny_config(), random.Random(0).randbytes(2 * store.PIECE + 5)
    with copier(place, here, config) as stored:
        copy(stored, 2)
    make_checkpoint(here, 4, config, content)
    parts, reached, ended = [], threading.Event(), threading.Event()

    def rule(method, path):
        if method in WRITES and re.search("partNumber=", path):
            parts.append(path)
            if len(parts) > 1 and not ended.is_set():
                # The first part is there, and no more.
                reached.set()
                ended.wait(60)
                return 503

    door.rule = rule
    process = subprocess.Popen(
        [sys.executable, "-c", COPY, place.address, here],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(reached.is_set, process, 100)
    process.kill()
    process.communicate()
    ended.set()
    assert committed(place) == [2]
    assert "state/d/1" not in place.steps()[4]
    assert_a_new_machine_takes(2, place, here, config, tmp_path / "new")
    del parts[:]
    with copier(place, here, config) as stored:
        copy(stored, 4)
    assert len(parts) == 3
    assert_a_new_machine_takes(4, place, here, config, tmp_path / "newer")


def damaged(place, kind):
    """Damages checkpoint 4. Returns the reason that is said."""
    name, listed = "4/state/d/1", json.loads(place.read("4/files.json", 2**20))
    content = place.read(name, 2**20)
    if kind == "changed":
        place.write(name, bytes([content[0] ^ 1]) + content[1:])
        return "state/d/1 has changed"
    if kind == "torn":
        place.write(name, content[:-1])
        return f"state/d/1 has {len(content) - 1} bytes of {len(content)}"
    if kind == "missing":
        place.remove([name])
        return "state/d/1 is missing"
    if kind == "no metadata":
        place.remove(["4/meta/metadata"])
        return "meta/metadata is missing"
    if kind == "other metadata":
        size = listed["meta/metadata"][0]
        place.write("4/meta/metadata", b" " * size)
        return "not JSON.*|.*"
    if kind == "empty list":
        place.write("4/files.json", b"")
    elif kind == "torn list":
        place.write("4/files.json", json.dumps(listed).encode()[:-9])
    elif kind == "list of a list":
        place.write("4/files.json", b"[]")
    return ".+"


DAMAGE = ("changed", "torn", "missing", "no metadata", "other metadata", "empty list", "torn list", "list of a list")


# What is wrong with a file is found in the same way in each kind of store.
@pytest.mark.parametrize(("kind", "damage"), zip(itertools.cycle(KINDS), DAMAGE), indirect=["kind"])
def test_a_damaged_checkpoint_is_named_passed_over_and_replaced(place, door, here, tiny_config, tmp_path, damage):
    config, new = tiny_config(), tmp_path / "new"
    with copier(place, here, config) as stored:
        copy(stored, 2, 4)
    reason = damaged(place, damage)
    before = place.steps()
    with copier(place, new, config) as stored:
        step, (first, second) = stored.fetch(newer_than=-1)
        assert step == 2
        assert re.fullmatch(rf"checkpoint 4 in {place.address} is damaged \({reason}\): it stays there, unused", first), first
        assert second == f"took checkpoint 2 from {place.address}"
        assert place.steps() == before
        assert [path.name for path in (new / "checkpoints").iterdir()] == ["2"]
        # The run saves that step again.
        assert contents(make_checkpoint(new, 4, config)) == contents(here / "checkpoints/4")
        copy(stored, 4)
    assert_a_new_machine_takes(4, place, here, config, tmp_path / "newer")


def test_a_file_that_disappears_while_it_is_copied_is_damage(place, door, here, tiny_config, tmp_path):
    config = tiny_config()
    with copier(place, here, config) as stored:
        copy(stored, 2, 4)
    door.rule = lambda method, path: 404 if method == "GET" and "/4/state/d" in unquote(path) else None
    with copier(place, tmp_path / "new", config) as stored:
        step, (first, _) = stored.fetch(newer_than=-1)
    assert step == 2
    assert "checkpoint 4 in" in first
    assert "is damaged (a file has disappeared while it was being copied)" in first


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_is_not_a_silent_store(place, door, kind, here, tiny_config, tmp_path, monkeypatch, code):
    config, new = tiny_config(), tmp_path / "new"
    with copier(place, here, config) as stored:
        copy(stored, 4)

    def full(path, mode="r"):
        if mode == "wb" and "/state/" in str(path):
            raise OSError(code, "the system's words", str(path))
        return open(path, mode)

    with copier(place, new, config) as stored:
        monkeypatch.setattr(store, "open", full, raising=False)
        sentence = rf"^{new}/checkpoints does not take the checkpoint of {place.address} \(the system's words: .*: remove"
        with pytest.raises(ConfigError, match=sentence) as error:
            stored.fetch(newer_than=-1)
        monkeypatch.delattr(store, "open")
        assert error.value.exit_code == exit_codes.BAD_INPUT
        assert contents(new) == {}
    assert_a_new_machine_takes(4, place, here, config, new)


def test_an_outage_that_another_process_met_has_its_exit_code(monkeypatch):
    """Process 1 could not reach the store: all end with its sentence, and with a code to restart."""
    outage, sent = ConfigError("Process 1 on h1: the store does not answer."), []
    outage.exit_code = exit_codes.LOST

    class OtherError(ConfigError):
        pass

    def meet(here: ConfigError | None) -> None:
        with distributed.raising_together(OtherError):
            if here is not None:
                raise here

    for here, says in ((outage, lambda text: (sent.append(text), text)[1]), (None, lambda text: text or sent[0])):
        monkeypatch.setattr(distributed, "first_nonempty", says)
        with pytest.raises(OtherError) as error:
            meet(here)
        assert (str(error.value), error.value.exit_code) == (str(outage), exit_codes.LOST)
