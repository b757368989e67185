"""The door for what comes from outside: what it takes, what it refuses, and that nothing else leaves it."""

import io
import json
import os
import random
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import yaml
from documented_launches import DOCUMENTED, environment_of
from hf_folders import HUB, random_weights, write_folder
from hypothesis import given, settings
from tiny import TINY

from jaxllm.checkpoint import files
from jaxllm.checkpoint.run_lock import read_holder
from jaxllm.cluster import launchers, peer_monitor
from jaxllm.cluster.rendezvous_checks import parse_process_info
from jaxllm.cluster.socket_messages import Channel, Connection
from jaxllm.config import ConfigError, config_folder, load_config
from jaxllm.config.hf_config import model_section
from jaxllm.data.manifest import DATA_ENDINGS, read_manifest, read_npy
from jaxllm.json_lines import read_lines
from jaxllm.terminal import LONGEST_WORD, safe_to_print
from jaxllm.untrusted import (
    RefusedInput,
    Whole,
    checked,
    checked_map,
    parse_json,
    parse_yaml,
    read_bytes,
    shown,
    whole_number,
    without_passwords,
)
from jaxllm.untrusted import read_lines as lines_of
from jaxllm.weights.folder import open_folder
from jaxllm.weights.safetensors import TensorFile


@pytest.mark.parametrize("path", sorted(config_folder().rglob("*.yaml")), ids=lambda path: path.stem)
def test_our_own_recipes_read_as_pyyaml_reads_them(path):
    assert parse_yaml(path.read_text()) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1:30", "1:30"), ("1:30.5", "1:30.5"), ("010", "010"), ("yes", "yes"), ("off", "off"), ("2026-01-01", "2026-01-01")),
        *(("1_000", 1000), ("0x1F", 31), ("0b11", 3), ("-5", -5), ("1.0e+12", 1e12), ("1e5", "1e5"), (".inf", np.inf)),
        *(("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("'1'", "1"), ("[1, a]", [1, "a"])),
    ],
)
def test_scalars_of_yaml(text, value):
    assert parse_yaml(f"a: {text}")["a"] == value


def test_a_merged_key_may_be_set_again():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")["b"] == {"x": 3, "y": 2}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NaN", "NaN is no JSON number"),
        ("-Infinity", "-Infinity is no JSON number"),
        ("[1e400]", "the number 1e400 is too large"),
        ('{"a": {"b": 1, "b": 2}}', "the key b is there twice"),
        ("[" * 65 + "]" * 65, "it nests deeper than 64 levels"),
        ("1" * 5000, "a number has thousands of digits"),
        ("{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ('{\n"a": x}', "not JSON (Expecting value at line 2, column 6)"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b" " * 2000, "it is larger than 1 KiB"),
    ],
)
def test_json_that_is_refused(text, reason):
    with pytest.raises(RefusedInput, match=re.escape(reason)):
        parse_json(text, 1024 if isinstance(text, bytes) else 2**20)


def test_a_key_twice_is_found_at_once():
    text = ", ".join(f'"{number}": 1' for number in [*range(200_000), 7])
    began_s = time.process_time()
    with pytest.raises(RefusedInput, match="the key 7 is there twice"):
        parse_json(f"{{{text}}}")
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize("text", ["!!bool x", "!!timestamp x", "!!int ''", "!!float 1:1", "!!binary x", "!x y", "!!set {a}"])
def test_tags_are_refused(text):
    with pytest.raises(RefusedInput, match=r"^line 1: the tag \S+ is not supported$"):
        parse_yaml(f"a: {text}")


def test_json_at_the_limits_is_taken():
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] == 10**30 + 19884624838656
    assert parse_json('{"a": NaN, "a": 1}', lenient=True) == {"a": 1}


