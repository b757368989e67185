"""The persistent compilation cache of runs: what is stored is found again, nothing that is wrong with it stops a run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import outside
import pytest
from run_files import records
from tiny import TINY

from jaxllm.cluster import distributed
from jaxllm.config import ConfigError
from jaxllm.machine import program_cache
from jaxllm.machine.program_cache import KEY_VARIABLE, SUFFIX, ProgramStore, name_of, signing_key
from jaxllm.private_jax import keep_programs_in

KEY = "jit_step-" + 64 * "a"
OTHER = "jit_step-" + 64 * "b"


def entry_of(key: str) -> str:
    """The file's name, for the key that signs in this process."""
    return f"{key}-{name_of(signing_key(program_cache._key_file))}{SUFFIX}"


def texts(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def process_cache():
    """Starts the cache of this process again; afterwards it is the suite's."""

    def start(wanted, default, agree=None):
        program_cache.start(wanted, lambda: default, os.environ, agree=agree)

    before = program_cache._known, program_cache._has_asked
    yield start
    program_cache._known, program_cache._has_asked = before
    start("auto", Path("unused"))


# --------------------------------------------------------------------------------------------------------------- the store


def test_a_program_is_found_as_it_was_stored(tmp_path):
    store = ProgramStore(tmp_path / "new")
    assert store.get(KEY) is None
    store.put(KEY, b"program")
    assert ProgramStore(tmp_path / "new").get(KEY) == store.get(KEY) == b"program"
    assert store.found == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == [entry_of(KEY)]
    assert store.entries() == [16 * "a"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: whole[:-1], id="half written"),
        pytest.param(lambda whole: whole + b"x", id="too long"),
        pytest.param(lambda whole: whole[:-1] + b"x", id="another byte"),
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: b"jaxllm 0" + whole[8:], id="another format"),
    ],
)
def test_a_damaged_entry_is_written_again(tmp_path, damage, caplog):
    store = ProgramStore(tmp_path)
    store.put(KEY, b"program")
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert store.get(KEY) is None
    assert store.compiled_in(KEY, 60.0)
    store.put(KEY, b"program")
    assert entry.read_bytes() == whole
    assert not store.compiled_in(KEY, 60.0)
    # JAX could not load it, for it compiled it after all.
    assert store.get(KEY) == b"program"
    assert store.compiled_in(KEY, 60.0)
    assert not texts(caplog)


def test_only_what_took_time_is_stored_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "_option", {"jax_persistent_cache_min_compile_time_secs": 0.5}.get)
    store, reader = ProgramStore(tmp_path), ProgramStore(tmp_path, is_writer=False)
    assert [store.compiled_in(KEY, seconds) for seconds in (0.4, 0.6)] == [False, True]
    assert store.compiled == 1
    assert not reader.compiled_in(KEY, 0.6)
    store.put(KEY, b"program")
    # Another process wrote it meanwhile.
    assert not store.compiled_in(KEY, 0.6)
    assert (store.compiled, reader.compiled) == (2, 1)


def test_a_process_finds_only_what_all_find(tmp_path):
    everywhere = ProgramStore(tmp_path)
    everywhere.put(KEY, b"program")
    everywhere.put(OTHER, b"other")
    store = ProgramStore(tmp_path, known=frozenset([16 * "b"]))
    assert (store.get(KEY), store.get(OTHER)) == (None, b"other")


def test_what_all_processes_see_is_the_intersection(monkeypatch):
    def exchange(text, combine):
        return combine([text, "b c d", "c b"])

    monkeypatch.setattr(distributed, "exchange", exchange)
    assert distributed._seen_by_all(["a", "b", "c"]) == {"b", "c"}
    assert distributed._seen_by_all([]) == frozenset()


def test_trouble_with_the_disk_is_said_once(tmp_path, caplog):
    """A file where the folder should be stands for a full disk or missing rights, which root does not have."""
    (tmp_path / "folder").write_text("")
    store = ProgramStore(tmp_path / "folder")
    for _ in range(2):
        assert store.get(KEY) is None
        store.put(KEY, b"program")
    assert texts(caplog) == [
        f"Compiled programs cannot be read in {tmp_path}/folder (Not a directory): the next start compiles again. Fix that, "
        f"name another folder by run.compilation_cache, or set it to off."
    ]


