"""Chat templates of today's models, as TRL collects them beside versions of its own that mark the answers. transformers renders
both: the published ones say which tokens a conversation has, TRL's which of them are learnt.
"""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxllm.data.chat import ChatTemplate, ChatTemplateError
from jaxllm.data.template_process import FIXED_DATE

transformers = pytest.importorskip("transformers")
if (trl := importlib.util.find_spec("trl")) is None:
    pytest.skip("TRL is not installed", allow_module_level=True)
FOLDER = Path(trl.submodule_search_locations[0]) / "chat_templates"

# Without those of images.
PUBLISHED = [
    "cohere2",
    "deepseek_r1_distill",
    "deepseekv3",
    "gemma",
    "gemma3",
    "glm4moe",
    "gptoss",
    "lfm2_v2",
    "llama3",
    "nemotron_3_nano",
    "phi3",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_instruct_2507",
]
# TRL's version writes thoughts in front of each answer, not of the last alone, or an end behind the last one.
OTHER_TEXT = {"deepseek_r1_distill", "glm4moe", "qwen3", "qwen3_5_think"}
SPECIAL = r"<turn\||<\|turn>|<[|｜][^<>{}'\"]*?[|｜]>|<(?:start|end)_of_turn>"


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


CONVERSATIONS = {
    "one turn": [said("user", "What is 2 + 2?"), said("assistant", "Four, I think.")],
    "two turns": [
        said("user", "Hi"),
        said("assistant", "Hello there."),
        said("user", "Bye"),
        said("assistant", "See you,\n\nsoon."),
    ],
    "system": [
        said("system", "Be brief."),
        said("user", "Hi"),
        said("assistant", "Hello"),
        said("user", "Bye"),
        said("assistant", "See"),
    ],
    "greeting": [said("assistant", "Welcome"), said("user", "Hi"), said("assistant", "Hello")],
    "thoughts": [
        said("user", "a?"),
        said("assistant", "<think>\nr\n</think>\n\nb"),
        said("user", "c?"),
        said("assistant", "<think>\ns\n</think>\n\nd"),
    ],
    "reasoning": [
        said("user", "a?"),
        said("assistant", "b", reasoning_content="r"),
        said("user", "c?"),
        said("assistant", "d", reasoning="s"),
    ],
    "repeats": [said(role, "Yes") for _ in range(3) for role in ("user", "assistant")],
}


def read(name):
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def spans_of(marks):
    """[start, stop) of each run of ones."""
    return [found.span() for found in re.finditer("1+", "".join(map(str, marks)))]


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_those_of_transformers_and_answers_those_of_trl(name, monkeypatch):
    """TRL learns two things more, which no model writes: the white space behind the token that ends a turn, and a part of what
    the generation prompt gives (with DeepSeek's templates all of it)."""
    # A text to train on must not change tomorrow.
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=lambda: FIXED_DATE))
    published, marked = read(name), read(f"{name}_training")
    special = ["<s>", "</s>", *sorted(set(re.findall(SPECIAL, published)))]
    # A token for each byte, so that each character of these texts is one.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    base.pre_tokenizer, base.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    base.add_special_tokens(special)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<s>", eos_token="</s>")
    ours = ChatTemplate(published, name, {"bos_token": "<s>", "eos_token": "</s>"}, knows_date=False)
    compared = 0
    for messages in CONVERSATIONS.values():
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            text = theirs.apply_chat_template(messages, chat_template=published, tokenize=False)
        except Exception:
            with pytest.raises(ChatTemplateError):
                ours.render_answers(messages, numbers, special)
            continue
        rendered, found = ours.render_answers(messages, numbers, special)
        assert rendered == text
        answers = [rendered[start:stop] for start, stop in found]
        for number, answer in zip(numbers, answers, strict=True):
            assert messages[number]["content"].split()[-1] in answer
        learnt = theirs.apply_chat_template(messages, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True)
        same_text = theirs.apply_chat_template(messages, chat_template=marked, tokenize=False) == text
        assert same_text or name in OTHER_TEXT
        if not same_text:
            continue
        compared += 1
        prompt = theirs.apply_chat_template(messages, chat_template=published, tokenize=False, add_generation_prompt=True)
        expected = [theirs.decode(learnt["input_ids"][slice(*span)]) for span in spans_of(learnt["assistant_masks"])]
        assert len(answers) == len(expected)
        for answer, whole in zip(answers, expected, strict=True):
            before, _, behind = whole.partition(answer)
            assert before in prompt.removeprefix(text)
            assert not behind.strip()
    assert compared or name == "glm4moe"
    ours.close()