def test_devices_and_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (read_bytes, lambda path: list(lines_of(path)), lambda path: read_npy(path, np.integer)):
            with pytest.raises(RefusedInput, match="not a regular file"):
                read(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_long_lines_are_left_out(tmp_path):
    (tmp_path / "lines").write_bytes(b"a\n" + b"x" * 11 + b"\n" + b"y" * 10 + b"\r\n" + b"w" * 10 + b"\r\rv\nz")
    assert list(lines_of(tmp_path / "lines", 10)) == [b"a", b"y" * 10, b"z"]


def npy(array, **options) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\3\4", "it is not a .npy file"),
        (npy(np.ones(3)), "it holds float64 of shape [3], not integer in 1 dims"),
        (npy(np.ones((3, 2), int)), "it holds int64 of shape [3, 2], not integer in 1 dims"),
        (npy(np.array(["a"])), "it holds <U1 of shape [1]"),
        (npy(np.array([{}]), allow_pickle=True), "it holds object of shape [1]"),
        (npy(np.arange(3)).replace(b"(3,)", b"(9,)"), "it says 9 numbers and has 24 bytes"),
        (npy(np.arange(3))[:-1], "it says 3 numbers and has 23 bytes"),
    ],
)
def test_arrays_that_are_refused(content, reason, tmp_path):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(RefusedInput, match=re.escape(reason)):
        read_npy(tmp_path / "x.npy", np.integer)


def test_an_array_is_read_as_numpy_reads_it(tmp_path):
    for array in (np.arange(7), np.arange(5, dtype=np.uint64), np.zeros(0, int)):
        np.save(tmp_path / "x.npy", array)
        found = read_npy(tmp_path / "x.npy", np.integer)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@dataclass(frozen=True)
class Stored:
    step: Whole
    name: str = "x"


def test_a_map_ends_at_the_first_that_is_wrong():
    assert checked_map({"a": 1}, Whole) == {"a": 1}
    with pytest.raises(RefusedInput, match=r"^1: it is x: it should be a valid integer$"):
        checked_map({str(number): "x" if number else 0 for number in range(9)}, Whole)


def test_a_type_says_what_is_wrong():
    assert checked({"step": 3, "more": 1}, Stored) == Stored(3)
    for value, reason in (
        ({}, "it has no step"),
        ({"step": "3"}, "step is 3: it should be a valid integer"),
        ({"step": -1}, "step is -1: it should be greater than or equal to 0"),
        ({"step": 2**63}, "step is 9223372036854775808: it should be less than or equal to"),
        ({"step": True}, "step is true: it should be a valid integer"),
        ([1], "it is [1]: it should be a dictionary or an instance of Stored"),
    ):
        with pytest.raises(RefusedInput, match=re.escape(reason)):
            checked(value, Stored)


def test_whole_numbers_of_the_environment():
    assert whole_number("0012") == 12
    for text in ("", "-1", "1.0", "٣", "²", "9" * 30, "4"):
        with pytest.raises(RefusedInput, match="whole number"):
            whole_number(text, 0, 3)


