"""YOCO fast prefill for Gemma 4 E2B and E4B under SGLang.

The last layers of these models read K and V that earlier layers wrote and write none themselves
(arXiv:2405.05254 calls such a stack "You Only Cache Once"; vLLM calls the idea "KV sharing fast
prefill"). In prefill they therefore need only the rows whose output is used: normally the last row
of each request. This package patches SGLang's ``Gemma4TextModel`` at run time so that all other
rows skip those layers.

SGLang loads it by itself through the ``sglang.srt.plugins`` entry point; ``SGLANG_GEMMA4_YOCO=0``
turns it off. Importing this module imports neither torch nor SGLang.

The path of one prefill. S is the first KV-shared layer of L; layer S-1, the donor, is the last one
with K and V of its own::

    1  SGLang plans the batch's attention; then core/gate.py decides whether the batch may be cut,
       and leaves a Plan on it: the kept rows (core/kept.py) and what runs the tail on them
    2  SGLang calls the model; core/forward.py takes the Plan from the batch
    3  core/cut.py has the model run layers 0 .. S-2 on all rows, by its own loop
    4  the donor's K and V are written for all rows (core/donor.py)
    5  the tail, layers S-1 .. L-1 and the norm, runs on the kept rows: eagerly (core/cut.py), or
       from a captured graph (captured/graphs.py)
    6  its rows are scattered into what the model returns; if anything fails, stock serves the batch

From the top down; imports go down, and both ways between captured/ and checking/::

    plugin.py          what SGLang calls: patch it, or log in one line why not
    commands/          what an operator runs: doctor, status, verify
    loading/           when a process and a runner start
        patch.py           SGLang's methods wrapped
        start.py           may this server's prefills be cut? capture the tail, check, announce
        classes.py         why not: somebody else's code where rows pass
        limits.py          why not: server arguments, attention, pools, linear layers
        metrics.py         /server_info and /metrics
        published.py       two helpers for code that cuts a batch itself
    prefill_graphs/    exits from SGLang's captured prefills; optional
    captured/          the tail captured in CUDA graphs
        graphs.py          capture, plan, replay
        backend.py         SGLang's graph backend
        proof.py           each graph against the same layers run eagerly
    checking/          does it give what stock gives, on this machine and with these weights?
        audit.py           every N-th prefill once more as stock, while it serves
        start.py           once, before it serves
        layerwise.py       each step of the fast path given stock's numbers, and compared
        requests.py        synthetic requests in borrowed slots
        rounding.py        which differences are rounding
    core/              the mechanism, as above; it imports nothing from the folders before it
        per_layer.py       per-layer inputs split by layers and rows
        state.py           what is known of a served model
        attention.py       the tail's own attention backend
        ranks.py           tensor-parallel ranks agree
        replaced.py        attributes of one object replaced for a span
    log.py             log lines and counters
    settings.py        environment variables, read once
    compat.py          what depends on the installed SGLang
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sglang-gemma4-yoco")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
