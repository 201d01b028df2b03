"""YOCO fast prefill for Gemma 4 and Gemma 3n (E2B and E4B) under SGLang.

The last layers of these models read K and V that earlier layers wrote and write none themselves
(arXiv:2405.05254 calls such a stack "You Only Cache Once"; vLLM calls the idea "KV sharing fast
prefill"). In prefill they therefore need only the rows whose output is used: normally the last row
of each request. This package patches SGLang's ``Gemma4TextModel`` and ``Gemma3nTextModel`` at run
time so that all other rows skip those layers.

SGLang loads it through the ``sglang.srt.plugins`` entry point; ``SGLANG_GEMMA4_YOCO=0`` turns it
off. Importing this module imports neither torch nor SGLang.

The path of one prefill. S is the first KV-shared layer of L; layer S-1, the donor (KV source
layer), is the last one with its own K and V. Layers S-1 to L-1 are the tail (the cross-decoder)::

    1  SGLang makes the attention metadata of the batch. Then core/planning.py decides on it. A
       batch that is eligible (core/eligibility.py) and worth cutting (core/worth.py) gets a Plan
       (core/plan.py): SGLang's batch rewritten to the kept rows (core/kept_batch.py), and a runner
       of the tail, which has metadata of its own (core/backend_pair.py).
    2  SGLang calls the model. core/forward.py takes the plan from the batch.
    3  core/cut.py runs layers 0 .. S-2 on all rows, in the model's own loop. If SGLang replays a
       captured prefill instead, prefill_exits/ leaves it at layer S-1.
    4  K and V of layer S-1 are written for all rows.
    5  The tail and the norm run on the kept rows: layer by layer (core/eager_tail.py), or from a
       captured graph (captured/graphs.py).
    6  The kept rows are scattered into the model's output. If any step fails, the batch falls back
       to stock; with several ranks the exception is raised.

The folders and files, from the top down. Imports go down, and no two of them import each other.
SGLang is imported in compat/ and commands/ only. core/ knows no model::

    commands/          the command line: doctor, status, verify
    plugin.py          SGLang's entry point: patch SGLang, or log one line with the reason
    startup/           what is patched in a process, and what is set up for a runner, by moment
        patch.py           wraps SGLang's methods; runner_methods.py and reports.py list them
        guard.py           around each call from a wrapped method: an error costs one log line
        backends_built.py  admits the server or not
        graphs_captured.py captures the tail after SGLang's own graphs
        checked.py         compares with stock, opens exits, begins audits
        pr27183.py         the two helpers of #27183, for models that cut a batch themselves
    metrics.py         /server_info and /metrics
    prefill_exits/     exits: SGLang's captured prefills are left at layer S-1
        exit_setup.py      fixes their capture, and opens the exits after a check
        graph_exits.py     leaves a graph at its exit point, and replays the tail
    checking/          comparisons with stock on this device and with these weights
        self_check.py      once, before the server serves
        audit.py           one of N prefills, while it serves
        layerwise.py       for both: each step of the tail on stock's inputs
        exit_check.py      an exit against a full replay of the same graph
        tail_graphs.py     each graph of the tail against the same layers, run eagerly
    captured/          the tail, captured in CUDA graphs: buckets, their capture and replay
    admission/         what a server must be for any of its batches to be cut
        order.py           the order of the reasons
        arguments.py       release, server arguments, environment variables
        runner_parts.py    attention backends, pools of K and V
        weights.py         kinds of linear layers
        third_party.py     code that may read skipped rows
    models/            one file for each text model, an implementation of core/model.py
    core/              the mechanism, as above
        state.py           the state of a served model
        per_layer.py       per-layer inputs, split by layers and rows
        interfaces.py      interfaces that the folders above implement
        ranks.py           agreement of tensor-parallel ranks
    compat/            SGLang's symbols, arguments, attention, pools, batches, layers and graphs
        backends.py        the attention backends that each model admits
    counters.py        forwards by outcome
    refusal.py         reasons why a batch, or a whole server, runs as stock
    log.py             log lines, each logged once
    patched.py         temporary attributes of one SGLang object
    settings.py        environment variables, read once
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    __version__ = version("sglang-gemma4-yoco")
except PackageNotFoundError:  # an uninstalled source tree on sys.path
    __version__ = "0+unknown"

try:
    #: The commit from which the wheel was built.
    COMMIT = Path(__file__).with_name("COMMIT").read_text().strip()
except OSError:  # a source tree, or an editable installation of one
    COMMIT = "unknown"

__all__ = ["COMMIT", "__version__"]
