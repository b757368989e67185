"""Prepared folders of stores, through the cache, against the same folder on a disk."""

import fcntl
import gc
import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from store_servers import Hub, Server, s3, s3_environment, serving
from tiny import TINY

from jaxllm.config import ConfigError, load_config
from jaxllm.data import buckets, cached, disk_documents, stores
from jaxllm.data.cached import CachedFolder, ShardCache
from jaxllm.data.disk_documents import PreparedDocuments
from jaxllm.data.prepare import prepare
from jaxllm.data.sources import load_data

pytest.importorskip("moto")
pytest.importorskip("obstore")
# Clients of the libraries are left to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
TEXTS = [f"{i} law mesh ring axis " * (i % 9 + 1) for i in range(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared folder of several shards, with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    parent = tmp_path_factory.mktemp("local")
    (parent / "words").mkdir()
    vocabulary = {word: i for i, word in enumerate(["<end>", "?", "law", "mesh", "ring", "axis", *map(str, range(200))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<end>"])
    words.save(str(parent / "words/tokenizer.json"))
    (parent / "words/tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (parent / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = parent / "prepared"
    prepare(
        [str(parent / "texts.jsonl")],
        out,
        tokenizer=str(parent / "words"),
        workers=1,
        progress=False,
        shard_bytes=9000,
        record_tokens=256,
    )
    assert len(list(out.glob("*.array_record"))) >= 6
    return out


@pytest.fixture(scope="module")
def server():
    """moto behind a server that counts requests, and fails when told to."""
    import boto3

    with ExitStack() as stack:
        door = stack.enter_context(serving(Server(behind=stack.enter_context(s3()))))
        door.client = boto3.client(
            "s3", endpoint_url=door.url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
        )
        door.client.create_bucket(Bucket="texts")
        yield door


@pytest.fixture
def store(server, folder, tmp_path, monkeypatch):
    """The folder at s3://texts/TEST, of this test alone."""
    for name, value in s3_environment(server.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "BLOCK", 20_000)
    monkeypatch.setattr(stores, "_AT_ONCE", 2)
    monkeypatch.setattr(buckets, "FIRST_WAIT_S", 0.01)
    buckets.open_bucket.cache_clear()
    for file in folder.rglob("*"):
        if file.is_file():
            server.client.put_object(
                Bucket="texts", Key=f"{tmp_path.name}/prepared/{file.relative_to(folder)}", Body=file.read_bytes()
            )
    server.root = f"s3://texts/{tmp_path.name}/prepared"
    server.seen.clear()
    yield server
    server.failures.clear()


def replace(store, name, content):
    store.client.put_object(Bucket="texts", Key=f"{store.root.removeprefix('s3://texts/')}/{name}", Body=content)


def config(path, **data):
    values = {**TINY, "data": {"source": "prepared", "paths": [str(path)], **data}}
    return load_config({**values, "model": {**TINY["model"], "vocab_size": 260}})


def stream_of(path, **data):
    return load_data(config(path, **data)).stream()


def background():
    return [thread for thread in threading.enumerate() if "_copy_others" in thread.name]


def filled():
    """Waits until nothing is copied in the background."""
    for thread in background():
        thread.join(60)
    assert not background()


def shards(cache):
    return {path.name: path for path in Path(cache).glob("*/*.array_record")}


def bytes_of(cache):
    return sum(path.stat().st_size for path in shards(cache).values())


def copies(store):
    return [path for method, path in store.seen if method == "GET" and path.endswith(".array_record")]


def read_all(documents):
    count = len(documents.lengths)
    return [ids.tolist() for ids in documents.read(np.arange(count), np.zeros(count, int), documents.lengths)]


def same_samples(first, second, ks):
    for k in ks:
        one, two = first.samples(np.array([k])), second.samples(np.array([k]))
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("room", ["all", "two shards"])
def test_samples_are_those_of_the_folder_on_a_disk(store, folder, tmp_path, room):
    sizes = [path.stat().st_size for path in folder.glob("*.array_record")]
    most = 2 * max(sizes) if room != "all" else 2**30
    cache = tmp_path / "cache"
    local, far = load_data(config(folder)), load_data(config(store.root, cache_dir=str(cache), cache_gib=most / 2**30))
    assert (far.fingerprint, far.description) == (local.fingerprint, local.description)
    assert not shards(cache)
    ours, theirs = far.stream(), local.stream()
    ks = [0, 7, 3, *range(2 * theirs.sources[0].packing.num_samples)]
    same_samples(ours, theirs, ks if room == "all" else ks[:16])
    filled()
    assert bytes_of(cache) <= most
    assert not list(cache.rglob("*.tmp"))
    if room == "all":
        assert {name: path.read_bytes() for name, path in shards(cache).items()} == {
            path.name: path.read_bytes() for path in folder.glob("*.array_record")
        }
        assert len(shards(cache)) == len(sizes)
        # Another start, and one of another process, copy nothing.
        store.seen.clear()
        same_samples(stream_of(store.root, cache_dir=str(cache)), theirs, range(20))
        filled()
        assert copies(store) == []
        assert [path for _, path in store.seen if "keys.npy" in path] == []


def test_a_room_that_is_too_small_is_said(store, folder, tmp_path, caplog):
    stream_of(store.root, cache_dir=str(tmp_path / "cache"), cache_gib=1e-9)
    assert "shards will be copied again and again. Raise data.cache_gib" in caplog.text


def test_the_background_fills_what_is_free_and_removes_nothing(store, folder, tmp_path):
    size = max(path.stat().st_size for path in folder.glob("*.array_record"))
    documents = PreparedDocuments(CachedFolder(ShardCache(tmp_path / "cache", 3 * size), store.root))
    last = len(documents.lengths) - 1
    documents.read([last], [0], [3])
    filled()
    assert [name[:12] for name in sorted(shards(tmp_path / "cache"))] == ["tokens-00000", "tokens-00001", "tokens-00008"]


def test_a_user_without_a_home_names_a_folder(folder, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    assert load_data(config(folder), homeless).sources
    for data, default in (({}, homeless), ({"cache_dir": "~no-such-user/cache"}, None), ({}, None)):
        with pytest.raises(ConfigError, match=r"^There is no home folder to cache shards of a store in: set data\.cache_dir"):
            load_data(config("s3://texts/a", **data), default)


def test_one_shard_is_copied_to_begin_with_and_the_others_in_the_background(store, tmp_path, monkeypatch):
    cache = ShardCache(tmp_path / "cache", 2**30)
    may_copy = threading.Event()
    copied, copy = [], type(CachedFolder(cache, store.root))._copy_shard

    def held(self, name, in_background):
        if in_background:
            may_copy.wait(60)
        copied.append((name, in_background))
        return copy(self, name, in_background)

    monkeypatch.setattr("jaxllm.data.cached.CachedFolder._copy_shard", held)
    documents = PreparedDocuments(CachedFolder(cache, store.root))
    documents.read([0], [0], [3])
    first = f"tokens-00000-of-{len(documents._shards):05d}.array_record"
    assert list(shards(cache.folder)) == [first]
    may_copy.set()
    filled()
    names = sorted(shards(cache.folder))
    assert len(names) == len(documents._shards)
    assert copied == [(first, False), *((name, True) for name in names[1:])]


def test_processes_of_a_host_share_the_copies(store, folder, tmp_path, monkeypatch):
    """Each cache stands for a process: locks of files tell them apart."""
    monkeypatch.setattr(stores, "BLOCK", 2**20)
    expected = read_all(PreparedDocuments(folder))
    found, barrier = {}, threading.Barrier(4)

    def process(number):
        documents = PreparedDocuments(CachedFolder(ShardCache(tmp_path / "cache", 2**30), store.root))
        barrier.wait(60)
        found[number] = read_all(documents)

    threads = [threading.Thread(target=process, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    filled()
    assert found == dict.fromkeys(range(4), expected)
    assert len(copies(store)) == len(set(copies(store))) == len(shards(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_what_was_read_longest_ago_leaves_first_and_comes_back(store, tmp_path, monkeypatch):
    cache = ShardCache(tmp_path / "cache", 2**30)
    folder = CachedFolder(cache, store.root)
    documents = PreparedDocuments(folder)
    read_all(documents)
    filled()
    first, second, *others = sorted(shards(cache.folder).values())
    # The disk's clock may be too coarse to tell the readings above apart.
    for number, path in enumerate((first, second, *others)):
        os.utime(path, (number, number))
    documents.read([0], [0], [3])
    total, sizes = bytes_of(cache.folder), {path: path.stat().st_size for path in (second, *others)}
    cache.most_bytes = total
    assert not cache.make_room(1, may_remove=False)
    assert cache.make_room(1, may_remove=True)
    assert not second.exists()
    assert first.exists()
    assert bytes_of(cache.folder) == total - sizes[second]
    cache.make_room(2 * total, may_remove=True)
    assert not shards(cache.folder)
    # Nothing of what left is open, and it comes back.
    readers = documents._shards[0]._readers
    assert not readers.cache_info().currsize
    assert read_all(documents)
    # Another process may remove a copy, also between the look for it and its opening.
    assert readers.cache_info().currsize
    first.unlink()
    cache.make_room(0, may_remove=True)
    assert not readers.cache_info().currsize
    assert documents.read([0], [0], [3])[0].tolist() == read_all(documents)[0][:3]
    open_file, removed = disk_documents._open, []

    def late(file):
        if not removed:
            removed.append(file)
            file.unlink()
        return open_file(file)

    monkeypatch.setattr(disk_documents, "_open", late)
    assert read_all(PreparedDocuments(CachedFolder(cache, store.root))) == read_all(documents)
    assert removed == [first]
    filled()


def test_a_folder_cannot_be_opened_while_its_shards_are_removed(tmp_path, monkeypatch):
    (tmp_path / "left").mkdir()
    (tmp_path / "left/0.array_record").write_bytes(b"?")
    real, seen = Path.unlink, []

    def unlink(self, **options):
        with open(self.parent / cached.IN_USE, "w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        seen.append(self.name)
        real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        assert ShardCache(tmp_path, 1).make_room(1, may_remove=False)
    assert seen == ["0.array_record"]
    with open(tmp_path / "left" / cached.IN_USE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_cache_full_of_another_folder_is_filled_in_advance_unless_a_process_has_that_open(store, folder, tmp_path):
    for file in folder.iterdir():
        if file.is_file():
            store.client.put_object(Bucket="texts", Key=f"{tmp_path.name}/other/{file.name}", Body=file.read_bytes())
    expected, others = read_all(PreparedDocuments(folder)), f"s3://texts/{tmp_path.name}/other"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (folder / "tokenizer" / name).read_bytes()
        store.client.put_object(Bucket="texts", Key=f"{tmp_path.name}/other/tokenizer/{name}", Body=content)
    # Each cache stands for a process: locks of files tell them apart.
    old = CachedFolder(ShardCache(tmp_path / "cache", 2**30), others)
    assert read_all(PreparedDocuments(old)) == expected
    filled()
    size = bytes_of(tmp_path / "cache")

    def first_batch():
        """What is in the cache of one folder's size when a document is read, and the background is done."""
        documents = PreparedDocuments(CachedFolder(ShardCache(tmp_path / "cache", size), store.root))
        documents.read([0], [0], [3])
        filled()
        found = [path.parent.name.partition("-")[0] for path in (tmp_path / "cache").glob("*/*.array_record")]
        return {name: found.count(name) for name in ("other", "prepared")}

    count = len(list(folder.glob("*.array_record")))
    # In the background nothing is removed that a process may read next, nor where it does not make enough room.
    cache = ShardCache(tmp_path / "cache", size)
    (tmp_path / "cache/left").mkdir()
    left = tmp_path / "cache/left/0.array_record"
    left.write_bytes(b"?")
    assert not cache.make_room(1, may_remove=False)
    assert left.exists()
    assert cache.make_room(0, may_remove=False)
    assert not left.exists()
    assert first_batch() == {"other": count - 1, "prepared": 1}
    assert read_all(PreparedDocuments(old)) == expected
    filled()
    del old
    gc.collect()
    assert first_batch() == {"other": 0, "prepared": count}


def test_a_store_that_stops_ends_with_one_sentence_and_leaves_no_part(store, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "TRIES", 2)
    buckets.open_bucket.cache_clear()
    monkeypatch.setattr("jaxllm.data.cached.CachedFolder._copy_others", lambda *_: None)
    documents = PreparedDocuments(CachedFolder(ShardCache(tmp_path / "cache", 2**30), store.root))
    store.failures = [503]
    documents.read([0], [0], [3])
    assert not store.failures
    read, calls = stores._read, []

    def after_a_while(file, start, stop):
        calls.append(start)
        if len(calls) == 2:
            store.failures = [503] * 1000
        return read(file, start, stop)

    monkeypatch.setattr(stores, "_read", after_a_while)
    with pytest.raises(ConfigError) as caught:
        read_all(documents)
    second = sorted(path.name for path in folder.glob("*.array_record"))[1]
    assert str(caught.value).startswith(
        f"{store.root}/{second} cannot be read (it does not answer as it should, Server returned"
    )
    assert len(shards(tmp_path / "cache")) == 1
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    store.failures = []
    assert read_all(documents) == read_all(PreparedDocuments(folder))


def test_another_content_is_refused(store, folder, tmp_path):
    first, second, *_ = sorted(folder.glob("*.array_record"))
    assert first.stat().st_size == second.stat().st_size
    replace(store, first.name, second.read_bytes())
    documents = PreparedDocuments(CachedFolder(ShardCache(tmp_path / "cache", 2**30), store.root))
    says = f"{store.root}/{first.name} is not what manifest.json beside it describes: prepare it again, or copy the complete"
    with pytest.raises(ConfigError, match=says):
        documents.read([0], [0], [3])
    filled()
    assert first.name not in shards(tmp_path / "cache")
    assert second.name not in shards(tmp_path / "cache")

    replace(store, first.name, first.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{first.name} has .* bytes and should have .*: prepare it again, or copy"):
        CachedFolder(ShardCache(tmp_path / "cache", 2**30), store.root)
    store.client.delete_object(Bucket="texts", Key=f"{store.root.removeprefix('s3://texts/')}/{first.name}")
    with pytest.raises(ConfigError, match=rf"^{store.root}/{first.name} is missing"):
        CachedFolder(ShardCache(tmp_path / "cache", 2**30), store.root)


def test_a_folder_that_is_none_is_named(store, tmp_path):
    cache = ShardCache(tmp_path / "cache", 2**30)
    with pytest.raises(ConfigError, match=rf"^{store.root.removesuffix('/prepared')} is not a prepared folder \(it has no man"):
        CachedFolder(cache, store.root.removesuffix("/prepared"))
    with pytest.raises(ConfigError, match=r"^No file matches 's3://texts/none/\*\*'"):
        CachedFolder(cache, "s3://texts/none")
    with pytest.raises(ConfigError, match=r"^https://host/texts is not read as a prepared folder: use s3://, gs:// or hf://"):
        CachedFolder(cache, "https://host/texts?signature=hidden")
    replace(store, "manifest.json", b"{}")
    with pytest.raises(ConfigError, match=rf"^{store.root}/manifest.json was not written by jaxllm data prepare"):
        CachedFolder(cache, store.root)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^The cache .*file cannot be written \(.*\): fix that, or name another .*cache_dir"):
        CachedFolder(ShardCache(tmp_path / "file", 2**30), store.root)


@pytest.mark.parametrize("ending", [".array_record", ".keys.npy"])
def test_a_damaged_copy_is_deleted_and_copied_again(store, folder, tmp_path, ending):
    open_now = lambda: PreparedDocuments(CachedFolder(ShardCache(tmp_path / "cache", 2**30), store.root))  # noqa: E731
    read_all(open_now())
    filled()
    file = next((tmp_path / "cache").rglob(f"tokens-00001*{ending}"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match=rf"{file.name} is damaged \(.*\) and was deleted: start again to copy s3://"):
        read_all(open_now())
    assert read_all(open_now()) == read_all(PreparedDocuments(folder))
    filled()


def test_a_folder_on_the_hub_is_read_at_one_commit(folder, tmp_path):
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with serving(Hub()) as hub, hub.is_the_hub(tmp_path / "hub"):
        commit = hub.push("datasets", "people/texts", files)
        for address in ("hf://datasets/people/texts", f"hf://datasets/people/texts@{commit}"):
            opened = CachedFolder(ShardCache(tmp_path / "cache", 2**30), address)
            hub.push("datasets", "people/texts", {"README.md": b"moved"})
            assert read_all(PreparedDocuments(opened)) == read_all(PreparedDocuments(folder))
            filled()
        assert [path.name.startswith("texts-") for path in (tmp_path / "cache").iterdir()] == [True]


def test_a_run_resumes_from_the_same_folder_in_a_store(store, folder, tmp_path, monkeypatch):
    from jaxllm.run.loop import fit

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    run = {"dir": str(tmp_path / "run")}
    values = {**TINY, "model": {**TINY["model"], "vocab_size": 260}, "run": run, "train": {**TINY["train"], "steps": 2}}
    fit(load_config({**values, "data": {"source": "prepared", "paths": str(folder)}}))
    fit(load_config({**values, "data": {"source": "prepared", "paths": store.root, "cache_gib": 3}}, ["train.steps=3"]))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps[:3] == [1, 2, 3]
    filled()
    assert len(shards(tmp_path / "xdg/jaxllm/data")) == len(list(folder.glob("*.array_record")))
