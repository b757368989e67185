"""Compares scores of a text with the logits of the model itself, on one device and on meshes."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from jaxllm.config.errors import ConfigError
from jaxllm.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxllm.inference.evaluate import PositionBucket, Score, Windows, evaluate, read_text, tokenize
from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import build_model, over_layers, stacking_of

LENGTH, TOKENS = 15, 100
SHARP = ("model.initializer_std=0.3", "data.mask_documents=false")


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.int32)


@pytest.fixture(scope="module")
def model(tiny_config):
    return build_model(tiny_config(*SHARP, "parallel.data=1"), jax.random.key(0))


@pytest.fixture(scope="module")
def losses(model, ids):
    """[start, j]: -log p of the token at start + j, given the tokens of the text from `start` on, float64."""
    graph, params = nnx.split(model)
    logits = jax.jit(lambda params, ids_BS: nnx.merge(graph, params)(ids_BS))
    rows = np.stack([ids[start : start + LENGTH] for start in range(TOKENS - LENGTH + 1)])
    log_p = np.asarray(jax.nn.log_softmax(logits(params, rows)), np.float64)
    found = np.full(rows.shape, np.nan)
    found[:, 1:] = -np.take_along_axis(log_p[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]
    return found


def windows_of(ids, stride=LENGTH, length=LENGTH):
    return Windows(ids, np.arange(len(ids) + 1), length, stride)


@pytest.fixture(scope="module")
def score_on(tiny_config, model, ids):
    """Returns score_on(*overrides, stride=, weights=, **options of evaluate) -> Score."""

    @functools.cache
    def on_mesh(overrides):
        config = tiny_config(*SHARP, *overrides)
        parallel = config.parallel
        mesh = make_mesh(parallel, jax.devices()[: parallel.pipe * parallel.data * parallel.context * parallel.tensor])
        return mesh, parallelize(config, mesh), stacking_of(config).stored

    def score(*overrides, stride=LENGTH, weights=None, **options):
        mesh, functions, stored = on_mesh(overrides)
        weights = nnx.to_pure_dict(nnx.state(model)) if weights is None else weights
        params = jax.tree.map(jax.device_put, over_layers(stored, weights), functions.master_shardings)
        return evaluate(functions, params, mesh, windows_of(ids, stride), **options)

    return score


@pytest.mark.parametrize(
    ("overrides", "width"),
    [
        (("parallel.data=1",), 15),
        (("parallel.data=2", "parallel.zero=3", "parallel.context=2", "parallel.tensor=2"), 16),
        (("parallel.data=2", "parallel.pipe=2"), 16),
        pytest.param(("parallel.data=1", "parallel.tensor=2"), 16, marks=pytest.mark.slow),
        pytest.param(("parallel.data=4", "parallel.zero=3"), 16, marks=pytest.mark.slow),
        pytest.param(("parallel.data=1", "parallel.context=2"), 16, marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_scores_are_those_of_the_logits_on_every_mesh(score_on, losses, overrides, width):
    # Six windows, which divide neither into batches of four rows nor into two microbatches of two.
    found = score_on(*overrides, width=width)
    expected = losses[0 : TOKENS - LENGTH + 1 : LENGTH, 1:]
    assert expected.size == found.tokens == 6 * 14
    assert (found.windows, found.dropped_tokens) == (6, 10)
    np.testing.assert_allclose(found.loss, expected.mean(), rtol=2e-6)
    detailed = score_on(*overrides, width=width, by_position=True)
    assert [(one.first, one.last, one.tokens) for one in detailed.by_position] == [
        *((1, 1, 6), (2, 3, 12), (4, 7, 24), (8, 14, 42)),
    ]
    for one in detailed.by_position:
        np.testing.assert_allclose(one.loss, expected[:, one.first - 1 : one.last].mean(), rtol=2e-6)
    assert detailed.loss == math.fsum(one.nats for one in detailed.by_position) / detailed.tokens
    np.testing.assert_allclose(detailed.loss, found.loss, rtol=2e-6)
    assert dataclasses.replace(detailed, loss=0, by_position=()) == dataclasses.replace(found, loss=0)


@pytest.mark.parametrize(("stride", "rows"), [(4, 1), (4, 3), (1, 3), (14, 3)])
def test_a_stride_scores_each_token_once_with_more_before_it(score_on, losses, stride, rows):
    seen = []
    progress = lambda what, done, total: seen.append((done, total))  # noqa: E731
    found = score_on("parallel.data=1", stride=stride, rows=rows, by_position=stride == 4, progress=progress)
    count = (TOKENS - LENGTH) // stride + 1
    later = losses[stride : (count - 1) * stride + 1 : stride, LENGTH - stride :]
    expected = np.concatenate([losses[0, 1:], later.reshape(-1)])
    assert found.tokens == expected.size == LENGTH - 1 + (count - 1) * stride
    np.testing.assert_allclose(found.loss, expected.mean(), rtol=2e-6)
    assert found.dropped_tokens == (TOKENS - LENGTH) % stride
    assert found.bytes == expected.size
    if stride == 4:
        # Only the first window scores tokens with fewer than 11 before them.
        assert [one.tokens for one in found.by_position] == [1, 2, 4, 7 + 4 * (count - 1)]
        assert found.loss == math.fsum(one.nats for one in found.by_position) / found.tokens
    assert seen == [(min(done, count), count) for done in range(0, count + rows, rows)]


def test_weights_that_are_no_numbers_are_refused(score_on, model):
    broken = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(ConfigError, match="The loss is not a number: the model's weights are damaged"):
        score_on("parallel.data=1", weights=broken)


@pytest.mark.parametrize(
    ("tokens", "length", "stride", "sentence"),
    [
        (9, 10, 10, "The text has 9 tokens, less than one window of 10: set --sequence-length=9 or less."),
        (1, 10, 10, "The text has 1 tokens, less than one window of 10: give a longer text."),
        (99, 1, 1, "--sequence-length=1 leaves no token to predict: use 2 or more."),
        (99, 10, 11, "--stride=11 is not in 1 .. 10, the sequence length"),
        (99, 10, 0, "--stride=0 is not in 1 .. 10, the sequence length"),
    ],
)
def test_windows_that_cannot_be_are_refused(tokens, length, stride, sentence):
    with pytest.raises(ConfigError) as refusal:
        windows_of(np.zeros(tokens, np.int32), stride, length)
    assert sentence in str(refusal.value)


# ---------------------------------------------------------------------------------------------------------------- bytes

TEXT = "The ñandú — a bird — runs.\r\n  €5 for 😀😀, not less.\n"


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory):
    """A byte-level BPE with a few English words, so that other text becomes pieces of characters. It adds <s> to its input,
    which must not happen here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["The bird runs. not less. for a "] * 20, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("word_pieces")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return load_tokenizer(folder)


