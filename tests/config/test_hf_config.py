"""config.json in both dialects, refusals by key, and model.name: FOLDER."""

import json
import subprocess
import sys

import pytest
from hf_folders import (
    GEMMA3,
    HUB,
    LLAMA3_ROPE,
    MIXTRAL,
    OLMO3,
    OLMOE,
    QWEN3_MOE,
    SMOLLM3,
    in_new_dialect,
    random_weights,
    write_folder,
)
from tiny import TINY

from jaxllm.config import ConfigError, ModelConfig, load_config
from jaxllm.config.hf_config import SHAPE_KEYS, hugging_face_config, model_section

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
STRETCHED = {**HUB, "rope_scaling": LLAMA3_ROPE}
MISTRAL = {**HUB, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN = {**HUB, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2}
QWEN2 = {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 10, "attention_bias": False}
OLMO2 = {**HUB, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


F, S = "full_attention", "sliding_attention"


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("dialect", [dict, in_new_dialect])
def test_both_dialects_say_the_same_network(dialect):
    section = model_section(dialect(STRETCHED), "config.json")
    assert section == {
        "num_layers": 3,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": 67,
        "rope_theta": 20000.0,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 16},
        "tie_embeddings": False,
        "norm_eps": 1e-5,
        "vision": None,
        "qkv_bias": False,
        "qk_norm": None,
        "block_norms": "before",
        "norm_plus_one": False,
        "activation": "silu",
        "scale_embeddings": False,
        "num_experts": None,
        "experts_per_token": None,
        "normalize_expert_weights": False,
        "sliding_window": None,
        "full_attention_every": None,
        "full_attention_first": 0,
        "local_rope_theta": None,
        "query_pre_attn_scalar": None,
        "no_rope_every": None,
    }
    assert tuple(section) == SHAPE_KEYS


def test_rope_scaling_of_each_type():
    def scaling(rope):
        return model_section({**HUB, "rope_scaling": rope}, "")["rope_scaling"]

    assert scaling({"type": "linear", "factor": 2}) == {"rope_type": "linear", "factor": 2.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1.0, "beta_fast": 32.0}
    assert scaling(YARN) == {**yarn, "original_max_position": 32}
    assert scaling({"rope_type": "yarn", "factor": 4.0, "attention_factor": None}) == {**yarn, "original_max_position": 128}
    assert scaling({**YARN, "beta_fast": 16, "attention_factor": 2})["attention_factor"] == 2.0


def test_the_spelling_of_older_folders_is_read():
    old = {**LLAMA3_ROPE, "type": LLAMA3_ROPE["rope_type"]}
    del old["rope_type"]
    assert model_section({**HUB, "rope_scaling": old}, "") == model_section(STRETCHED, "")


@pytest.mark.parametrize(
    ("key", "ours", "value"),
    [
        ("num_key_value_heads", "num_kv_heads", 4),
        ("rms_norm_eps", "norm_eps", 1e-6),
        ("rope_theta", "rope_theta", 10000.0),
        ("tie_word_embeddings", "tie_embeddings", False),
        ("architectures", "num_layers", 3),
    ],
)
def test_a_key_that_is_missing_is_what_transformers_takes(key, ours, value):
    assert model_section(without(HUB, key), "")[ours] == value


def test_mistral_has_defaults_of_its_own():
    assert model_section({**without(MISTRAL, "num_key_value_heads"), "num_attention_heads": 8}, "")["num_kv_heads"] == 8
    long = {**without(MISTRAL, "sliding_window"), "max_position_embeddings": 32768}
    assert model_section(long, "") == model_section(MISTRAL, "") | {"sliding_window": 4096}
    assert model_section({**MISTRAL, "sliding_window": 128}, "") == model_section(MISTRAL, "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"architectures": ["Qwen2MoeForCausalLM"]},
            r'architectures=\["Qwen2MoeForCausalLM"\]: jaxllm supports LlamaForCausalLM, .*and MixtralForCausalLM\.$',
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "gemma"}, "model_type=gemma"),
        ({"model_type": "mistral"}, "architectures=LlamaForCausalLM and model_type=mistral, which do not match"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        *(({"architectures": [name]}, name) for name in ("GptOssForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM")),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Llama"}}, "auto_map"),
        ({"sliding_window": 64}, "sliding_window=64, which its class does not read: remove it"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window=0: it should be a whole number"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type=dynamic: jaxllm supports default, llama3, linear and yarn",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling says factor=null"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling says truncate=false"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, "rope_scaling says mscale=1.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=null: it should be a number"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_parameters and rope_theta disagree"),
        ({"rope_parameters": {**LLAMA3_ROPE}, "rope_scaling": {"rope_type": "default"}}, "rope_parameters disagree"),
        ({"rope_parameters": {"full": {"rope_theta": 1.0}}}, "it should be an object with the angles of all layers"),
        ({"rope_theta": "big"}, "rope_theta=big: it should be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta=Infinity: it should be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN: it should be a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings=false: it should be true or false"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings=long: it should be a whole number of at least 1"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}}, "embeddings=0.5: it should be a whole number"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r'rope_type=\["yarn"\]: jaxllm supports default'),
        ({"layer_types": 5}, "layer_types=5: it should be a list"),
        ({"layer_types": [{}]}, "layer_types with {}"),
        ({"architectures": [{}]}, "architectures="),
        ({"architectures": None, "model_type": ["x"]}, "model_type="),
        ({"hidden_size": None}, "hidden_size=null: it should be a whole number of at least 1"),
        ({"vocab_size": 6.5}, "vocab_size=6.5: it should be a whole number of at least 1"),
        ({"num_attention_heads": 5}, "add head_dim"),
    ],
)
def test_what_ours_is_not_is_refused_by_name(change, sentence):
    with pytest.raises(ConfigError, match=f"^config.json.*{sentence}"):
        model_section({**HUB, **change}, "config.json")


def test_a_class_says_what_its_network_has():
    assert model_section(QWEN2, "") == model_section(HUB, "") | {"qkv_bias": True}
    assert model_section(QWEN3, "") == model_section({**HUB, "head_dim": 10}, "") | {"qk_norm": "head"}
    assert model_section(without(QWEN3, "head_dim"), "")["head_dim"] == 128
    assert model_section(OLMO2, "") == model_section(HUB, "") | {"qk_norm": "width", "block_norms": "after"}
    assert model_section(without(OLMO2, "rms_norm_eps"), "")["norm_eps"] == 1e-5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types with sliding_attention and no sliding"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types with linear_attention"),
        ({"use_sliding_window": True, "layer_types": [S, S]}, "num_hidden_layers=3 and layer_types for 2"),
        ({"use_sliding_window": True, "num_hidden_layers": 5, "layer_types": [S, F, F, S, S]}, "layer_types in an order that"),
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers=null: it should be a whole number"),
        ({"attention_bias": True}, "attention_bias=true"),
    ],
)
def test_what_a_qwen_may_not_be(change, sentence):
    with pytest.raises(ConfigError, match=f"^config.json.*{sentence}"):
        model_section({**QWEN3, **change}, "config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 128, "layer_types": [F, S, S]},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["full_attention"] * 3, "use_sliding_window": True, "max_window_layers": 0},
        {"attention_bias": True},
    ],
)
def test_a_window_that_no_layer_has_changes_nothing(change):
    assert model_section({**QWEN2, **change}, "") == model_section(QWEN2, "")


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"max_window_layers": 0}, (16, 16, 16)),
        ({}, (None, None, 16)),
        ({"layer_types": [F, S, S]}, (None, 16, 16)),
        ({"layer_types": [S, F, S]}, (16, None, 16)),
        ({"layer_types": [F, S, F]}, (None, 16, None)),
        ({"layer_types": [S, S, S]}, (16, 16, 16)),
    ],
)
def test_windows_of_some_layers_are_read_and_written(change, windows):
    section = model_section({**QWEN2, "use_sliding_window": True, **change}, "")
    assert ModelConfig.model_validate(section).windows == windows
    for original in ({**QWEN2, "use_sliding_window": True, **change}, QWEN2, None):
        written = hugging_face_config(section, dtype="float32", max_position=128, original=original)
        assert model_section(written, "") == section
        assert written["layer_types"] == [S if window else F for window in windows]


