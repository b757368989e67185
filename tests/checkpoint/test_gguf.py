"""`jaxllm export --to gguf`: keys, tensors, refusals, and transformers' own reader. llama.cpp itself: test_llama_cpp.py."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import scripts
from hf_folders import GEMMA3, HUB, LLAMA3_ROPE, random_weights, read_folder, write_folder

from jaxllm.cli import app as cli
from jaxllm.config import ConfigError
from jaxllm.data.tokenizer import load_tokenizer, save_byte_tokenizer
from jaxllm.run.loop import fit
from jaxllm.weights import staging
from jaxllm.weights.hf_convert import from_hf, to_hf
from jaxllm.weights.safetensors import Tensor

gguf = pytest.importorskip("gguf")

from jaxllm.weights.gguf_convert import to_gguf  # noqa: E402

BASE = {**HUB, "vocab_size": 260}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
GEMMA = {**GEMMA3, "query_pre_attn_scalar": 10}
CASES = {
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 10},
    "llama3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": QWEN2,
    "yarn": {**QWEN2, "rope_scaling": YARN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 10},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "gemma3": GEMMA,
    "gemma3 linear": {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TEXTS = ["Grüße, it's 12345 o'clock.", "  a  b\n\n\tc \r\n", "日本語 🙂 naïve", "don't DON'T I'LL", "", "x" * 20]


def config_of(case):
    return {**BASE, **CASES[case], "vocab_size": 260}


def make_source(path, config):
    source = write_folder(path, config, random_weights(config))
    save_byte_tokenizer(source)
    return source


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory):
    """(config.json, folder in Hugging Face's format, file)"""
    home, config = tmp_path_factory.mktemp("gguf"), config_of(request.param)
    source = make_source(home / "hf", config)
    to_gguf(str(source), str(home / "file" / "model.gguf"))
    return config, source, home / "file" / "model.gguf"


def tensors_of(file):
    """Name and values of each tensor, as float32."""
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = np.array(values, np.float32).reshape(tensor.shape[::-1])
    return found


def keys_of(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def their_name(name, norms_after):
    middle, end = name.removeprefix("model.layers.").rsplit(".", 1)
    layer, _, part = middle.partition(".") if middle[0].isdigit() else ("", "", middle)
    named = {**NAMES, "post_attention_layernorm": "post_attention_norm" if norms_after else "ffn_norm"}[part]
    return f"blk.{layer}.{named}.{end}" if layer else f"{named}.{end}"


def test_every_tensor_is_there_under_its_name(exported):
    config, source, file = exported
    found, weights, kind = tensors_of(file), read_folder(source), config["model_type"]
    halves_apart = scripts.load("launch/get_smollm2.py").halves_apart
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in weights.items():
        tensor = found.pop(their_name(name, kind in ("olmo2", "gemma3_text")))
        if kind in ("llama", "mistral") and (part := name.split(".")[-2]) in heads:
            tensor = halves_apart(tensor, heads[part])
        expected = values + np.float32(1) if kind == "gemma3_text" and name.endswith("norm.weight") else values
        np.testing.assert_array_equal(tensor, expected, name)
    assert list(found) == (["rope_freqs.weight"] if (config["rope_scaling"] or {}).get("rope_type") == "llama3" else [])


def test_keys_are_those_of_the_config(exported):
    config, _, file = exported
    keys = keys_of(file)
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    assert keys["general.architecture"] == arch
    expected = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", 6),
        "attention.value_length": config.get("head_dim", 6),
        "rope.dimension_count": config.get("head_dim", 6),
        "vocab_size": 260,
    }
    if arch == "gemma3":
        expected |= {"attention.sliding_window": 9, "attention.sliding_window_pattern": 2}
        expected |= {"rope.freq_base_swa": 50.0}
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        expected |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if scaling.get("rope_type") == "yarn":
        expected |= {"rope.scaling.original_context_length": 32}
    found = {name.removeprefix(f"{arch}."): value for name, value in keys.items() if name.startswith(f"{arch}.")}
    assert found.pop("rope.freq_base") == config["rope_theta"]
    assert found.pop("attention.layer_norm_rms_epsilon") == pytest.approx(config["rms_norm_eps"])
    assert found == expected


@pytest.mark.parametrize("exported", [case for case in CASES if case != "olmo2"], indirect=True)
def test_transformers_reads_the_same_model(exported):
    """Its reader knows no OLMo 2, no scaled angles, and no head_dim of Qwen 3 and window of Gemma 3: these it is told."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config, source, file = exported
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    told = (
        {}
        if config["model_type"] in ("llama", "mistral", "qwen2") and not config["rope_scaling"]
        else {"config": theirs.config}
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options, **told)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        is_rounded = config["model_type"] == "gemma3_text" and name.endswith("norm.weight")
        # 1 + scale is stored.
        torch.testing.assert_close(found[name], values, rtol=0, atol=2e-7 if is_rounded else 0)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5 if told else 0)


def test_llama3s_angles_are_divided_by_the_factors(tmp_path):
    pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_of("llama3")
    to_gguf(str(make_source(tmp_path / "hf", config)), str(tmp_path / "model.gguf"))
    factors = tensors_of(tmp_path / "model.gguf")["rope_freqs.weight"]
    # transformers writes into what it is given.
    ropes = (None, copy.deepcopy(LLAMA3_ROPE))
    plain, scaled = (LlamaRotaryEmbedding(LlamaConfig(**{**config, "rope_scaling": rope})) for rope in ropes)
    np.testing.assert_allclose(plain.inv_freq.numpy() / factors, scaled.inv_freq.numpy(), rtol=1e-6)
    assert factors.max() == 8


@pytest.mark.parametrize("case", ["llama3", "gemma3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_those_of_the_hf_export(dtype, case, tmp_path):
    """From jaxllm's own folder, whose matrices are transposed, as from Hugging Face's."""
    source = make_source(tmp_path / "hf", config_of(case))
    from_hf(str(source), str(tmp_path / "ours"))
    to_hf(str(tmp_path / "ours"), str(tmp_path / "rounded"), dtype=dtype)
    files = [tmp_path / name / "model.gguf" for name in ("of theirs", "of ours", "of rounded")]
    said = [
        to_gguf(str(folder), str(file), dtype=kind).lines()[0]
        for folder, file, kind in zip(
            (source, tmp_path / "ours", tmp_path / "rounded"), files, (dtype, dtype, None), strict=True
        )
    ]
    assert all(line.endswith(f"bytes of {dtype} and float32 in 1 file") for line in said)
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    code = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    kinds = {tensor.name: (tensor.tensor_type.name, len(tensor.shape)) for tensor in gguf.GGUFReader(files[0]).tensors}
    assert set(kinds.values()) == {(code, 2), ("F32", 1)}
    assert keys_of(files[0])["general.file_type"] == {"BF16": 32, "F16": 1}[code]


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({**CASES["mistral"], "sliding_window": 9}, "llama.cpp's llama has no model.sliding_window=9"),
        ({**QWEN2, "head_dim": 10}, "llama.cpp's qwen2 has no model.head_dim=10 that is not hidden_size / num_heads"),
        ({**QWEN2, "rope_scaling": LLAMA3_ROPE}, "llama.cpp's qwen2 has no model.rope_scaling.rope_type=llama3"),
        ({"rope_scaling": {**YARN, "beta_fast": 20.0}}, "llama.cpp's llama has no model.rope_scaling.beta_fast=20.0 but 32.0"),
        (
            {"rope_scaling": {**YARN, "attention_factor": 0.7}},
            "llama.cpp's llama has no model.rope_scaling.attention_factor=0.7 but its default",
        ),
        ({**CASES["olmo2"], "tie_word_embeddings": True}, "llama.cpp's olmo2 has no model.tie_embeddings=true"),
        ({**GEMMA, "rope_scaling": YARN}, "llama.cpp's gemma3 has no model.rope_scaling.rope_type=yarn"),
        (
            {**GEMMA, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "llama.cpp's gemma3 has no model.full_attention_first=1",
        ),
        (GEMMA3, "llama.cpp's gemma3 has no model.query_pre_attn_scalar=7 but 10 for 3 layers"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, reason, tmp_path):
    source = make_source(tmp_path / "hf", {**BASE, **changes, "vocab_size": 260})
    with pytest.raises(ConfigError) as refusal:
        to_gguf(str(source), str(tmp_path / "out.gguf"))
    assert str(refusal.value) == f"{reason}: use --to hf and another server."
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    weights = random_weights(BASE)
    weights["model.norm.weight"][3] = np.nan
    source = write_folder(tmp_path / "hf", BASE, weights)
    save_byte_tokenizer(source)
    with pytest.raises(ConfigError, match=r"^model\.norm\.weight holds values that are not finite"):
        to_gguf(str(source), str(tmp_path / "out.gguf"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_damaged_disk_is_noticed(tmp_path, monkeypatch):
    source = make_source(tmp_path / "hf", BASE)
    write = Tensor.write
    monkeypatch.setattr(Tensor, "write", lambda self, values, first=0: write(self, values[::-1], first))
    with pytest.raises(ConfigError, match="reads back differently"):
        to_gguf(str(source), str(tmp_path / "out.gguf"))
    assert not (tmp_path / "out.gguf").exists()


# ------------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch, capsys):
    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxllm", "export", *map(str, arguments), "--to", "gguf"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return called


def test_a_file_that_appeared_meanwhile_is_not_replaced(tmp_path):
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "there").write_bytes(b"there")
    with pytest.raises(FileExistsError):
        staging.rename_if_free(tmp_path / "new", tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"there"


def test_a_run_on_bytes_becomes_a_file(tiny_config, command, tmp_path, capsys):
    """And nothing that exists is overwritten."""
    run, out = tmp_path / "run", tmp_path / "run.gguf"
    fit(tiny_config(f"run.dir={run}", "checkpoint.every_steps=4", "data.held_out_fraction=0.0"))
    capsys.readouterr()
    code, said, error = command(run, out)
    assert (code, error) == (0, "")
    assert said.startswith(f"converted {run} at step 4 to {out}: ")
    keys = keys_of(out)
    assert (keys["llama.context_length"], keys["general.name"], keys["tokenizer.ggml.eos_token_id"]) == (16, "run", 0)
    assert keys["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "ā"]
    assert keys["tokenizer.ggml.token_type"] == [3] + [1] * 255
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (False, False)
    before = out.read_bytes()
    code, _, error = command(run, out)
    assert code == 2
    assert error.startswith(f"jaxllm: {out} exists already, and nothing is overwritten: choose another file")
    assert out.read_bytes() == before
    assert command(run, out, "--force", "--max-position", 32)[0] == 0
    assert (tmp_path / "run.gguf.before-1").read_bytes() == before
    assert keys_of(out)["llama.context_length"] == 32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.gguf", "run.gguf.before-1"]
    other = tmp_path / "other"
    code, _, error = command(run, other)
    assert (code, error) == (2, f"jaxllm: --to gguf writes a file, and {other} does not end in .gguf: name it {other}.gguf.\n")
    for option in (["--verify"], ["--max-shard-size", "1GB"]):
        code, _, error = command(run, tmp_path / "x.gguf", *option)
        assert (code, error) == (
            2,
            f"jaxllm: {option[0]} has no effect on what is written as gguf: leave it out, or write hf.\n",
        )
    (run / "file").touch()
    assert command(run, run, "--force")[2] == f"jaxllm: {run} exists already and is not a file: choose another.\n"


def test_without_the_library_it_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.weights.export.find_spec", lambda name: None)
    assert command(tmp_path, tmp_path / "x.gguf") == (
        2,
        "",
        "jaxllm: `jaxllm export --to gguf` needs the library gguf: pip install 'jaxllm[gguf]'.\n",
    )


# -------------------------------------------------------------------------------------------------------------- tokenizers


def trained(pre_tokenizer, ignore_merges=False):
    """A byte-level BPE trained on TEXTS, with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return json.loads(tokenizer.to_str())


def cuts():
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    from jaxllm.weights import gguf_convert as module

    of_gpt2 = ByteLevel(add_prefix_space=False)
    yield "gpt-2", of_gpt2, False
    yield "smollm", Sequence([Digits(individual_digits=True), of_gpt2]), False
    for (regex, ignores), name in module.CUTS.items():
        if name not in ("gpt-2", "smollm"):
            after = ByteLevel(add_prefix_space=False, use_regex=False)
            yield name, Sequence([Split(Regex(regex), "isolated"), after]), ignores


def with_tokenizer(path, content, config=BASE, **about):
    config = {**config, "vocab_size": 330}
    source = write_folder(path, config, random_weights(config))
    (path / "tokenizer.json").write_text(json.dumps(content))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **about}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return source


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken"])
def test_a_tokenizer_you_trained_gives_the_same_ids(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    pre_tokenizer, ignores = {found: rest for found, *rest in cuts()}[name]
    source = with_tokenizer(tmp_path / "hf", trained(pre_tokenizer, ignores), chat_template="{{ messages }}")
    to_gguf(str(source), str(tmp_path / "model.gguf"))
    keys = keys_of(tmp_path / "model.gguf")
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", name)
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    size = load_tokenizer(source).vocab_size
    assert keys["tokenizer.ggml.tokens"][size:] == [f"[PAD{number}]" for number in range(size, 330)]
    assert keys["tokenizer.ggml.token_type"] == [3, 3] + [1] * (size - 2) + [5] * (330 - size)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = load_tokenizer(source)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id) == (0, 1)
    if name == "smollm":
        # transformers' reader does not know this name; what reads the real one does.
        (tmp_path / "again").mkdir()
        scripts.load("launch/get_smollm2.py").write_tokenizer(Again(keys), tmp_path / "again")
        theirs = load_tokenizer(tmp_path / "again")
    for text in TEXTS:
        found = theirs.encode(text) if name != "smollm" else theirs.encode(text).tolist()
        assert found == ours.encode(text).tolist()


