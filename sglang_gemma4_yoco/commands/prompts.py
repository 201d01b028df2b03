"""The prompts for both servers: questions, and prompts that reach parts which questions do not."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from sglang_gemma4_yoco.commands.console import CommandError

QUESTIONS, PREFIX, CHUNKS, LOGPROBS, PICTURES = KINDS = (
    "questions",
    "a shared prefix",
    "longer than a chunk",
    "log-probabilities of the prompt",
    "pictures",
)
TIMED = "first tokens of timed prompts"
PREFIX_TOKENS = 320
WITH_LOGPROBS = 4
COLOURS = ("red", "green", "blue", "yellow", "black", "white")
WHICH_COLOURS = "The left half and the right half of this picture have one colour each. Name both."


class Prompt(NamedTuple):
    """One request: its kind, by which servers are judged, and its part of a body for /generate."""

    kind: str
    body: Mapping[str, Any]
    new_tokens: int = 12

    def request(self) -> dict[str, Any]:
        """The whole body: greedy, with the likeliest tokens of each position."""
        sampling = {"temperature": 0, "max_new_tokens": self.new_tokens}
        common = {"return_logprob": True, "top_logprobs_num": 20}
        return {"sampling_params": sampling, **common, **self.body}


def bundled() -> list[str]:
    """The package's own questions."""
    text = files("sglang_gemma4_yoco.commands").joinpath("prompts.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line.strip()]


def read_file(path: Path) -> list[str]:
    """A user's prompts: one per line, or if a line begins with ``{``, JSON with ``prompt``.

    Raises:
        CommandError: a line is wrong; the message names file and line.
        OSError: it cannot be read.
    """
    prompts: list[str] = []
    for number, content in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = content.decode().strip()
            prompts.append(str.strip(json.loads(line)["prompt"] if line[:1] == "{" else line))
        except (ValueError, KeyError, TypeError) as failure:
            raise CommandError(f'{path}:{number}: no text, or no JSON with a "prompt"') from failure
    if not any(prompts):
        raise CommandError(f"--prompts {path} has no prompt: write one per line.")
    return list(filter(None, prompts))


class Maker:
    """Makes prompts with a model's own tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The middle of the vocabulary: Gemma keeps its special tokens at both ends.
        self._words = range(len(tokenizer) // 2, len(tokenizer) * 9 // 10)

    @classmethod
    def of(cls, model: str) -> Maker:
        """For a model; raises CommandError if its tokenizer cannot be loaded."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(model))
        except (OSError, ValueError) as failure:
            raise CommandError(
                f"{model}: no tokenizer ({str(failure).strip().splitlines()[0]}). For a gated "
                "model accept its terms on its page, then `hf auth login` or set HF_TOKEN."
            ) from failure

    @property
    def has_template(self) -> bool:
        """Whether the model knows questions and answers; a base model continues a text."""
        return self._tokenizer.chat_template is not None

    def question(self, text: str) -> Prompt:
        """A question; of a base model a text to continue."""
        encode = self._tokenizer.encode
        ids = self._templated(text, return_dict=False) if self.has_template else encode(text)
        return Prompt(QUESTIONS, {"input_ids": list(ids)})

    def about_picture(self, url: str) -> Prompt:
        """A question about a ``picture``."""
        parts = [{"type": "image"}, {"type": "text", "text": WHICH_COLOURS}]
        text = self._templated(parts, tokenize=False)
        return Prompt(PICTURES, {"text": text, "image_data": [url]})

    def _templated(self, content: Any, **options: bool) -> Any:
        messages = [{"role": "user", "content": content}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)

    def shared_prefix(self, text: str) -> list[Prompt]:
        """Two prompts that begin alike; sent one after the other, the second is a prefix hit."""
        prefix = self._running_text(text, PREFIX_TOKENS)
        return [
            Prompt(PREFIX, {"input_ids": prefix + self._some_words(40, seed)}) for seed in (1, 2)
        ]

    def long(self, text: str, length: int) -> Prompt:
        """A prompt of ``length`` tokens."""
        return Prompt(CHUNKS, {"input_ids": self._running_text(text, length)})

    def _running_text(self, text: str, length: int) -> list[int]:
        """``length`` token ids of ``text``, from the beginning again when it ends."""
        return list(islice(cycle(self._tokenizer.encode(text)), length))

    def _some_words(self, count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(self._words, k=count)

    def timed(self, length: int, number: int) -> Prompt:
        """A prompt for one token, which shares no prefix with that of another number."""
        first = self._words[number % len(self._words)]
        return Prompt(TIMED, {"input_ids": [first, *self._some_words(length - 1, number)]}, 1)


def with_logprobs(questions: Sequence[Prompt]) -> list[Prompt]:
    """The first few questions, now with the log-probabilities of their own tokens.

    Every second one asks for them from its middle on, the others from their first token on.
    """
    prompts = []
    for number, question in enumerate(questions[:WITH_LOGPROBS]):
        start = len(question.body["input_ids"]) // 2 if number % 2 else 0
        prompts.append(Prompt(LOGPROBS, {**question.body, "logprob_start_len": start}))
    return prompts


def picture(left: str, right: str) -> str:
    """A picture whose halves have these ``COLOURS``, as a data URL."""
    from PIL import Image  # comes with SGLang

    image = Image.new("RGB", (224, 224), left)
    image.paste(right, (112, 0, 224, 224))
    file = io.BytesIO()
    image.save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
