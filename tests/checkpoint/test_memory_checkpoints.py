"""Checkpoints in the memory of hosts: what is found after a loss, when one counts as complete, and what the port takes."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from memory_saves import found_again, layout, opened, save

from jaxllm.checkpoint import memory as memory_module
from jaxllm.checkpoint import memory_files, memory_transfer
from jaxllm.checkpoint.files import describe_run
from jaxllm.checkpoint.memory import STORED, forget, neighbour, newest
from jaxllm.checkpoint.memory_files import Generation, Part, PartFile, copy_pieces, make_home, parts_in, write_part
from jaxllm.checkpoint.memory_restore import LostPieces, MemoryCheckpoint, Source
from jaxllm.checkpoint.memory_transfer import Port, get_header, put
from jaxllm.config import ConfigError
from jaxllm.runtime import distributed
from jaxllm.runtime.authentication import Channel, greet
from jaxllm.runtime.socket_messages import STRANGERS, connect, listen

SECRET, OTHER = b"the secret of this run", b"the secret of another"
RUN, START = "0" * 16, "1" * 16


@pytest.fixture(scope="module")
def config(tiny_config):
    return tiny_config()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def state_on(mesh, offset=0.0):
    """Sharded over both axes, over one, over none, in the host's memory, a scalar, another dtype."""

    def put(x, *spec, kind="device"):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind))

    values = np.arange(64, dtype=np.float32).reshape(8, 8) + np.float32(offset)
    return {
        "step": put(np.int32(offset)),
        "params": {"w": put(values, "a", "b"), "v": put(values + 100, "b"), "b": put(values[0])},
        "host": put(values + 200, None, "a", kind="pinned_host"),
        "half": put(jnp.asarray(values, jnp.bfloat16), ("a", "b")),
    }


def restored(found, state):
    return found.restore(layout(state, jax.tree.map(lambda x: x.sharding, state)), {})


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def files_of(folder) -> dict[int, Path]:
    return {int(path.parent.name.split("-")[0]): path for path in (folder / "memory").glob("*/*/*-of-*")}


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# --------------------------------------------------------------------------------------------------------- what is found


def test_a_state_comes_back_in_other_shardings(mesh, config, tmp_path):
    state = state_on(mesh, 7)
    found = found_again(tmp_path, config, state)
    assert found.meta()["step"] == 3
    assert_equal(restored(found, state), state)
    turned = {**state, "host": jax.device_put(state["host"], NamedSharding(mesh, PartitionSpec(("b", "a"))))}
    back = restored(found, turned)
    assert_equal(back, state)
    assert back["host"].sharding == turned["host"].sharding


def test_the_next_step_does_not_reach_a_copy(mesh):
    """Arrays of a CPU, and those in pinned memory, would be the array's own memory."""
    state = state_on(mesh)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    params = state.pop("params")
    before, copied = jax.device_get(params), copy_pieces(params)
    jax.block_until_ready(step(params))
    for piece, array in copied:
        inside = tuple(slice(*each) for each in piece.index)
        np.testing.assert_array_equal(array, before[piece.names[-1]][inside])
    # Not every version of JAX overwrites an array of which NumPy has a view.
    assert all(array.flags.owndata for _, array in [*copied, *copy_pieces(state)])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path),
        lambda path: flip(path, 60),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, 5),
        lambda path: os.truncate(path, 0),
        lambda path: path.unlink(),
    ],
    ids=["bytes", "header", "end", "start", "all", "gone"],
)
def test_a_damaged_file_leaves_the_checkpoint_before_and_then_the_store(mesh, config, tmp_path, damage):
    memory, two, four = opened(tmp_path, state_on(mesh)), state_on(mesh, 2), state_on(mesh, 4)
    save(memory, config, 2, two)
    save(memory, config, 4, four)
    assert_equal(restored(opened(tmp_path, four).find(after=None), four), four)
    damage(files_of(tmp_path)[4])
    found = opened(tmp_path, four).find(after=None)
    assert found.generation.step == 2
    assert_equal(restored(found, two), two)
    assert opened(tmp_path, four).find(after=2) is None
    damage(files_of(tmp_path)[2])
    assert opened(tmp_path, four).find(after=None) is None


@pytest.mark.parametrize(
    ("stored", "newest", "counts"), [(None, None, True), (2, 2, True), (2, 4, True), (2, 1, False), (2, None, False)]
)
def test_a_run_that_was_taken_back_in_the_store_does_not_take_what_came_later(mesh, config, tmp_path, stored, newest, counts):
    state, memory = state_on(mesh), opened(tmp_path, state_on(mesh))
    memory.save(3, state, describe_run(config, 3, "text") | {STORED: stored})
    memory.wait()
    assert (opened(tmp_path, state).find(None, newest) is not None) == counts


def test_a_start_without_memory_forgets_it(mesh, config, tmp_path):
    state = state_on(mesh)
    assert found_again(tmp_path, config, state) is not None
    forget(tmp_path)
    assert opened(tmp_path, state).find(None) is None


