"""lm-evaluation-harness on jaxllm gives what it gives on transformers."""

import json
import shutil
import sys
from functools import partial

import numpy as np
import pytest
from hf_folders import HUB, random_weights, write_folder

import jaxllm
from jaxllm.cli import app as cli
from jaxllm.config import ConfigError
from jaxllm.data.tokenizer import byte_characters, load_tokenizer, save_byte_tokenizer

pytest.importorskip("lm_eval")
huggingface = pytest.importorskip("lm_eval.models.huggingface")

import lm_eval  # noqa: E402
import torch  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from jaxllm.inference import lm_eval as module  # noqa: E402
from jaxllm.inference.lm_eval import JaxLLM, run_tasks  # noqa: E402
from jaxllm.inference.predict import encode_prompt  # noqa: E402

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 48}
CONFIG = {**HUB, **SIZES, "bos_token_id": None, "eos_token_id": 0}
MESHES = {"one device": ["parallel.data=1"], "data 2 x tensor 2": ["parallel.data=2", "parallel.tensor=2", "parallel.zero=3"]}
TEXTS = [
    "a",
    "The mesh has two axes.",
    "Grüße",
    "x " * 60,
    "A text that is longer than the model's forty-eight positions, by far.",
]
PAIRS = [("", "alone"), ("Two and two", " are four"), ("Ends in a space ", "here"), ("y" * 70, " cut on the left"), ("é", "\n")]
# Random weights continue without end: of bytes that are no UTF-8 both make the same replacement character.
PROMPTS = [("One", {"until": ["e"], "max_gen_toks": 12}), ("Two and a half", {"until": "\n", "max_gen_toks": 12})]
PROMPTS += [("z" * 60, {"until": ["e"], "max_gen_toks": 12}), ("A much longer prompt, of 40", {"until": [], "max_gen_toks": 5})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_folder(tmp_path_factory.mktemp("model") / "hf", CONFIG, random_weights(CONFIG))
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    # Its cache of logits scores the wrong positions where two windows have the same ids but not the same context.
    return huggingface.HFLM(str(folder), device="cpu", dtype="float32", batch_size=2, logits_cache=False)


@pytest.fixture(scope="module", params=MESHES)
def ours(request, folder):
    return JaxLLM(folder, MESHES[request.param])


def requests(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]


def test_log_likelihoods_are_those_of_transformers(ours, theirs):
    asked = requests("loglikelihood", PAIRS)
    expected, found = (model.loglikelihood(asked, disable_tqdm=True) for model in (theirs, ours))
    np.testing.assert_allclose([one for one, _ in found], [one for one, _ in expected], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_what_the_model_itself_says_is_greedy(ours, theirs):
    begun = ours.tok_encode("One")
    continued = theirs.model.generate(torch.tensor([begun]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    ids = continued[0, len(begun) :].tolist()
    asked = [(None, begun, ids), (None, begun, [*ids[:-1], (ids[-1] + 1) % 256])]
    for model in (theirs, ours):
        assert [greedy for _, greedy in model._loglikelihood_tokens(asked, disable_tqdm=True)] == [True, False]


def test_rolling_log_likelihoods_are_those_of_transformers(ours, theirs):
    asked = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    expected, found = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in (theirs, ours))
    assert ours.max_length == theirs.max_length == 48
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-6)


def test_continuations_are_those_of_transformers(ours, theirs):
    asked = requests("generate_until", PROMPTS)
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize("ours", ["one device"], indirect=True)
def test_an_answer_ends_at_a_stop_text(ours, theirs):
    """A text that the model does write: random weights write few letters."""
    prompts = [chr(number) for number in range(ord("A"), ord("z") + 1)]
    options = {"until": [], "max_gen_toks": 8}
    endless = ours.generate_until(requests("generate_until", [(prompt, options) for prompt in prompts]))
    found = [(prompt, text, c) for prompt, text in zip(prompts, endless, strict=True) for c in text[1:] if c.isascii()]
    prompt, text, stop = next(one for one in found if one[2].isprintable() and one[2] not in one[1][:1])
    asked = requests("generate_until", [(prompt, {**options, "until": [stop]})])
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True) == [text[: text.index(stop)]]


@pytest.mark.parametrize("ours", ["one device"], indirect=True)
def test_a_text_without_context_follows_the_end_of_another(ours):
    """The harness takes white space from the end of a context, so that of white space alone nothing is left."""
    asked = requests("loglikelihood", [(" \n", "a"), ("", " \na")])
    (one, _), (two, _) = ours.loglikelihood(asked, disable_tqdm=True)
    assert one == pytest.approx(two) != 0
    options = {"until": [], "max_gen_toks": 4}
    empty, end = ours.generate_until(requests("generate_until", [("", options), ("\0", options)]))
    assert empty == end


@pytest.mark.parametrize("ours", ["one device"], indirect=True)
def test_what_is_cut_is_counted(ours, caplog):
    ours.loglikelihood(requests("loglikelihood", [("y" * 70, "z"), ("y", "z")]), disable_tqdm=True)
    ours.generate_until(requests("generate_until", [("y" * 45, {"max_gen_toks": 4})]))
    says = "texts do not fit into the 48 tokens that the model supports, and were cut on the left."
    said = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert said == [f"1 of 2 {says}", f"1 of 1 {says}"]


@pytest.fixture(scope="module")
def chat(folder, tmp_path_factory):
    """A model with a chat template: its folder, the ids of its answer to One without a template, and the third of them, which
    ends a turn."""
    ids = jaxllm.generate(folder, "One", ["parallel.data=1"], max_new_tokens=8)[0].ids
    end = next(number for number in ids[1:] if number not in ids[:1] and number not in b"One\0")
    chat = shutil.copytree(folder, tmp_path_factory.mktemp("chat") / "chat")
    content = json.loads((chat / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": end, "content": byte_characters()[end]})
    (chat / "tokenizer.json").write_text(json.dumps(content))
    (chat / "chat_template.jinja").write_text(
        "{% for one in messages %}{{ one.content }}{% if one.role == 'assistant' %}" + byte_characters()[end] + "{% endif %}"
        "{% endfor %}"
    )
    return chat, ids, end


@pytest.fixture
def completed(monkeypatch):
    """What is continued from here on: (the first continuation, the ids that end it) of each batch."""
    seen, real = [], module.complete

    def complete(*arguments, **options):
        found = real(*arguments, **options)
        seen.append((found[0], options["stop_ids"]))
        return found

    monkeypatch.setattr(module, "complete", complete)
    return seen


def test_an_answer_in_a_conversation_ends_with_its_turn(chat, completed):
    """At the token by which the chat template ends a turn, which is not the EOS token. The same text without it does not."""
    folder, ids, end = chat
    model = JaxLLM(folder, ["parallel.data=1"])
    text, options = model.apply_chat_template([{"role": "user", "content": "One"}]), {"until": [], "max_gen_toks": 8}
    assert text == "One"
    model.generate_until(requests("generate_until", [("One", options), (text, options)]))
    assert [one.ids for one, _ in completed] == [ids, ids[: ids.index(end) + 1]]
    assert [one.ended_by for one, _ in completed] == ["length", "stop_token"]
    assert [ends for _, ends in completed] == [{0}, {0, end}]
    (answer,) = jaxllm.generate(folder, "One", ["parallel.data=1"], chat=True, max_new_tokens=8)
    assert answer.ids == completed[1][0].ids


def test_an_answer_ends_with_its_turn_if_the_harness_has_kept_the_requests(chat, completed, tasks, tmp_path, monkeypatch):
    """Then no text comes from this adapter's template. Requests without a template, and those to another one, are others."""
    monkeypatch.setattr(lm_eval.caching.cache, "PATH", str(tmp_path / "requests"))
    folder, _, end = chat
    manager = TaskManager(include_path=str(tasks), include_defaults=False)

    def answers(model, **options):
        found = lm_eval.simple_evaluate(
            model=model, tasks=["answers_of_sums"], task_manager=manager, cache_requests=True, bootstrap_iters=0, **options
        )
        return [one["resps"] for one in found["samples"]["answers_of_sums"]]

    first, second = (JaxLLM(folder, ["parallel.data=1"]) for _ in range(2))
    expected = answers(first, apply_chat_template=True)
    answers(first)
    count = len(completed)
    monkeypatch.setattr(second, "apply_chat_template", pytest.fail)
    assert answers(second, apply_chat_template=True) == expected
    answers(second)
    assert [ends for _, ends in completed[:count]] == [ends for _, ends in completed[count:]]
    assert {*map(frozenset, (ends for _, ends in completed))} == {frozenset({0}), frozenset({0, end})}
    other = shutil.copytree(folder, tmp_path / folder.name)
    (other / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}?{% endfor %}")
    assert JaxLLM(other, ["parallel.data=1"]).tokenizer_name != second.tokenizer_name == first.tokenizer_name


def test_a_tokenizer_with_bos_is_read_as_transformers_does(folder, tmp_path):
    """BOS comes before every text, and is the context of one without."""
    with_bos = shutil.copytree(folder, tmp_path / "bos")
    content = json.loads((with_bos / "tokenizer.json").read_text())
    begin = byte_characters()[1]
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1, "content": begin})
    single = [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {begin: {"id": begin, "ids": [1], "tokens": [begin]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    (with_bos / "tokenizer.json").write_text(json.dumps(content))
    about = json.loads((with_bos / "tokenizer_config.json").read_text())
    (with_bos / "tokenizer_config.json").write_text(json.dumps({**about, "bos_token": begin}))
    theirs = huggingface.HFLM(str(with_bos), device="cpu", dtype="float32", batch_size=2, logits_cache=False)
    ours = JaxLLM(with_bos, ["parallel.data=1"])
    assert ours.prefix_token_id == theirs.prefix_token_id == 1
    assert ours.tok_encode("One") == theirs.tok_encode("One") == [1, *b"One"]
    # A prompt of `jaxllm generate` is read alike. Newer HFLMs too leave out the second BOS of a text that spells one.
    for text in ("One", begin + "One", f"One{begin}", end := "One\0"):
        expected = theirs.tok_encode(text)
        expected = expected[expected[:2] == [1, 1] :]
        assert encode_prompt(load_tokenizer(with_bos), text, 256).tolist() == ours.tok_encode(text) == expected
    assert ours.tok_encode(end)[-1] == 0
    for kind, arguments in (("loglikelihood", PAIRS[:3]), ("loglikelihood_rolling", [(text,) for text in TEXTS[1:4]])):
        asked = requests(kind, arguments)
        expected, found = (getattr(model, kind)(asked, disable_tqdm=True) for model in (theirs, ours))
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), atol=1e-4, rtol=1e-6)
    asked = requests("generate_until", PROMPTS[:1])
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


def test_max_length_is_that_of_hflm(folder, tasks, monkeypatch, capsys):
    """More texts are cut, and the scores are still those of transformers."""
    theirs = huggingface.HFLM(str(folder), device="cpu", dtype="float32", batch_size=2, logits_cache=False, max_length=16)
    ours = JaxLLM(folder, ["parallel.data=1"], max_length=16)
    for kind, arguments in (("loglikelihood", PAIRS[:4]), ("loglikelihood_rolling", [(text,) for text in TEXTS])):
        asked = requests(kind, arguments)
        expected, found = (getattr(model, kind)(asked, disable_tqdm=True) for model in (theirs, ours))
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), atol=1e-4, rtol=1e-6)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = lm_eval.simple_evaluate(model=theirs, tasks=["choices_of_sums"], task_manager=manager, bootstrap_iters=0)
    kept = []
    monkeypatch.setattr(module, "JaxLLM", lambda *a, **k: kept.append(k["max_length"]) or JaxLLM(*a, **k))
    words = ["--model", folder, "--tasks", "choices_of_sums", "--include-path", tasks, "--json", "--max-length", 16]
    monkeypatch.setattr(sys, "argv", ["jaxllm", "lm-eval", *map(str, words), "parallel.data=1"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, kept) == (0, [16])
    assert without_errors(json.loads(capsys.readouterr().out)["results"]) == without_errors(expected["results"])


@pytest.mark.parametrize("ours", ["one device"], indirect=True)
def test_a_repeated_request_has_other_samples_in_each_batch(ours):
    asked = requests("generate_until", [("One", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12})] * 32)
    found = ours.generate_until(asked)
    assert found[:16] != found[16:]
    assert ours.generate_until(asked) == found


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two tasks, one of choices and one of answers."""
    path = tmp_path_factory.mktemp("tasks")
    lines = [{"text": f"{n} and {n} make", "choices": [f" {2 * n}", f" {n}", " many"], "label": n % 3} for n in range(6)]
    (path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {path / 'sums.jsonl'}}}}}\ntest_split: test\n"
    common += "doc_to_text: '{{text}}'\n"
    choices = "task: choices_of_sums\noutput_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: label\n"
    choices += "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    answers = "task: answers_of_sums\noutput_type: generate_until\ndoc_to_target: '{{choices[0]}}'\n"
    answers += "generation_kwargs: {until: ['e'], max_gen_toks: 6}\nmetric_list: [{metric: bleu}, {metric: exact_match}]\n"
    (path / "choices.yaml").write_text(common + choices)
    (path / "answers.yaml").write_text(common + answers.replace("{metric: bleu}, ", ""))
    return path


@pytest.fixture(autouse=True)
def only_own_tasks(monkeypatch):
    """Reading the harness's 10,000 tasks takes seconds."""
    monkeypatch.setattr(module, "TaskManager", partial(TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def expected(tasks, theirs):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = ["choices_of_sums", "answers_of_sums"]
    return lm_eval.simple_evaluate(model=theirs, tasks=names, task_manager=manager, bootstrap_iters=0)["results"]


def without_errors(results):
    return {task: {name: value for name, value in found.items() if "stderr" not in name} for task, found in results.items()}


@pytest.mark.parametrize("ours", ["one device"], indirect=True)
def test_a_task_has_the_metrics_of_transformers(ours, expected, tasks):
    found = run_tasks(ours, ["choices_of_sums", "answers_of_sums"], include_path=str(tasks))["results"]
    assert without_errors(found) == without_errors(expected)


def test_the_command_prints_one_object(folder, expected, tasks, monkeypatch, capsys):
    names = "choices_of_sums,answers_of_sums"
    words = ["--model", folder, "--tasks", names, "--include-path", tasks, "--json", *MESHES["data 2 x tensor 2"]]
    monkeypatch.setattr(sys, "argv", ["jaxllm", "lm-eval", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert without_errors(json.loads(capsys.readouterr().out)["results"]) == without_errors(expected)


@pytest.mark.parametrize("ours", ["one device"], indirect=True)
def test_mistakes_are_one_sentence(ours, tasks):
    with pytest.raises(ConfigError, match="lm-eval has no task no_such_sums"):
        run_tasks(ours, ["no_such_sums"], include_path=str(tasks))
    with pytest.raises(ConfigError, match=r"asks for 48 new tokens, and .* supports 48 with the prompt"):
        ours.generate_until(requests("generate_until", [("One", {"max_gen_toks": 48})]))
    for name, value in {"repetition_penalty": 1.2, "min_p": 0.1, "num_beams": 4}.items():
        with pytest.raises(
            ConfigError, match=rf"^A task asks for {name}={value}, and jaxllm has no \w+: leave out the task\.$"
        ):
            ours.generate_until(requests("generate_until", [("One", {"max_gen_toks": 4, name: value})]))
    off = {"repetition_penalty": 1.0, "min_p": 0.0, "num_beams": 1, "max_gen_toks": 4}
    assert len(ours.generate_until(requests("generate_until", [("One", off)]))) == 1
    for ending in ("", "z" * 49):
        with pytest.raises(ConfigError, match=rf"asks for the score of {len(ending)} tokens, and .* scores 1 to 48 at once"):
            ours.loglikelihood(requests("loglikelihood", [("One", ending)]), disable_tqdm=True)
    with pytest.raises(ConfigError, match="has no chat template: leave out --chat"):
        ours.apply_chat_template([{"role": "user", "content": "One"}])
