"""Imports scripts that are not in a package (benchmarks/, docs/, launch/, notebooks/) as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """Imports the script at a path from the checkout's root, such as benchmarks/gpu.py. Each is imported once per process.

    The module has the name that its neighbours import, and its folder is on sys.path during the import. Its neighbours and
    its dataclasses, which look in sys.modules, are then found.
    """
    script = CHECKOUT / path
    sys.path.insert(0, str(script.parent))
    try:
        module = importlib.import_module(script.stem)
    finally:
        sys.path.remove(str(script.parent))
    assert Path(module.__file__) == script, f"{module.__file__} has the name of {path}"
    return module
