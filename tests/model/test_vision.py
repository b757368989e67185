"""Models with a vision tower equal transformers': logits, loss and gradients; and folders come back as they were."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxllm
from jaxllm.config import ConfigError, load_config
from jaxllm.config.hf_config import hugging_face_config, model_section
from jaxllm.data.tokenizer import PROCESSOR_FILES
from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.parallelize import parallelize
from jaxllm.run.given import GivenBatches
from jaxllm.weights.hf_convert import from_hf, to_hf

TOKEN, SIDE, S = 39, 12, 32
CASES = {
    # Tower, text model, layer of the features, which positions make them, tied head; features of an image.
    "clip": ("CLIPVisionConfig", "LlamaConfig", -2, "default", False),
    "siglip": ("SiglipVisionConfig", "Qwen2Config", -1, "full", True),
    "clip-class-token": ("CLIPVisionConfig", "MistralConfig", 2, "full", False),
    "mixtral": ("SiglipVisionConfig", "MixtralConfig", -1, "full", False),
}
PER_IMAGE = {"clip": 9, "siglip": 9, "clip-class-token": 10, "mixtral": 9}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4}
NETWORK = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="session", params=CASES)
def theirs(request, tmp_path_factory):
    """(name of the case, transformers' model, its folder)"""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tower, network, layer, strategy, tied = CASES[request.param]
    more = {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": TOKEN + 1, "tie_word_embeddings": tied}
    config = transformers.LlavaConfig(
        vision_config=getattr(transformers, tower)(
            **TOWER, image_size=SIDE, **({"vision_use_head": False} if "Siglip" in tower else {})
        ),
        text_config=getattr(transformers, network)(**NETWORK, **more),
        image_token_index=TOKEN,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        # Biases and norms begin as zeros and ones, which would hide a mistake.
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("llava") / request.param
    model.save_pretrained(folder)
    for name in PROCESSOR_FILES[:1]:
        (folder / name).write_text('{"do_resize": true}')
    return request.param, model, folder


def batch(case):
    """(ids [2, S] with two images in the first row and one in the second, pixels [3, 3, SIDE, SIDE])"""
    rng, n = np.random.default_rng(0), PER_IMAGE[case]
    ids = rng.integers(0, TOKEN, (2, S)).astype(np.int32)
    for row, at in ((0, 0), (0, 20), (1, S - n)):
        ids[row, at : at + n] = TOKEN
    return ids, rng.normal(size=(3, 3, SIDE, SIDE)).astype(np.float32)


def test_logits_are_those_of_transformers(theirs):
    import torch

    case, network, folder = theirs
    ids, pixels = batch(case)
    with torch.no_grad():
        expected = network(input_ids=torch.tensor(ids).long(), pixel_values=torch.tensor(pixels)).logits.numpy()
    model = jaxllm.load_model(folder, compute_dtype="float32")
    np.testing.assert_allclose(model(ids, images=pixels), expected, atol=1e-5)
    # Without images an image token is one like others.
    assert np.abs(np.asarray(model(ids)) - expected).max() > 0.01


def test_loss_and_gradients_are_those_of_transformers(theirs):
    import torch

    case, network, folder = theirs
    ids, pixels = batch(case)
    mask = np.concatenate([ids[:, 1:] != TOKEN, np.zeros((2, 1), bool)], axis=1)
    targets = np.concatenate([ids[:, 1:], np.zeros((2, 1), np.int32)], axis=1)
    network.zero_grad()
    logits = network(input_ids=torch.tensor(ids).long(), pixel_values=torch.tensor(pixels)).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.tensor(targets).long(), reduction="none")
    (expected := losses[torch.tensor(mask)].mean()).backward()
    sizes = {"steps": 1, "global_batch_sequences": 2, "sequence_length": S}
    # A router's own loss is jaxllm's.
    model = {"name": str(folder), "compute_dtype": "float32", **({"balance_loss_weight": 0} if case == "mixtral" else {})}
    values = {"model": model, "train": sizes, "data": {"source": "given"}}
    config = load_config(values).resolve(1)
    mesh = make_mesh(config.parallel, jax.devices()[:1])
    model = jaxllm.load_model(folder, compute_dtype="float32", parallel={"data": 1})
    params = nnx.to_pure_dict(nnx.state(model))
    # The first sequence has two images; the second one, and a place whose pixels nothing reads.
    images = np.stack([pixels[:2], np.stack([pixels[2], np.full_like(pixels[2], 7.0)])])
    rows = {"tokens": ids, "targets": targets, "mask": mask, "positions": np.broadcast_to(np.arange(S, dtype=np.int32), (2, S))}
    with jax.set_mesh(mesh):
        functions = parallelize(config, mesh)
        on_mesh = jax.device_put(params, functions.master_shardings)
        arrays = {name: jnp.asarray(x)[None] for name, x in {**rows, "images": images}.items()}
        loss, gradients = jax.jit(functions.value_and_grad)(on_mesh, arrays)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    found = {"/".join(map(str, path)): np.asarray(g) for path, g in _leaves(gradients)}
    of = {name.removeprefix("model."): p.grad for name, p in network.named_parameters()}
    layer = {"vision/blocks/query": "q_proj.weight", "vision/blocks/out": "out_proj.weight", "vision/blocks/up": "fc1.weight"}
    for ours, name in layer.items():
        part = "mlp" if "fc" in name else "self_attn"
        grad = of[f"vision_tower.encoder.layers.1.{part}.{name}"].numpy()
        np.testing.assert_allclose(found[ours][1].reshape(grad.T.shape), grad.T, atol=1e-5)
    assert (found["vision/norm_after"] == 0).all()
    patch = of["vision_tower.embeddings.patch_embedding.weight"].numpy()
    np.testing.assert_allclose(found["vision/patch"].transpose(3, 0, 1, 2), patch, atol=1e-5)
    second = of["multi_modal_projector.linear_2.weight"].numpy()
    np.testing.assert_allclose(found["projector/second"], second.T, atol=1e-5)
    np.testing.assert_allclose(found["embedding"], of["language_model.embed_tokens.weight"].numpy(), atol=1e-5)


def _leaves(tree):
    return [([key.key for key in path], leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize("names", ["hub", "in memory"])
def test_a_folder_comes_back_as_it_was(theirs, tmp_path, names):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlavaForConditionalGeneration

    case, network, folder = theirs
    source = tmp_path / "source"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    if names == "in memory":
        tensors = {name: tensor for name, tensor in network.state_dict().items() if name in dict(network.named_parameters())}
    else:
        # Of the Hub, whose files were written by transformers 4.
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
        tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(9)[None]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    if (case, names) == ("mixtral", "in memory"):
        with pytest.raises(ConfigError, match="all experts of a layer in one tensor"):
            from_hf(source, tmp_path / "ours")
        return
    there = from_hf(source, tmp_path / "ours")
    assert [name.rpartition(".")[2] for name in there.dropped] == (["position_ids"] if names == "hub" else [])
    to_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    again, said = LlavaForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(said.values()), said
    expected, found = network.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert (tmp_path / "back" / PROCESSOR_FILES[0]).read_text() == (folder / PROCESSOR_FILES[0]).read_text()
    written = set(load_file(tmp_path / "back" / "model.safetensors"))
    assert "language_model.model.norm.weight" in written
    assert "vision_tower.vision_model.post_layernorm.bias" in written


def test_the_pooling_head_of_siglip_is_left_out_and_said(tmp_path):
    transformers = pytest.importorskip("transformers")
    tower = transformers.SiglipVisionConfig(**TOWER, image_size=SIDE)
    network = transformers.LlamaConfig(**NETWORK, vocab_size=40)
    config = transformers.LlavaConfig(vision_config=tower, text_config=network, image_token_index=TOKEN)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    done = from_hf(tmp_path / "source", tmp_path / "ours")
    assert "dropped 11 tensors such as vision_tower.head.attention.in_proj_bias: the network does not need them" in done.lines()
    to_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    _, said = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(said.values()), said


# ---------------------------------------------------------------------------------------------------------- config.json

VICUNA = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
LLAVA_15 = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {**VICUNA, "architectures": ["LlamaForCausalLM"]},
    "vision_config": {
        **{"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096},
        **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000},
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "torch_dtype": "float16",
}
"""As in the Hub's folder of LLaVA 1.5 7B, whose text_config leaves out what transformers' class has as defaults."""


def test_the_config_of_llava_15_is_read_with_the_defaults_of_its_classes():
    section = model_section(LLAVA_15, "config.json")
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 32, "num_heads": 32, "vocab_size": 32064}
    assert sizes.items() <= section.items()
    vision = section["vision"]
    assert (vision["kind"], vision["used_layers"], vision["activation"], vision["norm_eps"]) == ("clip", 23, "quick_gelu", 1e-5)
    assert jaxllm.load_config({"model": section, "train": SIZES}).model.vision.tokens_per_image == 576
    again = hugging_face_config(section, dtype="float16", max_position=None, original=LLAVA_15)
    assert model_section(again, "config.json") == section
    assert {key: again[key] for key in LLAVA_15 if key.startswith("vision_f")} == {
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


SIZES = {"steps": 1, "sequence_length": 16, "global_batch_sequences": 8, "freeze": ["vision", "projector"]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer is"),
        ({"vision_feature_layer": -25}, "used_layers"),
        ({"image_token_id": 7}, "image_token_index and image_token_id disagree"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_config of model_type=pixtral"),
        ({"text_config": None}, "text_config=null: it should be an object"),
        ({"text_config": {"model_type": "gpt2"}}, "model_type=gpt2: jaxllm supports"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act is relu"),
    ],
)
def test_another_tower_is_refused_by_its_key(changes, sentence):
    with pytest.raises(ConfigError, match="^config.json.*" + sentence.replace("[", r"\[")):
        model_section({**LLAVA_15, **changes}, "config.json")


VISION = {"image_token_id": 9, "image_size": 8, "patch_size": 4, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8}
MODEL = {"num_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "vocab_size": 300}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.vision.num_heads=3", "model.vision.hidden_size=8 is not a multiple of num_heads=3"),
        ("model.vision.used_layers=2", "used_layers=2 is more than num_layers=1"),
        ("model.vision.patch_size=16", "leaves no feature of an image"),
        ("model.vision.image_token_id=300", "image_token_id=300 is not below model.vocab_size=300"),
        ("parallel.pipe=2", "parallel.pipe=2 does not go together with model.vision"),
        ("model.num_heads=4 parallel.tensor=4", "parallel.tensor=4 does not go together with model.vision"),
        ("parallel.context=2", "parallel.context=2 does not go together with model.vision"),
        ("data.packing=concat", "set data.packing=best_fit"),
        ("train.freeze=[vision.blocks.*]", "freezes a part of vision"),
        ("data.max_images=0", r"No image is read with data.source=chat, max_images=0.*set train.freeze=\[vision, projector\]"),
        ("data.source=files", r"No image is read with data.source=files"),
        ("model.vision=null", None),
    ],
)
def test_what_does_not_go_together_with_a_tower_is_refused(override, sentence):
    data = {"source": "chat", "paths": [__file__], "tokenizer": "any", "packing": "best_fit"}
    values = {"model": {**MODEL, "vision": {**VISION, "num_heads": 2}}, "train": {**SIZES, "freeze": []}, "data": data}
    if sentence is None:
        assert json.loads(load_config(values, override.split()).model_dump_json())["model"]["vision"] is None
        return
    with pytest.raises(ConfigError, match=sentence):
        load_config(values, override.split())


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        ((8, 1, 3, 8, 8), None),
        (None, "has 4 image tokens in a sequence, and images for 0"),
        ((8, 0, 3, 8, 8), "has 4 image tokens in a sequence, and images for 0"),
        ((8, 1, 3, 8, 9), r"has images of shape \[8, 1, 3, 8, 9\]: it needs \[8, images, 3, 8, 8\]"),
    ],
)
def test_images_of_the_callers_batches_fit_their_places(images, sentence):
    values = {"model": {**MODEL, "vision": {**VISION, "num_heads": 2}}, "train": SIZES, "data": {"source": "given"}}
    config = load_config(values).resolve(1)
    tokens = np.zeros((8, 16), np.int32)
    tokens[3, 2:6] = VISION["image_token_id"]
    batch = {"tokens": tokens, "targets": tokens, "mask": tokens > 0, "segments": np.ones_like(tokens)}
    batch |= {} if images is None else {"images": np.ones(images, np.float32)}
    given = GivenBatches(config, lambda step: batch, jax.devices()[0])
    if sentence is None:
        assert given.at(0)["images"].shape == images
        return
    with pytest.raises(ConfigError, match=sentence):
        given.at(0)
