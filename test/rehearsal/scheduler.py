"""SGLang's own scheduler in this process, its loop with overlap on the rehearsal's device."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rehearsal import engine, kernels, operations, races
from sglang_gemma4_reference import checkpoint, releases
from sglang_gemma4_reference.engine import settings_changed
from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.core.state import get_attached_state
from sglang_gemma4_yoco.replaced import replaced

#: By iteration of the loop, the requests that come in: prompt tokens, tokens to generate, whether
#: log-probabilities are wanted.
TRAFFIC: dict[int, list[tuple[int, int, bool]]] = {
    0: [(40, 6, False)],
    2: [(150, 4, False)],  # two chunks and a rest
    5: [(7, 3, False), (33, 3, False)],
    6: [(5, 4, False)],
    9: [(200, 2, False), (3, 5, False)],
    10: [(90, 3, True)],
    14: [(20, 2, False)],
    18: [(64, 3, False), (65, 3, False)],
}
ITERATIONS = 45


class _Sink:
    """In place of the sockets to the other processes."""

    def send_output(self, *_: Any, **__: Any) -> None:
        pass


class Served:
    """A scheduler with its model; ``races`` has followed it from its start."""

    def __init__(self, folder: Path, mode: operations.Computed, **arguments: Any) -> None:
        checkpoint.write_checkpoint(folder, engine.E2B_SHORT, weights=False)
        from sglang.srt.managers import scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        kernels.install()
        load_plugins()
        self.races = races.Races(mode)
        chosen: dict[str, Any] = {
            "max_total_tokens": 4096,
            "max_running_requests": 8,
            "mem_fraction_static": 0.5,
            "chunked_prefill_size": 64,
            "skip_server_warmup": True,
            "watchdog_timeout": 3000,
        }
        args = ServerArgs(
            model_path=str(folder), device="cuda", load_format="dummy", **(chosen | arguments)
        )
        releases.configure_process(args)
        self.scheduler: Any = scheduler.Scheduler(args, PortArgs.init_new(args))
        for holder in (self.scheduler, self.scheduler.output_streamer):
            for name in ("send_to_detokenizer", "send_to_tokenizer"):
                if hasattr(holder, name):
                    setattr(holder, name, _Sink())
        for name in ("schedule", "forward", "copy"):
            stream = getattr(self.scheduler, f"{name}_stream")
            self.races.names[stream.cuda_stream] = name
        self._rounds = 0

    def serve(self) -> dict[str, Any]:
        """Run the traffic once: outcomes of forwards, accesses, races, kernels compiled."""
        torch.cuda.synchronize()
        self._rounds += 1
        self.races.found.clear()
        self.races.accesses = 0
        counters.forwards.clear()
        known = len(kernels.compiled)
        with self._requests_come_in():
            self.scheduler.run_event_loop()
        torch.cuda.synchronize()
        return {
            "forwards": dict(counters.forwards),
            "accesses": self.races.accesses,
            "races": dict(self.races.found.most_common(5)),
            "compiled": len(kernels.compiled) - known,
        }

    @contextmanager
    def _requests_come_in(self) -> Iterator[None]:
        draw = random.Random(self._rounds)  # other prompts: none is in the cache
        iterations = iter(range(ITERATIONS))

        def ingest(**_: Any) -> list[Any]:
            iteration = next(iterations, None)
            if iteration is None:
                self.scheduler.gracefully_exit = True
                return []
            asked = TRAFFIC.get(iteration, [])
            names = [f"{self._rounds} {iteration} {n}" for n in range(len(asked))]
            requests = [
                _request(name, [draw.randrange(300, 3700) for _ in range(tokens)], new, logprobs)
                for name, (tokens, new, logprobs) in zip(names, asked, strict=True)
            ]
            self.scheduler.process_input_requests(requests)
            return requests

        self.scheduler.gracefully_exit = False
        self.scheduler.ingest_requests = ingest
        try:
            yield
        finally:
            del self.scheduler.ingest_requests


def _request(name: str, ids: list[int], new: int, logprobs: bool) -> Any:
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    return io_struct.TokenizedGenerateReqInput(
        rid=name,
        input_text="",
        input_ids=array("q", ids),
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


# ---- races on purpose


@contextmanager
def planned_on_a_side_stream(served: Served) -> Iterator[None]:
    """The tail is planned on a stream that nothing orders."""

    state, side = get_attached_state(), _side_stream(served)
    assert state is not None
    stock = state.planner

    def planner(*args: Any) -> Any:
        with torch.cuda.stream(side):
            return stock(*args)

    with replaced(state, planner=planner):
        yield


@contextmanager
def replayed_on_a_side_stream(served: Served) -> Iterator[None]:
    """The tail's graph is replayed on a stream for which the forward's does not wait."""

    state, side = get_attached_state(), _side_stream(served)
    assert state is not None
    stock = state.captured.replay

    def replay(bucket: int) -> Any:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return stock(bucket)

    with replaced(state.captured, replay=replay):
        yield


@contextmanager
def without_the_barrier(served: Served) -> Iterator[None]:
    """SGLang's own barrier, which protects stock and the package alike, is taken away."""
    served.scheduler._apply_war_barrier = lambda: None
    try:
        yield
    finally:
        del served.scheduler._apply_war_barrier


def _side_stream(served: Served) -> torch.cuda.Stream:
    side = torch.cuda.Stream()
    served.races.names[side.cuda_stream] = "side"
    return side


ON_PURPOSE = (planned_on_a_side_stream, replayed_on_a_side_stream, without_the_barrier)


def find_races(folder: Path, mode: operations.Computed, **arguments: Any) -> dict[str, Any]:
    """What was found at the start, in traffic, beside audits and with each race on purpose."""

    served = Served(folder, mode, **arguments)
    state = get_attached_state()
    assert state is not None
    found: dict[str, Any] = {
        "refused": state.unsupported,
        "start": {"accesses": served.races.accesses, "races": dict(served.races.found)},
        "sound": served.serve(),
    }
    with settings_changed(audit=1):
        state.after_cut = audit.make_auditor(served.scheduler.tp_worker.model_runner, state)
        found["audited"] = served.serve() | {"audits": vars(counters.audits)}
    state.after_cut = None
    for race in ON_PURPOSE:
        with race(served):
            found[race.__name__] = served.serve()
    return found