def test_every_byte_of_a_text_belongs_to_one_token(word_pieces):
    for tokenizer in (word_pieces, ByteTokenizer()):
        ids, starts = tokenize(tokenizer, TEXT)
        assert starts[0] == 0
        assert starts[-1] == len(TEXT.encode())
        assert (np.diff(starts) >= 0).all()
        # If tokens end with complete characters, decoding gives the bytes between two positions.
        ends = [n for n in range(len(ids) + 1) if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode(ids[:n])]
        assert len(ends) > 20
        for begin, end in itertools.pairwise(ends):
            assert tokenizer.decode(ids[begin:end]).encode() == TEXT.encode()[starts[begin] : starts[end]]


def test_no_mark_is_added_and_none_is_read_in_text(word_pieces):
    ids, _ = tokenize(word_pieces, "a <s> b")
    assert 0 not in ids
    assert word_pieces.decode(ids) == "a <s> b"


def test_bytes_of_scored_tokens(word_pieces):
    ids, starts = tokenize(word_pieces, TEXT)
    windows = Windows(ids, starts, 10, 10)
    firsts = range(0, len(ids) - 9, 10)
    assert windows.scored_bytes == sum(int(starts[first + 10] - starts[first + 1]) for first in firsts)
    strided = Windows(ids, starts, 10, 3)
    last = 10 + (strided.count - 1) * 3
    assert strided.scored_bytes == starts[last] - starts[1]


def test_measures_follow_from_the_loss():
    score = Score(loss=2 * math.log(2), tokens=50, bytes=200, windows=1, dropped_tokens=0)
    assert score.perplexity == pytest.approx(4)
    assert score.bits_per_byte == pytest.approx(0.5)
    assert score.to_json()["tokens"] == 50
    assert Score(1e4, 1, 1, 1, 0).perplexity == math.inf
    assert "by_position" not in score.to_json()
    buckets = (PositionBucket(1, 1, 2, 5.0), PositionBucket(2, 3, 0, 0.0))
    detailed = dataclasses.replace(score, by_position=buckets)
    assert detailed.to_json() == score.to_json() | {
        "by_position": [
            {"loss": 2.5, "first": 1, "last": 1, "tokens": 2, "nats": 5.0},
            {"loss": None, "first": 2, "last": 3, "tokens": 0, "nats": 0.0},
        ]
    }
    assert [line.split() for line in detailed.lines()[-2:]] == [["1", "2", "2.5000"], ["2", "to", "3", "0", "-"]]
    # Only first parts of a character: there are no bytes to divide the loss by, and JSON has no infinity.
    assert Score(1.0, 3, 0, 1, 0).to_json()["bits_per_byte"] is None


def test_texts_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read .* give a file of UTF-8 text"):
        read_text(tmp_path / "nothing.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin.txt is not UTF-8 \(at byte 3\): convert it"):
        read_text(tmp_path / "latin.txt")
    (tmp_path / "lines.txt").write_bytes(b"a\r\nb")
    assert read_text(tmp_path / "lines.txt") == "a\r\nb"
