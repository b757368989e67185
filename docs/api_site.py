"""Additions of mkdocs.yml to the pages: an API page, and plain file names for links that lead out of docs/."""

from __future__ import annotations

import re
from typing import Any

import jaxllm
from jaxllm.compile.plan import plan

API = """# The API

The names of `import jaxllm`, such as `jaxllm.load_config`: a notebook needs nothing else. The import starts no device.

"""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=API + "\n".join(map(_entry, jaxllm.__all__))))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces links to files without a page by their text, followed by the file name if it differs."""

    def named(match: re.Match) -> str:
        text, path = match[1], match[2].partition("#")[0]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)", named, markdown)


def _entry(name: str) -> str:
    # The package jaxllm.plan is called as a function, but the site would show it as a package.
    thing = plan if name == "plan" else getattr(jaxllm, name)
    return f"::: {thing.__module__}.{thing.__qualname__}\n"