def test_the_entries_unused_for_longest_are_deleted_first(tmp_path):
    """All versions share the limit, and what was used within a day stays."""
    stores = [ProgramStore(tmp_path / f"jax-{version}") for version in "12"]
    keys = [f"jit_f-{number}" for number in range(4)]
    for number, key in enumerate(keys):
        stores[number % 2].put(key, bytes(10))
        os.utime(stores[number % 2].folder / entry_of(key), (number, number))
    # Reading it makes it the newest.
    stores[0].get(keys[0])
    size = (stores[0].folder / entry_of(keys[0])).stat().st_size
    now, killed = (f"{number}-{16 * 'a'}.tmp" for number in (1, 2))
    for name in ("no_entry", "another.tmp", now, killed):
        (stores[0].folder / name).write_bytes(bytes(1000))
    for name in ("another.tmp", killed):
        os.utime(stores[0].folder / name, (0, 0))
    program_cache.prune(tmp_path, limit_bytes=3 * size - 1)
    left = {path.name for path in tmp_path.glob("*/*")}
    assert left == {entry_of(keys[0]), entry_of(keys[3]), "no_entry", "another.tmp", now}
    program_cache.prune(tmp_path, limit_bytes=0)
    assert [path.name for path in tmp_path.glob(f"*/*{SUFFIX}")] == [entry_of(keys[0])]
    program_cache.prune(tmp_path, limit_bytes=0, unused_s=0)
    assert not list(tmp_path.glob(f"*/*{SUFFIX}"))
    program_cache.prune(tmp_path / "none")


def test_pruning_follows_no_link(tmp_path):
    """A recipe may name the cache, and a checkout hold the link."""
    theirs = ProgramStore(tmp_path / "theirs")
    theirs.put(KEY, b"program")
    (theirs.folder / f"1-{16 * 'a'}.tmp").touch()
    for file in theirs.folder.iterdir():
        os.utime(file, (0, 0))
    cache = tmp_path / "cache"
    mine = ProgramStore(cache / "jax-1")
    mine.put(OTHER, b"program")
    (cache / "jax-2").symlink_to(theirs.folder)
    (mine.folder / entry_of(KEY)).symlink_to(theirs.folder / entry_of(KEY))
    program_cache.prune(cache, limit_bytes=0, unused_s=0)
    assert not list(mine.folder.iterdir())
    assert len(list(theirs.folder.iterdir())) == 2


# ----------------------------------------------------------------------------------------- whose programs are loaded


@pytest.fixture
def stores(tmp_path, monkeypatch):
    """stores("mine") -> a store of one folder, in a process whose user has this key."""

    def make(user: str) -> ProgramStore:
        monkeypatch.setattr(program_cache, "_key_file", tmp_path / user)
        return ProgramStore(tmp_path / "folder")

    return make


def test_only_what_the_users_own_key_signed_is_loaded(stores):
    """Each user of a folder sees his own entries, and displaces no other's."""
    stores("theirs").put(KEY, b"theirs")
    mine = stores("mine")
    assert mine.get(KEY) is None
    assert mine.has_unsigned(KEY)
    assert not mine.has_unsigned(OTHER)
    assert mine.entries() == []
    mine.put(KEY, b"mine")
    assert (mine.get(KEY), stores("theirs").get(KEY)) == (b"mine", b"theirs")
    assert not mine.has_unsigned(KEY)


def test_a_cache_of_another_key_is_said(process_cache, tmp_path, monkeypatch, caplog):
    """A home folder that does not last makes a new key at each start."""
    said = (
        f"The compilation cache {tmp_path}/{program_cache.identity()} holds programs, and none that your key signed: this "
        f"start compiles its own. Where a home folder does not last, as in a pod, set {KEY_VARIABLE} to a file that does."
    )
    for user, warnings in (("first", []), ("second", [said]), ("first", [])):
        monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / user))
        process_cache("off", tmp_path)
        process_cache(str(tmp_path), tmp_path)
        assert texts(caplog) == warnings
        caplog.clear()
        if not warnings:
            program_cache._store.put(KEY, b"program")


