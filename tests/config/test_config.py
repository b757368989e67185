"""Every refusal is one sentence that names the key and says what to change."""

import json
import subprocess
import sys

import pytest
from tiny import TINY

from jaxllm.config import ConfigError, config_folder, json_schema, load_config, published_models
from jaxllm.config.named import as_named, title_of
from jaxllm.cost_model.hardware import GPUS
from jaxllm.plan.estimate import estimate
from jaxllm.plan.inference_estimate import estimate_inference
from jaxllm.plan.search import search
from jaxllm.plan.search_text import heading_lines

BASE = {
    "model": {"name": "llama-3.1-8b"},
    "train": {"steps": 10, "sequence_length": 128, "global_batch_sequences": 16},
}

REFUSALS = {
    ("train.stpes=3",): "Unknown key train.stpes: did you mean train.steps?",
    ("model.sequence_length=3",): "Unknown key model.sequence_length: did you mean train.sequence_length?",
    ("trian.steps=3",): "Unknown key trian.steps: did you mean train.steps?",
    ("[model.scan_layers=true]",): "Unknown key [model.scan_layers: did you mean model.scan_layers?",
    ("train.max-steps=3",): "Unknown key train.max-steps: did you mean train.steps?",
    ("model.name=llama-3-8",): (
        "model.name=llama-3-8 is neither a published model nor an existing folder: did you mean llama-3-8b?"
    ),
    ("model.num_kv_heads=5",): "model.num_heads=32 is not a multiple of model.num_kv_heads=5: use one of [1, 2, 4, 8, 16, 32]",
    ("model.head_dim=33",): "model.head_dim=33 is odd, and rotary embeddings rotate pairs: make it 34.",
    ("parallel.reduce_dtype=bfloat16",): "parallel.reduce_dtype=bfloat16 is for ZeRO 2 and 3: set zero=2, or leave it out.",
    ("parallel.zero=4",): "parallel.zero=4 is not one of the choices: use 0, 1, 2, 3.",
    ("model.compute_dtype=fp16",): "model.compute_dtype=fp16 is not one of the choices: use bfloat16, float32.",
    ("train.steps=0",): "train.steps=0 is not valid: it should be greater than or equal to 1.",
    ("train.steps=ten",): "train.steps=ten is not valid: it should be a valid integer.",
    ("train.steps=1e3",): "train.steps=1000.0 is not valid: it should be a valid integer, written 1000.",
    ("model.tie_embeddings=1",): "model.tie_embeddings=1 is not valid: it should be true or false.",
    ("model.rope_scaling=8",): "model.rope_scaling=8 is not valid: it should have keys below it.",
    (
        "model.rope_scaling={rope_type: linear, factor: 2, beta_fast: 8}",
    ): "model.rope_scaling.beta_fast=8.0 has no effect with rope_type=linear: leave it out.",
    (
        "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position: 6}",
    ): "original_max_position=6 is too short for yarn: no pair turns beta_slow=1.0 times in it.",
    (
        "model.rope_theta=1.0",
        "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position: 64}",
    ): "model.rope_theta=1.0 must be above 1 with rope_type=yarn",
    ("model.rope_scaling={rope_type: yarn, factor: 4}",): "model.rope_scaling.original_max_position is missing: yarn needs",
    ("model.rope_scaling={factor: 4, low_freq_factor: 5}",): "high_freq_factor=4.0 must be larger than low_freq_factor=5.0: ",
    ("model.num_heads=2147483643",): "use one of [1, 3, 715827881, 2147483643] key-value heads.",
    ("optimizer.learning_rate=high",): "optimizer.learning_rate=high is not valid: it should be a valid number.",
    ("data.mixture=3",): "data.mixture=3 is not valid: it should be a list.",
    ("log.profile_steps=[1, 2, 3]",): "it should have at most 2 items, not 3.",
    ("log.sample_prompt=''",): "it should have at least 1 character.",
    ("parallel.remat=most",): "parallel.remat=most is not one of the choices: use none, selective, full or offload.",
    ("parallel.pipe=100000",): "x virtual_stages=1 = 100000 without a layer: set parallel.pipe=32.",
    ("model.hidden_size=true",): "model.hidden_size=true is not valid: it should be a valid integer.",
    ("parallel.data=some",): "parallel.data=some is not valid: it should be a whole number of at least 1, or auto.",
    ("parallel.tensor=9",): "model.num_heads=32 cannot be split over parallel.tensor=9: use one of [1, 2, 4, 8, 16, 32].",
    (
        "train.sequence_length=130",
        "parallel.tensor=4",
    ): "train.sequence_length=130 does not divide over parallel.tensor=4: set train.sequence_length=128 or 132.",
    (
        "train.sequence_length=100",
        "parallel.context=8",
    ): "train.sequence_length=100 does not divide in two chunks over parallel.context=8 and each part over parallel.tensor=1: "
    "set train.sequence_length=96 or 112.",
    ("train.sequence_length=5", "parallel.context=4", "parallel.tensor=4"): "set train.sequence_length=16.",
    (
        "parallel.offload_state=all",
        "parallel.data=4",
    ): "and with parallel.zero=1 ranks have whole layers: set parallel.zero=3, or offload_state=optimizer_and_master.",
    ("parallel.offload_state=all", "parallel.context=2", "parallel.zero=2"): "with parallel.zero=2 ranks have whole layers",
    ("parallel.offload_state=all", "parallel.pipe=2"): "which parallel.pipe=2 does not allow: change that, or set offload",
    ("parallel.offload_state=all", "parallel.replica=2"): "which parallel.replica=2 does not allow",
    ("parallel.offload_state=all", "model.scan_layers=false"): "which model.scan_layers=false does not allow",
    ("parallel.offload_state=all", "log.noise_scale_every=1"): "which log.noise_scale_every=1 does not allow",
    ("parallel.offload_state=all", "log.layer_norms_every=1"): "which log.layer_norms_every=1 does not allow",
    ("parallel.data=3",): "train.global_batch_sequences=16 does not divide into parallel.data=3 ranks: use 15 or 18",
    (
        "parallel.data=4",
        "train.microbatch_sequences=3",
    ): "train.global_batch_sequences=16 does not divide into data ranks x microbatch = 4 x 3 = 12: "
    "use 12 or 24, or set train.microbatch_sequences=2.",
    (
        "parallel.data=3",
        "train.microbatch_sequences=1",
    ): "does not divide into data ranks x microbatch = 3 x 1 = 3: use 15 or 18, or change parallel.data.",
    ("train.seed=4294967296",): "train.seed=4294967296 is not valid: it should be less than 2147483648.",
    ("optimizer.beta2=1.0",): "optimizer.beta2=1.0 is not valid: it should be less than 1.",
    ("data.held_out_fraction=0", "log.baselines=true"): "need held-out text: set data.held_out_fraction above 0",
    (
        "optimizer.name=muon",
        "parallel.offload_state=optimizer",
    ): "optimizer.name=muon takes whole matrices, and parallel.offload",
    ("optimizer.name=given",): "optimizer.name=given and moments=null do not fit: with name=given set moments",
    ("optimizer.moments=1",): "optimizer.name=adamw and moments=1.0 do not fit",
    ("train.loss=given", "train.z_loss_weight=0.1"): "train.loss=given and train.z_loss_weight=0.1 do not go together",
    ("train.loss=given", "log.noise_scale_every=1"): "train.loss=given and log.noise_scale_every=1 do not go together",
    ("data.source=given", "train.eval_every_steps=1"): "need held-out text, and data.source=given has none: remove them.",
    ("data.source=given", "data.paths=[x]"): "data.paths is not read with data.source=given",
    ("data.source=files",): "data.source=files needs data.paths: give files or glob patterns.",
    ("data.source=files", "data.paths=[s3://a/b]"): "data.paths=s3://a/b is an address, which a run does not read: tokenise it",
    ("data.source=preferences", "data.paths=[hf://datasets/a/b/c]"): "does not read: copy it to a disk.",
    ("data.source=files", "data.paths=[nope/*.txt]"): "data.paths: no file matches 'nope/*.txt'",
    ("data.paths=[x]",): "data.paths is not read with data.source=python_stdlib",
    ("optimizer.decay_tokens=5",): "optimizer.decay_tokens belongs to schedule=wsd, not cosine",
    ("log.profile_steps=[5, 20]",): "log.profile_steps=[5, 20] is not [first, last] within 1..10.",
    ("model.lora.rank=0",): "model.lora.rank=0 is not valid: it should be greater than or equal to 1.",
    ("model.lora.alpha=8",): "model.lora.rank is missing",
    ("model.lora.rank=4", "model.lora.targets=[lm_head]"): "model.lora.targets",
    (
        "model.lora.rank=4",
        "train.freeze=[embedding]",
    ): "model.lora freezes all other parameters already: leave train.freeze out.",
    ("model.lora.rank=4", "parallel.tensor=2", "parallel.tensor_ring=true"): "parallel.tensor_ring=true does not go together "
    "with model.lora: leave one of them out.",
    ("train.freeze=[head]", "parallel.replica=2", "train.diloco_steps=2"): "train.diloco_steps=2 does not go together with "
    "train.freeze: leave one of them out.",
    ("train.freeze=[head]", "parallel.offload_state=all"): "parallel.offload_state=all does not go together with train.freeze",
    ("train.freeze=[layers.3.mlp.*]",): "train.freeze=layers.3.mlp.* is the name of no parameter: use patterns of embedding,",
    ("train.freeze=['*']",): "train.freeze leaves no parameter to train: remove one of its patterns.",
    ("train.init_adapter=x",): "train.init_adapter has no effect without model.lora: set model.lora.rank, or leave it out.",
    (
        "checkpoint.memory_every_steps=20",
    ): "checkpoint.memory_every_steps was removed with checkpoints in memory: leave it out, and lower every_steps.",
    (
        "parallel.overlap_passes=true",
    ): "parallel.overlap_passes was removed, as tensor ranks in a ring wait less: leave it out.",
    ("run.xla_options=[layer_combined]",): "run.xla_options was removed, as steps set what helps: leave it out, or set "
    "XLA_FLAGS.",
    ("steps=3",): "Unknown key steps: did you mean train.steps?",
    ("train.steps.x=3",): "'train.steps.x=3' does not name a key: steps has no keys below it.",
}


