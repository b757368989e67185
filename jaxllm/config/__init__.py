"""The typed, validated config: every key, every refusal, and how a config is read from YAML and overrides."""

from jaxllm.config.checks import all_have_layers, sequence_unit
from jaxllm.config.config import Config, json_schema, load_config, with_overrides
from jaxllm.config.errors import ConfigError
from jaxllm.config.load import config_folder, published_models
from jaxllm.config.model_config import ModelConfig, RopeScaling, whole_rope_scaling
from jaxllm.config.run_sections import CheckpointConfig, LogConfig, RunConfig
from jaxllm.config.sections import DataConfig, OptimizerConfig, ParallelConfig, SourceConfig, TrainConfig
from jaxllm.config.types import ATTENTION_RESULTS, AUTO, BLOCK_INPUT, Remat, Section, divisors
