"""YOCO fast prefill for Gemma 4 and Gemma 3n (E2B and E4B) under SGLang.

The last layers of these models read K and V that earlier layers wrote and write none themselves
(arXiv:2405.05254 calls such a stack "You Only Cache Once"; vLLM calls the idea "KV sharing fast
prefill"). In prefill they therefore need only the rows whose output is used: normally the last row
of each request. This package patches SGLang's ``Gemma4TextModel`` and ``Gemma3nTextModel`` at run
time so that all other rows skip those layers.

SGLang loads it by itself through the ``sglang.srt.plugins`` entry point; ``SGLANG_GEMMA4_YOCO=0``
turns it off. Importing this module imports neither torch nor SGLang.

The path of one prefill. S is the first KV-shared layer of L; layer S-1, the donor, is the last one
with K and V of its own (in other words: the KV source layer). Layers S-1 to L-1 are the tail (the
cross-decoder)::

    1  SGLang plans the batch's attention. Then core/plan.py decides on the batch. If it may be cut
       (core/eligibility.py) and is worth it (core/worth.py), its Plan is stored on it: the kept
       rows (core/kept_rows.py), the batch as the tail sees it (core/tail_batch.py), and what runs
       the tail on them, on an attention backend of the tail's own (core/tail.py).
    2  SGLang calls the model. core/forward.py takes the plan from the batch.
    3  core/cut.py has the model run layers 0 .. S-2 on all rows, by its own loop.
    4  K and V of layer S-1 are written for all rows.
    5  The tail and the norm run on the kept rows: launched layer by layer, or from a captured graph
       (captured/graphs.py).
    6  Their rows are scattered into what the model returns. If anything fails, stock serves the
       batch.

The rooms, from the top down. Imports go down, and no two folders import each other. SGLang is
imported in compat/, and by commands that an operator runs, and nowhere else. core/ knows no model::

    plugin.py          what SGLang calls: patch it, or log in one line why not
    commands/          what an operator runs: doctor, status, verify
    loading/           when a process and a runner start
        patch.py           SGLang's methods wrapped
        start.py           may this server's prefills be cut? capture the tail, check, announce
        classes.py         unsupported: somebody else's code where rows pass
        limits.py          unsupported: server arguments, attention, pools, linear layers
        metrics.py         /server_info and /metrics
        published.py       two helpers for code that cuts a batch itself
    prefill_exits/     exits from SGLang's captured prefills
        exit_setup.py      SGLang's capture is repaired, and exits are opened after a check
        graph_exits.py     a graph is left at its exit point, and the tail replayed
    checking/          does it give what stock gives, on this machine and with these weights?
        start.py           once, before it serves
        audit.py           one of N prefills once more as stock, while it serves
        layerwise.py       each step of the fast path given stock's numbers, and compared
        exit_check.py      an exit against the same graph, run to its end
        tail_graphs.py     each graph against the same layers, run eagerly
        requests.py        synthetic requests in slots that are restored
        rounding.py        which differences are rounding
    captured/          the tail captured in CUDA graphs
        lifecycle.py       when it is captured and dropped
        graphs.py          capture, plan, replay
    models/            one file for each text model; core/model.py says what is in it
    core/              the mechanism, as above
        per_layer.py       per-layer inputs split by layers and rows
        state.py           what is known of a served model
        interfaces.py      what core calls of the parts above it
        ranks.py           tensor-parallel ranks agree
    compat/            SGLang's names, arguments, attention, pools, batches, layers and graphs
    counters.py        forwards by outcome
    refusal.py         why a batch, or a whole server, runs as stock
    log.py             log lines, each logged once
    replaced.py        attributes of one object of SGLang's replaced, and put back
    settings.py        environment variables, read once
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sglang-gemma4-yoco")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
