"""Checkpoints of hosts that share no disk, without training: what is joined, fetched, kept and removed, and what faults do."""

import json
import re
import shutil
from contextlib import contextmanager

import pytest
from hosts_in_threads import Run, plain_copy, values_in, whole_values, write_part
from store_servers import committed, gcs_door

from jaxllm.checkpoint import host_shares
from jaxllm.checkpoint.files import describe_run, saved_steps
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.checkpoint.store import Store
from jaxllm.cluster import exit_codes
from jaxllm.config import ConfigError
from jaxllm.data import buckets

pytest.importorskip("obstore")
pytest.importorskip("moto")
# Clients of the libraries are left to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def store(bucket, monkeypatch):
    """An empty store, asked once."""
    monkeypatch.setattr(buckets, "TRIES", 1)
    return Store(bucket)


@pytest.fixture
def start(monkeypatch, tiny_config, store, tmp_path):
    """start("a", "b") -> Run with a process on each of these hosts, which has begun."""
    runs = []

    def begin(*hosts, config=(), into=store, **more):
        run = Run(monkeypatch, into, [tmp_path / host for host in hosts], tiny_config("checkpoint.keep=2", *config), **more)
        runs.append(run)
        run.begin()
        return run

    yield begin
    for run in runs:
        run.end()


def here(folder) -> list[int]:
    return saved_steps(folder / "checkpoints")


def shares(folder) -> list[str]:
    """The parts in a run directory: RANK/STEP."""
    return sorted("/".join(path.parts[-3:-1]) for path in (folder / "shares").glob("*/*/*/files.json"))


@pytest.fixture(params=["s3", "gs"])
def either(request, store, monkeypatch):
    """An empty store of each kind."""
    if request.param == "s3":
        yield store
        return
    with gcs_door("runs"):
        yield Store("gs://runs/first")


def test_two_processes_on_each_of_two_hosts_join_and_each_host_fetches_once(either, start, tmp_path, monkeypatch):
    monkeypatch.setattr(host_shares, "SHARED_LIMIT_S", 0.1)
    run = start("a", "a", "b", "b", into=either)
    assert run.on_all(lambda rank: host_shares.find_disk_groups(run.folders[rank])) == [run.groups] * 4
    assert run.groups.leaders == (0, 0, 2, 2)
    run.save(4)
    assert run.copy(4) is None
    run.look()
    run.end()
    assert committed(either) == [4]
    names = set(either.steps()[4])
    assert not any(name.startswith("parts/") for name in names)
    assert names - {"files.json"} == json.loads(either.read("4/files.json", 2**20)).keys()
    assert values_in(plain_copy(either, 4, tmp_path / "plain")) == whole_values(4, 4)

    fetched = []
    again = start("c", "d", "d", into=either, accept=lambda address, meta: fetched.append(meta["step"]))
    assert (again.latest, again.said) == (4, [f"took checkpoint 4 from {either.address}"])
    assert fetched == [4, 4]
    for host in ("c", "d"):
        assert values_in(tmp_path / host / "checkpoints/4") == whole_values(4, 4)
    assert shares(tmp_path / "a") == []


def test_a_host_keeps_one_fetched_checkpoint_and_what_the_store_lacks(start, store, tmp_path):
    for step in (2, 4, 6):
        run = start("a", "b")
        run.save(step)
        assert run.copy(step) is None
        run.end()
        # What the store has lost, it has otherwise, or it never had.
        if step == 4:
            shutil.copytree(tmp_path / "a/checkpoints/2", tmp_path / "a/checkpoints/1")
    assert (here(tmp_path / "a"), here(tmp_path / "b")) == ([1, 4], [4])
    (tmp_path / "b/checkpoints/4/files.json").write_text("{}")
    start("a", "b")
    assert (here(tmp_path / "a"), here(tmp_path / "b")) == ([1, 6], [4, 6])


