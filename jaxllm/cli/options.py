"""Options that several commands share, how their help looks, and how they print."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand

from jaxllm.config import Config, ConfigError, config_folder, load_config, published_models
from jaxllm.config.key_hints import meant
from jaxllm.config.named import as_named
from jaxllm.terminal import console, print_sentence
from jaxllm.untrusted import one_line


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """An option that takes a value, which its help calls `metavar`."""
    return typer.Option(*names, metavar=metavar, help=help, **more)


def flag(name: str, help: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help)


def argument(metavar: str, help: str) -> Any:
    """An argument without a dash, which its help calls `metavar`."""
    return typer.Argument(metavar=metavar, help=help)


def recipe(metavar: str, or_model: str = "") -> Any:
    """The argument of a config's name and of overrides; `or_model` says that a model's name is one too."""

    def complete(incomplete: str) -> list[str]:
        sections = ((section, field.annotation) for section, field in Config.model_fields.items())
        keys = [f"{section}.{key}=" for section, found in sections for key in getattr(found, "model_fields", ())]
        words = [*(path.stem for path in config_folder().glob("*.yaml")), *(published_models() if or_model else ()), *keys]
        return [word for word in words if word.startswith(incomplete)]

    text = f"A YAML recipe, or the name of one that comes with jaxllm, such as quickstart{or_model}; and keys to override, "
    text += "such as train.steps=100, in any order."
    return typer.Argument(metavar=f"{metavar} [SECTION.KEY=VALUE]...", help=text, autocompletion=complete)


AsJson = Annotated[bool, flag("--json", "Print one JSON object and nothing else.")]
GpuCount = Annotated[int | None, option("N", "Number of GPUs; none is needed here. Default: the config's mesh.")]
GpusPerHost = Annotated[int | None, option("N", "Default: the largest divisor of --gpus not above that kind's host size.")]
CacheDir = Annotated[str | None, option("DIR", "Folder of compile reports; default: jaxllm/compile in the user's cache.")]
NoCache = Annotated[bool, flag("--no-cache", "Compile even if a report is stored, and store none.")]
Adapter = Annotated[list[str] | None, option("FOLDER", "Merge a LoRA adapter in PEFT's format into the weights. Repeatable.")]
SavedStep = Annotated[int | None, option("N", "The checkpoint of this step; default: the newest.")]
Force = Annotated[bool, flag("--force", "Move an existing DST aside, to DST.before-1; it is not deleted.")]
Verify = Annotated[bool, flag("--verify", "Compare logits with transformers in float32 before DST is named (extra reference).")]
MaxShardSize = Annotated[
    str | None, option("SIZE", "Largest file, such as 500MiB; larger models become several files with an index. Default: 5GB.")
]
MaxPosition = Annotated[int | None, option("N", "max_position_embeddings; default: the model's, or a longer run's length.")]

Tokens = Annotated[str | None, option("N", "Also days, GPU-hours and energy for 300B, 15T ...")]
Price = Annotated[float | None, option("AMOUNT", "Also money: the price of a GPU-hour.")]
MtbfHours = Annotated[
    float | None, option("H", "Also goodput and the best time between checkpoints: hours between failures of one GPU.")
]
RestartMinutes = Annotated[
    float | None, option("MIN", "From a failure until training continues, without reading; default: 10, not measured.")
]
CheckpointRate = Annotated[
    float | None, option("GB/S", "From each host to the store; default: 1, not measured.", "--checkpoint-gb-per-s")
]
AchievedTflops = Annotated[
    float | None, option("TFLOPS", "Speed of a GPU for --tokens, 8 FLOPs per parameter and token; default: predicted.")
]
Purpose = Annotated[str, option("train|load|eval|generate", "What the memory is for; only train has a speed.", "--for")]
StoredDtype = Annotated[str | None, option("DTYPE", "--for others: bfloat16 or float32 on disk; default: float32.")]
WindowTokens = Annotated[int | None, option("N", "--for eval: tokens of a window; default: 1024.", "--sequence-length")]
Prompts = Annotated[int | None, option("N", "--for generate: prompts at once; default: 1.")]
PromptTokens = Annotated[int | None, option("N", "--for generate: tokens of the longest prompt; default: 1024.")]
NewTokens = Annotated[int | None, option("N", "--for generate: new tokens of each; default: 128.")]

Recipe = Annotated[list[str], recipe("CONFIG")]
RecipeOrModel = Annotated[list[str], recipe("CONFIG|MODEL", ", or of a published model, such as llama-3.1-8b")]
Overrides = Annotated[
    list[str] | None,
    argument(
        "[SECTION.KEY=VALUE]...",
        "Settings such as model.compute_dtype=float32 or parallel.tensor=2. Default: float32 on CPU, bfloat16 on GPUs, "
        "on all devices here.",
    ),
]
ModelFolder = Annotated[
    str,
    option(
        "DIR|NAME|ADDRESS",
        "A Hugging Face or jaxllm model folder, a run directory or one of its checkpoints; here, as ORG/NAME of the Hub, "
        "or in a store: s3://, gs://.",
    ),
]
OtherTokenizer = Annotated[
    str | None, option("PATH|NAME|bytes", "A folder with tokenizer.json, ORG/NAME, or bytes; default: the model's own.")
]


class Command(TyperCommand):
    """A command whose help shows only the metavar of each argument, which tells whether it is optional or repeatable, and that
    takes --section.key=value and --section.key value, as other trainers have them, for section.key=value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except Exception as error:
            # The class is that of the click which typer brings.
            name = getattr(error, "option_name", "") if type(error).__name__ == "NoSuchOption" else ""
            at = next((at for at, one in enumerate(args) if name and one.partition("=")[0] == name), None)
            if at is None or not any("=VALUE" in str(one.metavar) for one in self.params):
                raise
            key = name.lstrip("-")
            if "." not in key:
                if hint := meant(Config, [key], {}, cutoff=1):
                    raise ConfigError(f"No such option {name}, and overrides are written section.key=value: {hint}") from None
                raise
        if "=" not in args[at] and (args[at + 1 :] or ["--"])[0].startswith("--"):
            raise ConfigError(f"{name} needs a value: write {key}=VALUE.")
        end = at + (1 if "=" in args[at] else 2)
        return self.parse_args(ctx, [*args[:at], "=".join(args[at:end]).lstrip("-"), *args[end:]])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(str(one.metavar) for one in self.params if one.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title in ("Arguments", "Options"):
            rows = []
            for one in self.get_params(ctx):
                if (record := one.get_help_record(ctx)) and title.lower().startswith(one.param_type_name):
                    # Some versions of typer escape brackets for rich, which is not used here.
                    name = one.metavar if title == "Arguments" else record[0]
                    rows.append((name, record[1].replace("\\[", "[")))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def epilog(*lines: str) -> str:
    """The example command lines at the end of a help text, not rewrapped."""
    return "\b\n" + "\n".join(["For example:", *(f"  jaxllm {line}" for line in lines)])


def example(*lines: str) -> dict[str, Any]:
    """Arguments of `app.command` that all commands here share, with example command lines."""
    return {"cls": Command, "epilog": epilog(*lines)}


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines to standard output. On a terminal, lines that are too long are wrapped between words and indented."""
    lines, width = map(one_line, lines), shutil.get_terminal_size().columns

    def wrapped(line: str) -> str:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    if sys.stdout.isatty():
        lines = (line if len(line) <= width else wrapped(line) for line in lines)
    print("\n".join(lines), flush=True)


def print_report(report: Any, as_json: bool, render: Callable[[Any], Any] | None = None) -> None:
    """Prints a report as JSON, or as `render` draws it for a terminal; default: its lines."""
    if as_json:
        print(json.dumps(report.to_json()), flush=True)
    elif render is None:
        print_lines(report.lines())
    else:
        console().print(render(report))


def show(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Prints on the main process only; default: to standard output."""
    from jaxllm.cluster.distributed import is_main_process

    if is_main_process():
        print(text, end=end, file=file, flush=True)


def tell(line: str) -> None:
    """Prints a line to standard error on the main process only."""
    show(one_line(line), file=sys.stderr)


def compile_cache(given: str | None, unused: bool) -> Path | None:
    """The folder of compile reports; None: none is read or stored."""
    from jaxllm.cluster.distributed import cache_folder

    return None if unused else Path(given) if given else cache_folder() / "compile"


def load(recipe: list[str], read: Callable[[Any, list[str]], Config] = load_config, *, or_model: bool = False) -> Config:
    """The config of a command line: one file, and section.key=value strings before or after it. `or_model`: or a published
    model in its place, with the length and the batch of `sketch`."""
    files = [argument for argument in recipe if "=" not in argument]
    if len(files) != 1:
        given = f"{len(files)} were given: {', '.join(files)}" if files else "none was given"
        raise ConfigError(f"One config file is needed and {given}; overrides are written section.key=value.")
    name, overrides = files[0], [argument for argument in recipe if "=" in argument]
    if not or_model or name not in published_models() or Path(name).is_file():
        return read(name, overrides)
    sizes = sketch(name)
    config = read({}, [f"model.name={name}", *(f"train.{key}={value}" for key, value in sizes.items()), *overrides])
    if read is load_config:
        said = " ".join(f"train.{key}={getattr(config.train, key)}" for key in sizes)
        print_sentence(f"{name} is a model and no recipe, so this takes {said}; other keys may follow the name.")
    return config


def sketch(name: str) -> dict[str, int]:
    """Keys of `train` for a published model, as in docs/recipes.md: 8,192 tokens, or 4,096 with fast rotary frequencies, and
    2^20 tokens a step, from 30B parameters on 2^22, from 200B on 2^24."""
    from jaxllm.config.model_spec import parameter_count

    model = as_named(name)
    size, length = parameter_count(model), 8192 if model.rope_theta >= 5e5 else 4096
    step_tokens = 2**20 if size < 3e10 else 2**22 if size < 2e11 else 2**24
    batch = {"sequence_length": length, "global_batch_sequences": step_tokens // length, "microbatch_sequences": 1}
    return {"steps": 1000, **batch}


def load_other(recipe: list[str], words: list[str]) -> Config:
    """The config that is compared with that of a recipe: another recipe, or this one with other keys."""
    if any(re.match(r"XLA_FLAGS=|[^=]*\.json$", word) or Path(word).is_dir() for word in words):
        raise ConfigError(
            "--against takes another recipe or key=value: with an environment, XLA_FLAGS or a stored report compares "
            "benchmarks/against.py of jaxllm's repository."
        )
    return load(words if any("=" not in word for word in words) else [*recipe, *words], or_model=True)
