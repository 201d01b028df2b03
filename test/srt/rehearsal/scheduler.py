"""SGLang's own scheduler in this process, and its overlap loop on the rehearsal's device.

``traffic.json`` has the requests, by the iteration of the loop in which they come in: tokens of the
prompt, new ones to generate, and whether log-probabilities are wanted.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers import io_struct, scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from harness import batches
from rehearsal import device, engine, operations, races
from rehearsal.device import Answer
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.captured import graphs
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.core import planning
from sglang_gemma4_yoco.core.state import ModelState, get_attached_state
from sglang_gemma4_yoco.patched import patched

TRAFFIC: list[Answer] = device.read_table("traffic")
ITERATIONS = 45


class Loop:
    """A scheduler with its model, which ``races`` has observed from its start."""

    def __init__(self, folder: Path, question: str) -> None:
        arguments = engine.write_checkpoint(folder, question)
        load_plugins()
        assert operations.current is not None
        self.races = races.Races(operations.current)
        args = ServerArgs(**arguments)
        releases.configure_process(args)
        self.scheduler: Any = scheduler.Scheduler(args, PortArgs.init_new(args))
        self.scheduler.output_streamer.send_to_detokenizer = mock.Mock()
        for name in ("schedule", "forward", "copy"):
            stream = getattr(self.scheduler, f"{name}_stream")
            self.races.names[stream.cuda_stream] = name
        self._draw = random.Random(0)

    def serve(self) -> Answer:
        """Run the traffic once; return the outcomes of forwards, accesses and races."""
        torch.cuda.synchronize()
        self.races.found.clear()
        self.races.accesses = 0
        counters.served.forwards.clear()
        iterations = iter(range(ITERATIONS + 1))
        self.scheduler.gracefully_exit = False

        def ingest(**_: Any) -> list[Any]:
            iteration = next(iterations)
            self.scheduler.gracefully_exit = iteration == ITERATIONS
            requests = [self._make(**one) for one in TRAFFIC if one["iteration"] == iteration]
            self.scheduler.process_input_requests(requests)
            return requests

        with patched(self.scheduler, ingest_requests=ingest):
            self.scheduler.run_event_loop()
        torch.cuda.synchronize()
        return {
            "forwards": {str(name): n for name, n in counters.served.forwards.items()},
            "accesses": self.races.accesses,
            "races": dict(self.races.found.most_common(5)),
        }

    def _make(self, iteration: int, tokens: int, new: int, logprobs: bool = False) -> Any:
        """Return a request with a prompt that is in no cache."""
        sampling = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        return io_struct.TokenizedGenerateReqInput(
            rid=f"{iteration} {self._draw.random()}",
            input_text="",
            input_ids=array("q", batches.tokens(self._draw, tokens)),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=logprobs,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )


def _make_races(loop: Loop, state: ModelState) -> dict[str, AbstractContextManager[Any]]:
    """Return deliberate races: spans in which something runs on an unordered stream.

    The barrier is SGLang's own, and protects stock and the package alike.
    """
    side = torch.cuda.Stream()
    loop.races.names[side.cuda_stream] = "side"

    def on_the_side(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            with torch.cuda.stream(side):
                return call(*args)

        return called

    replay = on_the_side(graphs.Bucket.replay)
    return {
        "planned on a side stream": patched(planning, make_plan=on_the_side(planning.make_plan)),
        "replayed on a side stream": mock.patch.object(graphs.Bucket, "replay", replay),
        "without the barrier": patched(loop.scheduler, _apply_war_barrier=lambda: None),
    }


def find_races(folder: Path, question: str) -> Answer:
    """Return the findings at start, in traffic, during audits and with each deliberate race."""
    loop = Loop(folder, question)
    state = get_attached_state()
    assert state is not None
    found: Answer = {
        "refused": state.off_because,
        "start": {"accesses": loop.races.accesses, "races": dict(loop.races.found)},
        "sound": loop.serve(),
    }
    with settings.changed(audit=1):
        state.after_cut = audit.make_auditor(loop.scheduler.tp_worker.model_runner, state)
        found["audited"] = loop.serve() | {"audits": dict(counters.served.audits)}
    state.after_cut = None
    for name, span in _make_races(loop, state).items():
        with span:
            found[name] = loop.serve()
    return found