@pytest.mark.parametrize("kind", ["damaged", "intact"])
def test_with_an_empty_store_a_run_does_not_start_from_scratch_beside_checkpoints(door, start, store, tmp_path, kind):
    run = start("a", "b")
    run.save(2)
    assert run.copy(2) is None
    run.end()
    start("a", "b").end()
    store.remove(f"2/{name}" for name in store.steps()[2])
    shutil.rmtree(tmp_path / "a/checkpoints")
    if kind == "damaged":
        (tmp_path / "b/checkpoints/2/meta/metadata").unlink()
        reason = (
            r"No checkpoint in \S*/b/checkpoints is intact: 2 \(.*\); restore a copy of one there, or choose another run.dir"
        )
    else:
        reason = rf"\S*/b/checkpoints has checkpoint 2, and {store.address} has none, while the hosts share no run.dir: start"
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^Process 1 on .*: {reason}"):
            start("a", "b")
    # Nor while it is away.
    door.rule = lambda method, path: 503
    with pytest.raises(
        ConfigError, match=r"^Process 0 on .*: checkpoint.store=.* cannot be used \(it does not answer as it should"
    ) as away:
        start("a", "b")
    assert away.value.exit_code == exit_codes.LOST
    assert here(tmp_path / "b") == [2]


def test_a_host_with_a_newer_checkpoint_moves_it_aside(start, store, tmp_path):
    for step in (2, 4):
        run = start("a", "b")
        run.save(step)
        assert run.copy(step) is None
        run.end()
    start("a", "b").end()
    # Killed when the store's had been removed, to be replaced.
    store.remove(f"4/{name}" for name in store.steps()[4])
    shutil.rmtree(tmp_path / "a/checkpoints/4")
    before = values_in(tmp_path / "b/checkpoints/4")
    run = start("a", "b")
    assert run.latest == 2
    place = tmp_path / "b/checkpoints-damaged"
    said = f"is newer than 2, the newest whole one in {store.address}: moved to {place}"
    assert [re.sub("4 on .* is", "4 is", line) for line in run.said[1:]] == [f"checkpoint 4 {said}"]
    assert values_in(place / "4-1") == before
    assert (here(tmp_path / "a"), here(tmp_path / "b")) == ([2], [2])
    run.save(4)
    assert run.copy(4) is None
    run.end()
    assert start("a", "b").latest == 4


def test_parts_stay_until_their_hosts_are_back_or_the_run_has_gone_further(door, start, store, tmp_path):
    run = start("a", "b", "c")
    run.save(2)
    assert run.copy(2) is None
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 4, "loss": 1}\n')
    door.rule = lambda method, path: 403 if method == "PUT" and "/4/" in path else None
    run.save(4)
    assert "access is refused" in str(run.copy(4))
    run.end()
    door.rule = None
    # Host c is away; starts without it, and ends before the next checkpoint.
    for name in ("a/.to-store/9", "b/checkpoints/4.from-store", "b/shares/old-2/1/2"):
        (tmp_path / name).mkdir(parents=True)
    for _ in range(2):
        start("a", "b").end()
    assert [shares(tmp_path / host) for host in "abc"] == [["0/4"], ["1/4"], ["2/4"]]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"checkpoints", "metrics.jsonl", "shares"}
    assert here(tmp_path / "b") == [2]
    assert [path.name for path in (tmp_path / "b/checkpoints").iterdir()] == ["2"]
    assert not (tmp_path / "b/shares/old-2").exists()
    # With it again the checkpoint is whole, whatever the order; its curves are on the host that was that of process 0.
    run = start("b", "c", "a")
    assert run.said[0] == f"copied checkpoint 4, of which the hosts had all parts, to {store.address}"
    assert run.latest == 4
    assert values_in(tmp_path / "c/checkpoints/4") == whole_values(4, 3)
    assert (tmp_path / "b/metrics.jsonl").read_text() == (tmp_path / "a/metrics.jsonl").read_text()
    assert [shares(tmp_path / host) for host in "abc"] == [[], [], []]

    door.rule = lambda method, path: 403 if method == "PUT" and "/6/" in path else None
    run.save(6)
    assert run.copy(6) is not None
    run.end()
    door.rule = None
    run = start("a", "b")
    assert [shares(tmp_path / host) for host in "ab"] == [["2/6"], ["0/6"]]
    # From now on the parts are of a past that the run does not have.
    run.save(5)
    assert run.copy(5) is None
    run.look()
    assert [shares(tmp_path / host) for host in "ab"] == [[], []]
    run.end()
    assert start("a", "b", "c").latest == 5


