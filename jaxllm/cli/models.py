"""Commands on texts and models: data prepare, export, eval, generate and convert. cli/app.py gives them their names."""

import json
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from jaxllm.cli import options as opt
from jaxllm.cli.options import argument, flag, option
from jaxllm.config import ConfigError
from jaxllm.terminal import print_sentence, progress_shown
from jaxllm.untrusted import in_lines


def export(
    source: Annotated[str, argument("SRC", "A run directory, one of its checkpoints or a model; s3://, gs:// too.")],
    destination: Annotated[str, argument("DST", "A new folder; --to gguf: a new file.")],
    to: Annotated[
        str,
        option(
            "jaxllm|hf|gguf",
            "jaxllm: for train.init_from, or an archive; hf: for vLLM, transformers ...; gguf: for llama.cpp, Ollama.",
        ),
    ] = "jaxllm",
    step: opt.SavedStep = None,
    dtype: Annotated[
        str | None, option("DTYPE", "float32, bfloat16 or float16; default: float32; --to hf and gguf: as stored.")
    ] = None,
    max_shard_size: opt.MaxShardSize = None,
    max_position: opt.MaxPosition = None,
    adapter: opt.Adapter = None,
    force: opt.Force = False,
    verify: opt.Verify = False,
) -> None:
    """Writes only the weights of a run, with what serves them. --to hf is `jaxllm convert to-hf`; --to gguf writes one file."""
    from jaxllm.weights import export as formats
    from jaxllm.weights.hf_convert import parse_size

    options = {"step": step, "dtype": dtype, "max_position": max_position, "force": force, "verify": verify}
    options["largest_file"] = None if max_shard_size is None else parse_size(max_shard_size)
    opt.print_lines(formats.export(source, destination, to, adapters=tuple(adapter or ()), **options).lines())


def evaluate(
    model: opt.ModelFolder,
    text: Annotated[str, option("FILE", "A file of UTF-8 text.")],
    overrides: opt.Overrides = None,
    sequence_length: Annotated[
        int | None, option("S", "Tokens per window; default: 1024, or less if the model was made for less.")
    ] = None,
    stride: Annotated[
        int | None, option("N", "Tokens from one window to the next; default: S. Less gives each token more context.")
    ] = None,
    by_position: Annotated[
        bool, flag("--by-position", "Also the loss by how many tokens of the window are before: 1, 2-3, 4-7 ...")
    ] = False,
    tokenizer: opt.OtherTokenizer = None,
    adapter: opt.Adapter = None,
    as_json: opt.AsJson = False,
) -> None:
    """Scores a text: nats per token, perplexity, bits per byte. Windows overlap only by --stride; the rest is dropped."""
    from jaxllm.cluster.distributed import is_main_process
    from jaxllm.inference import predict

    options: dict[str, Any] = {"sequence_length": sequence_length, "stride": stride, "by_position": by_position}
    options |= {"tokenizer": tokenizer, "adapter": adapter or ()}
    with progress_shown(is_main_process()) as progress:
        score = predict.evaluate(model, text, overrides or [], **options, say=opt.tell, progress=progress)
    if is_main_process():
        opt.print_report(score, as_json)


def generate(
    model: opt.ModelFolder,
    prompt: Annotated[list[str], option("TEXT", "A text to continue. Repeatable: prompts are processed together.")],
    overrides: opt.Overrides = None,
    image: Annotated[list[str] | None, option("FILE", "An image, for the next image token of the prompts. Repeatable.")] = None,
    chat: Annotated[bool, flag("--chat", "Prompts are user messages: answer them with the model's chat template.")] = False,
    system: Annotated[str | None, option("TEXT", "With --chat: the system message.")] = None,
    max_new_tokens: Annotated[int, option("N", "At most this many tokens per prompt.")] = 128,
    temperature: Annotated[float, option("T", "0 takes the likeliest token; 1 samples from the model's probabilities.")] = 0.0,
    top_p: Annotated[float, option("P", "Sample from the likeliest tokens with this total probability.")] = 1.0,
    top_k: Annotated[int | None, option("K", "Sample from the K likeliest tokens; default: from all.")] = None,
    seed: Annotated[int, option("N", "Seed of the sampling.")] = 0,
    stop: Annotated[list[str] | None, option("TEXT", "A text that ends a continuation, like a stop token. Repeatable.")] = None,
    tokenizer: opt.OtherTokenizer = None,
    adapter: opt.Adapter = None,
    as_json: opt.AsJson = False,
) -> None:
    """Continues prompts, to see what a model has learned. Uses a key-value cache and prints text as it is generated."""
    from jaxllm.inference import predict
    from jaxllm.inference.generate import InTurn

    before = [f"> {text}\n" for text in prompt] if chat else prompt
    on_text = InTurn(before, partial(opt.show, end=""))
    found = predict.generate(
        model,
        prompt,
        overrides or [],
        images=image or (),
        chat=chat,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or [],
        tokenizer=tokenizer,
        adapter=adapter or (),
        say=opt.tell,
        **({} if as_json else {"on_text": on_text}),
    )
    if as_json:
        completions = [{"prompt": text, **one.to_json()} for text, one in zip(prompt, found, strict=True)]
        opt.show(json.dumps({"completions": completions}))


