"""Documents in cuDNN's packed calls. A stand-in for the two calls keeps their promises and gives nan beside them, so that all
but cuDNN itself is compared with plain attention; tests/gpu has the same with cuDNN.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import compare_kernels, documents, kernel_inputs

import jaxllm
from jaxllm.compile.aot import can_compile_for_gpus
from jaxllm.compile.report import compile_report
from jaxllm.config import ConfigError, load_config
from jaxllm.config.attention import BACKWARD_SLOTS, FORWARD_SLOTS, HOPPER, documents_by_length, packed_documents
from jaxllm.cost_model.hardware import GPUS
from jaxllm.model import cudnn_attention
from jaxllm.model.blockwise_attention import Mask, xla_kernel
from jaxllm.model.cudnn_attention import packed_calls
from jaxllm.parallel.kernels import choose_attention
from jaxllm.run import memory_check
from jaxllm.run.memory_check import require_right_attention, with_room_for_documents
from jaxllm.run.saving import require_same_run

LENGTH = 512
PLAIN = xla_kernel()


class RaggedCall:
    """What cuDNN is told: documents as offsets in elements and lengths, of tensors in pieces of `longest` tokens."""

    def __init__(self, q, k, lengths, offsets):
        self.shape, self.longest = q.shape, q.shape[1]
        count = lengths[0].size
        self.starts, keys = (o.reshape(-1)[:count] // math.prod(x.shape[2:]) for o, x in zip(offsets, (q, k), strict=True))
        self.lengths = lengths[0].reshape(-1)
        token = jnp.arange(q.shape[0] * self.longest)
        ends = self.starts + self.lengths
        inside = (token[None] >= self.starts[:, None]) & (token[None] < ends[:, None])
        self.document = jnp.where(inside.any(0), inside.argmax(0), -1)
        self.row = token - self.starts[self.document]
        whole = [o.reshape(-1)[count] // math.prod(x.shape[2:]) == token.size for o, x in zip(offsets, (q, k), strict=True)]
        same = (self.starts == keys).all() & (lengths[0] == lengths[1]).all() & whole[0] & whole[1]
        self.is_right = (self.document >= 0) & same & (self.lengths <= self.longest).all() & (inside.sum(0) <= 1).all()

    def flat(self, x):
        return x.reshape(1, -1, *x.shape[2:])

    def mask(self):
        return Mask(True, self.document[None], self.document[None])

    def given(self, x, like):
        return jnp.where(self.is_right[None, :, None, None], x, jnp.nan).reshape(like.shape).astype(like.dtype)


def stand_in():
    """JAX's binding, as far as cudnn_attention uses it for packed documents."""

    def forward(q, k, v, bias, q_lengths, k_lengths, q_offsets, k_offsets, *_, **parameters):
        call = RaggedCall(q, k, (q_lengths, k_lengths), (q_offsets, k_offsets))
        o, lse = PLAIN.forward(*map(call.flat, (q, k, v)), call.mask())
        place = jnp.where(call.is_right, call.document, call.starts.size), call.row
        rows = jnp.full((call.starts.size, call.longest, q.shape[2]), jnp.nan).at[place].set(lse[0], mode="drop")
        return call.given(o, q), rows.swapaxes(1, 2)

    def backward(q, k, v, bias, q_lengths, k_lengths, q_offsets, k_offsets, _, __, lse, o, do, **parameters):
        call = RaggedCall(q, k, (q_lengths, k_lengths), (q_offsets, k_offsets))
        rows = lse.swapaxes(1, 2)[call.document, call.row][None]
        inputs = [call.flat(x) for x in (q, k, v, o)]
        gradients = PLAIN.backward(*inputs, rows, call.flat(do), call.mask())
        return [call.given(g, x) for g, x in zip(gradients, (q, k, v), strict=True)]

    names = SimpleNamespace(BTNH=SimpleNamespace(value=0))
    return SimpleNamespace(
        MaskType={"PADDING_CAUSAL": 3},
        AttentionLayout=names,
        _dot_product_attention_fwd_cuda_lowering=lambda query: None,
        _dot_product_attention_fwd_p=SimpleNamespace(bind=forward),
        _dot_product_attention_bwd_p=SimpleNamespace(bind=backward),
    )


@pytest.fixture
def packed(monkeypatch):
    kernels = {most: cudnn_attention.cudnn_kernel(most) for most in (4, 64, 256)}
    monkeypatch.setattr(cudnn_attention, "cudnn_binding", stand_in)
    return kernels


@pytest.mark.parametrize(
    ("mean", "most"),
    [
        pytest.param(3, 256, id="short documents, the last calls"),
        pytest.param(30, 64, id="all lengths, three calls"),
        pytest.param(10**9, 64, id="one document, the first call"),
        pytest.param(200, 4, id="one call"),
    ],
)
def test_packed_documents_are_the_causal_block(packed, mean, most):
    segments = documents(LENGTH, mean)
    compare_kernels(packed[most], PLAIN, *kernel_inputs((4, 2), LENGTH), Mask(True, segments, segments), tolerance=2e-5)


