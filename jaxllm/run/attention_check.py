"""What attention needs before a run starts: room for the documents of the data, and right results of cuDNN."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxllm.config import Config, ConfigError
from jaxllm.config.attention import packed_documents, power_of_four, window_shares
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.model.cudnn_attention import largest_error

ATTENTION_TOLERANCE = 0.03


def with_room_for_documents(config: Config, device: jax.Device, count: Callable[[], int]) -> Config:
    """`config` with data.max_documents for the data, if attention packs documents and by default takes fewer.

    Args:
      count: gives the most documents of a sequence in the data. It is called if attention packs them.

    Raises:
      ConfigError: the data has more than data.max_documents.
    """
    most = packed_documents(config, compute_capability(device))
    if most is None or (found := count()) <= most:
        return config
    if config.data.max_documents is not None:
        raise ConfigError(
            f"data.max_documents={most} and the data has a sequence with {found:,} documents, free space at its end counted as "
            f"one: set data.max_documents to {found} or more, or to null."
        )
    data = config.data.model_copy(update={"max_documents": power_of_four(found)})
    return config.model_copy(update={"data": data})


def require_right_attention(config: Config, attention: str, mesh: jax.sharding.Mesh) -> None:
    """Compares cuDNN's attention, which uses a private binding of JAX, with plain XLA on a GPU before training starts.

    Raises:
      ConfigError: they differ.
    """
    device = mesh.devices.flat[0]
    if not attention.startswith("cudnn") or device.platform == "cpu":
        return
    model, packs = config.model, None
    if config.data.mask_documents:
        packs = packed_documents(config, compute_capability(device)) is not None
    heads = (model.num_heads // model.num_kv_heads, model.head_dim)
    has_windows = any(window_shares(model, config.train.sequence_length))
    with jax.default_device(jax.local_devices()[0]):
        error = largest_error(*heads, packs=packs, has_windows=has_windows)
        if error < ATTENTION_TOLERANCE:
            return
        halves_are_right = packs and largest_error(*heads, packs=False, has_windows=has_windows) < ATTENTION_TOLERANCE
    raise ConfigError(
        f"cuDNN's attention is off by {100 * error:.1f}% on this machine, so its version and JAX {jax.__version__} do not fit "
        f"together: set model.attention={'cudnn_halves' if halves_are_right else 'xla'}, or install other versions."
    )