@pytest.mark.parametrize("overrides", REFUSALS, ids=" ".join)
def test_refusal_says_what_to_change(overrides):
    with pytest.raises(ConfigError) as error:
        load_config(BASE, overrides)
    assert REFUSALS[overrides] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_removed_key_that_changed_nothing_is_left_out():
    """As configs have it that a version with the key has written."""
    left = [
        "parallel.overlap_passes=false",
        "run.xla_options=[]",
        "checkpoint.memory_every_steps=null",
        "checkpoint.memory_dir=/dev/shm",
    ]
    assert load_config(BASE, left) == load_config(BASE)


def test_one_path_is_a_list_of_one_and_an_empty_section_is_its_defaults():
    config = load_config({**BASE, "parallel": None}, ["data.source=files", f"data.paths={__file__}"])
    assert config.data.paths == (__file__,)
    assert config.parallel.zero == 1


def test_missing_sizes_and_sections_are_named():
    with pytest.raises(ConfigError, match=r"^model.num_layers is missing: .*model.name for a published shape"):
        load_config({**BASE, "model": {"num_heads": 4}})
    with pytest.raises(ConfigError, match=r"^The section train is missing"):
        load_config({"model": BASE["model"]})


PATH_IS_NO_NUMBER = (
    "data.mixture[0].paths[0]=3 is not valid: it should be a valid string, so put it in quotes "
    "(and those in quotes for a shell)."
)
PART = {"name": "x", "source": "files", "paths": [__file__], "weight": 1}


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            PART | {"source": "fils"},
            "data.mixture[0].source=fils is not one of the choices: use python_stdlib, files, chat, preferences, prepared, "
            "megatron, tokens, documents.",
        ),
        (PART | {"path": "x"}, "Unknown key data.mixture[0].path: did you mean data.mixture[0].paths?"),
        (PART | {"steps": 3}, "Unknown key data.mixture[0].steps: did you mean train.steps?"),
        (PART | {"zzz": 3}, "Unknown key data.mixture[0].zzz: the keys there are name, source, paths, weight."),
        ({k: v for k, v in PART.items() if k != "weight"}, "data.mixture[0].weight is missing: set it in the config."),
        (PART | {"weight": -1}, "data.mixture[0].weight=-1 is not valid: it should be greater than 0."),
        (PART | {"paths": [3]}, PATH_IS_NO_NUMBER),
    ],
)
def test_mistakes_in_a_mixture_name_the_part(part, sentence):
    with pytest.raises(ConfigError) as error:
        load_config({**BASE, "data": {"mixture": [part]}})
    assert str(error.value) == sentence