def test_parts_of_another_run_are_not_copied(door, start, store, tmp_path):
    door.rule = lambda method, path: 403 if method == "PUT" and "/2/" in path else None
    run = start("a", "b")
    run.save(2)
    assert run.copy(2) is not None
    run.end()
    door.rule = None

    def accept(address, meta):
        raise ConfigError(f"{address} holds another run.")

    with pytest.raises(ConfigError, match=r"^Process 0 on .*: \S*/a/shares/\S*/0/2 holds another run\.$"):
        start("a", "b", accept=accept)
    assert store.steps() == {}


def test_a_torn_part_is_passed_over(door, start, store, tmp_path):
    run = start("a", "b")
    run.save(2)
    assert run.copy(2) is None
    door.rule = lambda method, path: 403 if method == "PUT" and "/4/" in path else None
    run.save(4)
    assert run.copy(4) is not None
    run.end()
    door.rule = None
    for host, name, content in (
        ("a", "0/4/meta/metadata", "?"),
        ("b", "1/4/state/array_metadatas/process_1", ""),
        ("b", "1/4/files.json", "["),
    ):
        (path,) = (tmp_path / host / "shares").glob(f"*/{name}")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"?" if content == "?" else content.encode())
        run = start("a", "b")
        assert (run.latest, len(run.said)) == (2, 2)
        assert re.search(r"a/shares of each host has 1 of the 2 parts of checkpoint 4 intact: a start with all", run.said[1])
        run.end()
        path.write_bytes(whole)
    assert start("a", "b").latest == 4


def test_a_part_of_an_earlier_version_is_neither_copied_nor_deleted(door, start, store, tmp_path):
    """It has an index of its arrays, in the name that the whole checkpoint's index would have."""
    run = start("a", "b")
    with failing(door, "PUT", "/2/", 403, -1):
        run.save(2)
        assert run.copy(2) is not None
    run.end()
    (folder,) = (tmp_path / "b/shares").glob("*/1/2")
    (folder / "state/manifest.ocdbt").write_bytes(b"")
    listed = json.loads((folder / "files.json").read_text())
    (folder / "files.json").write_text(json.dumps(listed | {"state/manifest.ocdbt": [0, 0]}))
    with pytest.raises(ConfigError, match=rf"^Process 1 on .*: {folder} is a part that an earlier jaxllm wrote.*start the run"):
        start("a", "b")
    assert [shares(tmp_path / host) for host in "ab"] == [["0/2"], ["1/2"]]
    assert store.steps() == {}


def test_with_an_empty_store_a_run_does_not_start_from_scratch_beside_parts(door, start, store, tmp_path):
    run = start("a", "b", "c")
    with failing(door, "PUT", "/2/", 403, -1):
        run.save(2)
        assert run.copy(2) is not None
    run.end()
    assert run.on_all(lambda rank: run.joined[rank].has_parts()) == [True] * 3
    rest = f"and {store.address} has no checkpoint: start the run on all hosts that have its parts"
    with pytest.raises(ConfigError, match=rf"^\S*/a/shares of each host has 2 of the 3 parts of checkpoint 2 intact, {rest}"):
        start("a", "b")
    (path,) = (tmp_path / "c/shares").glob("*/2/2/meta/metadata")
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"has 2 of the 3 parts of checkpoint 2 intact, {rest}"):
        start("a", "b", "c")
    path.write_bytes(whole)
    assert [shares(tmp_path / host) for host in "abc"] == [["0/2"], ["1/2"], ["2/2"]]
    assert start("c", "b", "a").latest == 2


