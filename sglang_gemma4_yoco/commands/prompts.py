"""What both servers are asked: the package's own prompts or a user's, and those that reach further.

A prompt is one body for SGLang's /generate. Besides questions there are prompts that share a
prefix, one that is longer than a chunk, some whose own log-probabilities are wanted, and pictures.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco.commands.console import CommandError

QUESTIONS, PREFIX, CHUNKS, LOGPROBS, PICTURES = (
    "questions",
    "a shared prefix",
    "longer than a chunk",
    "log-probabilities of the prompt",
    "pictures",
)
KINDS = (QUESTIONS, PREFIX, CHUNKS, LOGPROBS, PICTURES)
ANSWER_TOKENS = 12
TOP_LOGPROBS = 20
PREFIX_TOKENS = 320
WITH_LOGPROBS = 4
COLOURS = {
    "red": (220, 20, 20),
    "green": (20, 160, 20),
    "blue": (20, 40, 220),
    "yellow": (250, 220, 20),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        kind: one of ``KINDS``; servers are judged by kind.
        title: how reports call it.
        body: for /generate, without what is the same for all.
    """

    kind: str
    title: str
    body: Mapping[str, Any] = field(repr=False)

    def request(self) -> dict[str, Any]:
        """The whole body: greedy, with the likeliest tokens of each position."""
        return {
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS},
            "return_logprob": True,
            "top_logprobs_num": TOP_LOGPROBS,
            **self.body,
        }


# ---------------------------------------------------------------- from files


def bundled() -> list[list[Message]]:
    """The package's own prompts, each as a conversation of one message."""
    text = files("sglang_gemma4_yoco.commands").joinpath("prompts.txt").read_text("utf-8")
    return [[_user(line)] for line in text.splitlines() if line.strip()]