def test_what_is_shown_fits_a_line():
    bomb = [1] * 9
    for _ in range(40):
        bomb = [bomb] * 9
    for value in (bomb, {"a": bomb}, "x\n\x1b[31m" * 1000, 10**5000, b"\xff" * 1000, None, True, 1.5, "short"):
        assert len(shown(value)) < 500
        assert shown(value).isprintable()
    assert [shown(value) for value in (None, True, "short", 3, [1, "a"])] == ["null", "true", "short", "3", '[1, "a"]']


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("s3://AKIA:wJalr/K7MD@bucket/a.jsonl: refused", "s3://bucket/a.jsonl: refused"),
        ("s3://AKIA:wJ@lr/K7@MD@bucket/a", "s3://bucket/a"),
        ("https://token@host/a@b and http://me:pw@host:80/", "https://host/a@b and http://host:80/"),
        ("'https://host/a?X-Amz-Signature=K7MD&b=1' is none", "'https://host/a' is none"),
        ("(https://host/a(1).gz?name=a(1).gz&X-Amz-Signature=K7MD): no", "(https://host/a(1).gz): no"),
        ("az://box/a.jsonl?sv=2020&sig=K7MD, s3://b/a?X-Amz-Signature=K7 x", "az://box/a.jsonl, s3://b/a x"),
        ("s3:/AKIA:wJalr/K7MD@bucket/run is none; https:/me:pw@host/a?sig=K#token=K", "s3:/bucket/run is none; https:/host/a"),
        ("https://host/a#token=K7MD hf://datasets/o/n/a?token=K7MD", "https://host/a hf://datasets/o/n/a"),
        ("https://h/p?path=C:/x&sig=K7 and https://h/p?next=https://g/y&sig=K7 x", "https://h/p and https://h/p x"),
        ("https://h?sig=a,https://g?sig=K7", "https://h"),
        ("https://me:p/w@[::1]:80/x and http://[::1]:80/x@y", "https://[::1]:80/x and http://[::1]:80/x@y"),
        # What only looks like it: a revision, a port, a pattern, and a path with an @.
        ("hf://datasets/o/n@main gs://b/c@d https://host:8080/@scope/x s3://b/a?*.txt s3://b/part-?/y=1 me@host: x", None),
        ("a.jsonl:/tmp/x@y D:/data/set#1=2/a.jsonl at 12:/x@y", None),
    ],
)
def test_no_message_has_a_password(text, public):
    """Whatever the address: half of all AWS keys have a slash."""
    assert without_passwords(text) == (public or text)
    assert shown(text, 200) == (public or text)


