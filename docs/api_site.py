"""What mkdocs.yml needs beside the pages: one of the API, and links that lead out of docs/ as plain names of files."""

from __future__ import annotations

import re
from typing import Any

import jaxllm
from jaxllm.commands.plan import plan

API = """# The API

The names of `import jaxllm`, such as `jaxllm.load_config`: a notebook needs nothing else. The import starts no device.

"""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=API + "\n".join(map(_entry, jaxllm.__all__))))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The site has no page for these files: the link becomes the text, and the file's name where that is another."""

    def named(match: re.Match) -> str:
        text, path = match[1], match[2].partition("#")[0]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)", named, markdown)


def _entry(name: str) -> str:
    # The package jaxllm.plan is called like a function, which the site would show as the package.
    thing = plan if name == "plan" else getattr(jaxllm, name)
    return f"::: {thing.__module__}.{thing.__qualname__}\n"
