"""Prints pip constraints with the lowest versions that pyproject.toml allows (launch/test.sh with JAXLLM_VERSIONS=lowest)."""

import re
import tomllib
from pathlib import Path


def lowest(requirement: str) -> str | None:
    """`NAME>=1.2,<2; MARKER` as `NAME==1.2; MARKER`; None if it names no lowest version."""
    found = re.fullmatch(r"([\w.-]+)(?:\[[^\]]*\])?>=([\w.]+)[^;]*(;.*)?", requirement)
    return None if found is None else f"{found[1]}=={found[2]}{found[3] or ''}"


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # Tools of the tests are the newest, and so is what compiles for GPUs.
    named = [*project["dependencies"], *extras["parquet"], *extras["stores"], *extras["gguf"]]
    print("\n".join(sorted({line for requirement in named if (line := lowest(requirement))})))


if __name__ == "__main__":
    main()
