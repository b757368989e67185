import pytest

from jaxllm.cost_model import step_sizes


@pytest.fixture
def older_xla(monkeypatch):
    """The XLA of JAX 0.10, whatever is installed; older_xla(False): that of 0.12."""

    def choose(older: bool = True) -> None:
        monkeypatch.setattr(step_sizes, "has_older_xla", lambda: older)

    choose()
    return choose
