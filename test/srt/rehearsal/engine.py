"""A Gemma 4 on SGLang's ModelRunner, on the rehearsal's device, with the package.

``questions.json`` says for each question of which model it is, what SGLang's server arguments are
and, in ``ask.py``, what is done with it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rehearsal import device, kernels
from rehearsal.device import Answer
from sglang_gemma4_reference import checkpoint
from sglang_gemma4_reference.checkpoint import Gemma4Shape

QUESTIONS: Answer = device.read_table("questions")


def shape_of(question: str) -> Gemma4Shape:
    """Return a preset with some other dimensions, and small towers: the real ones cost time."""
    asked = dict(QUESTIONS[question]["shape"])
    preset = checkpoint.PRESETS[asked.pop("preset")]
    small = checkpoint.E2B_TINY
    shape = dataclasses.replace(preset, dtype="bfloat16", **asked)
    return dataclasses.replace(shape, vision=small.vision, audio=small.audio)


def write_checkpoint(folder: Path, question: str) -> Answer:
    """Write the question's checkpoint, and return SGLang's server arguments for it.

    It has no weights: what is read as one is arbitrary.
    """
    checkpoint.write_checkpoint(folder, shape_of(question), weights=False)
    kernels.install()
    arguments: Answer = {
        "model_path": str(folder),
        "device": "cuda",
        "load_format": "dummy",
        "mem_fraction_static": 0.5,
        "max_total_tokens": 6000,
        "max_running_requests": 40,
    }
    arguments |= QUESTIONS[question].get("arguments", {})
    return arguments