def test_a_window_needs_a_class_that_has_it():
    section = model_section({**MISTRAL, "sliding_window": 16}, "")
    assert hugging_face_config(section, dtype="float32", max_position=128)["model_type"] == "mistral"
    with pytest.raises(ConfigError, match=r"no network with model\.sliding_window=16 and model\.full_attention_every=2: only"):
        hugging_face_config(section | {"full_attention_every": 2}, dtype="float32", max_position=128)
    for original, change in ((MISTRAL, {"full_attention_every": 2}), (HUB, {})):
        with pytest.raises(ConfigError, match="cannot have windows of 16 positions on these layers"):
            hugging_face_config(section | change, dtype="float32", max_position=128, original=original)


@pytest.mark.parametrize("change", [{"sliding_window": None, "full_attention_every": None, "local_rope_theta": None}, {}])
def test_gemmas_whose_layers_have_the_same_angles_or_no_windows(change):
    section = model_section(GEMMA3, "") | {"local_rope_theta": None} | change
    for max_position in (128, 32768):
        written = hugging_face_config(section, dtype="float32", max_position=max_position)
        assert written["rope_local_base_freq"] == section["rope_theta"]
        assert written["layer_types"] == ([F] * 3 if change else [S, F, S])
        read = ModelConfig.model_validate(model_section(written, ""))
        assert (read.windows, read.local_rope_theta or read.rope_theta) == ((None,) * 3 if change else (9, None, 9), 20000.0)
    scaled = section | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    if not change:
        with pytest.raises(
            ConfigError, match=r"does not scale the angles of layers with a window: set model\.local_rope_theta"
        ):
            hugging_face_config(scaled, dtype="float32", max_position=128)