def test_files_that_are_not_recipes(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no config file .*quickstrat.yaml: did you mean .*quickstart.yaml"):
        load_config(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError, match=r"There is no config file llama-3-1-8b: did you mean llama-3.1-8b\?$"):
        load_config("llama-3-1-8b")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="holds no sections"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("model: [\n")
    with pytest.raises(ConfigError, match=r"broken.yaml cannot be read as YAML \(line 2: .*\): fix it\.$"):
        load_config(tmp_path / "broken.yaml")


def test_overrides_win_and_are_typed():
    config = load_config(BASE, ["optimizer.learning_rate=3e-4", "train.steps=7", "train.steps=8", "model.tie_embeddings=true"])
    assert (config.optimizer.learning_rate, config.train.steps, config.model.tie_embeddings) == (3e-4, 8, True)
    assert (config.model.head_dim, config.model.num_kv_heads, config.model.rope_scaling.factor) == (128, 8, 8.0)
    # A quoted string stays a string, even if it looks like a number.
    assert load_config(BASE, ["run.dir='2024'"]).run.dir == "2024"


def test_the_mesh_must_be_the_devices():
    with pytest.raises(ConfigError, match=r"1 x 1 x 4 x 1 x 2 is 8 devices, but there are 16: set parallel.data=8"):
        load_config(BASE, ["parallel.data=4", "parallel.tensor=2"]).resolve(16)
    with pytest.raises(ConfigError, match=r"parallel.tensor=16 does not divide the 8 devices here"):
        load_config(BASE, ["parallel.tensor=16"]).resolve(8)
    with pytest.raises(ConfigError, match=r"does not divide into parallel.data=3 ranks"):
        load_config(BASE).resolve(3)
    with pytest.raises(ConfigError, match=r"= 1 x 1 x 1 x 1 x 1 is 1 device, but there are 8: set parallel.data=8"):
        load_config(BASE, ["parallel.data=1"]).resolve(8)
    assert load_config(BASE, ["parallel.tensor=2"]).resolve(8).parallel.data == 4


def test_microbatches_follow_from_the_batch():
    config = load_config(BASE, ["train.microbatch_sequences=2"]).resolve(4)
    assert (config.microbatch_sequences, config.num_microbatches, config.step_tokens) == (2, 2, 2048)
    assert load_config(BASE).resolve(4).num_microbatches == 1


def test_published_shapes_are_the_contract():
    contract = (
        "llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b "
        "llama-3.2-1b llama-3.2-3b smollm2-135m smollm2-360m smollm2-1.7b mistral-7b-v0.3 mistral-nemo-12b "
        "qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b "
        "qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b "
        "olmo-2-1b olmo-2-7b olmo-2-13b olmo-2-32b mistral-7b-v0.1 gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b "
        "olmo-3-7b olmo-3-32b smollm3-3b qwen3-30b-a3b olmoe-1b-7b mixtral-8x7b"
    )
    assert published_models() == sorted(contract.split())
    for name in published_models():
        assert load_config({**BASE, "model": {"name": name}}).model.name == name


def test_a_recipe_may_be_cut_short():
    """As in the README's Python example, the run has fewer tokens than the recipe's warm-up."""
    config = load_config(config_folder() / "quickstart.yaml", ["train.steps=20"])
    assert config.total_tokens < config.optimizer.warmup_tokens


def test_every_recipe_loads(tmp_path, monkeypatch):
    """Every recipe loads once the files exist that its first lines say to fetch."""
    recipes = sorted(path.absolute() for path in config_folder().glob("*.yaml"))
    assert recipes
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "smollm2"
    model.mkdir()
    (tmp_path / "data").mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}))
    (model / "tokenizer.json").touch()
    for name in ("data/chatterbot.jsonl", "pairs.jsonl"):
        (tmp_path / name).touch()
    for path in recipes:
        assert load_config(path).train.steps > 0