@pytest.mark.parametrize("piece", ["http://", "s3://a:", "x?", "://@", "http://a?"])
def test_looking_for_passwords_takes_time_in_proportion(piece):
    """A megabyte of what looks like addresses: the square of it would be an hour."""
    started = time.process_time()
    shown(piece * (2**20 // len(piece)))
    assert time.process_time() - started < 20


def test_a_sentence_cannot_steer_a_terminal():
    sentence = safe_to_print("a\x1b[2J\rb " + "x" * 5000 + " c\nmore")
    assert sentence.isprintable()
    assert sentence.startswith("a\\x1b[2J\\rb x")
    assert sentence.endswith(" c\\nmore")
    assert len(sentence) < LONGEST_WORD + 30


# -------------------------------------------------------------------------------------------------------------- fuzz
#
# Each door gets what is nearly right: a good input with some bytes or values replaced. Anything but its own error fails.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
fuzzed = settings(max_examples=1000, derandomize=True, deadline=None, database=None)


def refusal(error: type[Exception], call, *arguments) -> str:
    """The text of that error, the only one that the call may raise; "" if it succeeds."""
    try:
        call(*arguments)
    except error as raised:
        return str(raised)
    return ""


def replaced(content: bytes, seed: int) -> bytes:
    """The content with a few bytes changed, cut out or repeated."""
    rng, changed = random.Random(seed), bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(3)
        if kind == 0 and at < len(changed):
            changed[at] = rng.choice(b"{}[]\",:0129-eENn\\ \n\x00\xff&*!|>'%@")
        elif kind == 1:
            del changed[at : at + rng.randint(1, 8)]
        else:
            changed[at:at] = changed[max(0, at - rng.randint(1, 40)) : at]
    return bytes(changed)


def with_value(given: dict, key: str, value) -> dict:
    """A copy of nested maps with another value at a dotted key."""
    copy, (*outer, last) = json.loads(json.dumps(given)), key.split(".")
    node = copy
    for name in outer:
        node = node[name]
    node[last] = value
    return copy


KEYS = ["model", "train", "data", "parallel", "model.num_layers", "model.hidden_size", "model.num_kv_heads", "train.steps"]
KEYS += ["data.paths", "parallel.remat", "parallel.data", "train.batch_schedule", "model.rope_scaling", "data.mixture"]
BASE = {**TINY, "parallel": {}, "data": {**TINY["data"], "paths": "x"}}


@pytest.mark.slow
@fuzzed
@given(seed=st.integers(0, 2**32))
def test_fuzz_recipes(seed):
    refusal(RefusedInput, parse_yaml, replaced(yaml.safe_dump(BASE).encode(), seed).decode("utf-8", "replace"))


@pytest.mark.slow
@fuzzed
@given(key=st.sampled_from(KEYS), value=JSON)
def test_fuzz_configs(key, value):
    assert len(refusal(ConfigError, load_config, with_value(BASE, key, value))) < 2000


@pytest.mark.slow
@fuzzed
@given(key=st.sampled_from(KEYS), text=st.text(max_size=20))
def test_fuzz_overrides(key, text):
    refusal(ConfigError, load_config, BASE, [f"{key}={text}"])


@pytest.mark.slow
@fuzzed
@given(key=st.sampled_from([*HUB, "rope_parameters", "layer_types", "sliding_window", "auto_map"]), value=JSON)
def test_fuzz_config_json(key, value):
    for kind in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM"):
        said = {**HUB, "architectures": [kind], "model_type": None, key: value}
        assert len(refusal(ConfigError, model_section, said, "config.json")) < 2000


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("fuzz") / "hf", HUB, random_weights(HUB))


@pytest.mark.slow
@fuzzed
@given(seed=st.integers(0, 2**32))
def test_fuzz_safetensors(hub, seed):
    content = (hub / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    (hub / "spoiled").write_bytes(replaced(content[:end], seed) + content[end:])
    refusal(ConfigError, TensorFile, hub / "spoiled")


@pytest.mark.slow
@fuzzed
@given(key=st.sampled_from(["format", "model", "files", "hugging_face", "sequence_length", "model.num_layers"]), value=JSON)
def test_fuzz_model_json(tmp_path_factory, key, value):
    folder = tmp_path_factory.getbasetemp() / "ours"
    folder.mkdir(exist_ok=True)
    good = {"format": 2, "model": model_section(HUB, ""), "files": [], "hugging_face": {}, "sequence_length": 1}
    (folder / "model.json").write_text(json.dumps(with_value(good, key, value)))
    with pytest.raises(ConfigError):
        open_folder("--model", str(folder))


@pytest.mark.slow
@fuzzed
@given(key=st.sampled_from(["format", "step", "fingerprint", "config", "config.model", "skipped_steps"]), value=JSON)
def test_fuzz_metadata(tmp_path_factory, key, value):
    folder = tmp_path_factory.getbasetemp() / "4"
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    config = {"model": {}, "train": {"global_batch_sequences": 8, "sequence_length": 16}}
    good = {"format": 2, "step": 4, "fingerprint": "", "config": config, "skipped_steps": 0}
    (folder / "meta" / "metadata").write_text(json.dumps(with_value(good, key, value)))
    is_newer = isinstance(value, int) and value > files.FORMAT
    assert ("install a newer" in refusal(ConfigError, files.damage, folder)) == (key == "format" and is_newer)


@pytest.mark.slow
@fuzzed
@given(seed=st.integers(0, 2**32))
def test_fuzz_metrics(tmp_path_factory, seed):
    path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    line = json.dumps({"step": 3, "loss": 1.5, "skipped": False, "tokens": 10**6}).encode()
    path.write_bytes(replaced(line + b"\n" + line + b"\n", seed))
    for _, record in read_lines(path):
        assert isinstance(record["step"], int)


@pytest.mark.slow
@fuzzed
@given(seed=st.integers(0, 2**32))
def test_fuzz_arrays(tmp_path_factory, seed):
    path = tmp_path_factory.getbasetemp() / "x.npy"
    path.write_bytes(replaced(npy(np.arange(9)), seed))
    refusal(RefusedInput, read_npy, path, np.integer)


INFO = {"rank": 1, "count": 2, "host": "h", "machine": "m", "pid": 7, "versions": {"jaxllm": "1"}, "flags": ["--a=1"]}
MESSAGES = [
    INFO,
    {"hello": 1, "host": "h", "pid": 7},
    {"phase": "step", "step": 3, "seconds": 1.5},
    {"slowest": [1, "h", {"phase": "step", "step": 3, "seconds": 1.5}]},
    {"notice": {"sentence": "s", "code": 3, "own_error": True}},
]


@pytest.mark.slow
@fuzzed
@given(message=st.sampled_from(MESSAGES), pick=st.integers(0, 6), value=JSON, seed=st.integers(0, 2**32))
def test_fuzz_messages(message, pick, value, seed):
    """Bytes on a socket, and well-formed messages with a wrong value."""
    for secret in (None, b"s" * 32):
        with socket.socket() as end:
            connection = Connection(end, Channel(secret, is_server=True), 2**16)
            came = replaced(json.dumps(message).encode() + b"\n", seed) or b"\n"
            connection.socket = SimpleNamespace(recv=lambda _, came=came: came)
            refusal(ValueError, connection.read)
    wrong = {**message, list(message)[pick % len(message)]: value}
    info = parse_process_info(wrong, INFO["versions"])
    assert info is None or info.rank < info.count
    refusal(RefusedInput, peer_monitor.parse, wrong)


@pytest.mark.slow
@fuzzed
@given(
    text=st.text("h-,[]0123456789x \x00", max_size=30),
    name=st.sampled_from(["SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_ID"]),
    key=st.sampled_from(list(DOCUMENTED)),
)
def test_fuzz_launchers(text, name, key):
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_NODELIST": "h[1-2]"}
    refusal(ConfigError, launchers.find, {**slurm, name: text})
    refusal(ConfigError, launchers.find, {**slurm, "SLURM_NODELIST": text})
    refusal(ConfigError, launchers.find, {"JAXLLM_NUM_PROCESSES": "2", "JAXLLM_PROCESS_ID": "1", "JAXLLM_COORDINATOR": text})
    for one in DOCUMENTED[key]:
        refusal(ConfigError, launchers.find, {**environment_of(key, 0, 2, 29500), one: text})
    for one in ("TF_CONFIG", "SM_HOSTS", "VC_WORKER_NUM"):
        refusal(ConfigError, launchers.find, {one: text})


@pytest.mark.slow
@fuzzed
@given(key=st.sampled_from(["documents", "record_tokens", "dtype", "tokenizer", "tokenizer.kind", "shards"]), value=JSON)
def test_fuzz_manifests(tmp_path_factory, key, value):
    folder = tmp_path_factory.getbasetemp() / "prepared"
    folder.mkdir(exist_ok=True)
    files = {f"tokens-00000-of-00001{ending}": 8 for ending in DATA_ENDINGS}
    shard = {"name": "tokens-00000-of-00001", "documents": 3, "tokens": 9, "sha256": "0" * 64, "files": files}
    good = {"format": "jaxllm-tokens", "version": 1, "documents": 3, "record_tokens": 8, "dtype": "uint8", "shards": [shard]}
    good["tokenizer"] = {"kind": "bytes", "name": "bytes", "sha256": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(good))
    assert read_manifest(folder).documents == 3
    (folder / "manifest.json").write_text(json.dumps(with_value(good, key, value)))
    refusal(ConfigError, read_manifest, folder)


@pytest.mark.slow
@fuzzed
@given(seed=st.integers(0, 2**32))
def test_fuzz_locks(tmp_path_factory, seed):
    path = tmp_path_factory.getbasetemp() / ".holder.json"
    holder = {"launch_id": None, "attempt": 0, "host": "h", "pid": 7, "machine": "m", "born": "5", "token": "t", "time": "now"}
    path.write_bytes(replaced(json.dumps(holder).encode(), seed))
    found = read_holder(path)
    assert found is None or found.pid >= 0
