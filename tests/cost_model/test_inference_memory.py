"""Memory to load, evaluate and generate: weights and caches are those of live arrays, the rest is close to XLA's figure."""

import json
import math
import sys
import tracemalloc
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import scripts
import yaml
from flax import nnx
from hf_folders import HUB, random_weights, write_folder

from jaxllm.cli.app import main
from jaxllm.compile.aot import can_compile_for_gpus, gpu_devices
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.hardware import FIT_SHARE, GPUS
from jaxllm.cost_model.inference_memory import (
    cache_bytes,
    cache_positions,
    evaluation_moments,
    evaluation_rows,
    generation_moments,
    load_host_bytes,
    load_moments,
)
from jaxllm.inference.generate import Generator
from jaxllm.mesh.axes import make_mesh
from jaxllm.model.llama import Llama
from jaxllm.parallel.parallelize import parallelize
from jaxllm.plan.inference_estimate import PURPOSES, estimate_inference, load_untrained
from jaxllm.weights import read_weights
from jaxllm.weights.folder import open_folder
from jaxllm.weights.hf_convert import from_hf, to_hf
from jaxllm.weights.load_model import config_of
from jaxllm.weights.weights import find_weights

benchmark = scripts.load("benchmarks/inference_memory.py")
H100 = GPUS["h100-80gb"]
SHAPE = {"num_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300}


def sized(model=SHAPE, **parallel):
    train = {"steps": 1, "sequence_length": 64, "global_batch_sequences": 8, "microbatch_sequences": 1}
    devices = math.prod(size for axis, size in parallel.items() if axis != "zero")
    return load_config({"model": model, "parallel": parallel, "train": train}).resolve(devices)


def peak(moments):
    return max(sum(terms.values()) for terms in moments.values())


# ------------------------------------------------------------------------------------------------------------ live arrays


@pytest.mark.parametrize("window", [None, 8])
def test_a_cache_has_the_bytes_of_the_live_one(window, monkeypatch):
    config = sized({**SHAPE, "compute_dtype": "float32", "sliding_window": window})
    generator, live = Generator(Llama(config.model, rngs=nnx.Rngs(0))), []
    step = generator._step
    monkeypatch.setattr(
        generator, "_step", lambda params, caches, *rest, **how: (live.append(caches), step(params, caches, *rest, **how))[1]
    )
    prompts = [np.zeros(length, np.int32) for length in (20, 3, 7)]
    list(generator.ids(prompts, 4))
    assert sum(x.nbytes for x in jax.tree.leaves(live[0])) == cache_bytes(config.model, 4, cache_positions(20, 4))


@pytest.mark.parametrize("mesh", [{"data": 4, "zero": 3}, {"tensor": 2}, {"pipe": 2, "data": 2, "zero": 1}, {"context": 2}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_that_a_device_holds(mesh, dtype):
    config = sized(**mesh)
    devices = make_mesh(config.parallel, jax.devices()[: config.devices])
    with jax.set_mesh(devices):
        master = parallelize(config, devices).master
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(master)) * np.dtype(dtype).itemsize
    assert peak(load_moments(config, dtype)) == held
    assert all(terms["stored_weights"] == held for terms in evaluation_moments(config, H100, dtype).values())


LARGE = {**HUB, "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 6144, "tie_word_embeddings": False}
"""A stack of 50 MB in float32."""


def test_host_bytes_are_close_to_what_numpy_allocates(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "hf", LARGE, random_weights(LARGE))
    config = config_of(find_weights("x", str(folder)), [], 64).resolve(1)
    mesh = make_mesh(config.parallel, jax.devices()[:1])
    with jax.set_mesh(mesh):
        functions = parallelize(config, mesh)
    real = jax.device_put
    # As on a GPU: the arrays on the device are not in the host's memory, which NumPy's would share here.
    monkeypatch.setattr(read_weights.jax, "device_put", lambda x, place: real(jax.numpy.zeros(x.shape, x.dtype), place))

    def allocated(function):
        tracemalloc.start()
        function()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    estimated = load_host_bytes(config, "float32", 1)
    loaded = allocated(lambda: read_weights.load_params(open_folder("x", str(folder)), functions.master, functions.table))
    assert loaded == pytest.approx(estimated["model_folder"], rel=0.05)
    monkeypatch.undo()
    there, back = str(tmp_path / "ours"), str(tmp_path / "back")
    for convert in (partial(from_hf, str(folder), there), partial(to_hf, there, back)):
        assert 0.7 * estimated["convert"] < allocated(convert) <= 1.05 * estimated["convert"]


# ------------------------------------------------------------------------------------------------------------------- XLA


@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
@pytest.mark.parametrize("case", [5, 7])
def test_an_evaluation_is_close_to_xlas_figure(case):
    count, length, stored, model, mesh = benchmark.EVALUATIONS[case]
    config = benchmark.configured(model, count, length, mesh)
    memory = benchmark.compile_evaluation(config, gpu_devices(1, config.devices), stored).memory_analysis()
    assert peak(evaluation_moments(config, H100, stored)) == pytest.approx(benchmark.total_bytes(memory), rel=0.05)


@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
@pytest.mark.parametrize("case", [4, 10])
def test_generating_is_close_to_xlas_figure(case):
    *sizes, model, mesh = benchmark.GENERATIONS[case]
    config = benchmark.configured(model, 1, 1024, mesh)
    programs = benchmark.compile_generation(config, gpu_devices(1, config.devices), *sizes)
    moments = generation_moments(config, *sizes, config.model.compute_dtype, H100)
    for name, program in zip(("prefill", "decode"), programs, strict=True):
        estimated = max(sum(terms.values()) for moment, terms in moments.items() if moment.startswith(name))
        share = estimated / benchmark.total_bytes(program.memory_analysis())
        # JAX 0.10 rearranges keys or values in a step, JAX 0.12 both, and the estimate counts both.
        assert 0.9 < share < (1.1 if jax.__version_info__ >= (0, 11) or name == "prefill" else 1.2)


# ----------------------------------------------------------------------------------------------------------------- report

RECIPE = {
    "model": {"name": "llama-3.1-8b"},
    "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 128, "microbatch_sequences": 1},
}


def estimated(purpose, gpus=1, gpu="h100-80gb", recipe=RECIPE, **sizes):
    return estimate_inference(load_config(recipe), purpose, gpu, gpus, **sizes)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_json_has_the_sums_and_without_a_mesh_weights_are_shared_out(purpose):
    report = estimated(purpose, 4, **({"prompts": 4} if purpose == "generate" else {}))
    values = json.loads(json.dumps(report.to_json()))
    assert values["peak_bytes"] == sum(values["terms_bytes"].values()) == max(values["bytes_by_moment"].values())
    assert values["fits"] is (values["peak_bytes"] <= H100.capacity_bytes)
    assert (values["for"], values["devices"]) == (purpose, 4)
    assert report.config.parallel.zero == 3
    text = "\n".join(report.lines())
    assert all(name.replace("_", " ") in text for name in values["terms_bytes"])
    assert ("convert a run" in text) is (purpose == "load")
    assert estimated(purpose, 4, gpu=None).fits is None


def test_more_prompts_or_positions_need_more_and_a_narrower_store_less():
    generating = partial(estimated, "generate", stored_dtype="bfloat16")
    sizes = [generating(prompts=n).peak_bytes for n in (1, 2, 8, 64)]
    assert sizes == sorted(set(sizes))
    assert generating(prompt_tokens=4096).peak_bytes > sizes[0]
    # Stored in float32, both copies of the weights exist at the start.
    assert estimated("generate").moment == "cast"
    for purpose in ("load", "eval"):
        assert estimated(purpose, stored_dtype="bfloat16").peak_bytes < estimated(purpose).peak_bytes
    assert evaluation_rows(1024) == 8
    assert evaluation_rows(10**6) == 1


def test_what_does_not_fit_gets_changes_that_do():
    report = estimated("generate", prompts=64, prompt_tokens=4096, stored_dtype="bfloat16")
    assert report.fits is False
    words = dict(report.remedies)
    (fewer,) = (int(text.split()[1]) for text in words if text.startswith("--prompts"))
    again = estimated("generate", prompts=fewer, prompt_tokens=4096, stored_dtype="bfloat16")
    assert again.peak_bytes == words[f"--prompts {fewer}"] <= FIT_SHARE * H100.capacity_bytes
    assert estimated("generate", prompts=2 * fewer, prompt_tokens=4096).peak_bytes > FIT_SHARE * H100.capacity_bytes
    (wider,) = (text for text in words if text.startswith("parallel.tensor="))
    tensor = int(wider.removeprefix("parallel.tensor=").split()[0])
    sharded = {**RECIPE, "parallel": {"tensor": tensor, "data": 1, "zero": 3}}
    again = estimated("generate", tensor, recipe=sharded, prompts=64, prompt_tokens=4096, stored_dtype="bfloat16")
    assert again.peak_bytes == words[wider]
    assert f"  {wider} (" in "\n".join(report.lines())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--for", "serve"], "--for=serve is not one of the choices: use train, load, eval, generate."),
        (["--for", "generate", "--prompts", "0"], "--prompts=0 is not valid: use 1 or more."),
        (["--for", "load", "--stored-dtype", "int8"], "--stored-dtype=int8 is not one of the choices: use bfloat16, float32."),
        (["--for", "eval", "--sequence-length", "1023", "parallel.context=2"], "--sequence-length=1023 does not divide over"),
        (["--prompts", "2"], "--prompts belongs to --for generate: leave it out with --for train."),
        (["--for", "generate", "--sequence-length", "8"], "--sequence-length belongs to --for eval: leave it out with"),
        (["--for", "load", "--price", "2"], "Pictures, --convention and the quote are for training: leave them out with"),
        (["--for", "eval", "--over", "sequence"], "Pictures, --convention and the quote are for training: leave them out with"),
    ],
)
def test_mistakes_end_in_one_sentence(arguments, sentence, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["jaxllm", "estimate", "mesh-demo", "--gpus", "8", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert sentence in line


def test_a_gpu_that_cannot_compute_the_model_is_refused_but_can_hold_it_and_fp8_is_for_training_alone():
    with pytest.raises(ConfigError, match=r"set model\.compute_dtype=float32"):
        estimated("eval", gpu="v100-32gb")
    assert estimated("load", gpu="v100-32gb").peak_bytes == estimated("load").peak_bytes
    fp8 = {**RECIPE, "model": {**RECIPE["model"], "matmul_dtype": "fp8"}}
    for purpose in ("eval", "generate"):
        assert estimated(purpose, gpu="a100-80gb", recipe=fp8).moments == estimated(purpose, gpu="a100-80gb").moments


ROOT = Path(__file__).parents[2]
RECIPES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "docs/recipes").glob("*.yaml")])


