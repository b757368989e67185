"""LoRA equals PEFT on the same base and the same A and B, and its folders are PEFT's."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.make_golden import STEPS, case_config, draw_batches, draw_weights, network_of
from meshes import assert_close
from safetensors.numpy import load_file

import jaxllm
from jaxllm.config import ConfigError
from jaxllm.mesh.axes import batch_sharding, make_mesh
from jaxllm.parallel.parameters import merge_model
from jaxllm.run.loop import fit
from jaxllm.train.build import build_training
from jaxllm.weights.adapters import ADAPTER_CONFIG, WEIGHTS, write_adapter
from jaxllm.weights.hf_convert import adapter_to_peft, to_hf
from jaxllm.weights.weights import initial_adapter, initial_weights, read_initial

# PEFT 0.21 calls names that transformers 5 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
CASE = "gqa_llama3_rope"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def batches():
    return draw_batches(CASE)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a tiny model, and transformers' network of it."""
    pytest.importorskip("transformers")
    network = network_of(case_config(CASE).model, draw_weights(CASE))
    folder = tmp_path_factory.mktemp("base") / "base"
    network.save_pretrained(folder)
    return folder, network


@pytest.fixture(scope="module")
def theirs(base, tmp_path_factory):
    """(folder of a PEFT adapter with drawn A and B, what PEFT computes with it): logits, loss, gradients; losses and adapter of
    ten steps of AdamW."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    batches, o = draw_batches(CASE), case_config(CASE).optimizer
    network = peft.get_peft_model(base[1], peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM"))
    rng = np.random.default_rng(0)
    own = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for p in own.values():
        p.data = torch.tensor(0.3 * rng.standard_normal(p.shape).astype(np.float32))
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    network.save_pretrained(folder)
    tokens, targets, mask = (torch.tensor(batches[name]).long() for name in ("tokens", "targets", "mask"))
    targets = targets.where(mask.bool(), -100)

    def forward(step):
        logits_BSV = network(tokens[step]).logits
        return logits_BSV, torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), targets[step].flatten())

    logits, loss = forward(0)
    loss.backward()
    named = {name.replace(".default", ""): p for name, p in own.items()}
    found = {"logits": logits.detach().numpy(), "loss": loss.item()}
    found["gradients"] = {name: p.grad.numpy().copy() for name, p in named.items()}
    numbers = {"lr": o.learning_rate, "betas": (o.beta1, o.beta2), "eps": o.epsilon, "weight_decay": o.weight_decay}
    adamw = torch.optim.AdamW(own.values(), **numbers)
    found["losses"] = []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = forward(step)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), o.clip_norm)
        adamw.step()
        found["losses"].append(loss.item())
    found["trained"] = {name: p.detach().numpy().copy() for name, p in named.items()}
    return folder, found


@pytest.fixture(scope="module")
def config(base, theirs, text_file):
    lora = {"rank": 3, "alpha": 6, "targets": TARGETS}
    config = case_config(CASE).model_dump(mode="json")
    return {
        **config,
        "model": {"name": str(base[0]), "lora": lora, "compute_dtype": "float32", "attention": "xla"},
        "data": {"source": "files", "paths": [str(text_file)], "tokenizer": "bytes", "mask_documents": False},
        "train": {**config["train"], "init_from": str(base[0]), "init_adapter": str(theirs[0])},
        "parallel": {"zero": 3},
        "run": {"cpu_devices": 8},
    }


def in_peft_names(adapter, tree):
    """Our A and B of all layers as PEFT's dict."""
    found = {}
    for entry in adapter.entries.values():
        array = functools.reduce(lambda tree, name: tree[name], entry.path, tree)
        found |= {name: np.asarray(x).reshape(entry.matrix).T for name, x in zip(entry.tensors, array, strict=False)}
    return found


def relative(found, expected):
    return np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected)