def test_parts_of_a_first_save_that_never_ended_do_not_refuse_a_start(start, store, tmp_path):
    run = start("a", "b")
    run.save(2, ranks=[0])
    assert run.on_all(lambda rank: run.joined[rank].has_parts()) == [False] * 2
    run.end()
    run = start("a", "b")
    assert (run.latest, run.said) == (None, [])
    run.save(2)
    assert run.copy(2) is None
    run.look()
    assert [shares(tmp_path / host) for host in "ab"] == [[], []]


def test_an_older_checkpoint_of_the_hosts_is_copied_if_the_newest_is_damaged(door, start, store, tmp_path):
    run = start("a", "b")
    with failing(door, "PUT", "/[24]/", 403, -1):
        for step in (2, 4):
            run.save(step)
            assert run.copy(step) is not None
    run.end()
    for path in (tmp_path / "b/shares").glob("*/1/4/state/*/1"):
        path.write_bytes(b"?" * path.stat().st_size)
    run = start("a", "b")
    assert run.latest == 2
    assert [re.sub(r" \(.*\)| in s3.*|, of .*| from .*", "", line) for line in run.said] == [
        "copied checkpoint 4",
        "checkpoint 4",
        "copied checkpoint 2",
        "took checkpoint 2",
    ]
    assert values_in(tmp_path / "a/checkpoints/2") == whole_values(2, 2)


@contextmanager
def failing(door, method, path, status, times):
    """The first so many requests of a method for a path are answered with a status."""
    left = [times]

    def rule(asked, at):
        if asked == method and re.search(path, at) and left[0]:
            left[0] -= 1
            return status

    door.rule = rule
    yield left
    door.rule = None


def test_a_failure_between_the_parts_and_the_list_of_files_is_tried_again(door, start, store, tmp_path):
    run = start("a", "b")
    run.save(2)
    with failing(door, "PUT", r"/2/files\.json", 503, 1) as left:
        assert run.copy(2) is None
    assert left == [0]
    assert committed(store) == [2]
    assert values_in(plain_copy(store, 2, tmp_path / "plain")) == whole_values(2, 2)


def test_a_copy_whose_store_cannot_be_listed_after_the_commit_is_whole_and_the_next_one_deletes_older_ones(
    door, start, store, tmp_path, caplog
):
    run = start("a", "b", config=["checkpoint.keep=1"])
    run.save(2)
    assert run.copy(2) is None
    run.save(4)
    is_committed = []

    def rule(asked, at):
        if asked == "PUT" and at.endswith("/4/files.json"):
            is_committed.append(True)
        elif asked == "GET" and is_committed:
            return 503

    door.rule = rule
    assert run.copy(4) is None
    door.rule = None
    assert "are not deleted (it does not answer as it should" in caplog.text
    run.look()
    assert committed(store) == [2, 4]
    assert [shares(tmp_path / host) for host in "ab"] == [[], []]
    run.save(6)
    assert run.copy(6) is None
    assert committed(store) == [6]


@pytest.mark.parametrize(("status", "code"), [(503, exit_codes.LOST), (403, exit_codes.BAD_INPUT)])
def test_an_outage_of_another_host_may_pass_and_a_refusal_does_not(door, start, store, tmp_path, status, code):
    run = start("a", "b")
    run.save(2)
    with failing(door, "PUT", r"/2/.*process_1", status, -1):
        failure = run.copy(2)
    assert failure.exit_code == code
    assert re.search(r"could not be copied to .* for process 1 on .*: it is safe in \S*/a/shares of each host", str(failure))
    assert [shares(tmp_path / host) for host in "ab"] == [["0/2"], ["1/2"]]


