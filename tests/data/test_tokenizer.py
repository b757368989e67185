import base64
import json
import re
import struct

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxllm.config import ConfigError
from jaxllm.data.tokenizer import DOCUMENT_END, load_tokenizer, token_dtype
from jaxllm.data.tokenizer_growth import GROWTH, _Growth

LINES = ["the law of the mesh", "a ring of shards, a mesh of rings", "gather, then scatter: the law"] * 3
BOS, EOS = "<|begin|>", "<|end|>"


def trained(*special):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """folder(tokenizer, file=content, ...) -> a folder with the tokenizer and these JSON files."""

    def make(tokenizer, **files):
        path = tmp_path / "small"
        path.mkdir(exist_ok=True)
        tokenizer.save(str(path / "tokenizer.json"))
        for name, content in files.items():
            (path / f"{name}.json").write_text(json.dumps(content))
        return path

    return make


def with_template(single):
    tokenizer = trained(BOS, EOS)
    ids = [(mark, tokenizer.token_to_id(mark)) for mark in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


def plain(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_bytes_are_utf8_and_a_zero_byte():
    tokenizer = load_tokenizer("bytes")
    texts = ["héllo", "", "日本\n"]
    assert [ids.tobytes() for ids in tokenizer.encode_documents(texts)] == [t.encode() + DOCUMENT_END for t in texts]
    assert tokenizer.encode("héllo").tobytes() == "héllo".encode()
    assert tokenizer.decode(tokenizer.encode_documents(["héllo"])[0]) == "héllo"
    assert tokenizer.decode([0xC3]) == "�"
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == ("bytes", 256, None, 0)


def test_the_end_mark_follows_each_document(folder):
    raw = trained(EOS)
    tokenizer = load_tokenizer(folder(raw, tokenizer_config={"eos_token": EOS}))
    eos = raw.token_to_id(EOS)
    documents = tokenizer.encode_documents(["the law", "日本"])
    assert [ids.tolist() for ids in documents] == [[*plain(raw, "the law"), eos], [*plain(raw, "日本"), eos]]
    assert {ids.dtype for ids in documents} == {np.dtype("<u2")}
    assert tokenizer.encode("the law").tolist() == plain(raw, "the law")
    assert tokenizer.decode(documents[1]) == "日本"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.name) == (None, eos, "small")


@pytest.mark.parametrize("single", [f"{BOS} $A", f"{BOS} $A {EOS}"])
def test_the_post_processor_decides_about_marks_and_none_comes_twice(folder, single):
    raw = with_template(single)
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, "add_bos_token": True}
    tokenizer = load_tokenizer(folder(raw, tokenizer_config=config))
    bos, eos = raw.token_to_id(BOS), raw.token_to_id(EOS)
    assert tokenizer.encode_documents(["the law"])[0].tolist() == [bos, *plain(raw, "the law"), eos]
    assert tokenizer.encode("the law").tolist() == [bos, *plain(raw, "the law")]
    assert tokenizer.encode("the law").tolist()[1:] == plain(raw, "the law")


def test_one_token_may_mark_both_ends(folder):
    raw = trained(EOS)
    raw.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, raw.token_to_id(EOS))])
    tokenizer = load_tokenizer(folder(raw, tokenizer_config={"eos_token": EOS, "bos_token": EOS}))
    eos = raw.token_to_id(EOS)
    assert tokenizer.encode_documents(["the law"])[0].tolist() == [eos, *plain(raw, "the law"), eos]
    assert tokenizer.encode("").tolist() == [eos]


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_adds_what_the_post_processor_does_not(folder, adds):
    raw = trained(BOS, EOS)
    config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": adds}
    tokenizer = load_tokenizer(folder(raw, tokenizer_config=config))
    bos, eos = raw.token_to_id(BOS), raw.token_to_id(EOS)
    begin = [bos] if adds else []
    assert tokenizer.encode_documents(["the law"])[0].tolist() == [*begin, *plain(raw, "the law"), eos]
    assert tokenizer.encode("the law").tolist() == [*begin, *plain(raw, "the law")]
    assert tokenizer.bos_id == bos


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": EOS}},
        {"tokenizer_config": {"eos_token": {"content": EOS, "lstrip": False}}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": EOS}},
        {"config": {"eos_token_id": 1}},
        {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": [1, 0]}},
    ],
)
def test_where_the_end_mark_is_named(folder, files):
    assert load_tokenizer(folder(trained(BOS, EOS), **files)).eos_id == 1