def test_a_run_equals_peft(config, theirs, batches):
    """Logits, loss, gradients of A and B, and ten steps of AdamW."""
    expected = theirs[1]
    run = jaxllm.load_config(config, ["train.microbatch_sequences=1", "run.cpu_devices=1"]).resolve(1)
    mesh, adapter = make_mesh(run.parallel, jax.devices()[:1]), initial_adapter(run)
    training = build_training(run, mesh)

    def placed(step):
        arrays = {name: batches[name][step][:, None] for name in ("tokens", "targets", "mask")}
        arrays["positions"] = np.broadcast_to(np.arange(arrays["tokens"].shape[-1], dtype=np.int32), arrays["tokens"].shape)
        return jax.device_put(arrays, batch_sharding(mesh))

    def step(state, batch):
        return training.functions.value_and_grad(state.params, batch)[1], *training.step(state, batch)

    with jax.set_mesh(mesh):
        begun = training.create_state(0)
        params = read_initial(initial_weights(run), adapter, begun.params, training.functions.table)
        begun = dataclasses.replace(begun, params=params)
        logits = jax.jit(lambda model, ids: model(ids))(merge_model(run, params), jnp.asarray(batches["tokens"][0]))
        assert relative(logits, expected["logits"]) < 1e-5
        run_step, state, losses = jax.jit(step), begun, []
        for number in range(STEPS):
            gradients, state, metrics = run_step(state, placed(number))
            losses.append(float(metrics["loss"]))
            if number == 0:
                assert_close(in_peft_names(adapter, gradients), expected["gradients"], 1e-5)
    np.testing.assert_allclose(losses[0], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)
    assert_close(in_peft_names(adapter, state.params), expected["trained"], 1e-4)
    names = lambda tree: {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}  # noqa: E731
    moments = {name for name in names(state.opt_state) if "'" in name}
    assert len(moments) == 2 * 2 * len(TARGETS)
    assert all("lora" in name for name in moments)
    is_lora = lambda path: "lora" in jax.tree_util.keystr(path)  # noqa: E731
    jax.tree_util.tree_map_with_path(
        lambda path, new, old: is_lora(path) or np.testing.assert_array_equal(new, old), state.params, params
    )