def test_the_end_of_a_turn_is_that_of_your_own_template(tmp_path):
    """It is in chat_template.jinja, as a run keeps it, which comes before what the tokenizer came with."""
    content, end, broken = trained(next(cuts())[1]), " your turn ", "{% if %}"
    content["added_tokens"].append({**content["added_tokens"][1], "id": 313, "content": end})
    own = "{% for one in messages %}{{ one.role + ': ' + one.content + '" + end + "' }}{% endfor %}"
    theirs, tools = "{{ theirs }}", {"name": "tool_use", "template": "{{ tools }}"}
    several = [{"name": "default", "template": theirs}, tools]
    cases = [
        (own, theirs, own, 313),
        (own, None, own, 313),
        (own, several, own, 313),
        ("{{ messages }}", theirs, "{{ messages }}", None),
        (broken, theirs, theirs, None),
    ]
    for number, (template, other, written, turn) in enumerate(cases):
        source = with_tokenizer(tmp_path / f"{number}", content, chat_template=other)
        (source / "chat_template.jinja").write_text(template)
        to_gguf(str(source), str(tmp_path / f"{number}.gguf"))
        keys = keys_of(tmp_path / f"{number}.gguf")
        assert (keys["tokenizer.chat_template"], keys.get("tokenizer.ggml.eot_token_id")) == (written, turn)
        assert keys.get("tokenizer.chat_template.tool_use") == ("{{ tools }}" if other is several else None)


