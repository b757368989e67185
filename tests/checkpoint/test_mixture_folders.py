"""Folders of mixtures of experts: loss and gradients of transformers' networks, runs that go out, adapters, refusals."""

import jax
import numpy as np
import pytest
from golden.weights import to_theirs
from hf_folders import DTYPES, MIXTRAL, OLMOE, QWEN3_MOE, name_of, random_weights, read_folder, write_folder
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.config import ConfigError, load_config
from jaxllm.data.tokenizer import save_byte_tokenizer
from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.parallelize import parallelize
from jaxllm.run.loop import fit
from jaxllm.weights.adapters import WEIGHTS, open_adapter, write_adapter
from jaxllm.weights.folder import open_folder
from jaxllm.weights.gguf_convert import to_gguf
from jaxllm.weights.hf_convert import adapter_to_peft, from_hf, to_hf
from jaxllm.weights.read_weights import load_params
from jaxllm.weights.weights import export

# PEFT 0.21 calls names that transformers 5 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
FAMILIES = {"qwen3_moe": QWEN3_MOE, "olmoe": OLMOE, "mixtral": MIXTRAL}
B, S = 2, 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("mixtures")
    return {kind: write_folder(parent / kind, config, random_weights(config)) for kind, config in FAMILIES.items()}


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def network_of(transformers, folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")


def resolved(folder, *overrides, **parallel):
    train = {"steps": 2, "sequence_length": S, "global_batch_sequences": B, "microbatch_sequences": 1}
    model = {"name": str(folder), "compute_dtype": "float32", "balance_loss_weight": 0.0}
    data = {"source": "prepared", "paths": ["none"]}
    values = {"model": model, "train": train, "parallel": {"data": 1, **parallel}, "data": data}
    config = load_config(values, overrides)
    return config.resolve(config.devices)


def squares(arrays):
    """Sums of squares of each layer's matrices, those of its experts together: transformers 5 has them as two arrays."""
    found = {}
    for name, array in arrays.items():
        head, is_expert, tail = name.partition(".experts.")
        key = head + is_expert + ("down" if "down" in tail else "gate_up" if is_expert else "")
        found[key] = found.get(key, 0) + float(np.square(np.asarray(array, np.float64)).sum())
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(kind, folders, transformers):
    torch = pytest.importorskip("torch")
    ids = np.random.default_rng(2).integers(0, 67, (B, S + 1)).astype(np.int32)
    network = network_of(transformers, folders[kind])
    theirs = network(torch.tensor(ids[:, :-1]).long()).logits
    loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), torch.tensor(ids[:, 1:]).long().flatten())
    loss.backward()
    expected = squares({name: p.grad.numpy() for name, p in network.named_parameters()})
    config = resolved(folders[kind])
    mesh = make_mesh(config.parallel, jax.devices()[:1])
    rows = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": np.ones((B, S), bool)}
    rows["positions"] = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    with jax.set_mesh(mesh):
        run = parallelize(config, mesh)
        params = load_params(open_folder("x", str(folders[kind])), run.master, run.table)
        ours, gradients = jax.jit(run.value_and_grad)(params, {name: x.reshape(B, 1, S) for name, x in rows.items()})
    np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
    found = squares(to_theirs(jax.device_get(gradients), config.model))
    assert found.keys() == expected.keys()
    for name, square in expected.items():
        np.testing.assert_allclose(found[name], square, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_round_trip_is_exact_in_every_dtype(kind, tmp_path):
    config = FAMILIES[kind]
    weights = random_weights(config, "BF16")
    for number, code in enumerate(("F32", "F16")):
        name = name_of(config, f"model.layers.1.mlp.experts.{number}.down_proj.weight")
        weights[name] = random_weights(config, code)[name]
    from_hf(str(write_folder(tmp_path / "hf", config, weights, shards=3)), str(tmp_path / "ours"))
    to_hf(str(tmp_path / "ours"), str(tmp_path / "back"), largest_file=30_000)
    back = read_folder(tmp_path / "back")
    assert back.keys() == weights.keys()
    for name, values in weights.items():
        assert (back[name].dtype, back[name].shape, back[name].tobytes()) == (values.dtype, values.shape, values.tobytes()), (
            name
        )
    # In order: a file holds complete layers, and a layer its experts.
    layers = [int(name.split(".")[2]) for name in back if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert open_folder("x", str(tmp_path / "back")).model == open_folder("x", str(tmp_path / "ours")).model


def test_an_export_of_a_folder_is_its_conversion(folders, tmp_path):
    from_hf(str(folders["mixtral"]), str(tmp_path / "converted"))
    export(str(folders["mixtral"]), str(tmp_path / "exported"))
    converted, exported = (load_file(tmp_path / name / "weights.safetensors") for name in ("converted", "exported"))
    assert converted["layers.mlp.up"].shape == (3, 4, 24, 40)
    jax.tree.map(np.testing.assert_array_equal, converted, exported)


@pytest.mark.parametrize("parallel", [{"data": 4, "tensor": 2, "zero": 3}, {"pipe": 2, "data": 2, "zero": 1}], ids=str)
def test_every_mesh_gets_the_same_values(parallel, folders):
    """From Hugging Face's folder, whose experts are one tensor each."""
    config = resolved(folders["qwen3_moe"], "train.global_batch_sequences=8", **parallel)
    mesh = make_mesh(config.parallel, jax.devices()[: config.devices])
    with jax.set_mesh(mesh):
        run = parallelize(config, mesh)
    params = load_params(open_folder("x", str(folders["qwen3_moe"])), run.master, run.table)
    theirs = read_folder(folders["qwen3_moe"])
    for layer, expert in np.ndindex(3, 6):
        ours = np.asarray(params["layers"]["mlp"]["down"])[layer, expert]
        np.testing.assert_array_equal(ours, theirs[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"].T)


def test_a_run_goes_out_to_transformers(folders, transformers, text_file, tmp_path):
    """Its network says the class and the names: a run that began from nothing has no config.json."""
    values = {
        "model": {"name": str(folders["mixtral"]), "vocab_size": 256, "compute_dtype": "float32"},
        "train": {"steps": 1, "sequence_length": 16, "global_batch_sequences": 8, "init_from": None},
        "data": {"source": "files", "paths": [str(text_file)], "tokenizer": "bytes", "held_out_fraction": 0.0},
        "run": {"dir": str(tmp_path / "run"), "cpu_devices": 8},
        "parallel": {"zero": 3},
    }
    fit(load_config(values))
    assert to_hf(str(tmp_path / "run"), str(tmp_path / "out"), verify=True).agreement.largest_difference < 1e-4
    assert type(network_of(transformers, tmp_path / "out")).__name__ == "MixtralForCausalLM"
    assert "model.layers.2.block_sparse_moe.experts.3.w1.weight" in read_folder(tmp_path / "out")


def test_adapters_of_attention_come_in_and_go_out(folders, transformers, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    network = network_of(transformers, folders["mixtral"])
    network = peft.get_peft_model(network, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "o_proj"]))
    rng = np.random.default_rng(0)
    for p in network.parameters():
        if p.requires_grad:
            p.data = torch.tensor(0.3 * rng.standard_normal(p.shape).astype(np.float32))
    network.save_pretrained(tmp_path / "adapter")
    ids_BS = rng.integers(0, 67, (B, S)).astype(np.int32)
    with torch.no_grad():
        theirs = network(input_ids=torch.tensor(ids_BS).long()).logits.numpy()
    model = jaxllm.load_model(folders["mixtral"], "float32", {"data": 1}, adapter=tmp_path / "adapter")
    np.testing.assert_allclose(model(ids_BS), theirs, atol=1e-4)
    to_hf(str(folders["mixtral"]), str(tmp_path / "merged"), adapters=[str(tmp_path / "adapter")])
    with torch.no_grad():
        merged = network_of(transformers, tmp_path / "merged")(torch.tensor(ids_BS).long()).logits.numpy()
    np.testing.assert_allclose(merged, theirs, atol=1e-4)
    section = open_folder("x", str(folders["mixtral"])).model
    (tmp_path / "written").mkdir()
    write_adapter(open_adapter("x", str(tmp_path / "adapter"), section), tmp_path / "written", None, None)
    jax.tree.map(np.testing.assert_array_equal, *(load_file(tmp_path / x / WEIGHTS) for x in ("adapter", "written")))
    with pytest.raises(ConfigError, match="has no adapter: give a run with"):
        adapter_to_peft(str(folders["mixtral"]), str(tmp_path / "none"))


def test_adapters_of_experts_are_refused(folders, tmp_path):
    name = "base_model.model.model.layers.0.mlp.experts.0.up_proj"
    tensors = {f"{name}.lora_A.weight": np.ones((2, 24), np.float32), f"{name}.lora_B.weight": np.ones((16, 2), np.float32)}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    with pytest.raises(ConfigError, match="adapts up_proj, and adapters of experts are not supported: use one of attention"):
        jaxllm.load_model(folders["qwen3_moe"], adapter=tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_experts_in_one_tensor_are_refused(kind, transformers, folders, tmp_path):
    """As transformers 5 has them in memory. It does not write them so unless it is told to."""
    network = network_of(transformers, folders[kind])
    network.save_pretrained(tmp_path / "fused", save_original_format=False)
    with pytest.raises(ConfigError) as refused:
        open_folder("x", str(tmp_path / "fused"))
    assert str(refused.value) == (
        f"{tmp_path / 'fused'} holds model.layers.0.mlp.experts.down_proj, all experts of a layer in one tensor, which jaxllm "
        "does not read: load the model with transformers and call save_pretrained, which writes one for each expert."
    )
    network.save_pretrained(tmp_path / "plain")
    assert read_folder(tmp_path / "plain").keys() == random_weights(FAMILIES[kind]).keys()
    from_hf(str(tmp_path / "plain"), str(tmp_path / "ours"))


def test_a_missing_expert_and_one_too_many_are_named(tmp_path):
    weights = random_weights(MIXTRAL, "BF16")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    less = {key: value for key, value in weights.items() if key != name}
    more = {**weights, name.replace(".3.", ".4."): np.ones((24, 40), DTYPES["BF16"])}
    for number, (held, sentence) in enumerate(((less, f"has no tensor {name}"), (more, "which that network does not have"))):
        with pytest.raises(ConfigError, match=sentence):
            open_folder("x", str(write_folder(tmp_path / str(number), MIXTRAL, held)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_there_is_no_gguf(kind, tmp_path):
    config = {**FAMILIES[kind], "vocab_size": 260}
    save_byte_tokenizer(write_folder(tmp_path / "hf", config, random_weights(config)))
    with pytest.raises(ConfigError) as refused:
        to_gguf(str(tmp_path / "hf"), str(tmp_path / "model.gguf"))
    assert str(refused.value) == f"jaxllm writes no GGUF of {config['architectures'][0]}: use --to hf and another server."