def test_an_earlier_run_at_this_path_is_not_taken_and_removed(mesh, config, tmp_path):
    state = state_on(mesh)
    assert found_again(tmp_path, config, state) is not None
    (tmp_path / ".memory-run").unlink()
    memory = opened(tmp_path, state)
    assert memory.find(after=None) is None
    memory.begin(keep=None)
    assert files_of(tmp_path) == {}


def test_the_newest_with_a_part_of_each_process_is_chosen():
    def parts(step, count, *writers, start=START):
        return {Part(Generation(step, RUN, start), writer, count) for writer in writers}

    first, second = parts(4, 2, 0, 1), parts(6, 3, 0, 1, 2)
    held = {"a": parts(4, 2, 0) | parts(6, 3, 0, 2), "b": parts(4, 2, 1) | parts(6, 3, 1)}
    assert newest(held, None) == sorted(second)
    assert newest(held, 6) is None
    held["b"] -= parts(6, 3, 1)
    assert newest(held, None) == sorted(first)
    # One of another start does not complete it.
    held["b"] |= parts(6, 3, 1, start="2" * 16)
    assert newest(held, 3) == sorted(first)
    assert newest({}, None) is None


@pytest.mark.parametrize(
    ("hosts", "to"),
    [
        ("a", [None]),
        ("aa", [None, None]),
        ("abc", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aab", [2, 2, 0]),
    ],
)
def test_a_neighbour_is_a_process_of_the_next_host(hosts, to):
    assert [neighbour(rank, hosts) for rank in range(len(hosts))] == to


# ---------------------------------------------------------------------------------------------------------- when it is complete


def test_a_save_that_is_not_complete_leaves_the_one_before(mesh, config, tmp_path, monkeypatch, caplog):
    """One that is still being written is not waited for, one that failed is removed, and both are said."""
    state, memory, may_write = state_on(mesh), opened(tmp_path, state_on(mesh)), threading.Event()
    save(memory, config, 1, state)
    with monkeypatch.context() as patch:
        patch.setattr(memory_module, "write_part", lambda *args: may_write.wait(60) and write_part(*args))
        for step in (2, 3, 4):
            memory.save(step, state, {})
        assert sorted(files_of(tmp_path)) == [1]
    assert caplog.messages == ["No memory checkpoint at step 3: the previous one is not complete yet, as later ones may be."]
    caplog.clear()
    may_write.set()
    memory.wait()
    save(memory, config, 5, state)
    assert sorted(files_of(tmp_path)) == [2, 5]
    with monkeypatch.context() as patch:
        patch.setattr(memory_files, "sha256", lambda content: shutil.rmtree(next((tmp_path / "memory").glob("*/6-*"), "none")))
        save(memory, config, 6, state)
    save(memory, config, 7, state)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("The memory checkpoint of step 6 is not complete: process 0 could not write (")
    assert sorted(files_of(tmp_path)) == [5, 7]
    memory.close(is_useless=True)
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        *[(["done", "done"], "done"), (["", ""], "done"), (["done", "no space"], "no space")],
        *[(["done", "running"], "running"), (["no space", "running"], "running")],
    ],
)
def test_processes_agree_on_the_previous_save(outcomes, verdict):
    assert memory_module._verdict(outcomes) == verdict


def test_a_folder_that_cannot_be_used_is_refused(mesh, tmp_path, monkeypatch, caplog):
    state = state_on(mesh)
    with pytest.raises(ConfigError, match=r"checkpoint.memory_dir=/none cannot be used \(No such file or directory\): name a"):
        make_home("/none", tmp_path)
    home = make_home(str(tmp_path), tmp_path)
    home.chmod(0o750)
    with pytest.raises(
        ConfigError, match=r"is not a folder of this user alone: remove it, or choose another checkpoint\.memory"
    ):
        make_home(str(tmp_path), tmp_path)
    home.rmdir()
    home.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder of this user alone"):
        make_home(str(tmp_path), tmp_path)
    needed = 2 * sum(x.nbytes for x in jax.tree.leaves(state))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, needed - 1))
    with pytest.raises(ConfigError, match=r"memory_every_steps needs .* in checkpoint.memory_dir=.* and .* are free: choose"):
        opened(tmp_path / "run", state)
    # A run that lost a host has less space, and trains on without.
    memory = opened(tmp_path / "run", state, absent_hosts=1)
    memory.save(3, state, {})
    assert files_of(tmp_path / "run") == {}
    (sentence,) = caplog.messages
    assert sentence.startswith("No memory checkpoints: checkpoint.memory_every_steps needs")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, needed))
    opened(tmp_path / "run", state)


def test_several_hosts_need_a_secret(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "exchange", lambda text, combine: combine([text, "another host"]))
    with pytest.raises(ConfigError, match="processes of this run share no secret: set JAXLLM_SECRET or JAXLLM_SECRET_FILE"):
        opened(tmp_path, state_on(mesh))


