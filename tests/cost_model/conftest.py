import pytest

from jaxllm.config import layer_stack


@pytest.fixture
def older_xla(monkeypatch):
    """The XLA of JAX 0.10, whatever is installed; older_xla(False): that of 0.12."""

    def choose(older: bool = True) -> None:
        monkeypatch.setattr(layer_stack, "has_older_xla", lambda: older)

    choose()
    return choose
