"""Hostile recipes, overrides, descriptions of GPUs and options."""

from pathlib import Path

from hostile import Case, train

BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


def recipe(text: str, name: str = "base.yaml"):
    return lambda: Path(name).write_text(text)


def with_train(line: str):
    """base.yaml with another line for train.steps."""

    def write() -> None:
        text = Path("base.yaml").read_text()
        assert "\n  steps: 4\n" in text
        Path("base.yaml").write_text(text.replace("\n  steps: 4\n", f"\n  {line}\n"))

    return write


def doubled_section() -> None:
    path = Path("base.yaml")
    path.write_text(path.read_text() + "\ntrain:\n  steps: 7\n")


def unreadable() -> None:
    """Root reads everything, so that what is unreadable here is a folder."""
    Path("noread.yaml").mkdir()


def override(text: str, says: str) -> Case:
    return Case(f"override {text}", train(text), says)


CASES = [
    Case("base 60", train(), "train.steps=1:30 is not valid: it should be a valid integer", with_train("steps: 1:30")),
    Case("base 8", train(), "train.steps=010 is not valid: it should be a valid integer", with_train("steps: 010")),
    Case(
        *("yes", train(), "log.tensorboard=yes is not valid: it should be true or false"),
        lambda: Path("base.yaml").write_text(Path("base.yaml").read_text() + "\nlog: {tensorboard: yes}\n"),
    ),
    Case("aliases as a value", train(), "aliases expand to more than", recipe(f"{BOMB}train:\n  steps: *l\n")),
    Case("aliases as a mapping", train(), "aliases expand to more than", recipe(f"{BOMB}parallel:\n  remat: {{x: *l}}\n")),
    Case("an alias of itself", train(), "an alias contains itself", recipe("train: &a {steps: *a}\n")),
    Case("100,000 lists", train(), "nests deeper than 64 levels", recipe("a: " + "[" * 100_000)),
    Case("1,000 lists", train(), "nests deeper than 64 levels", recipe("a: " + "[" * 1_000 + "]" * 1_000)),
    Case("maps", train(), "nests deeper", recipe("\n".join(" " * n + "a:" for n in range(1200)))),
    Case("a key twice", train(), "line 3: the key steps is there twice", recipe("train:\n  steps: 4\n  steps: 7\n")),
    Case("a section twice", train(), "the key train is there twice", doubled_section),
    Case("a value of a megabyte", train(), "train.steps=xxxx", with_train("steps: " + "x" * 1_000_000)),
    Case("two megabytes", train(), "it is larger than 1 MiB", with_train("steps: " + "x" * 2_000_000)),
    Case("many values", train(), "it has more than 50,000 values", recipe("[" + "1," * 400_000 + "1]")),
    Case("a long path", ("train", "a" * 5000 + ".yaml"), "File name too long"),
    Case("a folder", ("train", "noread.yaml"), "There is no config file", unreadable),
    Case("digits", train(), "a number has thousands of digits", with_train("steps: " + "9" * 10_000)),
    override("train.steps=99999999999999999999999", "it should be less than or equal to 2147483647"),
    override("train.steps=9223372036854775807", "it should be less than or equal to 2147483647"),
    override("train.steps=2147483648", "it should be less than or equal to 2147483647"),
    override("train.global_batch_sequences=99999999999999", "it should be less than or equal to 2147483647"),
    override("train.global_batch_sequences=2147483640", "this machine has"),
    override("model.hidden_size=1000000000000", "it should be less than or equal to 2147483647"),
    override("model.hidden_size=4194304", "this machine has"),
    override("model.vocab_size=10000000000", "it should be less than or equal to 2147483647"),
    override("model.vocab_size=2147483647", "this machine has"),
    override("model.num_layers=99999999999999999999", "it should be less than or equal to 16384"),
    override("model.num_layers=100000000", "it should be less than or equal to 16384"),
    override("run.cpu_devices=100000", "it should be less than or equal to 4096"),
    override("run.cpu_devices=100000000", "it should be less than or equal to 4096"),
    override("run.stuck_min_s=1.0e+300", "it should be less than or equal to 1000000000"),
    override("train.steps=[0x" + "f" * 6000 + "]", "train.steps=["),
    override("train.steps=!!bool x", "the tag tag:yaml.org,2002:bool is not supported"),
    override("train.steps=" + "[" * 2000, "it nests deeper than 64 levels"),
    override("train.steps=" + "x" * 5000, "train.steps=xxxx"),
    Case(
        *("sizes beyond 2^63", train("model.hidden_size=1073741824", "model.vocab_size=2147483647")),
        "parameters, and at most 1e+15 are supported",
    ),
    Case("GPU that nests", ("estimate", "base.yaml", "--gpu", "g.yaml"), "nests deeper", recipe("a: " + "[" * 5000, "g.yaml")),
    Case(
        *("GPU twice", ("estimate", "base.yaml", "--gpu", "g.yaml"), "the key like is there twice"),
        recipe("like: h100-80gb\nlike: a100-80gb\n", "g.yaml"),
    ),
    Case("GPUs", ("estimate", "base.yaml", "--gpus", "9" * 30), "it should be at most 1,048,576"),
    Case("rows", ("plan", "base.yaml", "--gpus", "8", "--compile", "0", "--rows", "-1"), "'--rows': Input should be greater"),
    Case(
        "not a number", ("plan", "base.yaml", "--gpus", "8", "--host-gib-per-gpu", "nan"), "'--host-gib-per-gpu': Input should"
    ),
    Case("not whole", ("generate", "--model", "x", "--prompt", "a", "--max-new-tokens", "x"), "'--max-new-tokens': Input"),
    Case("no model", ("generate", "--model", "", "--prompt", "a"), "--model is empty: give a run directory"),
    Case("a long override taken", ("estimate", "base.yaml", "--gpus", "2", "run.dir=" + "d" * 300), None),
    Case("text that YAML 1.1 takes for a number", ("estimate", "base.yaml", "--gpus", "2", "run.dir=0123"), None),
]