@pytest.mark.parametrize("dialect", [dict, in_new_dialect])
def test_gemma_has_angles_of_its_own_in_windows(dialect):
    section = model_section(dialect({**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}), "")
    assert ModelConfig.model_validate(section).windows == (9, None, 9)
    assert (section["rope_theta"], section["local_rope_theta"], section["query_pre_attn_scalar"]) == (20000.0, 50.0, 7)
    assert section["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    by_class = model_section(without(GEMMA3, "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "head_dim"), "")
    assert (by_class["rope_theta"], by_class["local_rope_theta"], by_class["query_pre_attn_scalar"]) == (1e6, 1e4, None)
    assert (by_class["head_dim"], model_section(without(GEMMA3, "tie_word_embeddings"), "")["tie_embeddings"]) == (256, True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0, which jaxllm does not support"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ({"hidden_activation": "relu"}, "hidden_activation=relu"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {}},
            r'architectures=\["Gemma3ForConditionalGeneration"\]: jaxllm supports',
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "scales the angles of layers with a window"),
        ({"rope_parameters": {"sliding_attention": 5, "full_attention": {}}}, "it should have an object for each kind"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0: it should be a whole number of at least 1"),
        ({"sliding_window_pattern": "6"}, "sliding_window_pattern=6: it should be a whole number"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 5}}}, "rope_local_base_freq and rope_parameters disagree"),
    ],
)
def test_what_a_gemma_may_not_be(change, sentence):
    with pytest.raises(ConfigError, match=f"^config.json.*{sentence}"):
        model_section({**GEMMA3, **change}, "config.json")


