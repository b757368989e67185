"""The precision of each operation in a train step, as a table: `jaxllm inspect` prints it.

for row in precision_table(config): row.what, row.inputs, row.sums, row.result
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import Config


@dataclass(frozen=True)
class Row:
    what: str
    inputs: str
    """Precision of the operands."""
    sums: str
    """Precision of the accumulation inside the operation."""
    result: str


def precision_table(config: Config) -> tuple[Row, ...]:
    """The precisions of the config's train step on an NVIDIA GPU.

    XLA multiplies float32 in TF32 there (10 bits of mantissa) unless jax_default_matmul_precision changes it.
    """
    dtype = config.model.compute_dtype
    product = "TF32" if dtype == "float32" else dtype
    fp8 = config.model.multiplies_fp8
    rows = [
        Row("weights, moments, update", "float32", "float32", "float32"),
        Row("norms, angles, softmax, loss", "float32", "float32", "float32"),
        Row("block matmuls", "E4M3" if fp8 else product, "float32, fast" if fp8 else "float32", dtype),
        Row("their gradients", "E5M2 x E4M3" if fp8 else product, "float32", dtype),
        Row("attention", product, "float32", dtype),
        Row("head", product, "float32", "float32"),
        Row("gradient of the head", product, "float32", "float32"),
        Row("gradient of its input", product, "float32", dtype),
        Row("gradients over microbatches", dtype, "float32", "float32"),
        Row("gradients over data, context", "float32", "float32", "float32"),
    ]
    if config.parallel.zero and dtype != "float32":
        rows.append(Row("weights gathered over data", dtype, "-", dtype))
    if config.parallel.tensor > 1:
        rows.append(Row("hidden states over tensor", dtype, dtype, dtype))
    if config.parallel.pipe > 1:
        rows.append(Row("hidden states over pipe", dtype, dtype, dtype))
    if config.parallel.context > 1:
        rows.append(Row("attention over context, merged", dtype, "float32", dtype))
    return tuple(rows)
