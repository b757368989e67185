"""The config that most tests start from. Its model compiles in a second or two."""

TINY = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 256,
        "compute_dtype": "float32",
    },
    "train": {"steps": 4, "sequence_length": 16, "global_batch_sequences": 8},
    "data": {"source": "files"},
}

SMALL_MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 2048,
    "attention": "xla",
}
"""A config for compiling for GPUs, large enough that its matmuls run there."""
