"""SGLang's attention backends: which ones a model admits, and which ones may run its tail.

``GEMMA4`` and ``GEMMA3N`` are the only lists of them: admission in a server, the output of
``doctor``, and the tables of the documents follow from them. A class that is not admitted for a
model runs as stock, and so does a class derived from an admitted one. The evidence for each entry
is in ``test/srt/harness/attention_backends.toml``.

A class is correct for prefills if an extend step writes K and V of all rows to the pools, and if
each row of a window layer sees the layer's number of keys, its own included. It is correct for the
tail if a decode step over a donor's K and V sees the keys of the prefill's row, and can be
captured: it reads only buffers that ``init_forward_metadata_out_graph`` fills.
"""

from collections.abc import Iterable
from typing import NamedTuple

from sglang_gemma4_yoco.refusal import ServerRefusal


class Backend(NamedTuple):
    """A class of attention backends, as one model may use it.

    Attributes:
        path: the class's module and name in SGLang 0.5.22 and 0.5.23.
        flags: the values of ``--attention-backend`` for which SGLang builds it for this model.
        is_admitted: prefills on it may be cut.
        may_run_tail: the tail may run on it.
        reason: the reason for refusing a server, if not the general one.
    """

    path: str
    flags: tuple[str, ...]
    is_admitted: bool = False
    may_run_tail: bool = False
    reason: ServerRefusal | None = None


#: The entries of one model, by the path of the class.
BackendTable = dict[str, Backend]

TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
TRTLLM = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
FA = "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend"
XPU = "sglang.srt.layers.attention.xpu_backend.XPUAttentionBackend"
AITER = "sglang.srt.layers.attention.aiter_backend.AiterAttnBackend"
ASCEND = "sglang.srt.hardware_backend.npu.attention.ascend_backend.AscendAttnBackend"
AMX = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend"

TRITON_FAILS = ServerRefusal(
    "SGLang cannot run Gemma 3n's prefills on Triton's attention, which returns heads that the "
    "layer does not flatten (sgl-project/sglang#37515)"
)
FLASHINFER_DIFFERS = ServerRefusal(
    "FlashInfer's prefills of Gemma 3n may read other requests' K and V, or see one key fewer "
    "after a cached prefix (docs/upstream/gemma3n_window.md)"
)

GEMMA4 = (
    Backend(TRITON, ("triton",), is_admitted=True, may_run_tail=True),
    Backend(TRTLLM, ("trtllm_mha",), is_admitted=True),
    Backend(FA, ("fa4",), is_admitted=True),
    Backend(XPU, ("intel_xpu",), is_admitted=True),
    Backend(AITER, ("aiter",)),
    Backend(ASCEND, ("ascend",)),
    Backend(AMX, ("intel_amx",)),
)
GEMMA3N = (
    Backend(TRITON, ("triton",), may_run_tail=True, reason=TRITON_FAILS),
    Backend(TRTLLM, ("trtllm_mha",), is_admitted=True),
    Backend(FA, ("fa3", "fa4"), is_admitted=True),
    Backend(XPU, ("intel_xpu",), is_admitted=True),
    Backend(AITER, ("aiter",)),
    Backend(FLASHINFER, ("flashinfer",), reason=FLASHINFER_DIFFERS),
)


def make_table(entries: Iterable[Backend]) -> BackendTable:
    """Return the entries of one model by the path of the class."""
    return {entry.path: entry for entry in entries}


def get_path(kind: type) -> str:
    """Return a class's name with its module; other packages have classes of the same name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def may_run_tail(table: BackendTable, backend: object) -> bool:
    """Return True if the tail may run on a backend of this class."""
    entry = table.get(get_path(type(backend)))
    return entry is not None and entry.may_run_tail


def list_backend_modules() -> list[str]:
    """Return the modules of the classes that a model admits for prefills."""
    return [entry.path.rpartition(".")[0] for entry in GEMMA4 + GEMMA3N if entry.is_admitted]