def test_a_recipe_cannot_ask_for_code(tmp_path):
    """A class that log.sinks names is imported, and runs as the user. Beside the file it may be given, also the same one."""
    recipe = tmp_path / "recipe.yaml"
    values = TINY | {"data": {"source": "files", "paths": [str(recipe)]}, "log": {"sinks": ["theirs:Sink"]}}
    recipe.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        load_config(recipe, ["log.every_steps=1", "log.sinks_=[a:B]"])
    assert str(error.value) == (
        f'{recipe} sets log.sinks=["theirs:Sink"], code that would run as you, and a recipe must not ask for that: remove the '
        f"key, or give log.sinks='[module:Class]' on the command line."
    )
    assert load_config(recipe, ["log.sinks=[mine:Sink]"]).log.sinks == ("mine:Sink",)
    assert load_config(recipe, ["log.sinks=[]"]).log.sinks == ()
    assert load_config(recipe, ["+log.sinks=[mine:Sink]"]).log.sinks == ("mine:Sink",)
    assert load_config(values).log.sinks == ("theirs:Sink",)


def test_configs_are_frozen():
    config = load_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


def test_schema_lists_every_section_and_describes_keys():
    schema = json_schema()
    sections = {"model", "parallel", "data", "optimizer", "train", "checkpoint", "log", "run", "launch"}
    assert set(schema["properties"]) == sections
    train = schema["$defs"]["TrainConfig"]["properties"]
    assert "optimizer step" in train["global_batch_sequences"]["description"]
    assert json.loads(json.dumps(schema)) == schema