@pytest.fixture(scope="module")
def halves(config, tmp_path_factory):
    """Runs of four steps: one uninterrupted, and one that was stopped after two."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = ("train.global_batch_sequences=8", "train.steps=4", "parallel.tensor=2", "checkpoint.every_steps=2")

    def run(name, *more):
        return fit(jaxllm.load_config(config, [*sizes, f"run.dir={folder / name}", *more]))

    whole = run("whole")
    run("halves", "train.steps=2")
    return folder / "whole", whole, run("halves")


def test_resuming_equals_never_stopping_bit_for_bit(halves, config):
    _, whole, resumed = halves
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)


@pytest.fixture(scope="module")
def ids(batches):
    return jnp.asarray(batches["tokens"][0])


@pytest.fixture(scope="module")
def unmerged(halves, ids):
    """Logits of the run as it trained."""
    _, whole, _ = halves
    with jax.set_mesh(whole.mesh):
        return np.asarray(jax.jit(lambda model, ids: model(ids))(whole.model, ids))


def test_peft_loads_the_adapter_of_a_run(base, halves, ids, unmerged, config, tmp_path):
    folder, whole, _ = halves
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    kept = folder / "tokenizer"
    kept.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        (kept / name).write_text("{}")
    adapter_to_peft(str(folder), str(tmp_path / "adapter"))
    shutil.rmtree(kept)
    # What training ended answers with goes along; a config.json would say that it is a whole model.
    beside = {"generation_config.json", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {WEIGHTS, ADAPTER_CONFIG, *beside}
    ours = in_peft_names(initial_adapter(whole.config), whole.state.params)
    jax.tree.map(np.testing.assert_array_equal, load_file(tmp_path / "adapter" / WEIGHTS), ours)
    network = peft.PeftModel.from_pretrained(network_of(case_config(CASE).model, draw_weights(CASE)), tmp_path / "adapter")
    with torch.no_grad():
        assert relative(network(torch.tensor(np.asarray(ids)).long()).logits.numpy(), unmerged) < 1e-5
    # Merged while it is loaded, and from the run.
    for model in (jaxllm.load_model(base[0], adapter=tmp_path / "adapter"), jaxllm.load_model(folder)):
        assert model.config.lora is None
        assert relative(model(ids), unmerged) < 1e-5


def test_merged_weights_are_a_folder_of_transformers(base, halves, ids, unmerged, tmp_path):
    folder, _, _ = halves
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    to_hf(str(folder), str(tmp_path / "merged"), verify=True)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    with torch.no_grad():
        assert relative(network(torch.tensor(np.asarray(ids)).long()).logits.numpy(), unmerged) < 1e-5
    adapter_to_peft(str(folder), str(tmp_path / "adapter"))
    to_hf(str(base[0]), str(tmp_path / "both"), adapters=[str(tmp_path / "adapter")])
    jax.tree.map(np.testing.assert_array_equal, *(load_file(tmp_path / x / "model.safetensors") for x in ("both", "merged")))


def test_an_adapter_comes_back_bit_for_bit(theirs, config, tmp_path):
    run = jaxllm.load_config(config)
    adapter = initial_adapter(run)
    write_adapter(adapter, tmp_path, None, None)
    jax.tree.map(np.testing.assert_array_equal, *(load_file(x / WEIGHTS) for x in (theirs[0], tmp_path)))
    said = [json.loads((x / ADAPTER_CONFIG).read_text()) for x in (theirs[0], tmp_path)]
    assert {**said[0], **said[1], "target_modules": 0, "inference_mode": 0, "base_model_name_or_path": 0} == {
        **said[0],
        "target_modules": 0,
        "inference_mode": 0,
        "base_model_name_or_path": 0,
    }
    assert sorted(said[0]["target_modules"]) == sorted(said[1]["target_modules"])


STARTS = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica")


def test_what_has_no_part_in_an_adapter_is_taken(theirs, config, tmp_path):
    """Also a key that is yet to come, where it is off."""
    (tmp_path / WEIGHTS).write_bytes((theirs[0] / WEIGHTS).read_bytes())
    off = {"init_lora_weights": "Gaussian", "lora_dropout": 0.5, "next_config": None, "next_switch": False, "next_list": []}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(json.loads((theirs[0] / ADAPTER_CONFIG).read_text()) | off))
    assert initial_adapter(jaxllm.load_config(config, [f"train.init_adapter={tmp_path}"])).entries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=true, which jaxllm does not support: use another adapter"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        # Today's PEFT takes these parts out of the base model, or adapts behind these tokens alone.
        *(({"init_lora_weights": way}, f"init_lora_weights={way}, which jaxllm does not support") for way in STARTS),
        ({"init_lora_weights": "pissa"}, "or let PEFT save it as a plain LoRA"),
        ({"peft_type": "IA3", "feedforward_modules": ["down_proj"]}, "is not the config of a LoRA adapter"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\], which jaxllm does not support"),
        # And of a PEFT that is yet to come.
        ({"next_config": {"scale": 2}}, "next_config="),
        ({"next_factor": 1.5}, "next_factor=1.5"),
        ({"r": 4}, "holds an adapter|has shape"),
        ({"lora_alpha": 5}, "model.lora.alpha=5.0, not 6.0: set that value"),
        ({"use_rslora": True}, "model.lora.alpha=10.39"),
    ],
)
def test_what_is_not_supported_is_refused(theirs, config, tmp_path, change, message):
    (tmp_path / WEIGHTS).write_bytes((theirs[0] / WEIGHTS).read_bytes())
    said = json.loads((theirs[0] / ADAPTER_CONFIG).read_text())
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(said | change))
    with pytest.raises(ConfigError, match=message):
        initial_adapter(jaxllm.load_config(config, [f"train.init_adapter={tmp_path}"]))
