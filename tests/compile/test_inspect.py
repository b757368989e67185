"""`jaxllm inspect`: its bytes are those of live arrays, and it warns about waste on a mesh."""

import io
import json
import math
import re
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console

from jaxllm.compile.inspect import inspect_config, matmul_parts, network_warnings
from jaxllm.compile.text import render_inspect
from jaxllm.config import ATTENTION_RESULTS, ConfigError, config_folder, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.mesh.axes import make_mesh
from jaxllm.train.build import build_training

ROOT = config_folder().parent
PUBLISHED = {"train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 128, "microbatch_sequences": 1}}


def published(name, *overrides):
    return load_config({"model": {"name": name}, **PUBLISHED}, overrides)


def text_of(report):
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    console.print(render_inspect(report))
    return console.file.getvalue()


def messages(report, kind):
    return {w.parameter: w.message for w in report.warnings if w.kind == kind}


def inspect(*arguments):
    command = [sys.executable, "-m", "jaxllm.cli", "inspect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.fixture
def recipe(tmp_path):
    def write(**sections):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**PUBLISHED, **sections}))
        return str(path)

    return write


# ------------------------------------------------------------------------------------------------------- remat and offload


def test_what_remat_keeps_is_said():
    """Llama-3.1-8B over tensor 4: a token's hidden state is 8 KiB, an eighth of the MLP's 28 KiB twice."""
    mesh = ("parallel.data=2", "parallel.tensor=4", "data.mask_documents=false")
    kept = inspect_config(published("llama-3.1-8b", *mesh)).activations
    assert kept.kept["block_input"] == 4096 * 2 / 4
    assert kept.kept["mlp_up"] == 14336 * 2 / 4
    assert (kept.offloaded, kept.recomputed, kept.link_s) == ({}, (), 0)
    mixed = inspect_config(published("llama-3.1-8b", *mesh, "parallel.remat={mlp_up: offload, query: keep}"))
    assert mixed.activations.offloaded == {"mlp_up": 7168}
    assert mixed.activations.recomputed == ("key", "value", *ATTENTION_RESULTS, "attention_out", "mlp_gate")
    np.testing.assert_allclose(mixed.activations.link_s, 7168 / 55.04e9)
    text = " ".join(text_of(mixed).split())
    assert "Remat mapping" in text
    assert "offloaded 7,168: mlp_up 7,168" in text
    assert "130 ns to the host" in text
    everything = inspect_config(published("llama-3.1-8b", *mesh, "parallel.remat=none", "train.sequence_length=512"))
    assert everything.activations.unnamed > 5 * sum(kept.kept.values())


def test_the_state_on_the_host_is_billed():
    plain = inspect_config(published("llama-3.1-8b", "parallel.data=8"))
    assert (plain.state_offload.host, plain.state_offload.link_s) == (0, 0)
    report = inspect_config(published("llama-3.1-8b", "parallel.data=8", "parallel.offload_state=optimizer_and_master"))
    held, state = report.bytes_per_device, report.state_offload
    assert (state.host, state.to_device, state.to_host) == (held.master * 3, held.master * 4, held.master * 3)
    np.testing.assert_allclose(state.link_s, 7 * held.master / 55.04e9)
    assert "are in the host's memory" in " ".join(text_of(report).split())
    assert json.loads(json.dumps(report.to_json()))["state_offload"]["what"] == "optimizer_and_master"