def test_reading_a_config_starts_no_jax():
    code = (
        "import sys, jaxllm; jaxllm.load_config('configs/quickstart.yaml'); assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=config_folder().parent)


# ------------------------------------------------------------------------------------------------------- a name and sizes


@pytest.mark.parametrize("size", [{}, {"vocab_size": 256}], ids=str)
def test_a_name_on_the_command_line_replaces_the_sizes_of_the_file_and_says_so(size, caplog):
    overrides = [*(f"model.{key}={value}" for key, value in size.items()), "model.name=llama-3.1-70b"]
    model = load_config("mesh-demo", overrides).model
    assert model == as_named("llama-3.1-70b").model_copy(update={"compute_dtype": "float32", **size})
    assert [record.getMessage() for record in caplog.records] == [
        "model.name=llama-3.1-70b replaces num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, vocab_size of "
        "the recipe, whose compute_dtype stays."
    ]


def test_a_name_that_replaces_nothing_says_nothing(caplog):
    changed = {**BASE, "model": {"name": "llama-3.1-8b", "num_layers": 2}}
    assert load_config(changed, ["model.name=llama-3.1-8b"]) == load_config(changed)
    assert load_config(BASE, ["model.name=llama-3.1-70b"]).model == as_named("llama-3.1-70b")
    assert not caplog.records


def test_a_heading_says_what_differs_from_the_name():
    assert title_of(load_config(BASE).model) == "llama-3.1-8b"
    assert title_of(load_config({**BASE, "model": TINY["model"]}).model, "a model") == "a model"
    changed = load_config({**BASE, "model": {"name": "llama-3.1-8b", "num_layers": 2, "rope_theta": 1e4}})
    plan = search(changed, GPUS["h100-80gb"], 1)
    for lines in (estimate(changed, gpus=1).lines(), estimate_inference(changed, "load", gpus=1).lines(), heading_lines(plan)):
        assert next(iter(lines)).startswith("llama-3.1-8b with another num_layers, rope_theta ")


def test_a_changed_folder_has_a_heading_that_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({"model": load_config(BASE).model.model_dump(mode="json")}))
    named = {**BASE, "model": {"name": str(tmp_path)}}
    assert title_of(load_config(named).model) == str(tmp_path)
    changed = load_config(named, ["model.num_layers=2"]).model
    assert title_of(changed) == f"{tmp_path} with another num_layers"
    (tmp_path / "config.yaml").unlink()
    assert title_of(changed) == str(tmp_path)