def untrained(folder, recipe, *overrides):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return load_untrained(path, overrides)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_answered_and_of_training_counts_the_chunk_of_the_loss_alone(path, tmp_path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    # A folder that is not here.
    name = ["model.name=smollm2-135m"] if values["model"].get("name") == "smollm2" else []
    config = load_untrained(path, name)
    bare = {key: values[key] for key in ("model", "parallel") if key in values}
    bare = untrained(tmp_path, {**bare, "train": {"loss_chunk_tokens": config.train.loss_chunk_tokens}}, *name)
    gpus = 3 if config.parallel.data == "auto" else None
    for purpose in PURPOSES:
        report = estimate_inference(config, purpose, "h100-80gb", gpus)
        assert report.moments == estimate_inference(bare, purpose, "h100-80gb", gpus).moments
        assert report.config.devices == (gpus or config.devices)


def test_the_model_alone_is_enough_and_what_is_wrong_with_it_is_said(tmp_path):
    bare = partial(untrained, tmp_path, {"model": {"name": "llama-3.1-8b"}, "train": {"steps": 1}})
    for purpose in PURPOSES:
        # 128 sequences of training do not divide over 3.
        assert estimate_inference(bare(), purpose, gpus=3).moments == estimated(purpose, 3, gpu=None).moments
        # Only an evaluation computes windows, whose length 3 context ranks must divide.
        context = bare("parallel.context=3", "parallel.data=1")
        wanted = pytest.raises(ConfigError, match="multiple of 6") if purpose == "eval" else nullcontext()
        with wanted:
            estimate_inference(context, purpose)
    for override, sentence in (
        ("parallel.tensor=7", r"num_heads=32 cannot be split over parallel\.tensor=7"),
        ("train.step=3", r"Unknown key train\.step: did you mean train\.steps"),
        ("data.pakcing=concat", r"Unknown key data\.pakcing: did you mean data\.packing"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            bare(override)
    with pytest.raises(ConfigError, match=r"= 1 x 1 x 4 x 1 x 1 is 4 devices, but there are 3: set parallel\.data=3"):
        estimate_inference(bare("parallel.data=4"), "load", gpus=3)
    with pytest.raises(ConfigError, match="The section model is missing: add it to the config"):
        untrained(tmp_path, {})


def test_the_command_asks_for_a_batch_only_to_train(tmp_path, monkeypatch, capfd):
    path = tmp_path / "model.yaml"
    path.write_text("model: {name: llama-3.1-8b}")
    command = ["jaxllm", "estimate", str(path), "--gpus", "1", "--json"]
    monkeypatch.setattr(sys, "argv", [*command, "--for", "load"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert json.loads(capfd.readouterr().out)["peak_bytes"] == estimated("load").peak_bytes
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "The section train is missing" in capfd.readouterr().err


def test_more_data_ranks_are_a_change_that_fits(tmp_path):
    bare = partial(untrained, tmp_path, {"model": {"name": "llama-3.1-70b"}})
    changes = dict(estimate_inference(bare(), "load", "h100-80gb", 1).remedies)
    wider = estimate_inference(bare("parallel.data=4", "parallel.zero=3"), "load")
    assert wider.peak_bytes == changes["parallel.data=4 parallel.zero=3 on 4 GPUs"]


def test_a_number_that_is_not_there_is_asked_for():
    with pytest.raises(ConfigError, match="give their number with --gpus"):
        estimated("load", gpus=None)