def test_all_on_the_host_is_billed_by_microbatch():
    """Each takes weights twice, sums in and out; the step casts the layers, and reads their gradients twice. A batch schedule
    is billed at the largest batch that the run reaches."""
    on_host = ("parallel.data=8", "parallel.zero=3", "parallel.offload_state=all")

    def state(microbatches, *more):
        batch = (f"train.global_batch_sequences={8 * microbatches}", "train.microbatch_sequences=1")
        return inspect_config(published("llama-3.1-8b", *on_host, *batch, *more)).state_offload

    one, two, three = map(state, (1, 2, 3))
    assert state(1, "train.steps=2", "train.batch_schedule=[[1, 24], [1000000000, 32]]") == three
    sums = three.to_host - two.to_host
    assert three.to_device - two.to_device == sums + 2 * (sums // 2)
    assert two.to_device - one.to_device == 2 * sums + 2 * (sums // 2)
    held = inspect_config(published("llama-3.1-8b", *on_host)).bytes_per_device
    assert one.host == held.master * 3 + sums + sums // 2


# ----------------------------------------------------------------------------------------------------------------- bytes


def bytes_on_first_device(tree):
    """Bytes of arrays; counters do not count as moments."""
    first = jax.devices()[0]
    arrays = [a for a in jax.tree.leaves(tree) if a.ndim]
    return sum(s.data.nbytes for a in arrays for s in a.addressable_shards if s.device == first)


@pytest.mark.parametrize(("data", "tensor", "kv_heads", "dtype"), [(4, 2, 2, "bfloat16"), (2, 4, 2, "float32")])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_bytes_are_those_of_live_arrays(tiny_config, level, data, tensor, kv_heads, dtype):
    axes = [f"parallel.data={data}", f"parallel.tensor={tensor}", f"parallel.zero={level}"]
    sizes = [f"model.num_kv_heads={kv_heads}", "model.vocab_size=258", f"model.compute_dtype={dtype}"]
    config = tiny_config(*axes, *sizes).resolve(8)
    report = inspect_config(config)
    mesh = make_mesh(config.parallel)
    with jax.set_mesh(mesh):
        training = build_training(config, mesh)
        functions, state = training.functions, training.create_state(0)
    held = report.bytes_per_device
    assert held.master == bytes_on_first_device(state.params)
    assert held.moments == bytes_on_first_device(state.opt_state) == 2 * held.master

    # The compute copy and the gradients exist only inside a step: they follow from the shapes and a list of tensor-sharded
    # dims.
    split = {"embedding", "head", "query", "out", "gate", "up", "down"} | ({"key", "value"} if tensor <= kv_heads else set())
    shapes, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(functions.initialize, jax.random.key(0)))
    compute = sum(math.prod(x.shape) // (tensor if path[-1].key in split else 1) for path, x in shapes)
    sharded = compute // data
    copy = sharded if level == 3 else compute
    # Float32 weights that are unsharded (level 0) or read as shards (level 3) are used in place.
    expected = 2 * copy if dtype == "bfloat16" else 4 * copy * (level in (1, 2))
    assert held.compute_copy == expected
    assert held.gradients == 4 * (sharded if level >= 2 else compute)
    assert any("No compute copy" in note for note in report.notes) == (expected == 0)


def test_counts_leave_out_the_padding_and_agree_with_the_table():
    axes = ["parallel.tensor=3", "train.sequence_length=6144"]
    report = inspect_config(published("smollm2-135m", "model.vocab_size=49150", *axes), gpus=3)
    assert report.vocabulary_padding_rows == 2
    held = sum(math.prod(line.shape) for line in report.parameters)
    assert held - 2 * 576 == report.parameter_count == 134_515_008 - 2 * 576
    assert any("2 rows of zeros pad the vocabulary from 49150 to 49152." in note for note in report.notes)


def test_replicated_key_value_heads_are_said_with_their_cost():
    report = inspect_config(published("llama-3.1-8b", "parallel.tensor=16", "parallel.zero=0"), gpus=16)
    # Key and value of 32 layers, 4096 x 8 x 128, at 4 + 8 + 2 + 4 bytes; 15 of 16 parts are redundant.
    cost = 2 * 32 * 4096 * 8 * 128 * 18 * 15 // 16
    (note,) = [note for note in report.notes if "Key-value" in note]
    assert "8 of them do not split over tensor=16, so each tensor rank holds all 8 and uses one" in note
    assert f"{cost:,} bytes (4.2 GiB) more on each device" in note
    assert not any("Key-value" in note for note in inspect_config(published("llama-3.1-8b", "parallel.tensor=8"), 8).notes)


# -------------------------------------------------------------------------------------------------------------- warnings


MATRICES = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.gate", "mlp.up", "mlp.down")


def test_tiles_beyond_an_edge():
    report = inspect_config(published("llama-3.1-8b", "parallel.tensor=32", "train.microbatch_sequences=4"), gpus=32)
    # A ring of 32 ranks multiplies chunks of 1024 tokens, and 14336/32 = 448 columns are three tiles and a half of 128.
    message = "an output of 1024 x 448: 12% of its tiles are beyond its edge"
    assert messages(report, "tiles") == {f"layers.mlp.{name}": message for name in ("gate", "up", "down")}
    assert {w.axis for w in report.warnings if w.kind == "tiles"} == {"tensor"}
    text = " ".join(text_of(report).split())
    assert f"layers.mlp.down, layers.mlp.gate, layers.mlp.up (tensor=32): {message}" in text


def test_matmuls_too_small_for_the_largest_tiles():
    of_a100 = partial(inspect_config, gpu="a100-80gb")
    warned = messages(of_a100(published("llama-3.1-8b", "parallel.tensor=8"), gpus=16), "small")
    # 8192 x 128 are 32 tiles of 256 x 128, for 108 multiprocessors: smaller ones, and a sum in parts, fill them.
    message = "an output of 8192 x 128 is too small for the largest tiles: others have 86% of their speed"
    assert warned == {f"layers.attention.{name}": message for name in ("key", "value")}
    # Biases and norms are not multiplied, and an untied embedding is looked up.
    small = messages(of_a100(published("qwen2.5-7b", "parallel.tensor=4", "train.sequence_length=64"), gpus=8), "small")
    assert set(small) == {f"layers.{name}" for name in MATRICES} | {"head"}
    assert not messages(of_a100(published("llama-3.1-8b"), gpus=8), "small")


def test_a_tied_embedding_is_a_matmul_in_chunks():
    axes = ["parallel.tensor=3", "train.sequence_length=6144"]
    report = inspect_config(published("smollm2-135m", *axes, "train.loss_chunk_tokens=128"), gpus=3)
    assert messages(report, "small")["embedding"].startswith("an output of 128 x 576 is too small")


@pytest.mark.parametrize("kind", ["h100-80gb", "a100-80gb"])
@pytest.mark.parametrize(("name", "tensor"), [("llama-3.1-8b", 1), ("llama-3.1-8b", 8), ("smollm2-360m", 1), ("qwen2.5-7b", 4)])
def test_warnings_quote_matmuls_of_the_step(name, tensor, kind):
    report = inspect_config(published(name, f"parallel.tensor={tensor}"), gpus=8, gpu=kind)
    quoted = {tuple(map(int, re.search(r"output of (\d+) x (\d+)", w.message).groups())) for w in report.warnings}
    config = published(name, f"parallel.tensor={tensor}").resolve(8)
    assert quoted <= {shape[:2] for shape in matmul_parts(config, GPUS[kind], 8)}


# ------------------------------------------------------------------------------------------------------------------ mesh


def test_a_thousand_devices_need_not_be_here():
    assert jax.device_count() < 1024
    report = inspect_config(published("llama-3.1-70b", "parallel.data=128", "parallel.tensor=8", "parallel.zero=3"))
    assert (report.gpus, report.hosts, report.gpus_per_host) == (1024, 128, 8)
    assert report.parameter_count == 70_553_706_496
    # Almost everything is sharded 1024 ways: 12 bytes of state, 2 of weights, 4 of gradients.
    assert report.bytes_per_device.total == pytest.approx(18 * report.parameter_count / 1024, rel=1e-3)
    text = text_of(report)
    assert "pipe 1 x data 128 x context 1 x tensor 8" in text
    assert "data 127, tensor 0..7: 1016 1017 1018 1019 1020 1021 1022 1023" in text
    assert text.count("─ host ") == 3
    assert max(map(len, text.splitlines())) <= 80


def test_the_drawing_is_the_mesh(tiny_config):
    config = tiny_config("parallel.data=4", "parallel.tensor=2").resolve(8)
    text = text_of(inspect_config(config))
    for place, row in enumerate(np.vectorize(lambda d: d.id)(make_mesh(config.parallel).devices).reshape(4, 2)):
        assert f"data {place}, tensor 0..1: {row[0]} {row[1]}" in text
    assert "1 host of 8" in text
    assert "─ host" not in text


def test_hosts_that_do_not_hold_the_tensor_axis():
    axes = ["parallel.tensor=4", "parallel.zero=0", "train.global_batch_sequences=12"]
    report = inspect_config(published("llama-3.1-8b", *axes), 12)
    assert (report.hosts, report.gpus_per_host) == (2, 6)
    assert "the largest divisor of 12 not above 8" in report.hosts_because
    (network,) = [w.message for w in report.warnings if w.kind == "network"]
    assert network == "context x tensor = 4 devices do not fit within hosts of 6: every layer waits for the network"
    assert [w.message for w in network_warnings({"context": 1, "tensor": 2}, expert=8, gpus=64, per_host=8)] == [
        "expert x tensor = 16 devices do not fit within hosts of 8: tokens wait for the network"
    ]
    assert not list(network_warnings({"context": 1, "tensor": 2}, expert=4, gpus=64, per_host=8))
    text = text_of(report)
    assert "data 1, tensor 0..1: 4 5" in text
    assert "data 1, tensor 2..3: 6 7" in text


def test_the_number_of_devices_comes_from_the_nearest_source(tiny_config):
    assert inspect_config(tiny_config("run.cpu_devices=4")).gpus == 4
    assert inspect_config(tiny_config("run.cpu_devices=4"), gpus=2).gpus == 2
    assert inspect_config(tiny_config("parallel.data=4", "parallel.tensor=4")).gpus == 16
    assert inspect_config(tiny_config()).gpus == jax.device_count()


@pytest.mark.parametrize(
    ("overrides", "gpus", "per_host", "sentence"),
    [
        (["parallel.data=4"], 6, None, "is 4 devices, but there are 6: set parallel.data=6"),
        (["parallel.data=4", "parallel.tensor=4"], 6, None, "is 16 devices, but there are 6: change the axes"),
        (["parallel.tensor=4"], 6, None, "parallel.tensor=4 does not divide the 6 devices"),
        ([], 0, None, "--gpus=0 is not valid: it should be at least 1."),
        ([], 8, 3, "--gpus-per-host=3 does not divide the 8 GPUs: use one of 1, 2, 4, 8."),
    ],
)
def test_impossible_meshes_are_refused(overrides, gpus, per_host, sentence):
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as error:
        inspect_config(published("llama-3.1-8b", *overrides), gpus, per_host)
    assert sentence in str(error.value)


# ----------------------------------------------------------------------------------------------------------- command line


def test_json_alone_on_standard_output(recipe):
    path = recipe(model={"name": "llama-3.1-8b"})
    result = inspect(path, "parallel.tensor=8", "--gpus", "16", "--json", "parallel.zero=2")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["mesh"] == {"pipe": 1, "data": 2, "context": 1, "tensor": 8}
    assert report["parameter_count"] == 8_030_261_248
    assert report["total_bytes_per_device"] == sum(report["bytes_per_device"].values())
    query = next(line for line in report["parameters"] if line["path"] == "layers.attention.query")
    assert query["shape"] == [32, 4096, 32, 128]
    assert query["compute"] == [["pipe"], [], ["tensor"], []]
    assert query["master"] == [["pipe"], ["data", "context"], ["tensor"], []]


def test_text_shows_one_layer_of_the_stack(recipe):
    result = inspect(recipe(model={"name": "llama-3.1-8b"}), "--gpus", "8", "parallel.tensor=2")
    assert result.returncode == 0, result.stderr
    assert "float32 [4096, 32, 128] x 32" in result.stdout
    assert "8,030,261,248 parameters" in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "6", "parallel.data=4"], "is 4 devices, but there are 6: set parallel.data=6"),
        (["parallel.tensor=2"], "model.num_heads=9 cannot be split over parallel.tensor=2: use one of [1, 3, 9]."),
    ],
)
def test_mistakes_end_in_one_sentence_and_code_2(recipe, arguments, sentence):
    result = inspect(recipe(model={"name": "smollm2-135m"}), *arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_precision_is_told():
    from jaxllm.compile.inspect import precision_table

    def by_what(*overrides):
        return {row.what: (row.inputs, row.sums, row.result) for row in precision_table(published("llama-3.1-8b", *overrides))}

    plain = by_what("parallel.tensor=2")
    assert plain["block matmuls"] == ("bfloat16", "float32", "bfloat16")
    assert plain["hidden states over tensor"] == ("bfloat16", "bfloat16", "bfloat16")
    assert by_what("model.compute_dtype=float32")["head"] == ("TF32", "float32", "float32")
    fp8 = by_what("model.matmul_dtype=fp8")
    assert (fp8["block matmuls"][0], fp8["their gradients"][0]) == ("E4M3", "E5M2 x E4M3")
    assert {what for what in fp8 if fp8[what] != plain[what]} == {"block matmuls", "their gradients"}
    experts = ("model.num_experts=8", "model.experts_per_token=2", "parallel.zero=3", "parallel.data=8", "parallel.expert=8")
    mixture = by_what(*experts, "parallel.tensor=2")
    assert mixture["tokens between ranks with experts"] == ("bfloat16", "-", "bfloat16")
    assert mixture["router"] == ("TF32", "float32", "float32")
    assert mixture.keys() - plain.keys() == {"router", "tokens between ranks with experts"}


def test_times_and_warnings_are_those_of_the_gpu():
    config = published("llama-3.1-8b", "parallel.data=4", "parallel.tensor=8", "parallel.remat=offload")
    h100, a100 = (inspect_config(config, gpu=gpu) for gpu in ("h100-80gb", "a100-80gb"))
    assert a100.activations.link_s == 2 * h100.activations.link_s
    assert "55 GB/s each way of h100-80gb's link" in text_of(h100)
    # A100s do not send in a ring, where keys are one matmul with queries and values.
    assert ["layers.attention.key" in messages(report, "small") for report in (a100, h100)] == [True, False]
    assert inspect_config(config).activations == h100.activations
