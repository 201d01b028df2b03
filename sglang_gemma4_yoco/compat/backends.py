"""SGLang's attention backends: which of them a model admits, and on what evidence.

``TABLE`` is the only list of them: what a server admits, what ``doctor`` says, and the tables of
the documents follow from it. A class that it does not admit for a model runs as stock, and so does
one that is derived from a class it admits.

A class is right for prefills if an extend step writes K and V of all rows to the pools, and if each
row sees in a window layer as many keys as the layer says, its own among them. It is right for the
tail if a decode step over a donor's K and V sees what the prefill's row sees, and can be captured:
it reads only buffers that planning fills.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_gemma4_yoco.refusal import ServerRefusal

#: The models, as the documents call them.
GEMMA4, GEMMA3N = "Gemma 4", "Gemma 3n"
TRITON = "TritonAttnBackend"

#: Tests run SGLang's own class.
RUN = "run"
#: The source of the class was read: 0.5.23 line by line, 0.5.22 by pattern.
READ = "read"
#: Not admitted.
STOCK = "stock"

TRITON_FAILS = ServerRefusal(
    "SGLang cannot run Gemma 3n's prefills on Triton's attention, which returns heads that the "
    "layer does not flatten (sgl-project/sglang#37515)"
)
FLASHINFER = ServerRefusal(
    "FlashInfer's prefills of Gemma 3n may read other requests' K and V, or see one key less "
    "behind a cached prefix (docs/upstream.md)"
)


@dataclass(frozen=True)
class Evidence:
    """What is known of a class for one model.

    Attributes:
        how: ``RUN``, ``READ`` or ``STOCK``.
        tests: files below ``test/srt``, or tests in them. They show that the class is right; if its
            source was read, that another class in its place is; else that it is refused.
        note: for the documents, in Markdown.
        reason: what a server logs that is refused for this, if not the general reason.
    """

    how: str
    tests: tuple[str, ...]
    note: str = ""
    reason: ServerRefusal | None = None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A class of attention backends, as SGLang 0.5.23 has it.

    Attributes:
        name: of the class.
        module: the module that defines it, below ``sglang.srt``.
        lines: of that module, where the window and the shape of what is returned were read.
        flags: by model the values of ``--attention-backend`` for which it is built.
        chosen: by model when SGLang chooses it, if not by name alone.
        prefills: by model whether it may serve prefills.
        tail: by model whether it may run the tail.
    """

    name: str
    module: str
    lines: str = ""
    flags: Mapping[str, tuple[str, ...]]
    chosen: Mapping[str, str] = field(default_factory=dict)
    prefills: Mapping[str, Evidence]
    tail: Mapping[str, Evidence] = field(default_factory=dict)


_AS_READ = {
    GEMMA4: Evidence(
        READ,
        ("server/test_pages", "triton/test_any_backend_triton", "forward/test_any_backend"),
    ),
    GEMMA3N: Evidence(
        READ,
        (
            *("server/test_gemma3n_server", "forward/test_gemma3n"),
            *("forward/test_ranks::test_ranks_of_gemma3n", "triton/test_gemma3n_triton"),
        ),
    ),
}
_REFUSED = ("unit/test_limits::test_an_attention_backend",)
_NARROW = Evidence(STOCK, _REFUSED, "its window is one key narrower in some of its kernels")