class Again(dict):
    """Keys of a GGUF file as launch/get_smollm2.py reads them."""

    def __missing__(self, key):
        return 0

    def token(self, which):
        return self["tokenizer.ggml.tokens"][self[f"tokenizer.ggml.{which}_token_id"]]


def sentencepiece(prefix):
    """A BPE as transformers makes of sentencepiece's: bytes, characters, and what pairs of tokens make, in order. Without a
    prefix it has, as Gemma's, a token of the user for two spaces."""
    words = ["▁▁", "▁a", "it", "▁it", "on", "don", "▁don", "xx", "xxxx", "ss", "th", "the", "▁th", "▁the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aitodnxsthe.,'", *words]
    known = set(tokens[259:])
    merges = [[word[:at], word[at:]] for word in words for at in range(1, len(word)) if {word[:at], word[at:]} <= known]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, spaces] if prefix else [spaces]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *({"id": number, "content": tokens[number], **added} for number in range(3)),
            *([] if prefix else [{"id": tokens.index("▁▁"), "content": "▁▁", **added, "special": False}]),
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None},
            **{"end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
            **{"vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges},
        },
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_sentencepiece_gives_the_same_ids(prefix, tmp_path):
    transformers = pytest.importorskip("transformers")
    source = with_tokenizer(tmp_path / "hf", sentencepiece(prefix), BASE, add_bos_token=True)
    to_gguf(str(source), str(tmp_path / "model.gguf"))
    keys = keys_of(tmp_path / "model.gguf")
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.add_space_prefix"]) == ("llama", prefix)
    assert keys["tokenizer.ggml.add_bos_token"] is True
    types = keys["tokenizer.ggml.token_type"]
    assert types[:3] == [2, 3, 3]
    assert set(types[3:259]) == {6}
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf"), load_tokenizer(source)
    assert types.count(4) == (not prefix)
    for text in ["a don it", "the xxxx ss, it's", "é on"] if prefix else []:
        assert theirs.encode(text) == ours.encode(text).tolist()


def other_cut(content):
    content["pre_tokenizer"] = {"type": "Whitespace"}


def other_normalizer(content):
    content["normalizer"] = {"type": "Lowercase"}


def ignored_merges(content):
    content["model"]["ignore_merges"] = True


def only_words(content):
    content["model"] = {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "a": 2}, "unk_token": "a"}
    content["pre_tokenizer"] = {"type": "Whitespace"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_cut, "prepares text in a way for which llama.cpp has no name"),
        (other_normalizer, "prepares text in a way for which llama.cpp has no name"),
        (ignored_merges, "prepares text in a way for which llama.cpp has no name"),
        (only_words, "is no BPE that llama.cpp knows: use --to hf"),
    ],
)
def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_refused(change, reason, tmp_path):
    content = trained(next(cuts())[1])
    change(content)
    source = with_tokenizer(tmp_path / "hf", content)
    with pytest.raises(ConfigError, match=f"^The tokenizer of {source} {reason}"):
        to_gguf(str(source), str(tmp_path / "out.gguf"))
    assert not (tmp_path / "out.gguf").exists()


