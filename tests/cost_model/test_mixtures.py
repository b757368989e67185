"""What is said of mixtures of experts before a GPU is rented, and what is refused."""

import pytest
from scripts import CHECKOUT

from jaxllm.config import ConfigError, load_config
from jaxllm.config.attention import why_no_experts
from jaxllm.cost_model.flops import parameter_count, parameter_words, train_flops_per_token
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.plan.estimate import estimate
from jaxllm.plan.search import SearchOptions, best_with_fp8, search
from jaxllm.plan.search_text import verdict_lines
from jaxllm.run.messages import who_collapsed


def config_of(name, *overrides):
    train = {"steps": 1, "sequence_length": 4096, "global_batch_sequences": 64, "microbatch_sequences": 1}
    return load_config({"model": {"name": name}, "train": train, "parallel": {"zero": 3}}, overrides)


def test_the_parameters_of_a_token_are_counted():
    model = config_of("qwen3-30b-a3b").model
    assert parameter_words(model) == "30,532.1M parameters, 3,353.0M of them for a token"
    # The embedding is looked up; experts beyond the eight of a token are not multiplied.
    D, F, V, L = model.hidden_size, model.intermediate_size, model.vocab_size, model.num_layers
    attention = D * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    matmuls = L * (attention + 8 * 3 * D * F + D * 128) + V * D
    scores = 3 * 2 * 4096 * model.num_heads * model.head_dim * L
    assert train_flops_per_token(model, 4096) == 6 * matmuls + scores
    assert parameter_count(model) == 30_532_122_624


def test_eight_gpus_do_not_hold_30b_a3b_and_sixteen_do():
    """With AdamW 366 GB of state; two sequences of 4,096 tokens, and `selective`."""
    two_sequences = "train.microbatch_sequences=2"
    eight, sixteen = (estimate(config_of("qwen3-30b-a3b", two_sequences), "h100-80gb", n) for n in (8, 16))
    assert (eight.by_convention["jaxllm"].fits, sixteen.by_convention["jaxllm"].fits) == (False, True)


def test_no_layout_without_kernels_is_suggested():
    """An expert of 768 columns over 8 tensor ranks has 96, no multiple of 64."""
    found = estimate(config_of("qwen3-30b-a3b", "train.microbatch_sequences=4"), "h100-80gb", 16)
    tensor = [change.config.parallel.tensor for change in found.changes]
    assert tensor
    assert max(tensor) < 8


def test_the_range_of_a_mixtures_speed_says_how_little_was_timed():
    more = ("model.num_layers=2", "model.scan_layers=false", "train.microbatch_sequences=2")
    text = "\n".join(estimate(config_of("olmoe-1b-7b", *more), "h100-80gb", 1).lines())
    assert "extrapolated: experts, which only one GPU has trained" in text


def test_fp8_is_not_proposed():
    plan = search(config_of("olmoe-1b-7b", "model.num_layers=2"), find_gpu("h100-80gb"), 2)
    assert plan.candidates
    assert best_with_fp8(plan) is None


def test_expert_parallelism_gains_where_experts_have_few_tokens():
    """The page's figures; the estimate and the plan say which way is faster. With all tokens travelling nothing is gathered."""

    def of(tokens, sequences, expert):
        more = (f"train.sequence_length={tokens}", f"train.microbatch_sequences={sequences}", f"parallel.expert={expert}")
        recipe = config_of("qwen3-30b-a3b", *more, f"train.global_batch_sequences={512 * sequences}", "parallel.data=64")
        return estimate(recipe, "h200-141gb", 64)

    many, few = ([of(tokens, sequences, expert) for expert in (1, 8)] for tokens, sequences in ((8192, 2), (2048, 1)))
    longer, shorter = (there.speed.step_s / here.speed.step_s - 1 for here, there in (many, few))
    page = " ".join((CHECKOUT / "docs" / "experts.md").read_text(encoding="utf-8").split())
    assert f"is {longer:.0%} longer with `expert=8` at two sequences of 8,192 tokens a microbatch, and {-shorter:.0%}" in page
    assert few[1].memory.peak_bytes < few[0].memory.peak_bytes
    # Rows may be dropped, so a plan has experts on several ranks only if the config asks for it.
    for asked, keep, found in ((few[1], (), 8), (many[1], (), 1), (many[1], ("expert",), 8), (few[0], (), 1)):
        options = SearchOptions(keep=frozenset({"data", "zero", "microbatch_sequences", *keep}))
        plan = search(asked.config, find_gpu("h200-141gb"), 64, options=options)
        assert plan.candidates[0].choice.expert == found
        assert ("rows beyond parallel.expert_buffer are dropped" in "\n".join(verdict_lines(plan, 1))) == (found == 8)


REFUSED = {
    (
        "a100-80gb",
    ): "cannot be trained there: their kernels are for NVIDIA Hopper GPUs, of compute capability 9.0, and a100-80gb",
    ("h100-80gb", "model.compute_dtype=float32"): "do not multiply float32; set model.compute_dtype=bfloat16",
    ("h100-80gb", "parallel.tensor=8"): "each tensor rank; change model.intermediate_size=768 or parallel.tensor=8",
    ("h100-80gb", "model.hidden_size=2080"): "need a multiple of 64; change model.hidden_size=2080",
}


@pytest.mark.parametrize(("gpu", "overrides"), [(key[0], key[1:]) for key in REFUSED], ids=str)
def test_what_no_kernel_multiplies_is_refused(gpu, overrides):
    with pytest.raises(ConfigError) as refused:
        estimate(config_of("qwen3-30b-a3b", *overrides), gpu, 16)
    assert REFUSED[gpu, *overrides] in str(refused.value)
    assert why_no_experts(config_of("qwen3-30b-a3b", *overrides).model, 8, None, "cpu") is None


def test_megatrons_rule_is_of_dense_models():
    with pytest.raises(ConfigError, match="--convention=megatron is of models without experts: leave it out"):
        estimate(config_of("olmoe-1b-7b"), "h100-80gb", 8, convention="megatron")


def test_layers_of_a_mixture_are_watched_by_default():
    every = {key: config_of("olmoe-1b-7b", *key).layer_norms_every for key in ((), ("log.layer_norms_every=7",))}
    assert every == {(): 100, ("log.layer_norms_every=7",): 7}
    assert config_of("olmoe-1b-7b", "parallel.data=1", "parallel.offload_state=all").layer_norms_every is None
    assert config_of("olmoe-1b-7b", "train.freeze=[layers.*]").layer_norms_every is None
    assert config_of("llama-3.2-1b").layer_norms_every is None


def test_a_layer_that_uses_few_experts_is_named():
    model = config_of("mixtral-8x7b").model
    assert who_collapsed({"step": 3, "experts_used/0": 7.9, "experts_used/1": 5.1}, model) is None
    assert who_collapsed({"step": 3, "loss": 1.0}, model) is None
    assert who_collapsed({"step": 3, "experts_used/0": 7.9, "experts_used/1": 2.2}, model) == (
        "step 3: layer 1 sends its tokens to about 2.2 of 8 experts: raise model.balance_loss_weight=0.01, or lower "
        "optimizer.learning_rate"
    )
    alike = model.model_copy(update={"num_experts": 4})
    assert who_collapsed({"step": 3, "experts_used/0": 2.0}, alike) is not None
