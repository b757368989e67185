"""Scripts that are in no package (benchmarks/, docs/, launch/, notebooks/) as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """The script at a path from the checkout's root, such as benchmarks/gpu.py; once in a process.

    It has the name by which its neighbours import it, and its folder is on sys.path meanwhile: it finds them, and its
    dataclasses find themselves in sys.modules.
    """
    script = CHECKOUT / path
    sys.path.insert(0, str(script.parent))
    try:
        module = importlib.import_module(script.stem)
    finally:
        sys.path.remove(str(script.parent))
    assert Path(module.__file__) == script, f"{module.__file__} has the name of {path}"
    return module