def test_an_entry_is_not_taken_for_another(stores, tmp_path):
    """Nor is one with another length, nor a whole one that a key of the same name would not have signed."""
    mine, theirs = stores("mine"), stores("theirs")
    mine.put(KEY, b"program")
    (entry,) = mine.folder.iterdir()
    moved = entry.with_name(entry.name.replace(KEY, OTHER))
    moved.write_bytes(entry.read_bytes())
    assert mine.get(OTHER) is None
    theirs.put(OTHER, b"payload")
    (foreign,) = theirs.folder.glob(f"{OTHER}*")
    foreign.rename(moved)
    assert mine.entries() == [16 * "a", 16 * "b"], "its size is right"
    assert mine.get(OTHER) is None
    assert mine.get(KEY) == b"program"


def test_an_entry_too_large_for_a_program_is_not_read(stores, monkeypatch):
    """A sparse file takes no disk."""
    mine = stores("mine")
    mine.put(KEY, b"program")
    (entry,) = mine.folder.iterdir()
    length = 8 * 2**30
    with entry.open("wb") as file:
        file.write(program_cache._head(length))
        file.truncate(length + program_cache.HEADER_BYTES)
    monkeypatch.setattr(program_cache, "read_bytes", None)
    assert mine.get(KEY) is None
    assert not entry.exists()


def test_a_key_is_made_once_and_for_its_user_alone(tmp_path):
    program = f"""
import sys
from pathlib import Path
from jaxllm.machine.program_cache import signing_key
sys.stdin.read(1)
print(signing_key(Path({str(tmp_path / "new" / "key")!r})).decode())
"""
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        process.stdin.write("x")
        process.stdin.flush()
    keys = {process.communicate()[0].strip() for process in started}
    assert {len(key) for key in keys} == {64}
    assert keys == {(tmp_path / "new" / "key").read_text()}
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "new").iterdir()] == [0o600]


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (64 * "0", 0o604, "it is open to other users, or theirs: make a new one of mode 600, not 604"),
        ("", 0o600, "it does not hold 64 digits: delete it"),
        (66 * "0", 0o600, "it does not hold 64 digits: delete it"),
    ],
)
def test_a_key_that_proves_nothing_is_refused(stores, content, mode, why, tmp_path, caplog):
    """No program is kept then, nor loaded, and nothing is stored without a signature."""
    key = tmp_path / "mine"
    key.write_text(content)
    key.chmod(mode)
    store = stores("mine")
    store.put(KEY, b"program")
    assert store.get(KEY) is None
    assert not store.folder.exists()
    assert texts(caplog) == [
        f"Compiled programs are not kept: their key {key} cannot be used ({why}). Correct that, or set {KEY_VARIABLE} to "
        "another file."
    ]


# ------------------------------------------------------------------------------------------------------------- the process


def test_the_folder_is_that_of_this_jax_and_cpu(process_cache, tmp_path, monkeypatch):
    process_cache(str(tmp_path), tmp_path / "default")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / program_cache.identity())
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "given"))
    process_cache("auto", tmp_path / "default")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "given" / program_cache.identity())
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    process_cache("auto", tmp_path / "default")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "default" / program_cache.identity())
    before = program_cache.identity()
    program_cache.identity.cache_clear()
    monkeypatch.setattr(program_cache, "version", lambda package: "0.0")
    assert program_cache.identity() != before
    monkeypatch.undo()
    program_cache.identity.cache_clear()
    process_cache("off", tmp_path / "default")
    assert jax.config.jax_compilation_cache_dir is None


def test_a_home_is_not_needed(process_cache, tmp_path, monkeypatch, caplog):
    """In a container the user may have none."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    for wanted in ("off", str(tmp_path)):
        program_cache.start(wanted, no_home, os.environ)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / program_cache.identity())
    assert not texts(caplog)
    program_cache.start("auto", no_home, os.environ)
    assert jax.config.jax_compilation_cache_dir is None
    assert texts(caplog) == [
        "There is no compilation cache: Could not determine home directory. Name a folder by run.compilation_cache, or set it "
        "to off."
    ]


def test_a_folder_of_saved_programs_holds_no_cache(process_cache, tmp_path, monkeypatch):
    """It may be another user's."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / program_cache.MANIFEST).touch()
    process_cache(str(tmp_path / "saved"), tmp_path / "default")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "default" / program_cache.identity())