def test_a_special_token_that_cannot_be_is_one_sentence(tmp_path):
    source = with_tokenizer(tmp_path / "hf", trained(next(cuts())[1]), {**BASE, "pad_token_id": -1})
    with pytest.raises(ConfigError, match=r"cannot be written \(invalid value for special token type pad: -1\): correct the"):
        to_gguf(str(source), str(tmp_path / "out.gguf"))


def test_merges_that_are_no_scores_are_refused(tmp_path):
    for change in (lambda merges: merges.insert(1, merges.pop()), list.pop):
        content = sentencepiece(True)
        assert content["model"]["merges"][-2:] == [["▁", "the"], ["▁th", "e"]]
        change(content["model"]["merges"])
        source = with_tokenizer(tmp_path / str(id(content)), content)
        with pytest.raises(ConfigError, match=r"merges otherwise than sentencepiece: use --to hf"):
            to_gguf(str(source), str(tmp_path / "out.gguf"))
    content = sentencepiece(False)
    content["model"]["merges"].append(content["model"]["merges"].pop(0))
    with pytest.raises(ConfigError, match=r"merges otherwise than sentencepiece: use --to hf"):
        to_gguf(str(with_tokenizer(tmp_path / "late", content)), str(tmp_path / "out.gguf"))
    content = {**sentencepiece(False), "normalizer": sentencepiece(True)["normalizer"]}
    with pytest.raises(ConfigError, match=r"prepares text otherwise than sentencepiece: use --to hf"):
        to_gguf(str(with_tokenizer(tmp_path / "prefix", content)), str(tmp_path / "out.gguf"))