# ----------------------------------------------------------------------------------------------------------------- the port


@pytest.fixture
def port(tmp_path):
    """(address, folder) of another host, which takes files of up to 100 kB of this run."""
    home = tmp_path / "other"
    home.mkdir()
    listener = listen(0, "127.0.0.1")
    with closing(Port(listener, SECRET, home, lambda generation: 100_000 if generation.run == RUN else 0)):
        yield listener.getsockname(), home


def written(home, state, writer=0, count=1, run=RUN):
    """A file of one of several processes, each with every count-th piece."""
    part = Part(Generation(3, run, START), writer, count)
    meta = {"format": 2, "step": 3, "fingerprint": "", "config": {"model": {}, "train": MINIMAL}}
    home.mkdir(exist_ok=True)
    return part, write_part(home, part, meta, copy_pieces(state)[writer::count])


MINIMAL = {"global_batch_sequences": 1, "sequence_length": 1}


def test_a_state_is_read_from_other_hosts(mesh, port, tmp_path):
    """The files of two of three processes are on the other host."""
    address, there = port
    state, sources = state_on(mesh), []
    for writer in range(3):
        part, path = written(tmp_path / "here", state, writer, 3)
        if writer:
            put(address, SECRET, path, part)
            assert (there / part.path).read_bytes() == path.read_bytes()
            sources.append(Source(part, get_header(address, SECRET, part), address))
        else:
            sources.append(Source(part, PartFile(path).header, PartFile(path)))
    found = MemoryCheckpoint(part.generation, sources, SECRET, ("h1", "h2"))
    assert_equal(restored(found, state), state)
    flip(there / part.path)
    with pytest.raises(LostPieces, match=r"step 3 in the memory of h1, h2 could not be read \(.*other bytes came\)"):
        restored(found, state)


def test_only_expected_files_are_taken(mesh, port, tmp_path, monkeypatch):
    address, there = port
    state = state_on(mesh)
    part, path = written(tmp_path / "here", state)
    other, of_other = written(tmp_path / "here", state, run="f" * 16)
    with pytest.raises(OSError, match="it closed the connection"):
        put(address, SECRET, of_other, other)
    outside = part._replace(generation="../../3")
    with pytest.raises(OSError, match="it closed the connection"):
        put(address, SECRET, path, outside)
    with pytest.raises(OSError, match="it closed the connection"):
        get_header(address, SECRET, outside)
    with pytest.raises(OSError, match="it closed the connection"):
        get_header(address, SECRET, part)
    # Another file than the signed message names.
    named = {"put": str(part.generation), "writer": 0, "count": 1, "size": path.stat().st_size, "digest": "0" * 64}
    with memory_transfer._called(address, SECRET, **named) as (to, reply):
        assert "ready" in reply()
        to.sendall(path.read_bytes())
        with pytest.raises(OSError, match="it closed the connection"):
            reply()
    # The wire, or the sender's memory, changed a byte.
    flip(path)
    with pytest.raises(OSError, match="it closed the connection"):
        put(address, SECRET, path, part)
    large, of_large = written(tmp_path / "large", {"w": jnp.zeros(40_000)})
    with pytest.raises(OSError, match="it closed the connection"):
        put(address, SECRET, of_large, large)
    assert parts_in(there) == []
    assert not [file for file in there.rglob("*") if file.is_file()]


def test_strangers_get_nothing_and_cost_nothing(mesh, port, tmp_path, caplog):
    address, _ = port
    part, path = written(tmp_path / "here", state_on(mesh))
    put(address, SECRET, path, part)
    for secret in (OTHER, None):
        with pytest.raises((OSError, ValueError)):
            get_header(address, secret, part)
        with pytest.raises((OSError, ValueError)):
            put(address, secret, path, part)
    with ThreadPoolExecutor(8) as pool:
        silent = list(pool.map(lambda _: connect(*address, 5), range(2 * STRANGERS)))
    with connect(*address, 5) as garbage:
        garbage.sendall(os.urandom(1000))
        garbage.settimeout(30)
        assert garbage.recv(1) == b""
    # A recorded message of another connection.
    with connect(*address, 5) as replay:
        channel = Channel(SECRET, memory_transfer.PREFIX, is_server=False)
        greet(replay, channel, 5)
        line = channel.line(json.dumps({"get": str(part.generation), "writer": 0, "count": 1, "pieces": None}))
    with connect(*address, 5) as replay:
        replay.sendall(Channel(SECRET, memory_transfer.PREFIX, is_server=False).hello() + line)
        replay.settimeout(30)
        received = b""
        while block := replay.recv(4096):
            received += block
        assert b"digest" not in received
    assert get_header(address, SECRET, part) == PartFile(path).header
    for connection in silent:
        connection.close()
    (warning,) = caplog.messages
    assert warning.startswith("A process at 127.0.0.1 was turned away: its secret is not that of this run")