@pytest.mark.parametrize("first", ["a folder", "a file", "off", "a URL"])
def test_each_process_is_asked_once(process_cache, tmp_path, monkeypatch, first):
    """Whatever its folder, and however often it starts: another process waits for its answer."""
    program_cache._has_asked, asked = False, []

    def agree(entries):
        asked.append(list(entries))
        return frozenset(asked[0])

    (tmp_path / "file").write_text("")
    if first == "a URL":
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket")
    wanted = {"a folder": str(tmp_path / "one"), "a file": str(tmp_path / "file"), "off": "off", "a URL": "auto"}[first]
    for again in (wanted, wanted, str(tmp_path / "other")):
        process_cache(again, tmp_path, agree)
    assert len(asked) == 1
    # Nobody was asked about the other folder.
    assert program_cache._known == frozenset()


@pytest.mark.parametrize(
    ("rank", "hosts", "is_initialized", "has_met", "expected"),
    [
        (0, "ab", True, True, ("auto", True, True)),
        (1, "ab", True, True, ("auto", True, True)),
        (1, "aa", True, True, ("auto", False, True)),
        (3, "abab", True, True, ("auto", False, True)),
        (0, "", False, False, ("auto", True, False)),
        # The caller started JAX's processes.
        (1, "", True, False, ("off", True, False)),
    ],
)
def test_one_process_of_each_host_writes(monkeypatch, rank, hosts, is_initialized, has_met, expected):
    """In a run on GPUs all agree on what may be found."""
    started = []

    def start(wanted, *_, is_writer=True, agree=None):
        started.append((wanted, is_writer, agree is not None))

    monkeypatch.setattr(program_cache, "start", start)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: is_initialized)
    answer = SimpleNamespace(members=[(host, 1) for host in hosts])
    monkeypatch.setattr(distributed, "_meeting", SimpleNamespace(answer=answer) if has_met else None)
    launch = SimpleNamespace(process_id=rank)
    distributed._start_program_cache("auto", launch, on_cpu=False)
    distributed._start_program_cache("auto", launch, on_cpu=True)
    assert started == [expected, ("auto", True, False)]


def test_all_processes_are_asked_also_without_a_folder(process_cache, tmp_path, caplog):
    program_cache._has_asked, asked = False, []
    (tmp_path / "file").write_text("")
    process_cache(str(tmp_path / "file"), tmp_path, agree=lambda entries: asked.append(list(entries)) or frozenset())
    assert asked == [[]]
    assert jax.config.jax_compilation_cache_dir is None
    assert texts(caplog) == [
        f"The compilation cache {tmp_path}/file/{program_cache.identity()} cannot be used (Not a directory): every start "
        f"compiles. Name another folder by run.compilation_cache, or set it to off."
    ]


def test_a_folder_that_everyone_may_write_into_is_not_used(process_cache, tmp_path, caplog):
    tmp_path.chmod(0o777)
    process_cache(str(tmp_path), tmp_path)
    assert jax.config.jax_compilation_cache_dir is None
    assert texts(caplog) == [
        f"The compilation cache {tmp_path} is not used: every user of this machine may write into it, and its programs would "
        f"run as you. Run chmod o-w on it, or name another folder by run.compilation_cache."
    ]


def test_a_jax_without_these_places_keeps_its_own_files(process_cache, tmp_path, monkeypatch):
    monkeypatch.delattr("jax._src.compiler._cache_write")
    assert not keep_programs_in(ProgramStore(tmp_path))
    program_cache._has_asked = False
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "one"))
    process_cache("auto", tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "one" / program_cache.identity())
    # They have no signature, and a recipe may have named this folder.
    process_cache(str(tmp_path / "theirs"), tmp_path)
    assert jax.config.jax_compilation_cache_dir is None
    # Its keys differ by process, or a process that compiles waits for one that does not.
    process_cache(str(tmp_path / "several"), tmp_path, agree=frozenset)
    assert jax.config.jax_compilation_cache_dir is None