@pytest.mark.parametrize("special", [True, False])
def test_text_that_spells_a_mark_stays_text(folder, special):
    raw = trained(BOS, EOS) if special else trained()
    if not special:
        raw.add_tokens([BOS, EOS])
    tokenizer = load_tokenizer(folder(raw, tokenizer_config={"bos_token": BOS, "eos_token": EOS}))
    text = f"a {EOS} b {BOS}{EOS}"
    ids = tokenizer.encode_documents([text])[0].tolist()
    assert ids.count(tokenizer.eos_id) == 1
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text).tolist() == ids[:-1]


def test_truncation_and_padding_are_switched_off(folder):
    raw = trained(EOS)
    expected = [plain(raw, text) for text in (" ".join(LINES), "law")]
    raw.enable_truncation(4)
    raw.enable_padding(length=50)
    tokenizer = load_tokenizer(folder(raw, tokenizer_config={"eos_token": EOS}))
    documents = tokenizer.encode_documents([" ".join(LINES), "law"])
    assert [ids.tolist()[:-1] for ids in documents] == expected


def test_the_vocabulary_holds_added_tokens(folder):
    raw = trained(EOS)
    raw.add_tokens(["<user>"])
    tokenizer = load_tokenizer(folder(raw, tokenizer_config={"eos_token": EOS}))
    assert tokenizer.vocab_size == raw.token_to_id("<user>") + 1
    assert tokenizer.encode("<user>").tolist() == [tokenizer.vocab_size - 1]


@pytest.mark.parametrize(
    "files", [{"config": {"eos_token_id": 1, "bos_token_id": 0}}, {"special_tokens_map": {"eos_token": EOS}}]
)
def test_a_saved_tokenizer_gives_the_same_ids(folder, tmp_path, files):
    tokenizer = load_tokenizer(folder(with_template(f"{BOS} $A"), **files))
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy", name="small")
    assert (again.sha256, again.name, again.bos_id, again.eos_id) == (
        tokenizer.sha256,
        tokenizer.name,
        tokenizer.bos_id,
        tokenizer.eos_id,
    )
    assert again.encode_documents(LINES)[0].tolist() == tokenizer.encode_documents(LINES)[0].tolist()
    assert load_tokenizer(tmp_path / "copy" / "tokenizer.json").sha256 == tokenizer.sha256


def test_the_digest_tells_marks_apart(folder):
    raw = trained(BOS, EOS)
    configs = ({"eos_token": EOS}, {"eos_token": BOS}, {"eos_token": EOS, "bos_token": BOS, "add_bos_token": True})
    assert len({load_tokenizer(folder(raw, tokenizer_config=config)).sha256 for config in configs}) == 3


def test_the_smallest_type_that_holds_every_id():
    assert [token_dtype(size).name for size in (256, 257, 65536, 65537)] == ["uint8", "uint16", "uint16", "uint32"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no token that ends a document (no file beside it names one): add"),
        ({"tokenizer_config": {"eos_token": "<x>"}}, "(its eos_token '<x>' is not in the vocabulary)"),
        ({"config": {"eos_token_id": 9999}}, "(its eos_token 'id 9999' is not in the vocabulary)"),
        ({"tokenizer_config": {"eos_token": EOS, "add_bos_token": True}}, "says add_bos_token but there is no bos_token"),
        ({"tokenizer_config": [1]}, "tokenizer_config.json does not hold a JSON object: fix it or remove it."),
    ],
)
def test_missing_marks_are_refused(folder, files, sentence):
    with pytest.raises(ConfigError) as error:
        load_tokenizer(folder(trained(BOS, EOS), **files))
    assert sentence in str(error.value)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no .*tokenizer\.json: name a folder with tokenizer\.json, or bytes\."):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer \(.*\): save it again"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("method", ["encode", "encode_documents"])
def test_texts_the_library_cannot_encode_are_one_sentence(folder, method):
    raw = Tokenizer(models.WordLevel({"law": 0, EOS: 1}))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load_tokenizer(folder(raw, tokenizer_config={"eos_token": EOS}))
    encode = tokenizer.encode if method == "encode" else lambda text: tokenizer.encode_documents([text])[0]
    assert encode("law")[0] == 0
    with pytest.raises(ConfigError) as error:
        encode("law mesh")
    reason = "WordLevel error: Missing [UNK] token from the vocabulary"
    hint = "fix its tokenizer.json or choose another."
    assert str(error.value) == f"The tokenizer small cannot encode a text ({reason}): {hint}"


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [("PanicException", r"^The tokenizer small .* \(at line\): fix"), ("KeyboardInterrupt", "at\nline")],
)
def test_panics_of_the_library_are_one_sentence_and_nothing_else_is(folder, raised, sentence):
    tokenizer = load_tokenizer(folder(trained(EOS), tokenizer_config={"eos_token": EOS}))
    # Stands for pyo3's panic, which inherits from BaseException only.
    kind = KeyboardInterrupt if raised == "KeyboardInterrupt" else type(raised, (BaseException,), {})

    class Panics:
        def encode_batch_fast(self, *_, **__):
            raise kind("at\nline")

    tokenizer._tokenizer = Panics()
    with pytest.raises(ConfigError if raised == "PanicException" else kind, match=sentence):
        tokenizer.encode_documents(["the law"])


