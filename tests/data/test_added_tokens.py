"""Tokens that the files beside a tokenizer.json name and it lacks: transformers' ids, or a refusal by file."""

import json
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from jaxllm.config import ConfigError, load_config
from jaxllm.data.prepare import prepare
from jaxllm.data.sources import load_data
from jaxllm.data.tokenizer import load_tokenizer
from jaxllm.inference.predict import stop_ids
from jaxllm.run.saving import keep_companions, stop_at
from jaxllm.weights.folder import Folder
from jaxllm.weights.hf_convert import config_json, write_companions

END, TURN, START, PAD, WORD = "<|end|>", "<|im_end|>", "<|im_start|>", "[PAD]", "law"
TEXTS = [f"{START}a{TURN}\n  {PAD} {WORD}{END}", f"a {TURN} b  {START}  c", f"{WORD}s {PAD}", f"{END}{END} a"]
BYTES = 256


def described(text, **flags):
    return {"content": text, **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False), "special": True} | flags


def write(folder, single=None, **files):
    """A byte-level tokenizer.json with END alone as id 256, and these files beside it."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: token for token, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    if single:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(END, BYTES)])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_config": {}} | files
    said["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **said["tokenizer_config"]}
    for name, content in said.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def config(**said):
    return {"tokenizer_config": said}


def decoder(*tokens, first=BYTES):
    return config(added_tokens_decoder={str(first + number): token for number, token in enumerate(tokens)})


NAMED = {"pad_token": PAD, "bos_token": START}


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


FOLDERS = {
    "added_tokens_decoder": decoder(described(END), described(TURN), described(START, rstrip=True)),
    "other flags than tokenizer.json": decoder(described(END, lstrip=True, rstrip=True)),
    "a word that is no special token": decoder(described(WORD, special=False, single_word=True, normalized=True), first=257),
    "added_tokens.json": {"added_tokens": {TURN: 258, START: 257, END: 256}},
    "added_tokens.json and names": {"added_tokens": {TURN: 257}, "special_tokens_map": {"pad_token": TURN, "cls_token": PAD}},
    "names": config(**NAMED, image_token=TURN),
    "names of special_tokens_map.json": {"special_tokens_map": {**NAMED, "unk_token": described(TURN, rstrip=True)}},
    "a list": config(additional_special_tokens=[START, TURN], **NAMED),
    "a list of special_tokens_map.json": {"special_tokens_map": {"additional_special_tokens": [START, TURN]}},
    "a map": config(extra_special_tokens={"start": START, "image_token": TURN}),
    "names beside added_tokens_decoder": {
        "tokenizer_config": {**NAMED, **decoder(described(TURN), first=257)["tokenizer_config"]},
        # Not read where there is an added_tokens_decoder.
        "special_tokens_map": {"pad_token": WORD},
        "added_tokens": {WORD: 999},
    },
}


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_ids_are_those_of_transformers(files, tmp_path, transformers):
    folder = write(tmp_path / "small", **files)
    ours = load_tokenizer(folder)
    ours.save(tmp_path / "copy")
    for theirs in map(transformers.AutoTokenizer.from_pretrained, (folder, tmp_path / "copy")):
        assert ours.vocab_size == len(theirs)
        for text in TEXTS:
            assert ours.encode(text, parse_special=True).tolist() == theirs(text)["input_ids"]
    again = load_tokenizer(tmp_path / "copy")
    assert (again.sha256, again.special_tokens) == (ours.sha256, ours.special_tokens)


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_special_tokens_beside_a_tokenizer_leave_documents_as_they_are(files, tmp_path):
    """What was prepared before stays usable; another token changes ids, and the digest says so."""
    bare, whole = load_tokenizer(write(tmp_path / "bare")), load_tokenizer(write(tmp_path / "whole", **files))
    added = {token for token in whole.added.values() if not token.special}
    texts = [text for text in TEXTS if not any(token.content in text for token in added)]
    assert [ids.tolist() for ids in whole.encode_documents(texts)] == [ids.tolist() for ids in bare.encode_documents(texts)]
    assert whole.text_size == bare.text_size + len(added)
    assert (whole.sha256 == bare.sha256) is not bool(added)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (decoder(described(TURN), first=259), r"tokenizer_config\.json gives the token <\|im_end\|> the id 259, and with"),
        (decoder(described(TURN)), r"the id 256, and with tokenizer\.json beside it the id is 257: correct the file"),
        (decoder(described(END), described(TURN), described(TURN)), "the id 258, and with .* the id is 257"),
        (decoder(described(END), first=257), r"gives the token <\|end\|> the id 257, .* the id is 256"),
        ({"added_tokens": {TURN: 257, START: 257}}, r"added_tokens\.json gives the token <\|im_start\|> the id 257"),
        ({"added_tokens": {END: 300}}, r"added_tokens\.json gives the token <\|end\|> the id 300, .* the id is 256"),
        ({"added_tokens": {TURN: "x"}}, r"added_tokens\.json has tokens of another form than transformers writes"),
        (config(added_tokens_decoder=[TURN]), r"tokenizer_config\.json has tokens of another form"),
        (config(added_tokens_decoder={"257": {"content": 5}}), r"tokenizer_config\.json has tokens of another form"),
        (config(added_tokens_decoder={"257": described(TURN, lstrip="no")}), r"tokenizer_config\.json has tokens of another"),
        (
            config(eos_token=TURN),
            r"has no token that ends a document \(its eos_token '<\|im_end\|>' is not in the vocabulary\)",
        ),
    ],
)
def test_files_that_disagree_are_refused_by_name(files, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        load_tokenizer(write(tmp_path / "small", **files))


@pytest.mark.parametrize(("single", "text"), product([None, f"{END} $A", f"{END} $A {END}", f"$A {END}"], TEXTS))
def test_a_prompt_is_read_as_transformers_reads_it(single, text, tmp_path, transformers):
    """But BOS does not come twice before a prompt that spells it, and no EOS comes after one."""
    names = {"bos_token": END} if single and single.startswith(END) else {}
    folder = write(tmp_path / "small", single, tokenizer_config={"additional_special_tokens": [START, TURN, PAD], **names})
    theirs = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    if single and single.endswith(END):
        theirs = theirs[:-1]
    if names and text.startswith(END):
        theirs = theirs[1:]
    assert load_tokenizer(folder).encode(text, parse_special=True).tolist() == theirs


# --------------------------------------------------------------------------------------------------- ids beyond a model's

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MODEL = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "num_kv_heads": 1}


def read(folder, rows, source="files", template=None, **train):
    """load_data of a model with this many rows, on a text of bytes, on the same prepared, or on a conversation."""
    (folder / "text.txt").write_text("some words " * 20)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 40}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    if source == "prepared" and not (folder / "prepared").exists():
        prepare([str(folder / "text.txt")], folder / "prepared", tokenizer=str(folder), workers=1, progress=False)
    paths = {"files": "text.txt", "prepared": "prepared", "chat": "chat.jsonl"}
    data = {"source": source, "paths": [str(folder / paths[source])], "held_out_fraction": 0}
    data |= {} if source == "prepared" else {"tokenizer": str(folder)}
    data |= {} if template is None else {"chat_template": template}
    train = {"steps": 1, "sequence_length": 16, "global_batch_sequences": 1, **train}
    return load_data(load_config({"model": MODEL | {"vocab_size": rows}, "train": train, "data": data}))


@pytest.mark.parametrize("source", ["files", "prepared", "chat"])
def test_a_padding_token_needs_no_row(source, tmp_path, caplog):
    """Nor any other special token that no text has: rows are needed for those that texts have, and no others."""
    ids = decoder(described(END), described(START), described(TURN), described(PAD), described("<unused>"))
    folder = write(tmp_path / "small", tokenizer_config={"chat_template": CHATML, **ids["tokenizer_config"]})
    needed = 259 if source == "chat" else 257
    data = read(folder, needed, source)
    (samples, *_) = data.stream().sources[0].in_order([0])["tokens"]
    assert samples.max() < needed
    assert f"has special tokens from model.vocab_size={needed} on, which no text has" in caplog.text
    with pytest.raises(ConfigError, match=rf"has {needed} ids and model\.vocab_size={needed - 1}: set model\.vocab_size to at"):
        read(folder, needed - 1, source)
    with pytest.raises(ConfigError, match=r"give the weights of train\.init_from more rows \(transformers' resize_"):
        read(folder, needed - 1, source, init_from="model")


def test_a_word_that_any_text_may_have_needs_a_row(tmp_path):
    ids = decoder(described(END), described(PAD), described(WORD, special=False))
    with pytest.raises(ConfigError, match=r"has \d+ ids and model\.vocab_size=257: set model\.vocab_size to at least 25"):
        read(write(tmp_path / "small", **ids), 257)


# ----------------------------------------------------------------------------------------------------------- ends of turns


@pytest.mark.parametrize(
    ("generation", "original", "ends"),
    [
        ({"eos_token_id": 256, "max_new_tokens": 9}, {"eos_token_id": 256}, [256, 257]),
        ({"eos_token_id": [5, 256]}, {"eos_token_id": 256}, [5, 256, 257]),
        ({"temperature": 0.5}, {"eos_token_id": [7], "pad_token_id": 3}, [7, 257]),
        (None, {"eos_token_id": [7, 8], "bos_token_id": 9}, [7, 8, 257]),
        (None, None, [256, 257]),
        ({"eos_token_id": None}, {"eos_token_id": None}, [256, 257]),
        ({"eos_token_id": [257, 256]}, {"eos_token_id": 256}, [257, 256]),
        ({"eos_token_id": 257}, None, None),
        (None, {"eos_token_id": 257}, None),
    ],
)
def test_servers_stop_at_the_end_of_a_turn_too(generation, original, ends, tmp_path):
    """Beside the tokens that ended a text before, which stay, as all else in these files. A file with it is not touched."""
    tokenizer = load_tokenizer(write(tmp_path, **decoder(described(END), described(TURN))))
    files = {"generation_config.json": generation, "config.json": original}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    for _ in range(2):
        stop_at({257}, tmp_path, tokenizer)
        stop_at(set(), tmp_path, tokenizer)
        found = {name: json.loads(path.read_text()) if (path := tmp_path / name).exists() else None for name in files}
        if ends is None:
            assert found == files
        else:
            assert found["generation_config.json"].items() >= ((generation or {}) | {"eos_token_id": ends}).items()
            assert found["config.json"] == (None if original is None else original | {"eos_token_id": ends})
    for name in ("bos_token_id", "pad_token_id"):
        if ends and original and name in original:
            assert found["generation_config.json"][name] == original[name]


@pytest.mark.parametrize("template", ["the tokenizer's", "of data.chat_template"])
def test_a_run_on_conversations_keeps_its_template_and_the_end_of_its_turns(template, tmp_path):
    """In the files that every export copies, and from which `jaxllm generate` stops."""
    said = decoder(described(END), described(START), described(TURN))["tokenizer_config"]
    folder = write(tmp_path / "small", tokenizer_config=said | {"chat_template": CHATML if "tok" in template else "{{ 'x' }}"})
    (tmp_path / "own.jinja").write_text(CHATML)
    data = read(folder, 259, "chat", None if "tok" in template else str(tmp_path / "own.jinja"))
    trainer = SimpleNamespace(start=SimpleNamespace(weights=None), step=0, data=data, config=data.config)
    keep_companions(tmp_path / "run", trainer)
    trainer.step = 1
    keep_companions(tmp_path / "run", trainer)
    kept = tmp_path / "run" / "tokenizer"
    assert (kept / "chat_template.jinja").read_text() == CHATML
    assert json.loads((kept / "generation_config.json").read_text()) == {"eos_token_id": [256, 258]}
    of_files = read(folder, 259, "files")
    texts = SimpleNamespace(start=SimpleNamespace(weights=None), step=0, data=of_files, config=of_files.config)
    keep_companions(tmp_path / "texts", texts)
    assert not (tmp_path / "texts" / "tokenizer" / "generation_config.json").exists()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"eos_token_id": 257}')
    texts.start.weights = SimpleNamespace(outline=SimpleNamespace(companions=tmp_path / "base"))
    keep_companions(tmp_path / "texts", texts)
    kept_of_texts = json.loads((tmp_path / "texts" / "tokenizer" / "config.json").read_text())
    assert kept_of_texts == {"eos_token_id": [257, 256]}
    outline = Folder(tmp_path, "a run", data.config.model.model_dump(), kept, sequence_length=16)
    write_companions(outline, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [256, 258]}
    assert config_json(outline, np.dtype(np.float32), None)["eos_token_id"] == [256, 258]
    assert stop_ids(load_tokenizer(kept), outline.generation) == {256, 258}
