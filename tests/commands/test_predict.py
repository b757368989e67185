"""`jaxllm eval` and `jaxllm generate` on each kind of folder: their output, and refusals before any device is used."""

import json
import shutil
import subprocess
import sys
from contextlib import closing

import jax
import numpy as np
import outside
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.checkpoint.files import describe_run
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.cli.app import app
from jaxllm.config.errors import ConfigError
from jaxllm.data.chat import load_chat_template
from jaxllm.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxllm.inference.generate import InTurn
from jaxllm.inference.predict import encode_prompt, stop_ids
from jaxllm.weights.hf_convert import from_hf

TEXT = "the law of the mesh: gather, shard, tick — and gather.\n" * 4
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("scored") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run_dir(tiny_config, tmp_path_factory):
    """A run of a byte model at its start, saved by training's own code. Large weights give continuations that are not one
    byte repeated.
    """
    folder = tmp_path_factory.mktemp("runs") / "bytes"
    trainer = jaxllm.Trainer(tiny_config("model.initializer_std=0.3", "data.held_out_fraction=0"))
    with closing(Checkpoints(folder, trainer.config.checkpoint)) as checkpoints:
        checkpoints.save(1, trainer.state, describe_run(trainer.config, 1, trainer.data.fingerprint))
        checkpoints.wait()
    return folder


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    """A folder as on a model hub: config.json, model.safetensors, a tokenizer, a chat template; random weights."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    marks = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=marks, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    V, D, F, N, K, H, L = tokenizer.get_vocab_size(), 24, 42, 3, 1, 8, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "num_hidden_layers": L,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D)}
    shapes |= {"self_attn.o_proj": (D, N * H), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    draw = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": draw.normal(size=(V, D)), "model.norm.weight": np.ones(D)}
    for layer in range(L):
        start = f"model.layers.{layer}"
        tensors |= {f"{start}.{name}.weight": 0.3 * draw.normal(size=shape) for name, shape in shapes.items()}
        tensors |= {f"{start}.{name}.weight": np.ones(D) for name in ("input_layernorm", "post_attention_layernorm")}
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


# ------------------------------------------------------------------------------------------------------------------ eval


def reference_losses(folder, ids, length, stride):
    """[window, token but the first], float64, from the logits of load_model."""
    model = jaxllm.load_model(folder, compute_dtype="float32", parallel={"data": 1})
    graph, params = nnx.split(model)
    logits = jax.jit(lambda params, ids_BS: nnx.merge(graph, params)(ids_BS))
    rows = np.stack([ids[start : start + length] for start in range(0, len(ids) - length + 1, stride)]).astype(np.int32)
    log_p = np.asarray(jax.nn.log_softmax(logits(params, rows)), np.float64)
    return -np.take_along_axis(log_p[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]


@pytest.fixture(scope="module")
def run_losses(run_dir):
    """Expected loss for windows of 16 tokens that begin every 8 tokens."""
    return reference_losses(run_dir, np.frombuffer(TEXT.encode(), np.uint8), 16, 8)


def test_a_run_of_bytes_is_scored_with_the_length_it_was_trained_with(run_dir, run_losses, text):
    said, expected = [], run_losses[::2]
    score = jaxllm.evaluate(run_dir, text, say=said.append)
    np.testing.assert_allclose(score.loss, expected.mean(), rtol=2e-6)
    assert score.tokens == score.bytes == expected.size
    # Without overrides the weights are sharded over all devices.
    assert said == [f"{run_dir} at step 1, computing in float32 on 8 cpu devices: data 8"]


def test_a_hub_folder_is_scored_as_its_own_tokenizer_cuts_the_text(hub_folder, text):
    tokenizer = load_tokenizer(hub_folder)
    ids = tokenizer.encode(TEXT)
    expected = reference_losses(hub_folder, ids, 16, 16)
    # Three ranks do not divide 16 positions, so rows are padded to 18. Of eight devices six are used.
    said = []
    score = jaxllm.evaluate(hub_folder, text, ["parallel.tensor=3"], sequence_length=16, say=said.append)
    assert said == [f"{hub_folder}, computing in float32 on 6 cpu devices: data 2, tensor 3"]
    np.testing.assert_allclose(score.loss, expected.mean(), rtol=2e-6)
    assert (score.tokens, score.windows) == (expected.size, len(ids) // 16)
    assert score.bytes < len(TEXT.encode())


def test_a_folder_of_jaxllms_own_is_scored_and_continued_as_the_one_it_was_made_from(hub_folder, text, tmp_path):
    own = tmp_path / "own"
    from_hf(str(hub_folder), str(own))
    scores = [jaxllm.evaluate(folder, text, ["parallel.data=1"]) for folder in (hub_folder, own)]
    assert scores[0] == scores[1]
    # No length was given, and the default of 1024 is above the model's 32 positions.
    assert scores[0].tokens == 31 * scores[0].windows
    (ours,), (theirs,) = (jaxllm.generate(f, "law", ["parallel.data=1"], max_new_tokens=5) for f in (own, hub_folder))
    assert ours == theirs


def test_a_window_that_is_longer_than_the_model_knows_is_noted(hub_folder, text):
    said = []
    jaxllm.evaluate(hub_folder, text, ["parallel.data=1"], sequence_length=33, say=said.append)
    assert said[1:] == ["note: up to 33 positions, but the model supports 32; expect nonsense beyond those"]


# -------------------------------------------------------------------------------------------------------------- generate


PROMPTS = ["the law", "tick"]


@pytest.fixture(scope="module")
def continued(run_dir):
    return jaxllm.generate(run_dir, PROMPTS, ["parallel.data=1"], max_new_tokens=9)


def test_a_run_of_bytes_goes_on_with_bytes(run_dir, continued):
    model = jaxllm.load_model(run_dir, compute_dtype="float32", parallel={"data": 1})
    graph, params = nnx.split(model)
    logits = jax.jit(lambda params, ids_BS: nnx.merge(graph, params)(ids_BS))
    for prompt, completion in zip(PROMPTS, continued, strict=True):
        ids = [*prompt.encode(), *completion.ids]
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(ids) - 1] = ids[:-1]
        likeliest = np.asarray(logits(params, padded))[0].argmax(-1)
        assert likeliest[len(prompt) - 1 : len(ids) - 1].tolist() == completion.ids
        assert completion.text == ByteTokenizer().decode(completion.ids)


def test_a_conversation_is_written_by_the_template_and_ends_as_it_does(hub_folder):
    tokenizer, template = load_tokenizer(hub_folder), load_chat_template(hub_folder)
    ids = encode_prompt(tokenizer, "tick?", 300, template, system="law")
    spelled = "<|im_start|>system\nlaw<|im_end|>\n<|im_start|>user\ntick?<|im_end|>\n<|im_start|>assistant\n"
    raw = tokenizers.Tokenizer.from_file(str(hub_folder / "tokenizer.json"))
    assert ids.tolist() == raw.encode(spelled).ids
    assert ids.tolist().count(1) == 3
    assert stop_ids(tokenizer, {}) == {0}
    assert stop_ids(tokenizer, {}, template) == {0, 2}
    assert stop_ids(tokenizer, {"eos_token_id": [5, 6]}) == {0, 5, 6}
    assert stop_ids(tokenizer, {"eos_token_id": 7}) == {0, 7}
    assert stop_ids(tokenizer, {}, None, ["law", "<|im_start|>"]) == {0, 1}


def test_a_tokenizer_without_an_end_mark_serves_but_not_for_documents(hub_folder, tmp_path):
    shutil.copy(hub_folder / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match="has no token that ends a document"):
        load_tokenizer(tmp_path)
    bare = load_tokenizer(tmp_path, for_documents=False)
    whole = load_tokenizer(hub_folder)
    assert (bare.eos_id, stop_ids(bare, {})) == (None, frozenset())
    assert bare.encode(TEXT).tolist() == whole.encode(TEXT).tolist()
    assert bare.special_tokens == whole.special_tokens


def test_an_answer_differs_from_a_continuation(hub_folder):
    options = {"overrides": ["parallel.data=1"], "max_new_tokens": 6}
    (answer,) = jaxllm.generate(hub_folder, "tick", chat=True, **options)
    spelled = "<|im_start|>user\ntick<|im_end|>\n<|im_start|>assistant\n"
    plain, as_text = jaxllm.generate(hub_folder, ["tick", spelled], **options)
    assert answer.ids == as_text.ids != plain.ids


# -------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def no_device(monkeypatch):
    def touched(*_):
        raise AssertionError("a device was touched")

    for name in ("devices", "local_devices", "default_backend"):
        monkeypatch.setattr(jax, name, touched)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"sequence_length": 10_000},
            "The text has 228 tokens, less than one window of 10000: set --sequence-length=228 or less.",
        ),
        ({"stride": 17}, "--stride=17 is not in 1 .. 16, the sequence length"),
        (
            {"text": "nowhere.txt"},
            "The text nowhere.txt cannot be read (No such file or directory): give a file of UTF-8 text.",
        ),
        ({"model": "nowhere"}, "--model=nowhere is not a folder"),
        ({"overrides": ["parallel.tensor=3"]}, "model.num_heads=4 cannot be split over parallel.tensor=3"),
        ({"overrides": ["parallel.tensro=2"]}, "Unknown key parallel.tensro: did you mean parallel.tensor?"),
        ({"overrides": ["parallel.tensor=two"]}, "parallel.tensor=two is not valid"),
        ({"overrides": ["model.vocab_size=512"]}, "has model.vocab_size=256: leave it out."),
        ({"overrides": ["model.name=smollm2-135m"]}, "is a model already: leave it out."),
        ({"overrides": ["train.sequence_length=8"]}, "train.sequence_length applies only to training: leave it out"),
        ({"tokenizer": "nowhere"}, "There is no tokenizer nowhere: name a folder with tokenizer.json, or bytes."),
    ],
)
def test_scoring_refuses_in_one_sentence(run_dir, text, no_device, options, sentence):
    with pytest.raises(ConfigError) as refusal:
        jaxllm.evaluate(**{"model": run_dir, "text": text, **options})
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompts": [""]}, "A prompt is empty, and this tokenizer adds no BOS token: give at least one character."),
        ({"prompts": ["a", "b\udcff"]}, "A prompt is not Unicode (at character 1): give it in UTF-8."),
        ({"prompts": []}, "No prompt is given: give one with --prompt."),
        ({"max_new_tokens": 0}, "--max-new-tokens=0 leaves nothing to generate: use 1 or more."),
        ({"stop": ["x", ""]}, "--stop is empty, and would end every text at its start"),
        ({"top_p": 0.5}, "temperature=0 does not sample: set temperature."),
        ({"chat": True}, "has no chat template: leave out --chat, or add chat_template.jinja to it."),
        ({"system": "Be brief."}, "--system is part of a conversation: add --chat, or leave it out."),
        ({"model": "nowhere"}, "--model=nowhere is not a folder"),
        ({"overrides": ["model.compute_dtype=float8"]}, "model.compute_dtype=float8 is not one of the choices"),
    ],
)
def test_generating_refuses_in_one_sentence(run_dir, no_device, options, sentence):
    with pytest.raises(ConfigError) as refusal:
        jaxllm.generate(**{"model": run_dir, "prompts": ["a"], **options})
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_stop_text_that_no_text_can_have_is_refused(hub_folder, no_device):
    """The text that is searched for it has no special tokens."""
    with pytest.raises(ConfigError, match=r"--stop=<\|im_end\|>\\n is a special token and more, which no text has: give that"):
        jaxllm.generate(hub_folder, "a", stop=["law", "<|im_end|>", "<|im_end|>\n"])


def test_a_large_vocabulary_without_a_tokenizer_is_not_read_as_bytes(hub_folder, text, tmp_path, no_device):
    config = json.loads((hub_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 600}))
    weights = load_file(hub_folder / "model.safetensors")
    save_file(weights | {"model.embed_tokens.weight": np.zeros((600, 24), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no tokenizer.json, and its vocabulary of 600 is not bytes: name a folder"):
        jaxllm.evaluate(tmp_path, text)
    with pytest.raises(ConfigError, match=r"no tokenizer.json, and .* with --tokenizer"):
        jaxllm.generate(tmp_path, ["a"])


def test_a_tokenizer_of_another_model_is_refused(run_dir, hub_folder, text, no_device):
    with pytest.raises(ConfigError, match=r"gives the id 2\d\d, and the model's vocabulary is 256: use the tokenizer that"):
        jaxllm.evaluate(run_dir, text, tokenizer=str(hub_folder))


# ---------------------------------------------------------------------------------------------------------- command line


def command(*arguments):
    options = {"capture_output": True, "text": True, "timeout": 300, "env": outside.environment()}
    return subprocess.run([sys.executable, "-m", "jaxllm.cli", *map(str, arguments)], check=False, **options)


def test_eval_prints_one_json_object_alone(run_dir, run_losses, text):
    arguments = ["--model", run_dir, "--text", text, "--stride", 8, "run.cpu_devices=2", "parallel.data=2", "--json"]
    done = command("eval", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"loss", "perplexity", "bits_per_byte", "tokens", "bytes", "windows", "dropped_tokens"}
    expected = np.concatenate([run_losses[0], run_losses[1:, -8:].reshape(-1)])
    assert found["tokens"] == expected.size == 15 + 8 * (found["windows"] - 1)
    np.testing.assert_allclose(found["loss"], expected.mean(), rtol=2e-6)
    np.testing.assert_allclose(found["perplexity"], np.exp(found["loss"]), rtol=1e-9)
    np.testing.assert_allclose(found["bits_per_byte"], found["loss"] / np.log(2), rtol=1e-9)
    assert done.stderr == f"{run_dir} at step 1, computing in float32 on 2 cpu devices: data 2\n"


def test_a_note_that_comes_before_the_devices_starts_none(hub_folder, tmp_path):
    """The devices would be others, and without the flags of the run."""
    folder = shutil.copytree(hub_folder, tmp_path / "hub", ignore=shutil.ignore_patterns("tokenizer*"))
    arguments = ["--model", folder, "--prompt", "a", "--max-new-tokens", 1, "run.cpu_devices=2", "parallel.data=2"]
    done = command("generate", *arguments)
    assert done.stderr == (
        f"note: {folder} has no tokenizer.json, so text is read as bytes\n"
        f"{folder}, computing in float32 on 2 cpu devices: data 2\n"
    )
    assert done.returncode == 0


def test_generate_prints_prompts_and_what_follows(run_dir, continued, capsys):
    prompts = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    arguments = ["generate", "--model", str(run_dir), *prompts, "--max-new-tokens", "9", "parallel.data=1"]
    app(arguments, standalone_mode=False)
    printed = capsys.readouterr()
    assert printed.err == f"{run_dir} at step 1, computing in float32 on 1 cpu device\n"
    shown = []
    show = InTurn(PROMPTS, shown.append)
    for row, completion in enumerate(continued):
        show(row, completion.text, True)
    assert printed.out == "".join(shown)
    assert printed.out.startswith("the law")


def test_the_command_line_ends_with_one_sentence_and_code_2(run_dir):
    done = command("generate", "--model", run_dir, "--prompt", "a", "--top-k", 3)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip() == (
        "jaxllm: top_p and top_k limit sampling, but temperature=0 does not sample: set temperature."
    )


def test_texts_that_grow_together_are_shown_one_after_the_other():
    shown = []
    show = InTurn(["A", "B", "C"], shown.append)
    show(1, "two", False)
    assert shown == ["A"]
    show(0, " one", False)
    show(2, "three", True)
    show(1, "!\x1b", True)
    assert "".join(shown) == "A one"
    show(0, ".", True)
    assert "".join(shown) == "A one.\nBtwo!\N{REPLACEMENT CHARACTER}\nCthree\n"
