"""Bytes and FLOPs of a vision tower for one microbatch on one device."""

import math
from collections.abc import Callable

from jaxllm.config import Config
from jaxllm.config.model_spec import OF_IMAGES, parameters
from jaxllm.config.types import ITEMSIZE


class ImageSizes:
    """Zeros without images. In the backward pass layers of the tower are computed again, one by one."""

    def __init__(self, config: Config):
        vision, tensor, frozen = config.model.vision, config.parallel.tensor, config.frozen
        specs = [spec for spec in parameters(config.model) if spec.path.startswith(OF_IMAGES)]
        self.parameters = sum(spec.size for spec in specs) / tensor
        self.trained_parameters = sum(spec.size for spec in specs if spec.path not in frozen) / tensor
        self.count = config.microbatch_sequences * config.images_per_sequence
        """Images of a microbatch, with those that are padding."""
        self.pixels_bytes = self.kept_bytes = self.layer_bytes = self.moved_bytes = 0.0
        self.forward_flops = self.backward_flops = 0.0
        if vision is None or not self.count:
            return
        itemsize, D, F, T = ITEMSIZE[config.model.compute_dtype], vision.hidden_size, vision.intermediate_size, vision.positions
        rows, features, width = self.count * T, self.count * vision.tokens_per_image, config.model.hidden_size
        trains_tower, trains_projector = (path not in frozen for path in ("vision.patch", "projector.first"))
        self.matmul = rows, F // tensor, D
        """Rows, columns and length of the sum of a feed-forward's first matmul."""
        self.pixels_bytes = 4 * self.count * math.prod(vision.pixels)
        # Inputs of layers; of the projector the input and both sides of its activation; the features.
        of_projector = features * (D + 2 * width / tensor) if trains_projector or trains_tower else 0
        self.kept_bytes = itemsize * ((vision.used_layers * rows * D if trains_tower else 0) + of_projector + features * width)
        # Queries, keys, values, attention's output and both sides of the activation, and float32 scores; then their gradients.
        products, scores = itemsize * rows * (4 * D + 2 * F) / tensor, 4 * self.count * T**2 * vision.num_heads / tensor
        self.layer_bytes = (products + scores) * (2 if trains_tower else 1)
        # Attention here is XLA's: what it reads and writes, in float32 scores, by the kernels of two steps for H100s.
        self.moved_bytes = vision.used_layers * scores * (20 if trains_tower else 3)
        layer = 2 * rows * (4 * D * D + 2 * D * F) + 4 * self.count * T**2 * D
        patches = 2 * self.count * vision.patches * vision.channels * vision.patch_size**2 * D
        tower, projector = (vision.used_layers * layer + patches) / tensor, 2 * features * width * (D + width) / tensor
        self.forward_flops = tower + projector
        # A layer's forward pass again, and two products for each of its own.
        self.backward_flops = 3 * tower * trains_tower + 2 * projector * (trains_projector or trains_tower)

    def times(self, microbatches: int, matmul_s: Callable[..., float], moved_s: Callable[[float], float]) -> dict[str, float]:
        """Seconds of tower and projector in a step, by those of a matmul and of bytes that are read or written."""
        if not self.count:
            return {}
        flops_per_s = 2 * math.prod(self.matmul) / matmul_s(*self.matmul)
        matmuls_s = (self.forward_flops + self.backward_flops) / flops_per_s
        return {"vision": microbatches * (matmuls_s + moved_s(self.moved_bytes))}