@pytest.mark.parametrize("dialect", [dict, in_new_dialect])
def test_olmo_3_scales_the_angles_of_full_layers_alone(dialect):
    section = model_section(dialect(OLMO3), "")
    assert ModelConfig.model_validate(section).windows == (9, None, 9)
    assert (section["rope_theta"], section["local_rope_theta"]) == (5e5, 5e5)
    assert section["rope_scaling"]["rope_type"] == "yarn"
    # As published: three layers of four, by the class.
    named = load_config({"model": {"name": "olmo-3-7b"}, "train": TINY["train"]}).model
    hub = {"sliding_window": 4096, "max_position_embeddings": 65536, "num_hidden_layers": 32, "layer_types": None}
    by_class = ModelConfig.model_validate(model_section({**OLMO3, **hub}, ""))
    assert by_class.windows == named.windows == (4096, 4096, 4096, None) * 8
    assert model_section(dialect({**OLMO3, "rope_scaling": None}), "")["local_rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("change", "layers", "every"),
    [
        ({}, 3, 2),
        ({"no_rope_layers": [1, 1, 0, 1, 1, 0]}, 6, 3),
        ({"no_rope_layers": [0, 0, 0]}, 3, 1),
        ({"no_rope_layers": [1, 1, 1, 0]}, 3, None),
        ({"no_rope_layer_interval": 4}, 3, None),
    ],
)
def test_layers_of_smollm3_without_rotation(change, layers, every):
    config = {**SMOLLM3, **change, "num_hidden_layers": layers}
    section = model_section(config, "")
    assert section["no_rope_every"] == every
    for original in (config, None):
        written = hugging_face_config(section, dtype="float32", max_position=128, original=original)
        if original or every:
            assert written["no_rope_layers"] == [0 if every and (n + 1) % every == 0 else 1 for n in range(layers)]
            assert model_section(written, "") == section
    assert model_section(without(SMOLLM3, "rope_theta", "tie_word_embeddings"), "") == model_section(SMOLLM3, "") | {
        "rope_theta": 2e6
    }
    unused = {"sliding_window": 9, "use_sliding_window": False, "no_rope_layer_interval": None, "no_rope_layers": [1, 0, 1]}
    assert model_section({**SMOLLM3, **unused}, "") == model_section(SMOLLM3, "")
    with pytest.raises(ConfigError, match="LlamaForCausalLM rotates in all layers: only jaxllm can load this model"):
        hugging_face_config(model_section(SMOLLM3, ""), dtype="float32", max_position=128, original=HUB)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"no_rope_layers": [0, 0, 1]}, "no_rope_layers in an order that jaxllm does not support"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]: it should be a list of 0 and 1 for 3 layers"),
        ({"no_rope_layers": [1, 0, 2]}, "it should be a list of 0 and 1 for 3 layers"),
        ({"no_rope_layers": "all"}, "it should be a list of 0 and 1 for 3 layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0: it should be a whole number of at least 1"),
        ({"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window=true, which jaxllm does not support here"),
    ],
)
def test_what_a_smollm3_may_not_be(change, sentence):
    with pytest.raises(ConfigError, match=f"^config.json.*{sentence}"):
        model_section({**SMOLLM3, **change}, "config.json")


@pytest.mark.parametrize("dialect", [dict, in_new_dialect])
def test_mixtures_say_their_experts(dialect):
    qwen, olmoe, mixtral = (model_section(dialect(config), "") for config in (QWEN3_MOE, OLMOE, MIXTRAL))
    experts = {"num_experts": 6, "experts_per_token": 2, "normalize_expert_weights": True, "intermediate_size": 16}
    assert qwen == model_section({**QWEN3, "attention_bias": None}, "") | experts
    experts = {"num_experts": 6, "experts_per_token": 3, "normalize_expert_weights": False}
    assert olmoe == model_section(HUB, "") | experts | {"qk_norm": "width"}
    experts = {"num_experts": 4, "experts_per_token": 2, "normalize_expert_weights": True}
    assert mixtral == model_section(HUB, "") | experts | {"sliding_window": 9}


def test_what_mixtures_are_without_their_keys():
    """As the classes of transformers fill them in."""

    def of(config, *keys):
        section = model_section(without(config, *keys), "")
        return [section[key] for key in ("num_experts", "experts_per_token", "normalize_expert_weights", "intermediate_size")]

    counts = ("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")
    assert of(QWEN3_MOE, *counts) == [128, 8, False, 768]
    assert of(OLMOE, *counts) == [64, 8, False, 40]
    assert of(MIXTRAL, *counts) == [8, 2, True, 40]
    assert model_section(without(QWEN3_MOE, "head_dim"), "")["head_dim"] == 6
    assert model_section(without(MIXTRAL, "rope_theta"), "")["rope_theta"] == 1e6
    # Mixtral's class does not read it.
    assert of({**MIXTRAL, "norm_topk_prob": False}) == [4, 2, True, 40]


