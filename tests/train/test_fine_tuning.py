"""Fine-tuning on conversations: the loss equals that of each answer alone, and real weights learn."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import records
from safetensors.numpy import load_file
from tiny import TINY

import jaxllm
from jaxllm.config import load_config
from jaxllm.parallel.parameters import merge_model

TEMPLATE = """\
{%- for m in messages %}{{ '[' + m.role + ']' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
# SmolLM2's own template, without its initial system message.
CHATML = TEMPLATE.replace("'[' +", "'<|im_start|>' +").replace("']' + m.content +", "'\\n' + m.content + '<|im_end|>' +")
CHATML = CHATML.replace("[assistant]", "<|im_start|>assistant\\n")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A tiny byte model and 40 conversations of two turns, packed, on data 4 x tensor 2."""
    folder = tmp_path_factory.mktemp("chat")
    lines = []
    for n in range(40):
        said = [f"{n}+1?", f"{n + 1}", "twice?", f"that is {2 * n + 2}."]
        messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=True)]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    (folder / "chat.jinja").write_text(TEMPLATE)
    data = {
        "source": "chat",
        "paths": [str(folder / "chat.jsonl")],
        "tokenizer": "bytes",
        "chat_template": str(folder / "chat.jinja"),
        "packing": "best_fit",
        "held_out_fraction": 0.3,
    }
    train = TINY["train"] | {"sequence_length": 192}
    return jaxllm.Trainer(load_config(TINY | {"data": data, "train": train}, ["parallel.tensor=2", "run.cpu_devices=8"]))


def test_targets_that_are_not_scored_have_no_part_in_loss_or_gradient(trainer):
    gradients = jax.jit(trainer.programs.functions.value_and_grad)
    batch = trainer.train_batch(0)
    mask = np.asarray(batch["mask"])
    assert 0.1 < mask.mean() < 0.5
    others = np.random.default_rng(0).integers(0, 256, mask.shape, np.int32)

    def with_targets(array):
        return batch | {"targets": jax.device_put(array.astype(np.int32), batch["targets"].sharding)}

    with jax.set_mesh(trainer.mesh):
        expected = gradients(trainer.state.params, batch)
        unscored = gradients(trainer.state.params, with_targets(np.where(mask, batch["targets"], others)))
        scored = gradients(trainer.state.params, with_targets(np.where(mask, others, batch["targets"])))
    jax.tree.map(np.testing.assert_array_equal, unscored, expected)
    assert abs(float(scored[0]) - float(expected[0])) > 1e-3


def test_the_held_out_loss_is_that_of_answers_in_conversations_alone(trainer):
    """Compares packing, masks and segments with one conversation at a time, without any of them."""
    (source,) = trainer.data.sources
    documents, longest = source.documents, int(source.documents.lengths.max())

    @jax.jit
    def nll(params, ids_S):
        logits_SV = merge_model(trainer.config, params)(ids_S[None])[0]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits_SV[:-1]), ids_S[1:, None], axis=1)[:, 0]

    params = jax.device_get(trainer.state.params)
    total, count = 0.0, 0
    for number in source.held_out:
        span = np.array([number]), np.array([0]), documents.lengths[[number]]
        (ids,), (scored,) = documents.read(*span), documents.scored(*span)
        # Padding to one length is not seen and needs only one compilation.
        padded = np.zeros(longest, np.int32)
        padded[: len(ids)] = ids
        total += float(nll(params, padded)[: len(ids) - 1][scored[1:]].sum())
        count += int(scored[1:].sum())
        text = bytes(ids[scored]).decode()
        assert text.count("\n") == 2
        assert "[" not in text
    found = trainer.evaluate()
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-5)


@pytest.fixture(scope="module")
def fine_tuned(smollm2_first_layers, chatterbot_file, tmp_path_factory):
    """(lines of metrics.jsonl, run directory) after six short steps of SmolLM2's first two layers, by the command line."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    (folder / "chatml.jinja").write_text(CHATML)
    keys = {
        "model.name": smollm2_first_layers,
        "data.paths": f"[{chatterbot_file}]",
        "data.chat_template": folder / "chatml.jinja",
        "data.held_out_fraction": 0.01,
        "optimizer.learning_rate": 2e-3,
        "optimizer.warmup_tokens": 0,
        "train.steps": 6,
        "train.sequence_length": 64,
        "train.eval_every_steps": "null",
        "run.cpu_devices": 1,
        "run.dir": folder / "run",
    }
    command = [sys.executable, "-m", "jaxllm.cli", "train", "configs/finetune-smollm2-chat.yaml"]
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in keys.items())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return records(folder / "run"), folder / "run"


@pytest.mark.slow
def test_real_weights_learn_to_answer(fine_tuned):
    lines, _ = fine_tuned
    losses = [line["loss"] for line in lines if "loss" in line]
    (held_out,) = [line["eval_loss"] for line in lines if "eval_loss" in line]
    # Two of thirty layers cannot model language at first.
    assert losses[0] > 12
    assert max(losses[-1], held_out) < losses[0] - 3


def test_a_fine_tuned_model_is_the_same_in_transformers(fine_tuned, smollm2_first_layers, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from jaxllm.weights.hf_convert import to_hf

    _, run = fine_tuned
    exported = tmp_path / "exported"
    to_hf(str(run), str(exported))
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": "What is a robot?"}, {"role": "assistant", "content": "A machine."}]
    # The run's template replaced the model's original one.
    text = "<|im_start|>user\nWhat is a robot?<|im_end|>\n<|im_start|>assistant\nA machine.<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    ours = np.asarray(jaxllm.load_model(run, compute_dtype="float32", parallel={"data": 1})(jnp.array([ids]))[0])
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    # The weights differ from the initial ones.
    name = "model.layers.1.mlp.down_proj.weight"
    before, after = (load_file(folder / "model.safetensors")[name] for folder in (smollm2_first_layers, exported))
    assert before.shape == after.shape
    assert np.abs(after - before).max() > 1e-3
