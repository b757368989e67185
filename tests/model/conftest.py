"""The model's own arithmetic must not promote dtypes implicitly. (Elsewhere optax does: float ** int32.)"""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
