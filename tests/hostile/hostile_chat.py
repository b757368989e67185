"""Hostile tokenizers and chat templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from hostile import Case, train
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

CONVERSATION = [{"role": "user", "content": "law?"}, {"role": "assistant", "content": "mesh."}]
SPECIAL = ["<s>", "</s>"]


def tokenizer(change: Callable[[dict[str, Any]], object] = lambda described: None, **files: Any) -> Callable[[], None]:
    """Writes tok/tokenizer.json after a change, and files beside it: JSON, or the text itself."""

    def write() -> None:
        made = tokenizers.Tokenizer(models.BPE())
        made.add_special_tokens(SPECIAL)
        made.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet())[:200])
        described = json.loads(made.to_str())
        change(described)
        Path("tok").mkdir()
        Path("tok/tokenizer.json").write_text(json.dumps(described))
        for name, content in {"tokenizer_config": {"eos_token": "</s>", "bos_token": "<s>"}, **files}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            Path(f"tok/{name}.json").write_text(text)
        Path("t.jsonl").write_text('{"text": "law mesh"}\n' * 3)

    return write


def prepares(name: str, says: str | None, change: Callable[[dict[str, Any]], object] = lambda described: None, **files: Any):
    words = ("data", "prepare", "t.jsonl", "--out", "out", "--tokenizer", "tok", "--workers", "1")
    return Case(name, words, says, tokenizer(change, **files))


def sets(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described.__setitem__(key, value)


def template(source: str) -> Callable[[], None]:
    """Writes tok/ with a chat template, and one conversation."""

    def write() -> None:
        tokenizer()()
        Path("tok/chat_template.jinja").write_text(source)
        Path("c.jsonl").write_text(json.dumps({"messages": CONVERSATION}))

    return write


def learns(name: str, says: str, source: str) -> Case:
    data = ("data.source=chat", "data.paths=c.jsonl", "data.tokenizer=tok", "model.vocab_size=300", "train.steps=2")
    return Case(name, train(*data), says, template(source))


def model(source: str) -> Callable[[], None]:
    """Writes tok/ with a chat template and a model of one layer."""

    def write() -> None:
        template(source)()
        V, D, F = 300, 8, 8
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": V,
            "hidden_size": D,
            "intermediate_size": F,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
            "max_position_embeddings": 32,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "torch_dtype": "float32",
        }
        Path("tok/config.json").write_text(json.dumps(config))
        shapes = {f"self_attn.{letter}_proj": (D, D) for letter in "qkvo"}
        shapes |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
        shapes |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
        tensors = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
        tensors |= {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
        save_file({name: np.ones(shape, np.float32) for name, shape in tensors.items()}, "tok/model.safetensors")

    return write


def answers(name: str, says: str | None, source: str) -> Case:
    words = ("generate", "--model", "tok", "--chat", "--prompt", "hello", "--max-new-tokens", "2", "parallel.data=1")
    return Case(name, words, says, model(source))


def replaces(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def huge_id() -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [10**9], "tokens": ["<s>"]}},
    }


def many_added(described: dict[str, Any]) -> None:
    described["post_processor"] = huge_id()
    described["post_processor"]["special_tokens"]["<s>"] = {"id": "<s>", "ids": [0] * 2000, "tokens": ["<s>"] * 2000}


def many_tries(described: dict[str, Any]) -> None:
    described["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    token = {"id": 300, "content": "a" * 40 + "b", "special": False, "normalized": True}
    described["added_tokens"].append({**described["added_tokens"][-1], **token})


LONG, MEMORY, TOO_OFTEN = (
    "takes more than 2 s of processor time to render: fix",
    "needs more than 512 MiB of memory",
    "100 times as long",
)
DOUBLINGS = [replaces("a", "aa")] * 40

CASES = [
    prepares("tk fine", None),
    prepares(
        "tk-norm-bomb",
        f"tok/tokenizer.json is not a tokenizer (its normalizer may make a text more than {TOO_OFTEN}): save it again",
        sets("normalizer", {"type": "Sequence", "normalizers": DOUBLINGS}),
    ),
    prepares("tk-norm-bomb in another form", TOO_OFTEN, sets("normalizer", {"normalizers": DOUBLINGS})),
    prepares(
        "tk-prepend-bomb",
        "its normalizer puts more than 4,096 bytes before a text",
        sets("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 1000}] * 200}),
    ),
    prepares(
        "tk pre-tokenizer bomb",
        f"its pre_tokenizer may make a text more than {TOO_OFTEN}",
        sets(
            "pre_tokenizer",
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
                * 40,
            },
        ),
    ),
    prepares(
        "tk decoder bomb",
        f"its decoder may make a text more than {TOO_OFTEN}",
        sets("decoder", {"type": "Sequence", "decoders": DOUBLINGS}),
    ),
    prepares("tk panics when read", "is not a tokenizer (Onig: Regex search error: retry-limit-in-match over", many_tries),
    prepares("tk many added", "its post_processor adds more than 1,024 tokens to a text", many_added),
    prepares(
        "tk long affix",
        "its end_of_word_suffix has more than 256 characters",
        lambda described: described["model"].update(end_of_word_suffix="x" * 1000),
    ),
    prepares("tk-post-huge-id", "tok/tokenizer.json adds the id 1000000000 to a text", sets("post_processor", huge_id())),
    prepares("tk-cfg-deep", "tok/tokenizer_config.json cannot be used (it nests", tokenizer_config='{"a": ' + "[" * 100_000),
    prepares("tk cfg twice", "the key eos_token is there twice", tokenizer_config='{"eos_token": "<s>", "eos_token": "</s>"}'),
    prepares("tk cfg long token", "has more than 4,096 characters", tokenizer_config={"eos_token": "x" * 5000}),
    prepares("tk map deep", "special_tokens_map.json cannot be used", tokenizer_config={}, special_tokens_map="[" * 100_000),
    prepares("tk gen deep", "generation_config.json cannot be used", tokenizer_config={}, generation_config="[" * 100_000),
    prepares(
        "tk-gen-eos-huge",
        "(its eos_token 'id 1000000000000' is not in the vocabulary)",
        tokenizer_config={},
        generation_config={"eos_token_id": 10**12},
    ),
    learns("ch-dos-01", LONG, "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"),
    learns("ch-dos-04", MEMORY, "{{ ('a' * 10 ** 10) | length }}"),
    learns("ch-dos-05", MEMORY, "{{ ([0] * 10 ** 10) | length }}"),
    learns("ch-dos-08", MEMORY, "{{ '%9999999999d' % messages | length }}"),
    learns("ch-dos-09", MEMORY, "{{ '{:>9999999999}'.format(1) }}"),
    learns("ch-dos-10", MEMORY, "{{ 'a' | center(10 ** 10) }}"),
    learns("ch-dos-11", MEMORY, "{{ messages | tojson(indent=10 ** 9) }}"),
    learns("ch-dos-12", "of processor time to render", "{{ lipsum(n=10 ** 7) }}"),
    learns("ch-dos-14", "to render: fix it", "{{ messages | slice(10 ** 9) | list | length }}"),
    learns(
        "ch-dos-15", MEMORY, "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    learns("ch-dos-17", LONG, "{{ 2 ** (10 ** 12) % 7 }}"),
    learns("ch-dos-18", "cannot be compiled (RecursionError", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    learns("ch-dos-19", "cannot be compiled (", "{% if true %}" * 3000 + "{% endif %}" * 3000),
    learns("ch long output", "writes a text of", "{{ 'a' * 10 ** 7 }}"),
    learns("ch large", "is larger than 1 MiB", "a" * 2**20 + "b"),
    answers("gc-strftime", "makes nothing of a message: fix it, or leave out --chat.", "{{ strftime_now('%9999999999d') }}"),
    answers("gc-strftime-global", "makes nothing of a message", "{{ strftime_now.__globals__ }}"),
    answers("gc-loop", LONG, "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"),
    answers("gc fine", None, "{{ messages[0].content }}"),
]