TABLE = (
    Backend(
        name=TRITON,
        module="layers.attention.triton_backend",
        flags={GEMMA4: ("triton",), GEMMA3N: ("triton",)},
        chosen={GEMMA4: "by default, except on SM100 (so also on an H100 and on AMD)"},
        prefills={
            GEMMA4: Evidence(RUN, ("triton/test_hard_batches",)),
            # In all releases that were tested.
            GEMMA3N: Evidence(
                STOCK,
                ("triton/test_gemma3n_triton::test_alone",),
                "SGLang stops at the first prefill "
                "([the fault](upstream/gemma3n_attention_output.md))",
                TRITON_FAILS,
            ),
        },
        tail={
            GEMMA4: Evidence(RUN, ("triton/test_hard_batches", "triton/test_any_backend_triton")),
            GEMMA3N: Evidence(RUN, ("triton/test_gemma3n_triton::test_beside_another_backend",)),
        },
    ),
    Backend(
        name="TRTLLMHAAttnBackend",
        module="layers.attention.trtllm_mha_backend",
        lines="1678, 1691, 1958 and 2035",
        flags={GEMMA4: ("trtllm_mha",), GEMMA3N: ("trtllm_mha",)},
        chosen=dict.fromkeys((GEMMA4, GEMMA3N), "by default on SM100 (such as B200)"),
        prefills=_AS_READ,
    ),
    Backend(
        name="FlashAttentionBackend",
        module="layers.attention.flashattention_backend",
        lines="1558 to 1568, 2064, 2137 to 2147 and 2416",
        flags={GEMMA4: ("fa4",), GEMMA3N: ("fa3", "fa4")},
        chosen={GEMMA3N: "`fa3` by default on SM90 (such as H100)"},
        prefills=_AS_READ,
    ),
    Backend(
        name="XPUAttentionBackend",
        module="layers.attention.xpu_backend",
        lines="747 to 752, 1050, 1413 to 1420 and 1624",
        flags={GEMMA4: ("intel_xpu",), GEMMA3N: ("intel_xpu",)},
        prefills=_AS_READ,
    ),
    Backend(
        name="AiterAttnBackend",
        module="layers.attention.aiter_backend",
        flags={GEMMA4: ("aiter",), GEMMA3N: ("aiter",)},
        chosen={GEMMA3N: "by default on AMD"},
        prefills={GEMMA4: _NARROW, GEMMA3N: _NARROW},
    ),
    Backend(
        name="AscendAttnBackend",
        module="hardware_backend.npu.attention.ascend_backend",
        flags={GEMMA4: ("ascend",)},
        chosen={GEMMA4: "by name, or by its platform"},
        prefills={
            GEMMA4: Evidence(STOCK, _REFUSED, "its pools and forward modes are its own"),
        },
    ),
    Backend(
        name="IntelAMXAttnBackend",
        module="layers.attention.intel_amx_backend",
        flags={GEMMA4: ("intel_amx",)},
        chosen={GEMMA4: "by name, or by its platform"},
        prefills={
            GEMMA4: Evidence(
                STOCK,
                _REFUSED,
                "its decode step writes K and V of as many rows as there are queries, and there is "
                "no Triton beside it",
            ),
        },
    ),
    Backend(
        name="FlashInferAttnBackend",
        module="layers.attention.flashinfer_backend",
        flags={GEMMA3N: ("flashinfer",)},
        chosen={GEMMA3N: "by default on other NVIDIA GPUs"},
        prefills={
            GEMMA3N: Evidence(
                STOCK,
                ("forward/test_gemma3n::test_flashinfer",),
                "it may read other requests' K and V, and its windows differ between rows: "
                "[what was read](upstream/gemma3n_window.md)",
                FLASHINFER,
            ),
        },
    ),
)


@dataclass(frozen=True)
class Attention:
    """What is known of attention backends for one model.

    Attributes:
        flags: the class by the value of ``--attention-backend`` for which it is built.
        prefills: by class whether it may serve prefills.
        tail: the classes that may run the tail.
    """

    flags: Mapping[str, str]
    prefills: dict[str, Evidence]
    tail: set[str]

    def list_flags(self, *how: str) -> list[str]:
        """Return the flags of the classes of which this is known."""
        return [flag for flag, name in self.flags.items() if self.prefills[name].how in how]


def judge(model: str) -> Attention:
    """Return what ``TABLE`` has for a model."""
    flags: dict[str, str] = {}
    found = Attention(flags, {}, set())
    for row in TABLE:
        if model in row.prefills:
            flags |= dict.fromkeys(row.flags[model], row.name)
            found.prefills[row.name] = row.prefills[model]
        if model in row.tail:
            found.tail.add(row.name)
    return found


def list_modules() -> list[str]:
    """Return the modules, below ``sglang.srt``, of the classes that a model admits."""
    modules = []
    for row in TABLE:
        if any(evidence.how != STOCK for evidence in row.prefills.values()):
            modules.append(row.module)
    return modules