def test_a_qwen3_moe_has_its_window_on_all_layers_if_it_is_switched_on():
    on = {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    section = model_section(on, "")
    assert ModelConfig.model_validate(section).windows == (16, 16, 16)
    assert model_section({**on, "use_sliding_window": False}, "") == section | {"sliding_window": None}
    for original in (on, QWEN3_MOE, None):
        written = hugging_face_config(section, dtype="float32", max_position=128, original=original)
        assert (written["use_sliding_window"], written["sliding_window"]) == (True, 16)
        assert model_section(written, "") == section
    with pytest.raises(ConfigError, match="cannot have windows of 16 positions on these layers"):
        hugging_face_config(section | {"full_attention_first": 1}, dtype="float32", max_position=128, original=on)


@pytest.mark.parametrize("config", [QWEN3_MOE, OLMOE, MIXTRAL])
def test_what_a_mixture_says_of_its_training_is_kept(config):
    said = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    original = {**config, **said, "num_experts": 7, "num_local_experts": 7}
    section = model_section(original, "") | {"num_experts": 9}
    written = hugging_face_config(section, dtype="float32", max_position=None, original=original)
    assert {key: written[key] for key in (*said, "num_experts", "num_local_experts")} == {
        **said,
        "num_experts": 9,
        "num_local_experts": 9,
    }


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2, which jaxllm does not support"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\], which jaxllm does not support"),
        (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob=yes: it should be true or false"),
        (QWEN3_MOE, {"num_local_experts": 5}, r"num_experts and num_local_experts disagree \(6 and 5\)"),
        (QWEN3_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size=0: it should be a whole number of at least 1"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias=true"),
        (QWEN3_MOE, {"layer_types": [S] * 3}, "layer_types with sliding_attention, which jaxllm does not support"),
        (OLMOE, {"clip_qkv": 8.0}, r"clip_qkv=8\.0, which jaxllm does not support"),
        (OLMOE, {"num_experts": None}, "num_experts=null: it should be a whole number"),
        (OLMOE, {"sliding_window": 9}, "sliding_window=9, which its class does not read"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1, which jaxllm does not support"),
        (MIXTRAL, {"num_experts_per_tok": "2"}, "num_experts_per_tok=2: it should be a whole number"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts=0: it should be a whole number of at least 1"),
    ],
)
def test_what_a_mixture_may_not_be(config, change, sentence):
    with pytest.raises(ConfigError, match=f"^config.json.*{sentence}"):
        model_section({**config, **change}, "config.json")


def test_mixtures_that_transformers_lacks_are_named():
    qwen, olmoe, mixtral = (model_section(config, "") for config in (QWEN3_MOE, OLMOE, MIXTRAL))
    lacking = [qwen | {"block_norms": "after"}, mixtral | {"normalize_expert_weights": False}, olmoe | {"no_rope_every": 2}]
    lacking += [olmoe | {"num_experts": None, "experts_per_token": None}]
    for section in lacking:
        with pytest.raises(ConfigError, match=r"^transformers has no network with model.*: only jaxllm can load this model"):
            hugging_face_config(section, dtype="float32", max_position=128)
    with pytest.raises(ConfigError, match="OlmoeForCausalLM has no head_dim=10 of its own: only jaxllm can load this model"):
        hugging_face_config(olmoe | {"head_dim": 10}, dtype="float32", max_position=128)


@pytest.mark.parametrize(
    "config",
    [
        *(HUB, QWEN2, QWEN3, OLMO2, OLMO3, SMOLLM3, GEMMA3, {**MISTRAL, "sliding_window": 16}),
        *(QWEN3_MOE, {**QWEN3_MOE, "norm_topk_prob": False}, OLMOE, {**OLMOE, "norm_topk_prob": True}, MIXTRAL),
    ],
)
def test_a_network_without_its_config_gets_the_class_that_computes_it(config):
    section = model_section(config, "")
    written = hugging_face_config(section, dtype="float32", max_position=128)
    assert (written["architectures"], written["model_type"]) == (config["architectures"], config["model_type"])
    assert model_section(written, "") == section


def test_a_network_that_transformers_lacks_is_named():
    section = model_section(QWEN2, "") | {"qk_norm": "head"}
    with pytest.raises(
        ConfigError, match=r"^transformers has no network with model.qkv_bias=True and model.qk_norm=head: only"
    ):
        hugging_face_config(section, dtype="float32", max_position=128)


@pytest.mark.parametrize(
    "config",
    [
        HUB,
        STRETCHED,
        in_new_dialect(STRETCHED),
        MISTRAL,
        {**MISTRAL, "sliding_window": 16},
        QWEN2,
        in_new_dialect(QWEN3),
        in_new_dialect(OLMO2),
        GEMMA3,
        in_new_dialect(GEMMA3),
        OLMO3,
        in_new_dialect(OLMO3),
        SMOLLM3,
        {**QWEN2, "rope_scaling": YARN},
        *(dialect(config) for config in (QWEN3_MOE, OLMOE, MIXTRAL) for dialect in (dict, in_new_dialect)),
    ],
)
def test_what_is_written_is_read_back_in_either_dialect(config):
    section = model_section(config, "")
    written = hugging_face_config(section, dtype="bfloat16", max_position=None, original={**config, "pad_token_id": 7})
    assert model_section(without(written, "rope_theta", "rope_scaling"), "") == section
    assert model_section(without(written, "rope_parameters"), "") == section
    assert (written["dtype"], written["torch_dtype"], written["pad_token_id"]) == ("bfloat16", "bfloat16", 7)
    assert written["architectures"] == config["architectures"]
    assert written["max_position_embeddings"] == 128


def test_a_longer_context_takes_away_a_qwens_window_too():
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    original = {**QWEN2, "use_sliding_window": True, "sliding_window": 128, "layer_types": types}
    written = hugging_face_config(model_section(original, ""), dtype="float32", max_position=256, original=original)
    assert (written["sliding_window"], written["use_sliding_window"]) == (None, False)
    assert set(written["layer_types"]) == {"full_attention"}
    assert model_section(written, "") == model_section(original, "")


@pytest.mark.parametrize("said", [{"sliding_window": 128}, {}])
def test_a_longer_context_takes_away_a_window_that_never_closed(said):
    """By transformers' default of 4096 too, missing in config.json."""
    original = {**without(MISTRAL, "sliding_window"), "use_sliding_window": False, **said}
    written = hugging_face_config(model_section(original, ""), dtype="float32", max_position=8192, original=original)
    assert written["sliding_window"] is None
    assert model_section(written, "") == model_section(original, "")


# ------------------------------------------------------------------------------------------------------- model.name: FOLDER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {**STRETCHED, "vocab_size": 300, "tie_word_embeddings": True}
    path = write_folder(tmp_path_factory.mktemp("named") / "hf", config, random_weights(config))
    (path / "tokenizer.json").write_text("{}")
    return path


def recipe(name, **data):
    return {"model": {"name": name}, "train": TINY["train"], "data": data}


def test_a_recipe_takes_shape_weights_and_tokenizer_of_the_folder_it_names(folder, text_file):
    config = load_config(recipe(str(folder), source="files", paths=[str(text_file)]))
    assert (config.model.num_layers, config.model.vocab_size, config.model.rope_scaling.factor) == (3, 300, 8.0)
    assert (config.train.init_from, config.data.tokenizer) == (str(folder), str(folder))


def test_what_a_recipe_says_itself_wins(folder):
    config = load_config(recipe(str(folder), tokenizer="bytes"), ["train.init_from=null", "model.num_layers=2"])
    assert (config.train.init_from, config.data.tokenizer, config.model.num_layers) == (None, "bytes", 2)
    assert load_config(recipe(str(folder), source="prepared", paths=["x"])).data.tokenizer is None


def test_the_config_of_a_run_needs_no_folder(folder, tmp_path):
    """config.yaml of a run has the complete shape, so the model folder need not exist any more."""
    ran = load_config(recipe(str(folder))).model_dump(mode="json")
    ran["model"]["name"] = str(tmp_path / "gone")
    again = load_config(ran)
    assert again.model.num_layers == 3
    assert again.train.init_from == str(folder)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^model.name=.* holds no model: give a folder with config.json"):
        load_config(recipe(str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read \(not JSON"):
        load_config(recipe(str(tmp_path)))


def test_reading_the_shape_imports_no_jax(folder):
    code = f"""
import sys
from jaxllm.config import load_config
load_config({json.dumps(recipe(str(folder)))})
from jaxllm.weights.hf_convert import from_hf
from_hf({str(folder)!r}, {str(folder.parent / "converted")!r})
assert "jax" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
