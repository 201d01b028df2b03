"""The prompts for both servers: questions, and prompts for code that questions do not reach."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_gemma4_yoco.commands.console import CommandError, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS, PREFIX, CHUNKS, LOGPROBS, PICTURES = KINDS = (
    "questions",
    "a shared prefix",
    "longer than a chunk",
    "log-probabilities of the prompt",
    "pictures",
)
TIMED = "first tokens of timed prompts"
NEW_TOKENS = 12  # of an answer
BUNDLED = Path(__file__).with_name("prompts.txt")
PREFIX_TOKENS = 320
# Rows to skip of a prompt whose log-probabilities are read, by whether it is served on a CPU: its
# tail runs eagerly, and on a GPU that needs 1024.
SKIPPED = {True: 64, False: 1280}
WHICH_COLOURS = "The left half and the right half of this picture have one colour each. Name both."


class Prompt(NamedTuple):
    """One request: its kind, by which answers are grouped, and its part of the /generate body."""

    kind: str
    body: Document
    new_tokens: int = NEW_TOKENS

    def request(self) -> Document:
        """Return the whole body: greedy, with the likeliest tokens of each position."""
        return self.body | {
            "sampling_params": {"temperature": 0, "max_new_tokens": self.new_tokens},
            "return_logprob": True,
            "top_logprobs_num": 20,
        }


def read_file(path: Path) -> list[str]:
    """Return the prompts of a text file, one per line; raise CommandError if there is none."""
    lines = path.read_text("utf-8-sig", errors="replace").split("\n")
    if not (prompts := [line.strip() for line in lines if line.strip()]):
        raise CommandError(f"--prompts {path} has no prompt: write one per line.")
    return prompts


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer; raise CommandError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as failure:  # their messages name the remedy
        raise CommandError(
            f"--model-path {model!r} does not exist, or has no tokenizer: {failure}"
        ) from failure


def make_prompts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    before: int,
    *,
    long: int = 0,
    pictures: bool = False,
) -> list[Prompt]:
    """Return prompts of all kinds, with each text as a question.

    Args:
        before: random tokens before those whose log-probabilities are read: none may come from the
            prefix cache.
        long: tokens of the prompt that is longer than a chunk; 0 for none.
        pictures: ask about pictures, which needs a chat template.
    """

    def templated(content: object, **options: bool) -> Any:  # text, or tokens
        messages = [{"role": "user", "content": content}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)

    encode = tokenizer.encode
    if tokenizer.chat_template:
        questions = [templated(text, return_dict=False) for text in texts]
    else:
        questions = [encode(text) for text in texts]
    made = [Prompt(QUESTIONS, {"input_ids": ids}) for ids in questions]
    for number, ids in enumerate(questions[:4]):
        body = {"input_ids": _draw_words(tokenizer, before, number) + ids}
        made.append(Prompt(LOGPROBS, body | {"logprob_start_len": before}))
    prefix = list(islice(cycle(encode("\n".join(texts))), PREFIX_TOKENS))
    # A question, and a hit of the prefix cache if they are sent one after the other.
    for kind in (QUESTIONS, PREFIX):
        body = {"input_ids": prefix + _draw_words(tokenizer, 40, len(made))}
        made.append(Prompt(kind, body))
    if long:
        text = encode("\n".join(reversed(texts)))
        made.append(Prompt(CHUNKS, {"input_ids": list(islice(cycle(text), long))}))
    if pictures:
        parts = [{"type": "image"}, {"type": "text", "text": WHICH_COLOURS}]
        question = templated(parts, tokenize=False)
        for colours in (("red", "green"), ("blue", "yellow")):
            picture = draw_picture(*colours)
            made.append(Prompt(PICTURES, {"text": question, "image_data": [picture]}))
    return made


def _draw_words(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[int]:
    """Return tokens from the middle of the vocabulary: Gemma's special tokens are at both ends."""
    middle = range(len(tokenizer) // 2, len(tokenizer) * 9 // 10)
    return [middle[seed % len(middle)], *random.Random(seed).choices(middle, k=count - 1)]


def make_timed(tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> Prompt:
    """Return a prompt for one new token, which shares no prefix with those of other numbers."""
    return Prompt(TIMED, {"input_ids": _draw_words(tokenizer, length, number)}, 1)


def draw_picture(left: str, right: str) -> str:
    """Return a picture whose halves have these colours, as a data URL."""
    from PIL import Image  # comes with SGLang

    image = Image.new("RGB", (224, 224), left)
    image.paste(right, (112, 0, 224, 224))
    file = io.BytesIO()
    image.save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
