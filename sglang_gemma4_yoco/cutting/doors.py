"""Where SGLang's recorded prefills can be left: at the attention of the first layer behind the cut.

SGLang records a prefill as one CUDA graph for each stretch between two attentions (its *breakable*
graphs), and runs the attentions eagerly between them. So every attention is a door out of the
recording. With L layers and the cut inside layer K-1::

    segment 0 | attention 0 | segment 1 | ... | segment K-1 | attention K-1 | ... | segment L
                                                            ^ the door: K and V of layer K-1

A batch that is cut runs SGLang's own segments up to the door; then its K and V are written, its
tail is replayed, and the tail's rows go into SGLang's output. Any other batch runs the recording to
its end. Nothing is recorded twice.

What can be read at the door are tensors that Python held there when SGLang recorded: their memory
is kept by the recording. Later segments overwrite it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.tail.shadow import Shadows

NOT_YET = "SGLang has recorded no prefills"
NOT_NOTED = "some recorded prefill does not come by the first layer behind the cut"


@dataclass(frozen=True)
class Door:
    """One recording's.

    Attributes:
        segments: how many of its segments run before the door.
        rows: [bucket, hidden], the residual at the input of the first layer behind the cut.
        keys, values: [bucket, kv_heads, head_dim], that layer's; None where it is layer K, which
            has none.
    """

    segments: int
    rows: torch.Tensor
    keys: torch.Tensor | None
    values: torch.Tensor | None


class Doors:
    """The doors of one model's recorded prefills, one for each bucket; all are open, or none.

    Attributes:
        closed: why no batch may leave by them; None if they are open.
    """

    def __init__(self) -> None:
        self.closed: str | None = NOT_YET
        self._noted: weakref.WeakKeyDictionary[Any, Door] = weakref.WeakKeyDictionary()
        self._recorded: seams.RecordedPrefills | None = None
        self._ways: dict[Any, tuple[Any, Door, torch.Tensor]] = {}

    # -- while SGLang records ------------------------------------------------------------------

    @contextmanager
    def noting(self, graph: Any, layer: Any) -> Iterator[None]:
        """Note where the prefill that is recorded in the span into ``graph`` can be left.

        Args:
            layer: the first one behind the cut.
        """
        inputs: list[torch.Tensor] = []

        def entered(stock: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                rows = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
                batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[3]
                if seams.residual_is_written(batch, rows):
                    inputs.append(rows)
                return stock(*args, **kwargs)

            return forward

        def attending(stock: Callable[..., Any]) -> Callable[..., Any]:
            def forward(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
                if inputs:
                    self._note(graph, layer.self_attn.attn, inputs[-1], k, v)
                return stock(q, k, v, *args, **kwargs)

            return forward

        with Shadows() as shadows:
            shadows.add(layer, "forward", entered)
            shadows.add(layer.self_attn.attn, "forward", attending)
            yield

    def _note(self, graph: Any, attention: Any, rows: torch.Tensor, k: Any, v: Any) -> None:
        keys = values = None
        if k is not None:
            heads = (-1, attention.tp_k_head_num, attention.head_dim)
            keys, values = (seams.held_by_graph(part).view(*heads) for part in (k, v))
        segments = seams.segments_so_far(graph)
        self._noted[graph] = Door(segments, seams.held_by_graph(rows), keys, values)

    # -- when it has recorded ------------------------------------------------------------------

    def find(self, runner: Any) -> str | None:
        """Find the doors of what this ``ModelRunner`` has recorded; why there are none, or None.

        They stay closed until ``open``.
        """
        self.close(NOT_YET)
        reason = seams.RecordedPrefills.why_not(runner)
        if reason is not None:
            return reason
        recorded = seams.RecordedPrefills(runner.prefill_cuda_graph_runner)
        outputs = recorded.outputs
        for key, graph in recorded.graphs.items():
            door = self._noted.get(graph)
            if door is None:
                self._ways.clear()
                return NOT_NOTED
            first = recorded.first_segments(graph, door.segments)
            self._ways[key] = (first, door, outputs[key])
        self._recorded = recorded
        return None

    def describe(self) -> str:
        """Of which buckets, and behind which segment each; the same on all ranks."""
        found = {str(key): door.segments for key, (_, door, _) in self._ways.items()}
        return f"doors: {sorted(found.items())}"

    def summary(self) -> str:
        """For the log: where they are, and of which recordings."""
        return f"leave its recording {self._place()}, where they can be cut ({self._which()})"

    def state(self) -> str:
        """The same for /server_info; why they are closed, if they are."""
        if self.closed is not None:
            return f"closed: {self.closed}"
        return f"open {self._place()} ({self._which()})"

    def _place(self) -> str:
        return f"behind segment {max(door.segments for _, door, _ in self._ways.values())}"

    def _which(self) -> str:
        return f"{len(self._ways)} recordings of up to {self.room} tokens"

    @property
    def room(self) -> int:
        """Tokens of the largest bucket; 0 without any."""
        return max((getattr(key, "size", key) for key in self._ways), default=0)

    def open(self) -> None:
        """Batches may leave by them from now on."""
        for _, _, output in self._ways.values():
            output.zero_()  # rows that nobody writes any more must at least be finite
        self.closed = None

    def close(self, reason: str) -> None:
        """No batch may leave by them from now on."""
        self.closed = reason
        self._recorded = None
        self._ways.clear()

    # -- one batch -----------------------------------------------------------------------------

    def reach(self, bucket: Any) -> tuple[Door, torch.Tensor]:
        """Run a recorded prefill up to its door.

        Returns:
            the door, and SGLang's output of that bucket, [bucket, hidden], which is not written.
        """
        assert self._recorded is not None, "the gate admits no batch where doors are closed"
        first, door, output = self._ways[bucket]
        self._recorded.replay(first)
        return door, output