def lm_eval(
    model: opt.ModelFolder,
    tasks: Annotated[str, option("A,B", "Tasks of lm-evaluation-harness, such as arc_easy,hellaswag.")],
    overrides: opt.Overrides = None,
    limit: Annotated[int | None, option("N", "Only the first N requests of each task.", min=1)] = None,
    num_fewshot: Annotated[int | None, option("N", "Examples before each; default: the task's.", min=0)] = None,
    include_path: Annotated[str | None, option("DIR", "A folder with tasks of your own.")] = None,
    chat: Annotated[bool, flag("--chat", "Ask with the model's chat template.")] = False,
    max_length: Annotated[
        int | None, option("N", "Tokens of a text; default: what the model supports, a run: its sequence_length.", min=2)
    ] = None,
    tokenizer: opt.OtherTokenizer = None,
    adapter: opt.Adapter = None,
    as_json: opt.AsJson = False,
) -> None:
    """Scores a model by the tasks of lm-evaluation-harness. EleutherAI's own code, on any mesh (extra lm-eval)."""
    if find_spec("lm_eval") is None:
        raise ConfigError("`jaxllm lm-eval` needs lm-evaluation-harness: pip install 'jaxllm[lm-eval]'.")
    from jaxllm.inference.lm_eval import JaxLLM, run_tasks, shown

    harnessed = JaxLLM(model, overrides or [], tokenizer=tokenizer, adapter=adapter or (), max_length=max_length, say=opt.tell)
    options = {"limit": limit, "num_fewshot": num_fewshot, "include_path": include_path, "chat": chat}
    found = run_tasks(harnessed, [task.strip() for task in tasks.split(",")], **options)
    opt.show(in_lines(shown(found, as_json)))


def data_prepare(
    inputs: Annotated[
        list[str],
        argument(
            "INPUT...",
            "Files, quoted patterns (** for folders) or addresses: s3://, gs://, https://, hf://datasets/ORG/NAME/... "
            ".jsonl and .ndjson: one object per line; .json: that, or one array; .csv, .parquet and .arrow: rows; any other "
            "text file: one document. .gz and .zst are decompressed.",
        ),
    ],
    out: Annotated[str, option("DIR", "The folder to write; a stopped run resumes in it.")],
    tokenizer: Annotated[str, option("PATH|NAME|bytes", "A folder with tokenizer.json, ORG/NAME, or bytes.")],
    text_key: Annotated[str, option("NAME", "The field or column that holds the text.")] = "text",
    workers: Annotated[int | None, option("N", "Number of processes; default: one per CPU.")] = None,
    shard: Annotated[str, option("I/N", "Do the I-th of N parts of the work, from 0; all parts use the same --out.")] = "0/1",
    shard_megabytes: Annotated[
        int | None, option("MIB", "Approximate MiB of input per shard; default: a 64th of the input, but 4 to 256.")
    ] = None,
    max_broken_share: Annotated[float, option("SHARE", "Refuse more broken records than this share.")] = 0.01,
    strict: Annotated[bool, flag("--strict", "Stop at the first broken record: --max-broken-share 0.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Tokenizes text once into a folder to train on. It uses several processes; run it again to resume."""
    from jaxllm.data.prepare import parse_shard, prepare

    try:
        summary = prepare(
            inputs,
            out,
            tokenizer=tokenizer,
            text_key=text_key,
            workers=workers,
            shard=parse_shard(shard),
            shard_bytes=None if shard_megabytes is None else shard_megabytes * 2**20,
            max_broken_share=0 if strict else max_broken_share,
            progress=not as_json,
        )
    except KeyboardInterrupt as stopped:
        print_sentence(str(stopped) or "stopped before anything was prepared.")
        raise typer.Exit(130) from None
    opt.print_report(summary, as_json)


def data_fill(recipe: opt.Recipe, as_json: opt.AsJson = False) -> None:
    """Counts how much of a step's positions the text uses. Padded, and packed as the run packs it."""
    loaded = opt.load(recipe)
    from jaxllm.data.measures import fill

    opt.print_report(fill(loaded), as_json)


def convert_from_hf(
    source: Annotated[
        str, argument("SRC", "A folder with config.json and *.safetensors, ORG/NAME of the Hub, or s3://, gs://.")
    ],
    destination: Annotated[str, argument("DST", "A new folder, in jaxllm's own format.")],
    force: opt.Force = False,
    verify: opt.Verify = False,
) -> None:
    """Converts a Hugging Face folder to jaxllm's own format. Bit for bit, one tensor at a time; verifies the result."""
    from jaxllm.weights.hf_convert import from_hf

    opt.print_lines(from_hf(source, destination, force=force, verify=verify).lines())


def convert_to_hf(
    source: Annotated[str, argument("SRC", "A jaxllm model folder, a run directory or a checkpoint; s3://, gs:// too.")],
    destination: Annotated[str, argument("DST", "A new folder that transformers can load.")],
    step: opt.SavedStep = None,
    dtype: Annotated[str | None, option("DTYPE", "float32, bfloat16 or float16; default: as stored.")] = None,
    max_shard_size: opt.MaxShardSize = None,
    max_position: opt.MaxPosition = None,
    adapter: opt.Adapter = None,
    adapter_only: Annotated[
        bool, flag("--adapter-only", "Write the adapter of a run with model.lora alone, in PEFT's format.")
    ] = False,
    force: opt.Force = False,
    verify: opt.Verify = False,
) -> None:
    """Writes a model or a run as a Hugging Face folder, with LoRA adapters merged. Verifies the result."""
    to = "peft" if adapter_only else "hf"
    export(source, destination, to, step, dtype, max_shard_size, max_position, adapter, force, verify)