def test_permanent_parts_stay_until_they_are_copied(door, start, store, tmp_path):
    run = start("a", "b", config=["checkpoint.keep=1", "checkpoint.keep_every_steps=2"])
    with failing(door, "PUT", "/[24]/", 403, -1):
        for step in (2, 3, 4, 5, 7):
            run.save(step)
            run.joined[0].offer(step)
        assert run.joined[0].wait() is not None
        run.look()
    assert committed(store) == [7]
    assert [shares(tmp_path / host) for host in "ab"] == [["0/2", "0/4"], ["1/2", "1/4"]]
    run.joined[0].offer(2)
    assert run.copy(4) is None
    run.look()
    assert committed(store) == [2, 4, 7]
    assert [shares(tmp_path / host) for host in "ab"] == [[], []]


def test_permanent_parts_of_any_age_stay_until_all_their_hosts_are_back(door, start, store, tmp_path):
    more = ["checkpoint.keep=1", "checkpoint.keep_every_steps=2"]
    run = start("a", "b", config=more)
    for step in (2, 3, 4):
        run.save(step)
        with failing(door, "PUT", "/[24]/", 403, -1):
            assert run.copy(step) is not None
    run.look()
    run.end()
    assert committed(store) == [3]
    for step in (5, 7):
        run = start("a", config=more)
        assert run.latest == {5: 3, 7: 5}[step]
        run.save(step)
        assert run.copy(step) is None
        run.look()
        run.end()
        assert [shares(tmp_path / host) for host in "ab"] == [["0/2", "0/4"], ["1/2", "1/4"]]
    run = start("a", "b", config=more)
    copied = [f"copied checkpoint {step}, of which the hosts had all parts, to {store.address}" for step in (2, 4)]
    assert (run.latest, run.said) == (7, [*copied, f"took checkpoint 7 from {store.address}"])
    assert committed(store) == [2, 4, 7]
    assert [shares(tmp_path / host) for host in "ab"] == [[], []]
    for step in (2, 4):
        assert values_in(plain_copy(store, step, tmp_path / "plain")) == whole_values(step, 2)


def test_a_part_that_is_deleted_under_its_copy_commits_nothing(start, store, tmp_path):
    """A later start on the host deletes the parts of one of which a process still runs."""
    run = start("a", "b")
    run.save(2, ranks=[0])
    write_part(run.joined[1].shares.folder / "2", 1, describe_run(run._config, 2, "a text"))
    (run.joined[1].shares.folder / "2/state/array_metadatas/process_1").unlink()
    failure = run.copy(2)
    assert re.search(r"No such file or directory.*process_1.*, for process 1 on", str(failure))
    assert committed(store) == []
    shutil.rmtree(run.joined[1].shares.folder / "2")
    assert "it was deleted before it was copied, for process 1 on" in str(run.copy(2))
    run.end()
    assert [*store.steps()] == [2]
    assert start("a", "b").latest is None
    assert store.steps() == {}


def test_a_damaged_checkpoint_of_the_store_counts_as_the_newest_for_memory(start, store, tmp_path):
    run = start("a", "b")
    for step in (2, 4):
        run.save(step)
        assert run.copy(step) is None
    run.end()
    name = next(name for name in store.steps()[4] if re.match(r"state/\w+/1$", name))
    store.write(f"4/{name}", b"?" * store.steps()[4][name])
    run = start("a", "b")
    assert run.latest == 2

    def open_checkpoints(rank):
        checkpoints = Checkpoints(tmp_path / "ab"[rank], run._config.checkpoint, joined=run.joined[rank])
        return checkpoints.newest_name

    run.on_all(lambda rank: setattr(run.joined[rank], "_fetched", set()))
    assert run.on_all(open_checkpoints) == [4, 4]
