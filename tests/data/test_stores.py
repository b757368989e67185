import gzip
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_servers import Hub, Server, gcs_door, s3_door, serving

from jaxllm.config import ConfigError
from jaxllm.data import buckets, stores
from jaxllm.data.manifest import DATA_ENDINGS
from jaxllm.data.prepare import find_inputs, prepare
from jaxllm.data.records import Part, read_part

pytest.importorskip("fsspec")
pytest.importorskip("httpx2")
# Clients of the libraries are left to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

TEXTS = [f"{i} law mesh ring axis " * (i % 9 + 1) for i in range(400)]


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(texts):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=30)
    return sink.getvalue().to_pybytes()


FILES = {
    "a/one.jsonl": lines(TEXTS[:150]),
    "a/b/two.jsonl.gz": gzip.compress(lines(TEXTS[150:200])),
    "a/three.parquet": table(TEXTS[200:300]),
    "a/four.csv": ("id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS[300:350]))).encode(),
    "a/five.json": json.dumps([{"text": text} for text in TEXTS[350:]]).encode(),
}


class Store:
    """One kind of store: where its files are, and how one is written."""

    def __init__(self, root, write, patterns):
        self.root, self.write, self.patterns = root, write, patterns


@pytest.fixture(scope="module")
def servers():
    """Starts the server of a kind of store when it is first asked for. Every one holds FILES."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        made = {}

        def of(kind):
            if kind not in made:
                made[kind] = MAKERS[kind](stack)
            return made[kind]

        yield of


def make_bucket(stack, scheme):
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    door = stack.enter_context({"s3": s3_door, "gs": gcs_door}[scheme]("texts"))

    def write(name, content):
        door.client.put_object(Bucket="texts", Key=name, Body=content)

    return filled(Store(f"{scheme}://texts", write, [f"{scheme}://texts/a/**"]), door)


def make_http(stack):
    server = stack.enter_context(serving(Server()))

    def write(name, content):
        server.files["/" + name] = content

    return filled(Store(server.url, write, [f"{server.url}/{name}" for name in FILES]), server)


def make_hf(stack):
    server = stack.enter_context(serving(Hub()))
    stack.enter_context(server.is_the_hub())
    files = {}

    def write(name, content):
        files[name] = content
        server.push("datasets", "people/texts", dict(files))

    return filled(Store("hf://datasets/people/texts", write, ["hf://datasets/people/texts/a/**"]), server)


def filled(store, server):
    store.server = server
    for name, content in FILES.items():
        store.write(name, content)
    return store


MAKERS = {
    "s3": lambda stack: make_bucket(stack, "s3"),
    "gs": lambda stack: make_bucket(stack, "gs"),
    "http": make_http,
    "hf": make_hf,
}


def quick(monkeypatch, tries=5):
    monkeypatch.setattr(buckets, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(buckets, "TRIES", tries)
    buckets.open_bucket.cache_clear()


@pytest.fixture(params=MAKERS)
def store(request, servers, monkeypatch):
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.01)
    quick(monkeypatch)
    found = servers(request.param)
    stores._web.cache_clear()
    yield found
    found.server.failures.clear()


def here(inputs, out, **options):
    return prepare(inputs, out, tokenizer="bytes", **{"workers": 1, "progress": False, "shard_bytes": 9000, **options})


def data_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith(DATA_ENDINGS)}


def local(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return [str(tmp_path / "a/**")]


def test_a_store_gives_the_bytes_that_files_give(store, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK", 3000)
    monkeypatch.setattr(stores, "BUFFER", 2000)
    summary = here(store.patterns, tmp_path / "out")
    assert (summary.documents, summary.broken) == (400, 0)
    assert summary.shards > 3
    here(local(tmp_path), tmp_path / "local")
    assert data_of(tmp_path / "out") == data_of(tmp_path / "local")
    listed = json.loads((tmp_path / "out/inputs.json").read_text())
    assert [one["bytes"] for one in listed["files"]] == [len(FILES[name]) for name in sorted(FILES)]
    assert all(one["version"] for one in listed["files"])
    assert not (tmp_path / "local/inputs.json").exists()


only = pytest.mark.parametrize


@only("store", ["s3"], indirect=True)
def test_workers_and_machines_make_the_same_folder(store, tmp_path):
    here(store.patterns, tmp_path / "one")
    here(store.patterns, tmp_path / "three", shard=(0, 3), workers=2)
    for part in (1, 2):
        here(store.patterns, tmp_path / "three", shard=(part, 3))
    one, three = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "three"))
    assert one == three
    assert not any(b"hidden-key" in content for content in one.values())


@only("store", ["s3", "gs"], indirect=True)
def test_markers_of_folders_are_no_files_and_empty_files_are(store, tmp_path):
    content = {"m/": b"", "m/n/": b"", "m/n/a.jsonl": lines(TEXTS[:3]), "m/n/empty.jsonl": b"", "m/n/empty.txt": b""}
    for name, here_is in content.items():
        store.write(name, here_is)
    summary = here([f"{store.root}/m/**"], tmp_path / "out")
    assert (summary.documents, summary.empty, summary.broken) == (3, 1, 0)
    assert sorted(stores.files_below(f"{store.root}/m")) == ["n/a.jsonl", "n/empty.jsonl", "n/empty.txt"]


def test_a_change_is_noticed_before_and_while_a_part_is_read(store, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK", 2000)
    monkeypatch.setattr(stores, "BUFFER", 500)
    longer, other = lines(["law " * 50] * 80), lines(["axe " * 50] * 80)
    store.write("b/changing.jsonl", longer)
    (file,) = find_inputs([f"{store.root}/b/changing.jsonl"], Path("out"))
    records = read_part(Part(file, 0, file.size, file.size), "text")
    assert next(records).text == "law " * 50
    store.write("b/changing.jsonl", other)
    if store.root.startswith("hf"):
        # A commit stays what it is, and the next listing is of another one.
        assert [record.text for record in records] == ["law " * 50] * 79
        (newer,) = find_inputs([f"{store.root}/b/changing.jsonl"], Path("out"))
        assert (newer.path, newer.size) == (file.path, file.size)
        assert newer.version != file.version
        return
    with pytest.raises(ConfigError, match=r"changing\.jsonl has changed while it was being read"):
        list(records)
    with pytest.raises(ConfigError, match=r"changing\.jsonl has changed while it was being read"):
        next(read_part(Part(file, 0, file.size, file.size), "text"))


def test_a_busy_store_is_asked_again(store, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    (file,) = find_inputs([f"{store.root}/a/one.jsonl"], tmp_path)
    store.server.failures = [503, 503]
    assert [record.text for record in read_part(Part(file, 0, file.size, file.size), "text")] == TEXTS[:150]
    assert not store.server.failures


@only("store", ["s3", "http"], indirect=True)
def test_a_store_that_stays_busy_ends_with_one_sentence_and_later_the_rest_is_made(store, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "TRIES", 2)
    quick(monkeypatch, tries=2)
    monkeypatch.setattr(stores, "BLOCK", 1000)
    monkeypatch.setattr(stores, "BUFFER", 1000)
    read, calls = stores._read, []

    def after_a_while(file, start, stop):
        calls.append(start)
        if len(calls) == 20:
            store.server.failures = [503] * 1000
        return read(file, start, stop)

    monkeypatch.setattr(stores, "_read", after_a_while)
    with pytest.raises(ConfigError, match=r"cannot be read \(it .* 503 .*\): run the command again"):
        here(store.patterns, tmp_path / "out")
    monkeypatch.setattr(stores, "_read", read)
    store.server.failures = []
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert done
    summary = here(store.patterns, tmp_path / "out")
    assert summary.complete
    assert 0 < summary.shards_written < summary.shards
    assert done.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}.items()
    here(local(tmp_path), tmp_path / "local")
    assert data_of(tmp_path / "out") == data_of(tmp_path / "local")


def refused(pattern, tmp_path, *more):
    with pytest.raises(ConfigError) as caught:
        here([pattern, *more], tmp_path / "refused")
    assert not (tmp_path / "refused/manifest.json").exists()
    return str(caught.value)


def test_what_is_not_there_is_named(store, tmp_path):
    where = f"{store.root}/none.jsonl"
    said = refused(where, tmp_path)
    assert said.startswith((f"{where} is not there", f"No file matches '{where}' at commit"))
    if store.root.startswith("http"):
        return
    if not store.root.startswith("hf"):
        assert "is a folder" in refused(f"{store.root}/a", tmp_path)
        assert "is a folder" in refused(store.root, tmp_path)
        assert "has two slashes beside each other" in refused(f"{store.root}//a/one.jsonl", tmp_path)
        assert "cannot be read (Could not parse path" in refused(f"{store.root}/../a/one.jsonl", tmp_path)
    assert refused(f"{store.root}/a/*.txt", tmp_path).startswith(f"No file matches '{store.root}/a/*.txt'")
    unknown = store.root.replace("texts", "nowhere") + "/a.jsonl"
    assert refused(unknown, tmp_path).startswith(f"{unknown} is not there")


@only(("status", "says"), [(403, "access is refused): give an address that is signed"), (418, "(answer 418): check")])
def test_what_a_server_says_is_told_without_the_signature(servers, monkeypatch, tmp_path, status, says):
    store = servers("http")
    store.server.failures = [status] * 2
    signed = f"{store.root.replace('://', '://me:password@')}/a/one.jsonl?Signature=hidden-signature"
    said = refused(signed, tmp_path)
    store.server.failures = []
    assert says in said
    assert "hidden" not in said
    assert "password" not in said


@only("store", ["s3", "gs"], indirect=True)
@only(
    ("status", "code", "says"),
    [
        (400, "ExpiredToken", "(the session token has expired): set "),
        (400, "Other", "(Server returned non-2xx status code: 400 Bad Request): check the address, "),
        (301, "Other", "incorrectly configured region): check the address, "),
        (400, "RequestTimeout", "(it does not answer as it should, Server returned non-2xx status code: 400 Bad Request): run"),
        (408, "Other", "(it does not answer as it should, Server returned non-2xx status code: 408 Request Timeout): run"),
        (501, "Other", "(Server returned non-2xx status code: 501 Not Implemented): check the address, "),
        (403, "SignatureDoesNotMatch", "(access is refused): set "),
        (507, "Other", "(it is full): free space there"),
    ],
)
def test_what_a_bucket_sends_beside_a_status_is_not_repeated(store, tmp_path, status, code, says):
    sent = f"<Error><Code>{code}</Code><Message>words - more</Message><Token-0>hidden-token</Token-0></Error>".encode()
    store.server.rule = lambda method, path: (status, sent)
    said = refused(f"{store.root}/a/*.jsonl", tmp_path)
    store.server.rule = None
    assert says in said
    assert "hidden" not in said


def test_a_server_that_is_away_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.0)
    with serving(Server()) as server:
        address = f"{server.url}/a.jsonl"
    assert refused(address, tmp_path).startswith(
        f"{address} cannot be read (it does not answer as it should, All connection attempts failed): run"
    )


def test_a_signature_is_used_and_not_stored(servers, monkeypatch, tmp_path):
    store = servers("http")
    here([f"{store.root}/a/one.jsonl?Signature=hidden-signature"], tmp_path / "out")
    assert ("GET", "/a/one.jsonl?Signature=hidden-signature") in store.server.seen
    assert not any(b"hidden" in path.read_bytes() for path in (tmp_path / "out").iterdir())
    # A new signature for the same content resumes.
    assert here([f"{store.root}/a/one.jsonl?Signature=another"], tmp_path / "out").shards_written == 0


def test_a_server_without_ranges_is_not_read_whole(servers, monkeypatch, tmp_path):
    store = servers("http")
    monkeypatch.setattr(store.server, "accepts_ranges", "none")
    assert "sends no parts of a file: download it" in refused(f"{store.root}/a/one.jsonl", tmp_path)


def test_a_server_that_ignores_ranges_is_noticed(servers, monkeypatch, tmp_path):
    store = servers("http")
    monkeypatch.setattr(stores, "BLOCK", 1000)
    monkeypatch.setattr(store.server, "accepts_ranges", "yes, but not really")
    assert "sends no parts of a file: download it" in refused(f"{store.root}/a/one.jsonl", tmp_path)


def test_without_credentials_the_variables_are_named(servers, monkeypatch, tmp_path):
    servers("s3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    quick(monkeypatch)
    said = refused("s3://texts/a/one.jsonl", tmp_path)
    assert "(no credentials were found): set AWS_PROFILE, or AWS_ACCESS_KEY_ID and" in said


def test_profiles_are_read_and_what_is_not_read_of_them_is_named(servers, monkeypatch, tmp_path):
    from fsspec.config import conf

    server = servers("s3").server.url
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    config, keys = tmp_path / ".aws/config", "aws_access_key_id = a\naws_secret_access_key = hidden\n"
    config.write_text(f"[profile mine]\nregion = eu-west-1\nendpoint_url = {server}\n[default]\nregion = eu-west-2\n")
    (tmp_path / ".aws/credentials").write_text(f"[mine]\n{keys}")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    quick(monkeypatch)
    assert here(["s3://texts/a/one.jsonl"], tmp_path / "out").documents == 150
    assert buckets._s3_settings()["region"] == "eu-west-1"
    # Variables go before a profile, and what is set for fsspec before both.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert buckets._s3_settings() == {"disable_bulk_delete": True, "endpoint_url": server}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")

    def said():
        quick(monkeypatch)
        return refused("s3://texts/a/one.jsonl", tmp_path)

    monkeypatch.setenv("AWS_PROFILE", "another")
    assert said().startswith("The profile another is not in ~/.aws: set AWS_PROFILE, or AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    for key in ("role_arn", "sso_session", "credential_process", "services"):
        config.write_text(f"[profile mine]\n{key} = some\n")
        assert re.match(
            rf"What is set for s3:// has {key}, which jaxllm does not follow: set AWS_ENDPOINT_URL_S3 to .* `eval", said()
        )
    for key in ("use_fips_endpoint", "use_dualstack_endpoint"):
        for value, is_refused in (("true", True), ("false", False)):
            config.write_text(f"[profile mine]\n{key} = {value}\n")
            assert said().startswith(f"What is set for s3:// has {key}, ") is is_refused
    config.write_text("[profile mine]\ns3 =\n    max_queue_size = 9\n    use_accelerate_endpoint = true\n")
    assert said().startswith("What is set for s3:// has use_accelerate_endpoint, ")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
        config.write_text("[profile mine]\nca_bundle = of the profile\n")
        assert said().startswith("What is set for s3:// has use_fips_endpoint, ")
        for name in ("AWS_USE_FIPS_ENDPOINT", "AWS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        assert "of the profile" in said()
        patch.setenv("AWS_CA_BUNDLE", "of the variable")
        assert "of the variable" in said()
    # What the refusals say helps.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    assert buckets._s3_settings()["aws_access_key_id"] == "a"
    monkeypatch.setitem(conf, "s3", {"anon": False})
    assert buckets._s3_settings()["aws_access_key_id"] == "a"
    for text in ("aws_secret_access_key = hidden\n", "[profile mine]\naws_secret_access_key hidden\n"):
        config.write_text(text)
        why = re.escape(f"s3://texts cannot be opened ({config} has a line that sets nothing): correct ")
        assert re.match(why, said())


@only(
    ("scheme", "given", "says"),
    [
        ("s3", {"anon": True, "client_kwargs": {"endpoint_url": "URL"}}, ""),
        ("s3", {"key": "a", "secret": "b", "endpoint_url": "URL"}, ""),
        ("s3", {"default_block_size": 5}, "'default_block_size'.* is not valid"),
        ("s3", {"key": "a", "secret": "hidden-key", "client_kwargs": {"verify": False}}, "'verify' is not valid"),
        ("gs", {"token": "anon", "endpoint_url": "URL"}, ""),
        ("gs", {"token": "/nowhere.json"}, "nowhere.json"),
        ("gs", {"consistency": "md5"}, "'consistency' is not valid"),
    ],
)
def test_what_was_set_for_fsspec_is_used_or_named(servers, monkeypatch, tmp_path, scheme, given, says):
    from fsspec.config import conf

    door = servers(scheme).server
    door.client.put_object_acl(Bucket="texts", Key="a/one.jsonl", ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(conf, scheme, json.loads(json.dumps(given).replace("URL", door.url)))
    if says:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        quick(monkeypatch)
        assert re.search(rf"cannot be opened \(.*{says}", refused(f"{scheme}://texts/a/one.jsonl", tmp_path))
        return
    quick(monkeypatch)
    assert here([f"{scheme}://texts/a/one.jsonl"], tmp_path / "out").documents == 150


def test_of_what_was_set_for_fsspec_headers_go_to_web_servers(servers, monkeypatch, tmp_path):
    from fsspec.config import conf

    store = servers("http")
    stores._web.cache_clear()
    monkeypatch.setitem(conf, "https", {"headers": {"X-Key": "hidden"}, "client_kwargs": {"trust_env": True}})
    assert here([f"{store.root}/a/one.jsonl"], tmp_path / "out").documents == 150
    assert stores._web().headers["X-Key"] == "hidden"
    stores._web.cache_clear()
    monkeypatch.setitem(conf, "https", {"ssl": False})
    said = refused(f"{store.root}/a/one.jsonl", tmp_path)
    assert said.startswith("FSSPEC_HTTPS or a file of fsspec's sets ssl, which has no effect: ")
    stores._web.cache_clear()


@only("given", [{"key": "theirs", "secret": "b"}, {"profile": "mine"}, {}])
def test_the_session_token_of_other_keys_is_not_sent(monkeypatch, tmp_path, given):
    from fsspec.config import conf

    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[mine]\naws_access_key_id = theirs\naws_secret_access_key = b\n")
    monkeypatch.setitem(conf, "s3", given)
    headers = []
    with serving(Server()) as server:
        monkeypatch.setattr(server, "answer", lambda *request: (headers.append(request[3]), (404, {}, b""))[1])
        variables = {
            "ACCESS_KEY_ID": "ours",
            "SECRET_ACCESS_KEY": "s",
            "SESSION_TOKEN": "our-token",
            "ENDPOINT_URL": server.url,
        }
        for name, value in (variables | {"ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("HOME", str(tmp_path))
        quick(monkeypatch)
        refused("s3://texts/a/one.jsonl", tmp_path)
    key, token = ("theirs", None) if given else ("ours", "our-token")
    assert {f"Credential={key}/" in one["Authorization"] for one in headers} == {True}
    assert {one["X-Amz-Security-Token"] for one in headers} == {token}


def test_gated_datasets_say_what_to_set(servers, monkeypatch, tmp_path):
    store = servers("hf")
    monkeypatch.setattr(store.server, "gated", {"people/texts"})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    said = refused("hf://datasets/people/texts/a/one.jsonl", tmp_path)
    assert "one.jsonl cannot be read (access is refused): set HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    assert here(["hf://datasets/people/texts/a/one.jsonl"], tmp_path / "out").documents == 150
    assert not any(b"secret-token" in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_the_commit_is_pinned_and_can_be_named(servers, monkeypatch, tmp_path):
    store = servers("hf")
    first, *_, last = store.server.repos["datasets", "people/texts"]
    here([f"hf://datasets/people/texts@{last}/a/**"], tmp_path / "out")
    listed = json.loads((tmp_path / "out/inputs.json").read_text())["files"]
    assert listed[-1]["file"] == f"hf://datasets/people/texts@{last}/a/three.parquet"
    assert "No file matches" in refused(f"hf://datasets/people/texts@{first}/a/*.csv", tmp_path / "first")
    # A commit that leaves these files alone resumes the folder; one that changes them does not.
    store.write("README.md", b"words")
    assert here(store.patterns, tmp_path / "out").shards_written == 0
    store.write("a/one.jsonl", lines(["axe"]))
    with pytest.raises(ConfigError, match="holds shards of other inputs"):
        here(store.patterns, tmp_path / "out")
    store.write("a/one.jsonl", FILES["a/one.jsonl"])


@only("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "STORAGE_EMULATOR_HOST"])
def test_a_variable_that_is_wrong_is_named(variable, servers, tmp_path, monkeypatch):
    servers("s3")
    monkeypatch.setenv(variable, "not there")
    quick(monkeypatch)
    said = refused(f"{'gs' if variable.startswith('STORAGE') else 's3'}://texts/a/one.jsonl", tmp_path)
    assert re.search(
        r"://texts cannot be opened \(.*not there.*\): correct the address, or the variable or file that says so\.$", said
    )


def test_a_process_that_used_a_bucket_does_not_end_beside_its_threads(servers, monkeypatch):
    """5 of 80 that ended right after a refusal were aborted."""
    quick(monkeypatch)
    servers("s3")
    made = []
    monkeypatch.setattr(buckets.atexit, "register", lambda *call: made.append(call))
    for _ in range(2):
        buckets.open_bucket("s3://texts")
    assert made == [(buckets.time.sleep, 0.1)]


@only("pattern", ["*.jsonl", "**/one.jsonl", "a/[a-o]*.jsonl", "?/one.jsonl", "a/*/*.gz", "**"])
def test_patterns_name_in_a_bucket_what_they_name_on_a_disk(servers, pattern, tmp_path, monkeypatch):
    quick(monkeypatch)
    root = servers("s3").root
    local(tmp_path)
    found = [file.address.removeprefix(f"{root}/") for file in found_by(f"{root}/{pattern}")]
    there = [Path(file.path).relative_to(tmp_path).as_posix() for file in found_by(f"{tmp_path}/{pattern}")]
    assert sorted(name for name in found if name in FILES) == sorted(there)


def found_by(pattern):
    try:
        return find_inputs([pattern], Path("out"))
    except ConfigError:
        return []


@only("store", ["s3"], indirect=True)
def test_who_waits_for_a_silent_bucket_can_be_interrupted(store):
    go = threading.Event()
    store.server.rule = lambda method, path: go.wait(60) and None
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        stores._info(f"{store.root}/a/one.jsonl")
    go.set()
    store.server.rule = None


@only(
    ("module", "pattern"),
    [("obstore", "s3://texts/a"), ("obstore", "gs://texts/a"), ("huggingface_hub", "hf://datasets/a/b/c")],
)
def test_a_missing_library_says_what_to_install(module, pattern, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(known, pattern[:2], raising=False)
    buckets.open_bucket.cache_clear()
    assert refused(pattern, tmp_path) == f"{pattern[:2]}:// needs {module}: pip install 'jaxllm[stores]'."


@only("servers_of", ["http", "hf"])
def test_two_inputs_of_one_name_are_refused(servers, servers_of, monkeypatch, tmp_path):
    """Only one of them would be read."""
    store = servers(servers_of)
    pair = [f"{store.root}/a/one.jsonl?file={number}" for number in (1, 2)]
    if servers_of == "hf":
        store.write("README.md", b"words")
        commits = store.server.repos["datasets", "people/texts"]
        pair = [f"{store.root}@{commit}/a/one.jsonl" for commit in list(commits)[-2:]][::-1]
    said = refused(pair[0], tmp_path, pair[1])
    assert said.startswith(f"Two of the inputs are called {store.root}/a/one.jsonl, because")
    assert here([pair[0], pair[0]], tmp_path / "out").documents == 150


@only(("scheme", "says"), [("ftp", "is not an address"), ("s3", "set AWS_PROFILE"), ("gs", "set GOOGLE_")])
def test_a_password_in_any_address_is_not_repeated(scheme, says, tmp_path):
    said = refused(f"{scheme}://me:hidden@texts/a.jsonl", tmp_path)
    assert said.startswith(f"{scheme}://texts/a.jsonl ")
    assert says in said
    assert "hidden" not in said


@only("pattern", ["ftp://host/a", "s4://texts/a", "file:///etc/passwd", "memory://a"])
def test_other_addresses_are_refused(pattern, tmp_path):
    assert "is not an address that jaxllm reads: use s3://, gs://, hf:// or https://" in refused(pattern, tmp_path)
