"""SGLang's attention backends: those that a model admits, and the evidence.

``TABLE`` is the only list of them: admission in a server, the output of ``doctor``, and the tables
of the documents follow from it. A class that it does not admit for a model runs as stock, and so
does a class derived from an admitted one.

A class is correct for prefills if an extend step writes K and V of all rows to the pools, and if
each row of a window layer sees the layer's number of keys, its own included. It is correct for the
tail if a decode step over a donor's K and V sees the keys of the prefill's row, and can be
captured: it reads only buffers that planning fills.
"""

from typing import NamedTuple

from sglang_gemma4_yoco.refusal import ServerRefusal

#: Tests run SGLang's own class.
RUN = "run"
#: The source of the class was reviewed: 0.5.23 in full, 0.5.22 by grep.
READ = "read"
#: Not admitted.
STOCK = "stock"


class Backend(NamedTuple):
    """A class of attention backends, and its status for one model.

    Attributes:
        model: as the documents call it.
        path: the class's module and name in SGLang 0.5.22 and 0.5.23.
        flags: the values of ``--attention-backend`` for which SGLang builds it for this model.
        prefills: ``RUN``, ``READ`` or ``STOCK``.
        tests: files below ``test/srt``, or tests in them. They show that the class is correct; if
            ``READ``, that a class used in its place is; if ``STOCK``, that it is refused.
        tail: tests that run the tail on it. If empty, it must not run the tail.
        chosen: when SGLang chooses it.
        note: for the documents, in Markdown.
        reason: the reason for refusing a server, if not the general one.
    """

    model: str
    path: str
    flags: tuple[str, ...]
    prefills: str
    tests: tuple[str, ...]
    tail: tuple[str, ...] = ()
    chosen: str = "by name"
    note: str = ""
    reason: ServerRefusal | None = None


GEMMA4, GEMMA3N = "Gemma 4", "Gemma 3n"

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

_HARD, _ANY = "triton/test_hard_batches", "triton/test_any_backend_triton"
_READ_4 = ("server/test_pages", _ANY, "forward/test_any_backend")
_READ_3N = (
    "server/test_gemma3n_server",
    "forward/test_gemma3n",
    "forward/test_ranks::test_ranks_of_gemma3n",
    "triton/test_gemma3n_triton",
)
_REFUSED = ("unit/test_limits::test_an_attention_backend",)

_NOT_SM100 = "by default (also on an H100 and on AMD), except on SM100"
_SM100 = "by default on SM100 (such as B200)"
_SM90 = "`fa3` by default on SM90 (such as H100)"
_AMD = "by default on AMD"
_PLATFORM = "by name, or by its platform"

_NARROW = "its window is one key narrower in some of its kernels"
_OWN_POOLS = "its pools and forward modes are its own"
_NO_TRITON = (
    "its decode step writes K and V of as many rows as there are queries, and Triton is not "
    "available on its platform"
)

TABLE = (
    Backend(GEMMA4, TRITON, ("triton",), RUN, (_HARD,), tail=(_HARD, _ANY), chosen=_NOT_SM100),
    Backend(GEMMA4, TRTLLM, ("trtllm_mha",), READ, _READ_4, chosen=_SM100),
    Backend(GEMMA4, FA, ("fa4",), READ, _READ_4),
    Backend(GEMMA4, XPU, ("intel_xpu",), READ, _READ_4),
    Backend(GEMMA4, AITER, ("aiter",), STOCK, _REFUSED, note=_NARROW),
    Backend(GEMMA4, ASCEND, ("ascend",), STOCK, _REFUSED, chosen=_PLATFORM, note=_OWN_POOLS),
    Backend(GEMMA4, AMX, ("intel_amx",), STOCK, _REFUSED, chosen=_PLATFORM, note=_NO_TRITON),
    Backend(
        *(GEMMA3N, TRITON, ("triton",), STOCK, ("triton/test_gemma3n_triton::test_alone",)),
        tail=("triton/test_gemma3n_triton::test_beside_another_backend",),
        # In all releases that were tested.
        note="SGLang crashes at the first prefill ([bug](upstream/gemma3n_attention_output.md))",
        reason=TRITON_FAILS,
    ),
    Backend(GEMMA3N, TRTLLM, ("trtllm_mha",), READ, _READ_3N, chosen=_SM100),
    Backend(GEMMA3N, FA, ("fa3", "fa4"), READ, _READ_3N, chosen=_SM90),
    Backend(GEMMA3N, XPU, ("intel_xpu",), READ, _READ_3N),
    Backend(GEMMA3N, AITER, ("aiter",), STOCK, _REFUSED, chosen=_AMD, note=_NARROW),
    Backend(
        *(GEMMA3N, FLASHINFER, ("flashinfer",), STOCK, ("forward/test_gemma3n::test_flashinfer",)),
        chosen="by default on other NVIDIA GPUs",
        note="it may read other requests' K and V, and its windows differ between rows: "
        "[what was read](upstream/gemma3n_window.md)",
        reason=FLASHINFER_DIFFERS,
    ),
)
#: The rows of ``TABLE`` for one model, by the path of the class.
Attention = dict[str, Backend]


def list_rows(model: str) -> Attention:
    """Return the rows of ``TABLE`` for a model, by the path of the class."""
    return {row.path: row for row in TABLE if row.model == model}


def list_flags(attention: Attention, *prefills: str) -> list[str]:
    """Return the flags of the classes with one of these values of ``prefills``."""
    return [flag for row in attention.values() if row.prefills in prefills for flag in row.flags]


def get_path(kind: type) -> str:
    """Return a class's name with its module; other packages have classes of the same name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def may_run_tail(attention: Attention, backend: object) -> bool:
    """Return True if the tail may run on a backend: tests run it on its class."""
    row = attention.get(get_path(type(backend)))
    return row is not None and bool(row.tail)


def list_backend_modules() -> list[str]:
    """Return the modules of the classes that a model admits for prefills."""
    return [row.path.rpartition(".")[0] for row in TABLE if row.prefills != STOCK]