def test_a_model_without_its_tokenizer_is_refused(tmp_path):
    source = write_folder(tmp_path / "hf", BASE, random_weights(BASE))
    with pytest.raises(ConfigError, match=r"^SRC=.* has no tokenizer\.json, which llama\.cpp needs: put the model's own"):
        to_gguf(str(source), str(tmp_path / "out.gguf"))
    with_tokenizer(tmp_path / "other", trained(next(cuts())[1]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(
        ConfigError, match=r"^The tokenizer of .* has \d+ ids, and the model 260: give the model's own tokenizer\.$"
    ):
        to_gguf(str(source), str(tmp_path / "out.gguf"))


def test_what_is_read_back_by_get_smollm2_is_the_folder(tmp_path):
    """launch/get_smollm2.py makes a folder of the GGUF file of the real SmolLM2: the inverse of this export."""
    name, pre_tokenizer, _ = list(cuts())[1]
    about = {"pad_token": "</s>", "unk_token": "</s>", "chat_template": "{{ messages }}", "model_max_length": 128}
    source = with_tokenizer(tmp_path / "hf", trained(pre_tokenizer), {**BASE, "tie_word_embeddings": True}, **about)
    to_gguf(str(source), str(tmp_path / "model.gguf"))
    (tmp_path / "back").mkdir()
    scripts.load("launch/get_smollm2.py").write_folder(Path(tmp_path / "model.gguf"), tmp_path / "back", "float32")
    theirs, back = read_folder(source), read_folder(tmp_path / "back")
    assert name == "smollm"
    assert theirs.keys() == back.keys()
    for tensor, values in theirs.items():
        np.testing.assert_array_equal(back[tensor], values)
    for text in TEXTS:
        assert load_tokenizer(tmp_path / "back").encode(text).tolist() == load_tokenizer(source).encode(text).tolist()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: config[key] for key in BASE if key in config} == {
        **{key: BASE[key] for key in BASE if key in config},
        **{"vocab_size": 330, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1},
    }
