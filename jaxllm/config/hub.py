"""Models of the Hugging Face Hub by name: ORG/NAME, or ORG/NAME@REVISION with a branch, a tag or a commit.

huggingface_hub downloads them into its cache, and reads HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE as it documents
(https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables). A name is pinned to the commit that its
revision is now; a run stores it with the commit.
"""

import logging
import re
from pathlib import Path

from jaxllm.config.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,200})?", re.ASCII)
_COMMIT = "[0-9a-f]{40}"
_SMALL = ["*.json", "*.jinja", "tokenizer.model", "LICENSE*", "NOTICE*", "README.md"]
# Weights in other formats, and copies of the same in folders, are not read.
_NEVER = ["*/*", "consolidated*"]

log = logging.getLogger(__name__)


def is_hub_name(text: str) -> bool:
    """Whether a text that is no folder may name a model of the Hub."""
    return _NAME.fullmatch(text) is not None


def folder_of(key: str, text: str, *, weights: bool) -> Path:
    """The folder that a text names: itself, or for a model of the Hub its files in the cache, downloaded if they are missing.

    Args:
      key: the option or key that the user set to `text`, for error messages.
      weights: with the weights. Without, with what describes the model.

    Raises:
      ConfigError: huggingface_hub is not installed, the Hub has no such model or does not give it, or there is no network.
    """
    path = Path(text)
    if path.exists() or not is_hub_name(text):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{key}={text} is not a folder: name one, or load the model from the Hub with pip install 'jaxllm[stores]'."
        ) from None
    repo, _, revision = text.partition("@")
    wanted = [*_SMALL, "*.safetensors"] if weights else _SMALL
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=wanted, ignore_patterns=_NEVER))
    except Exception as error:
        raise _refused(key, text, error) from None


def pinned(text: str, folder: Path) -> str:
    """The name with the commit of its folder in the cache, of which the last part is that commit."""
    return f"{text.partition('@')[0]}@{folder.name}"


def pin(key: str, text: str) -> str:
    """A name of the Hub with the commit that it is now, whose small files are then in the cache; other texts as they are.
    Raises as `folder_of`."""
    if re.fullmatch(_COMMIT, text.partition("@")[2]):
        return text
    folder = folder_of(key, text, weights=False)
    return text if folder == Path(text) else pinned(text, folder)


def stays(key: str, name: str, kept: str, run_dir: Path) -> bool:
    """Whether a run that stored the name `kept` is one of `name`, and stays at its commit; with a warning for a revision."""
    repo, _, revision = name.partition("@")
    if not re.fullmatch(re.escape(repo) + f"@{_COMMIT}", kept) or re.fullmatch(_COMMIT, revision):
        return False
    if revision:
        # It may be another one than the run began with, which only the Hub could say.
        log.warning("The run in %s stays at %s=%s: choose another run.dir for %s of today.", run_dir, key, kept, name)
    return True


def _refused(key: str, text: str, error: Exception) -> ConfigError:
    from huggingface_hub import errors

    repo, _, revision = text.partition("@")
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(f"{key}={text} is given to those who accept its terms: do so on its page, and set HF_TOKEN.")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{key}={text}: the Hub has {repo}, but no revision {revision}: name another.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{key}={text} is neither a folder here nor a model that the Hub shows: check the name, or set HF_TOKEN if it is "
            f"private."
        )
    if isinstance(error, OSError) and error.filename:
        return ConfigError(
            f"{key}={text} cannot be stored in {error.filename} ({error.strerror}): set HF_HOME to another place."
        )
    return ConfigError(
        f"{key}={text} is not a folder here, and the Hub does not give it ({type(error).__name__}): run `hf download {repo}"
        f"{f' --revision {revision}' if revision else ''}` where there is a network and take HF_HOME along, or name a folder."
    )
