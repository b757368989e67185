"""Run directories with given metrics lines, and what a page holds."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import yaml

BATCH = 128
"""Tokens per step of TINY: 8 sequences of 16."""
RATE = 1000.0
ONE = ("data.source=python_stdlib", "parallel.data=1", "parallel.zero=0")


def write_config(folder, config):
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps(count, batch=BATCH, first=1, tokens=0, **more):
    """Metrics lines of steps whose loss falls by a hundredth each."""
    return [
        {
            **{"step": step, "tokens": tokens + (step - first + 1) * batch, "loss": 5 * 0.99**step, "grad_norm": 1.0},
            **{"learning_rate": 1e-3, "tokens_per_s_per_device": RATE},
            **more,
        }
        for step in range(first, first + count)
    ]


def timed(lines, *unix_s, **first):
    """The lines with times; each step waited half a second for its batch."""
    found = [line | {"unix_s": at, "data_s": 0.5} for line, at in zip(lines, unix_s, strict=True)]
    return [found[0] | first, *found[1:]]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], set(), {}

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes |= {name: value for name, value in attrs if name in ("src", "href", "style", "onclick")}
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def pictures(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
