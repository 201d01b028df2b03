"""SGLang's scheduler in this process, in the prefill role of prefill-decode disaggregation.

Its own event loop runs, on requests that name nobody as their peer. Their sender is SGLang's own
for such requests, which sends nothing; what a real one would send is read at that very time. A
process has one scheduler.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.srt.disaggregation import prefill
from sglang.srt.disaggregation.fake.conn import FakeKVSender
from sglang.srt.disaggregation.utils import TransferBackend, get_kv_class
from sglang.srt.distributed import bootstrap
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.models.gemma4_causal import Gemma4TextModel
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_gemma4_reference import roles
from sglang_gemma4_reference.engine import switched
from sglang_gemma4_reference.row_trace import Prefill, observe
from sglang_gemma4_yoco import log

CHUNK = 64


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: of its own.
        prompt: token ids.
        logprob_start: position from which on input logprobs are wanted; -1 for none.
    """

    name: str
    prompt: list[int]
    logprob_start: int = -1


@dataclass
class Served:
    """What became of some requests.

    Attributes:
        finished: the requests, as SGLang answers them, by name.
        sent: what was sent of each, one entry for each time: the bytes of K and V of every layer
            that has some, and what SGLang sends of the window's layers beside the last.
        prefills: the forwards.
        outcomes: the package's own count of them.
    """

    finished: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, list[list[bytes]]] = field(default_factory=dict)
    prefills: list[Prefill] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)


class PrefillRole:
    """A scheduler with the role."""

    def __init__(self, checkpoint: Path) -> None:
        """Load the model."""
        load_plugins()  # as every process of a server does first
        args = ServerArgs(
            model_path=str(checkpoint),
            device="cpu",
            dtype="float32",
            max_total_tokens=4096,
            chunked_prefill_size=CHUNK,
            disaggregation_mode="prefill",
            disaggregation_transfer_backend="mooncake_tcp",
            optimistic_prefill_attempts=2,
        )
        args.resolve_once()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        with _without_transfer_engine():
            self._scheduler = Scheduler(args, PortArgs.init_new(args))
        self._served = Served()
        self._room_of: dict[int, str] = {}
        model = self._scheduler.tp_worker.model_runner.model
        (text_model,) = (part for part in model.modules() if isinstance(part, Gemma4TextModel))
        observe(text_model, lambda forward: self._served.prefills.append(forward))

    def serve(
        self, switch: str, requests: Sequence[Request], retried: Sequence[str] = ()
    ) -> Served:
        """Let the event loop run until these requests are done, none of them cached before.

        Args:
            switch: the fast path on (``1``) or off (``0``).
            retried: names of those whose peer is late: what they have computed is put away, and
                they start again.
        """
        scheduler = self._scheduler
        assert scheduler.flush_cache(), "a request of before holds memory"
        self._overwrite_the_pools()
        log.reset()
        self._served = Served()
        self._room_of = {room: request.name for room, request in enumerate(requests, 1)}
        scheduler.gracefully_exit, scheduler.last_batch = False, None
        with switched(switch), self._seeing_what_comes(), _late(retried):
            for room, request in enumerate(requests, 1):
                scheduler.handle_generate_request(_tokenized(request, room))
            scheduler.run_event_loop()
        self._served.outcomes = dict(log.forwards)
        return self._served

    @property
    def _buffers(self) -> Any:
        """What SGLang tells a transfer engine of the pools."""
        return self._scheduler.disagg_prefill_bootstrap_queue.kv_manager.kv_args

    def _overwrite_the_pools(self) -> None:
        """Nothing can be read, or sent, that was not written since. The floats are 785."""
        buffers = self._buffers
        for start, length in zip(buffers.kv_data_ptrs, buffers.kv_data_lens, strict=True):
            ctypes.memset(start, 0x44, length)
        for starts, lengths in zip(buffers.state_data_ptrs, buffers.state_data_lens, strict=True):
            for start, length in zip(starts, lengths, strict=True):
                ctypes.memset(start, 0x44, length)

    @contextmanager
    def _seeing_what_comes(self) -> Iterator[None]:
        """Note what is sent and what is answered; the loop ends when all has been."""
        stock = FakeKVSender.send
        buffers = self._buffers

        def send(sender: Any, indices: Any, states: Any = None, *args: Any, **kwargs: Any) -> None:
            sent = _bytes(buffers.kv_data_ptrs, buffers.kv_item_lens, indices)
            for i, of_state in enumerate(states or ()):
                pointers, lengths = buffers.state_data_ptrs[i], buffers.state_item_lens[i]
                sent += _bytes(pointers, lengths, of_state)
            name = self._room_of[sender.bootstrap_room]
            self._served.sent.setdefault(name, []).append(sent)
            stock(sender, indices, states, *args, **kwargs)

        def answer(_: Any, requests: Sequence[Any], *__: object, **___: object) -> None:
            self._served.finished |= {request.rid: request for request in requests}
            if len(self._served.finished) == len(self._room_of):
                self._scheduler.gracefully_exit = True

        streamer = type(self._scheduler.output_streamer)
        with (
            mock.patch.object(FakeKVSender, "send", send),
            mock.patch.object(streamer, "stream_output", answer),
        ):
            yield


def _bytes(pointers: Sequence[int], lengths: Sequence[int], indices: Any) -> list[bytes]:
    """The pages of these numbers, of each buffer."""
    return [
        b"".join(ctypes.string_at(start + int(index) * length, length) for index in indices)
        for start, length in zip(pointers, lengths, strict=True)
    ]


def _tokenized(request: Request, room: int) -> TokenizedGenerateReqInput:
    sampling = SamplingParams(temperature=0, max_new_tokens=4)
    sampling.normalize(None)
    wants = request.logprob_start >= 0
    return TokenizedGenerateReqInput(
        rid=request.name,
        input_text="",
        input_ids=array("q", request.prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=request.logprob_start if wants else len(request.prompt),
        top_logprobs_num=2,
        token_ids_logprob=None,
        stream=False,
        bootstrap_host=roles.NOBODY,
        bootstrap_room=room,
    )


@contextmanager
def _late(names: Sequence[str]) -> Iterator[None]:
    """Let the peers of these requests be there at the second attempt, as SGLang's own tests do."""

    def should_force_retry(request: Any) -> bool:
        return request.rid in names and not request.is_retracted

    with mock.patch.object(prefill, "should_force_retry", should_force_retry):
        yield


@contextmanager
def _without_transfer_engine() -> Iterator[None]:
    """Nothing is to be sent, so neither the engine is needed nor a server to meet peers at."""

    def fake_class(_: TransferBackend, kind: Any) -> Any:
        return get_kv_class(TransferBackend.FAKE, kind)

    with (
        mock.patch.object(bootstrap, "maybe_init_shared_mooncake_transfer_engine"),
        mock.patch.object(prefill, "get_kv_class", fake_class),
    ):
        yield