def test_documents_of_all_lengths_fill_their_calls(packed):
    """As many documents just above each bound as fit, so that no call has a place left for one more."""
    sizes = [[129] * 3 + [125], [33] * 15 + [17], [2] * 256, [1] * 255 + [257]]
    segments = jnp.asarray([np.repeat(np.arange(len(row)), row) for row in sizes[:2]], jnp.int32)
    inputs = kernel_inputs((4, 2), LENGTH)
    compare_kernels(packed[64], PLAIN, *inputs, Mask(True, segments, segments), tolerance=2e-5)
    segments = jnp.asarray([np.repeat(np.arange(len(row)), row) for row in sizes[2:]], jnp.int32)
    compare_kernels(packed[256], PLAIN, *inputs, Mask(True, segments, segments), tolerance=2e-5)


def test_more_documents_than_compiled_are_nan(packed):
    """They must not become gradients of wrong texts: the trainer skips such a step, and says so."""
    segments = jnp.arange(LENGTH, dtype=jnp.int32)[None].repeat(2, 0) // 100
    q, k, v, do = kernel_inputs((4, 2), LENGTH)
    mask = Mask(True, segments, segments)
    o, lse = packed[4].forward(q, k, v, mask)
    assert np.isnan(o).all()
    assert np.isnan(lse).all()
    assert all(np.isnan(g).all() for g in packed[4].backward(q, k, v, o, lse, do, mask))