def read_file(path: Path) -> list[list[Message]]:
    """A user's prompts as conversations.

    A file holds one prompt per line, or, if its first line begins with ``{``, one JSON object per
    line, with ``prompt`` (text) or ``messages`` (as in SGLang's chat API). Empty lines are left
    out.

    Raises:
        CommandError: it cannot be read, or a line is not what it must be; names file and line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise CommandError(f"--prompts {path} cannot be read: {failure}") from failure
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise CommandError(f"--prompts {path} has no prompt: write one per line.")
    if not filled[0][1].lstrip().startswith("{"):
        return [[_user(line.strip())] for _, line in filled]
    conversations = []
    for number, line in filled:
        try:
            conversations.append(_conversation(json.loads(line)))
        except json.JSONDecodeError as failure:
            raise CommandError(f"{path}:{number}: no JSON: {failure.msg}") from failure
        except ValueError as failure:
            raise CommandError(f"{path}:{number}: {failure}") from failure
    return conversations


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _conversation(line: Any) -> list[Message]:
    """The messages of one line of JSON.

    Raises:
        ValueError: says what is wrong with it.
    """
    if not isinstance(line, dict) or len({"prompt", "messages"} & line.keys()) != 1:
        raise ValueError('needs an object with either "prompt" or "messages"')
    if "prompt" in line:
        if not isinstance(line["prompt"], str) or not line["prompt"]:
            raise ValueError('"prompt" must be text')
        return [_user(line["prompt"])]
    messages = line["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one message')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f'a message needs a "role", one of {", ".join(_ROLES)}')
        _check_content(message.get("content"))
    return messages


def _check_content(content: Any) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise ValueError('a message needs "content": text, or a list of parts')
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if kind == "image_url" and isinstance(_image_of(part), str):
            continue
        raise ValueError(
            'a part of "content" is {"type": "text", "text": ...} or '
            '{"type": "image_url", "image_url": {"url": ...}}'
        )


def _image_of(part: Mapping[str, Any]) -> Any:
    image = part.get("image_url")
    return image.get("url") if isinstance(image, dict) else image


# ---------------------------------------------------------------- for one model


class Maker:
    """Makes prompts with a model's own tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        vocabulary = len(tokenizer)
        # The middle of the vocabulary: Gemma keeps its special tokens at both ends.
        self._words = range(vocabulary // 2, vocabulary * 9 // 10)

    @classmethod
    def of(cls, model: str) -> Maker:
        """For the model with this path or this name on the Hugging Face hub.

        Raises:
            CommandError: it has no tokenizer, or none that can be had.
        """
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(model))
        except (OSError, ValueError) as failure:
            first = str(failure).strip().partition("\n")[0]
            raise CommandError(
                f"{model}: no tokenizer could be loaded ({first}). For a gated model accept its "
                "terms on its page, then `hf auth login` or set HF_TOKEN."
            ) from failure

    def question(self, conversation: Sequence[Message]) -> Prompt:
        """One conversation that the model is to continue, with its pictures."""
        parts = [
            part
            for message in conversation
            if not isinstance(message["content"], str)
            for part in message["content"]
        ]
        images = [_image_of(part) for part in parts if part["type"] == "image_url"]
        if not images:
            return Prompt(QUESTIONS, _title(conversation), {"input_ids": self._ids(conversation)})
        text = self._templated(conversation, tokenize=False)
        return Prompt(PICTURES, _title(conversation), {"text": text, "image_data": images})

    def _ids(self, conversation: Sequence[Message]) -> list[int]:
        if self._tokenizer.chat_template is None:  # a model that was not taught to chat
            text = "\n".join(str(message["content"]) for message in conversation)
            ids: list[int] = self._tokenizer.encode(text)
        else:
            ids = self._templated(conversation, return_dict=False)
        return list(ids)

    def _templated(self, conversation: Sequence[Message], **options: bool) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                _for_template(conversation), add_generation_prompt=True, **options
            )
        except (TemplateError, ValueError, TypeError) as failure:
            raise CommandError(
                f"the model's chat template refuses {_title(conversation)!r}: {failure}"
            ) from failure

    def shared_prefix(self, text: str) -> list[Prompt]:
        """Two prompts that begin alike; asked one after the other, the second is a prefix hit."""
        prefix = self.running_text(text, PREFIX_TOKENS)
        endings = [self._some_words(40, seed) for seed in (1, 2)]
        return [
            Prompt(PREFIX, f"{PREFIX_TOKENS} tokens and {which}", {"input_ids": prefix + ending})
            for which, ending in zip(("an ending", "another ending"), endings, strict=True)
        ]

    def long(self, text: str, length: int) -> Prompt:
        """A prompt of ``length`` tokens."""
        return Prompt(CHUNKS, f"{length} tokens", {"input_ids": self.running_text(text, length)})

    def running_text(self, text: str, length: int) -> list[int]:
        """``text`` as so many token ids, from the beginning again when it ends."""
        return list(islice(cycle(self._tokenizer.encode(text)), length))

    def _some_words(self, count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(self._words, k=count)

    def random(self, length: int, number: int) -> list[int]:
        """A prompt for timing, which shares no prefix with that of another number."""
        first = self._words[number % len(self._words)]
        return [first, *self._some_words(length - 1, number)]


def with_logprobs(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first few of these prompts, so that their own log-probabilities are answered too."""
    chosen = [prompt for prompt in prompts if prompt.kind == QUESTIONS][:WITH_LOGPROBS]
    # From the first token on, and from the middle on.
    return [
        Prompt(
            LOGPROBS,
            prompt.title,
            {
                **prompt.body,
                "logprob_start_len": len(prompt.body["input_ids"]) // 2 if number % 2 else 0,
            },
        )
        for number, prompt in enumerate(chosen)
    ]


def picture_conversations(
    pairs: Iterable[tuple[str, str]] = (("red", "green"), ("blue", "yellow")),
) -> list[list[Message]]:
    """Questions about pictures of these colours, which are made here."""
    question = "The left half and the right half of this picture have one colour each. Name both."
    return [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": _picture(pair)}},
                    {"type": "text", "text": question},
                ],
            }
        ]
        for pair in pairs
    ]


def _picture(pair: tuple[str, str]) -> str:
    left, right = (COLOURS[name] for name in pair)
    return two_colours(left, right)


def two_colours(left: tuple[int, int, int], right: tuple[int, int, int]) -> str:
    """A picture whose halves have these colours (red, green, blue), as a data URL."""
    from PIL import Image

    image = Image.new("RGB", (224, 224), left)
    image.paste(right, (112, 0, 224, 224))
    file = io.BytesIO()
    image.save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _for_template(conversation: Sequence[Message]) -> list[Message]:
    """As chat templates want it: a part for a picture is of the type ``image``."""
    return [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [
                part if part["type"] == "text" else {"type": "image"} for part in message["content"]
            ],
        }
        for message in conversation
    ]


def _title(conversation: Sequence[Message]) -> str:
    """The beginning of what was asked last."""
    content = conversation[-1]["content"]
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content if part["type"] == "text")
    return content if len(content) <= 60 else content[:57] + "..."
