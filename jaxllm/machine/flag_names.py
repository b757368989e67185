"""Reads the text of XLA_FLAGS as XLA does, and refuses what XLA would end the process for."""

from __future__ import annotations

import functools
import mmap
import re
from itertools import islice
from pathlib import Path

import jaxlib

from jaxllm.config import ConfigError
from jaxllm.config.run_sections import MOST_CPU_DEVICES
from jaxllm.untrusted import RefusedInput, shown, whole_number

_FLAG = re.compile(r"""[ \t\r\n]*(-[A-Za-z0-9_-]*)(?:='[^']*'?|="(?:\\.|[^"\\])*"?|[^ \t\r\n]*)""", re.DOTALL)
MOST_UNKNOWN = 8
"""It takes a quarter of a second to find that a name is unknown."""
_CPU_DEVICES = "xla_force_host_platform_device_count"
_EVERY_JAXLIB_HAS = "xla_dump_to"


def split(text: str) -> tuple[list[str], str]:
    """Names of the flags with their dashes, each once, and the text where XLA stops reading: at the first word that is none."""
    words, at = [], 0
    while found := _FLAG.match(text, at):
        words.append(found[1])
        at = found.end()
    return list(dict.fromkeys(words)), text[at:].strip(" \t\r\n")


def names(text: str) -> list[str]:
    """Names without dashes, each once."""
    return [word[2:] for word in split(text)[0] if word.startswith("--")]


def unknown(text: str) -> list[str]:
    """The first names that the installed jaxlib does not have: the first use of a device would end the process."""
    return list(islice((name for name in names(text) if not is_known(name)), MOST_UNKNOWN))


def require_known(text: str) -> None:
    """Raises ConfigError if XLA would abort the process at these flags, or read only some of them.

    A name that was retired may still be in the library: XLA itself refuses that.
    """
    if not text.strip():
        return
    words, rest = split(text)
    # XLA takes a text that begins otherwise for the name of a file; ours are added to the text, so that there is none.
    odd = [word for word in words if not word.startswith("--")] + rest.split()[:1]
    if odd:
        raise ConfigError(f"XLA_FLAGS has {shown(odd[0])}, which is no flag: write --name=value for each flag, or unset it.")
    if (lacking := unknown(text)) and is_known(_EVERY_JAXLIB_HAS):
        listed = " and ".join(f"--{shown(name)}" for name in lacking)
        raise ConfigError(
            f"XLA_FLAGS has {listed}, which this JAX (jaxlib {jaxlib.__version__}) does not know: remove "
            f"{'it' if len(lacking) == 1 else 'them'}."
        )


def forced_cpu_devices(text: str) -> int | None:
    """Raises ConfigError if the number of CPU devices among the flags is none."""
    given = re.findall(rf"--{_CPU_DEVICES}=(\S*)", text)
    if not given:
        return None
    try:
        return whole_number(given[-1].strip("'\""), 1, MOST_CPU_DEVICES)
    except RefusedInput as reason:
        raise ConfigError(f"XLA_FLAGS has --{_CPU_DEVICES}={shown(given[-1])}: {reason}.") from None


@functools.cache
def is_known(flag: str) -> bool:
    """Whether the installed jaxlib has this flag of XLA_FLAGS. XLA aborts the process at an unknown one, and reads flags when
    JAX starts, so this searches its libraries for the name (5 ms, and 0.2 s for a name that is not there).
    """
    if not flag:
        return False
    for library in Path(str(jaxlib.__file__)).parent.glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(flag.encode() + b"\0") != -1:
                return True
    return False