# ------------------------------------------------------------------------------------------- how much a text may grow


def charsmap(longest):
    """A map of SentencePiece with an empty trie."""
    return base64.b64encode(struct.pack("<I", 4) + b"\0" * 4 + b"a\0" + longest.encode() + b"\0").decode()


def text_step(kind, **fields):
    return {"type": kind, **fields}


def replace(pattern, content):
    kind = "String" if isinstance(pattern, str) else "Regex"
    return text_step("Replace", pattern={kind: pattern if kind == "String" else pattern.pattern}, content=content)


PREPEND, SPACES, LONGEST = text_step("Prepend", prepend="▁"), replace(" ", "▁"), "صلى الله عليه وسلم"
PRECOMPILED, METASPACE = (
    text_step("Precompiled", precompiled_charsmap=charsmap(LONGEST)),
    text_step("Metaspace", replacement="▁"),
)
BYTE_LEVEL, SINGLE_SPACES = text_step("ByteLevel"), replace(re.compile(" {2,}"), " ")
QUOTES = [replace("``", '"'), replace("''", '"')]
BLANKS = [replace(" " * n, f"<|blank_{n}|>") for n in range(80, 1, -1)]


@pytest.mark.parametrize(
    ("steps", "factor"),
    [
        pytest.param([PREPEND, SPACES], 3, id="llama 2"),
        pytest.param([BYTE_LEVEL], 2, id="llama 3"),
        pytest.param([SPACES], 3, id="gemma"),
        pytest.param([text_step("NFC"), BYTE_LEVEL], 2, id="qwen"),
        pytest.param([text_step("BertNormalizer")], 2, id="bert"),
        pytest.param([text_step("NFC"), replace(re.compile(r"\s+"), " "), text_step("Lowercase"), BYTE_LEVEL], 2, id="clip"),
        pytest.param([PRECOMPILED, SINGLE_SPACES, METASPACE], 33, id="t5"),
        pytest.param(
            [*QUOTES, text_step("NFKD"), text_step("StripAccents"), PRECOMPILED, SINGLE_SPACES, METASPACE], 33, id="albert"
        ),
        pytest.param([replace("\n", "<n>"), replace("\t", "<|tab|>"), *BLANKS], 7, id="blanks"),
        pytest.param([replace(re.compile(r"\r\n?"), "\n"), replace(re.compile("[“”]"), '"')] * 7, 1, id="clean-ups"),
        pytest.param([PRECOMPILED, replace(" ", "b" * 100)], 1100, id="what a map inserts"),
        pytest.param([replace("a", "aa")] * 7, 128, id="doubling"),
        pytest.param([replace("a", "bb"), replace("b", "aa")] * 4, 256, id="doubling by turns"),
        pytest.param([replace("a", "ﷺ"), text_step("NFKD"), replace("ا", "ﷺ")], 33**2, id="decomposed"),
        pytest.param([replace("", "aaaa")] * 3, 125, id="everywhere"),
    ],
)
def test_growth_is_bounded_above_what_real_tokenizers_do(steps, factor):
    growth = _Growth()
    for step in steps:
        growth.take(step)
    assert growth.factor == factor
    assert (growth.factor > GROWTH) == (factor > 66)


@pytest.mark.parametrize(("normalizer", "text"), [([replace("a", "ab")] * 3, "a law"), ([PREPEND, SPACES], "a b c")])
def test_growth_is_no_less_than_the_library_makes_of_a_text(normalizer, text):
    made = trained(EOS)
    described = json.loads(made.to_str()) | {"normalizer": text_step("Sequence", normalizers=normalizer)}
    grown = Tokenizer.from_str(json.dumps(described)).normalizer.normalize_str(text)
    growth = _Growth()
    for step in normalizer:
        growth.take(step)
    assert len(text) < len(grown) <= len(text.encode()) * growth.factor + growth.before


def test_ids_beyond_the_vocabulary_are_refused_by_file(folder):
    raw = trained(EOS)
    raw.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 300)])
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json adds the id 300 to a text, and its vocabulary has \d+ ids: fix its"
    ):
        load_tokenizer(folder(raw, tokenizer_config={"eos_token": EOS}))


def test_a_tokenizer_without_a_vocabulary_is_no_error_of_ours(folder):
    assert load_tokenizer(folder(Tokenizer(models.BPE())), for_documents=False).vocab_size == 0