@pytest.mark.parametrize(
    ("most", "length", "slots", "expected"),
    [
        (4, 8192, BACKWARD_SLOTS, [(8192, 4)]),
        (5, 8192, BACKWARD_SLOTS, [(8192, 4), (2048, 2)]),
        (64, 8192, BACKWARD_SLOTS, [(8192, 4), (2048, 4), (512, 4)]),
        (256, 8192, BACKWARD_SLOTS, [(8192, 4), (2048, 4), (512, 4), (128, 4)]),
        (64, 8192, FORWARD_SLOTS, [(8192, 64)]),
        (256, 8192, FORWARD_SLOTS, [(8192, 64), (128, 4)]),
        (1, 8192, FORWARD_SLOTS, [(8192, 2)]),
        (64, 8200, BACKWARD_SLOTS, [(8200, 4), (2050, 16)]),
    ],
)
def test_the_calls_grow_with_the_logarithm_of_the_documents(most, length, slots, expected):
    """Their memory does not, where lengths divide: each has `slots` documents of its longest length for every S tokens."""
    assert documents_by_length(most, length, slots) == expected
    segments = jax.ShapeDtypeStruct((2, length), jnp.int32)
    shapes = jax.eval_shape(lambda s: [call.lengths for call in packed_calls(s, most, slots)], segments)
    assert [x.shape for x in shapes] == [(2 * (length // longest), count) for longest, count in expected]


# --------------------------------------------------------------------------------------------------------- which way, and room

H100, A100 = (
    SimpleNamespace(platform="gpu", device_kind=f"some {capability}", compute_capability=capability)
    for capability in ("9.0", "8.0")
)


@pytest.fixture
def config(tiny_config):
    def made(*overrides):
        config = tiny_config("model.compute_dtype=bfloat16", "parallel.data=1", *overrides)
        return config.resolve(config.devices)

    return made


@pytest.mark.parametrize(
    ("length", "overrides", "expected"),
    [
        (8192, (), 64),
        (4096, (), 64),
        (2048, (), 16),
        (512, (), 4),
        (128, (), 4),
        (131072, (), 1024),
        (8192, ("data.max_documents=20",), 20),
        (8192, ("data.mask_documents=false",), None),
        (8192, ("model.attention=cudnn",), 64),
        (8192, ("model.attention=cudnn_halves",), None),
        (8192, ("model.attention=xla",), None),
        (8192, ("model.compute_dtype=float32",), None),
        (8192, ("run.deterministic=true",), None),
        (8200, (), None),
        (8200, ("data.max_documents=16",), 16),
        (8192 * 4, ("parallel.context=4",), 256),
        (8184 * 4, ("parallel.context=4",), None),
        # 8 heads of 4: 2^31 numbers in the queries.
        (2**20, ("train.microbatch_sequences=64", "train.global_batch_sequences=64"), None),
        (2**20, ("train.microbatch_sequences=32", "train.global_batch_sequences=64"), 16384),
    ],
)
def test_hopper_packs_one_document_for_128_tokens_by_default(config, length, overrides, expected):
    long = config(f"train.sequence_length={length}", *overrides)
    assert packed_documents(long, HOPPER) == packed_documents(long, (10, 0)) == expected
    assert packed_documents(long, (8, 0)) is packed_documents(long, None) is None


@pytest.mark.parametrize(
    ("overrides", "on_hopper", "on_ampere"),
    [
        ((), "cudnn, up to 4 documents packed", "cudnn, documents by halves"),
        (("model.attention=cudnn_halves",), "cudnn, documents by halves", "cudnn, documents by halves"),
        (("data.mask_documents=false",), "cudnn", "cudnn"),
        (("parallel.context=2",), "cudnn all_gather, up to 4 documents packed", "cudnn all_gather, documents by halves"),
        (("model.attention=xla",), "xla", "xla"),
    ],
)
def test_the_name_of_the_attention_says_how_documents_are_masked(config, overrides, on_hopper, on_ampere):
    assert [choose_attention(config(*overrides), device)[0] for device in (H100, A100)] == [on_hopper, on_ampere]


@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_a_step_for_h100s_has_one_call_forward_and_two_backward():
    """A sequence of 2,048 tokens has up to 16 documents: one call forward, two backward. Without documents one is enough."""
    base = {
        "model": {
            "num_layers": 2,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_heads": 8,
            "num_kv_heads": 2,
            "vocab_size": 512,
        },
        "train": {"steps": 1, "sequence_length": 2048, "global_batch_sequences": 3, "microbatch_sequences": 1},
    }
    found = {}
    for masks in ("true", "false"):
        report = compile_report(load_config(base, [f"data.mask_documents={masks}"]), GPUS["h100-80gb"], 1)
        runs = {part.part: part.runs for part in report.kernels.parts if part.part.startswith("attention")}
        found[masks] = {name: runs.get(name, 0) // 6 for name in ("attention_forward", "attention_backward", "attention_again")}
        assert report.compiled_flops == pytest.approx(report.executed_flops, rel=1e-3)
        found[masks]["flops"] = report.attention_kernel_flops
    flops = {"flops": found["false"]["flops"]}
    assert found["true"] == {"attention_forward": 1, "attention_backward": 2, "attention_again": 0, **flops}
    assert found["false"] == {"attention_forward": 1, "attention_backward": 1, "attention_again": 0, **flops}


def test_a_run_has_room_for_the_documents_of_its_data(config):
    def most(found, *overrides, device=H100):
        return with_room_for_documents(config(*overrides), device, lambda: found).data.max_documents

    assert most(4) is None
    assert most(5) == 16
    assert most(17) == 64
    assert most(17, "data.max_documents=17") == 17
    # Where nothing is packed the data is not counted.
    assert most(None, device=A100) is None
    with pytest.raises(
        ConfigError, match=r"data.max_documents=16 and the data has a sequence with 17 documents.*to 17 or more"
    ):
        most(17, "data.max_documents=16")


@pytest.mark.parametrize(
    ("packed_error", "halves_error", "advice"),
    [(0.5, 0.01, "model.attention=cudnn_halves"), (0.5, 0.5, "model.attention=xla"), (math.nan, 0.01, "cudnn_halves")],
)
def test_wrong_numbers_of_cudnn_stop_a_run_with_what_works(config, monkeypatch, packed_error, halves_error, advice):
    monkeypatch.setattr(
        memory_check, "largest_error", lambda group, head_dim, packs, has_windows: packed_error if packs else halves_error
    )
    mesh = SimpleNamespace(devices=np.array([H100]))
    with pytest.raises(ConfigError, match=f"cuDNN's attention is off by .*% on this machine.*set .*{advice}"):
        require_right_attention(config(), "cudnn", mesh)
    packed_error = 0.01
    require_right_attention(config(), "cudnn", mesh)


def test_a_trainer_counts_the_documents_of_its_data(tiny_config, tmp_path, monkeypatch):
    """On a GPU that packs them; and the run may continue with another number."""
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"{number:03}")
    files = ("data.source=files", f"data.paths=[{tmp_path}/*.txt]", "data.held_out_fraction=0.1", "run.cpu_devices=8")
    monkeypatch.setattr(memory_check, "packed_documents", lambda config, _: config.data.max_documents or 4)
    trainer = jaxllm.Trainer(tiny_config(*files))
    # Three bytes and an end each. Of 16 tokens: an end, four more documents, and free space if the last sequence has any, which
    # depends on the held-out ones and so on the folder's name.
    assert trainer.data.most_documents(trainer.stream) in (5, 6)
    assert trainer.config.data.max_documents == 16
    meta = {"config": trainer.config.model_dump(mode="json"), "fingerprint": "same", "step": 1}
    require_same_run(tmp_path, meta, tiny_config(*files), "same")
    with pytest.raises(ConfigError, match=r"max_documents=4 and the data has a sequence with [56] documents"):
        jaxllm.Trainer(tiny_config(*files, "data.max_documents=4"))