def test_programs_for_absent_devices_are_not_stored(process_cache, tmp_path, monkeypatch):
    """Nobody could load them. JAX's own cache, which the variable asks for, would store them and warn at the next start."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    distributed.start_without_devices()
    assert program_cache._store.folder == tmp_path / program_cache.identity()
    from jax._src import compiler

    compiler._cache_write(KEY, 60.0, "step", SimpleNamespace(runtime_type="compile_only_runtime"), None)
    assert program_cache.counts() == (0, 0)
    assert not list(program_cache._store.folder.iterdir())


def test_a_url_is_refused(process_cache, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.compilation_cache=gs://bucket is not a folder: name one on a disk"):
        process_cache("gs://bucket", tmp_path)


# ------------------------------------------------------------------------------------------------------------------- runs

RUN = """
import sys
import jaxllm
from jaxllm.machine import program_cache
jaxllm.fit(jaxllm.load_config(sys.argv[1], sys.argv[2:]))
print(*program_cache.counts(), file=sys.__stderr__)
"""
OVERRIDES = (
    *("train.eval_every_steps=2", "train.eval_batches=1", "checkpoint.every_steps=2"),
    *("log.layer_norms_every=2", "log.sample_tokens=2"),
)


@pytest.fixture(scope="module")
def recipe(text_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(json.dumps(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    return path


def start(recipe, folder, *overrides, cache, variables=()) -> subprocess.Popen:
    words = [
        sys.executable,
        "-c",
        RUN,
        str(recipe),
        f"run.dir={folder}",
        f"run.compilation_cache={cache}",
        *OVERRIDES,
        *overrides,
    ]
    # Programs are tiny: LLVM's optimiser would take most of the time.
    given_flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = outside.environment(**given_flags, **dict(variables))
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen) -> tuple[str, int, int]:
    """(what it printed, programs found, programs compiled)"""
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    found, compiled = error.splitlines()[-1].split()
    # Nothing but the counts: no warning.
    assert len(error.splitlines()) == 1, error
    return out, int(found), int(compiled)


def losses(folder) -> list[float]:
    return [record["loss"] for record in records(folder) if "loss" in record]


def test_a_killed_run_goes_on_without_compiling(recipe, tmp_path):
    """Bit for bit, by the same programs."""
    cache, one_cpu = tmp_path / "cache", "run.cpu_devices=2"
    out, found, compiled = outcome(start(recipe, tmp_path / "whole", one_cpu, cache=cache))
    assert found == 0
    assert compiled >= 5
    killed = start(recipe, tmp_path / "killed", one_cpu, cache=cache)
    outside.wait_until(lambda: (tmp_path / "killed" / "checkpoints" / "2").is_dir(), killed, 300)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    out, found, compiled = outcome(start(recipe, tmp_path / "killed", one_cpu, cache=cache))
    assert compiled == 0
    assert found >= 5
    assert "compiled the train step in" in out
    assert "s, from the cache" in out
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    first = next(record for record in records(tmp_path / "killed") if record.get("step") == 3)
    assert first["programs_compiled"] == 0
    assert first["programs_found"] >= 2


@pytest.mark.slow
def test_two_processes_each_find_their_programs(recipe, tmp_path):
    ends = []
    for name in ("first", "second"):
        port = outside.free_port()
        ranks = [
            start(
                recipe,
                tmp_path / name,
                *("run.cpu_devices=1", "log.layer_norms_every=null", "log.sample_tokens=0"),
                cache=tmp_path / "cache",
                variables={
                    "JAXLLM_COORDINATOR": f"127.0.0.1:{port}",
                    "JAXLLM_NUM_PROCESSES": "2",
                    "JAXLLM_PROCESS_ID": str(rank),
                }.items(),
            )
            for rank in range(2)
        ]
        ends.append([outcome(process)[1:] for process in ranks])
    (_, compiled), (_, compiled_too) = ends[0]
    assert min(compiled, compiled_too) >= 3
    assert [count for _, count in ends[1]] == [0, 0]
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
