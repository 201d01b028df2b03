"""YOCO fast prefill for Gemma 4 E2B and E4B under SGLang.

The last layers of these models read K/V that earlier layers wrote and write none themselves
(arXiv:2405.05254 calls such a stack "You Only Cache Once"). In prefill they therefore need only
the rows whose output somebody reads: normally one row per request. This package patches SGLang's
``Gemma4TextModel`` at run time so that all other rows skip those layers.

SGLang loads it by itself through the ``sglang.srt.plugins`` entry point; ``SGLANG_GEMMA4_YOCO=0``
turns it off. Importing this module imports neither torch nor SGLang.

From the top down, each file knowing only those below it::

    plugin.py     what SGLang calls: settings and seams judged, then patched, or refused in one line

    commands/     what an operator runs, in no server
        main.py       the command line, one module for each command
        doctor.py     would it be active, before a server is started
        preflight.py  what that asks of SGLang: other plugins, the model, a server's flags
        ceiling.py    what a model can save at most, by arithmetic
        findings.py   what was found: lines to read, facts for a program, the verdict
        status.py     is it active on a running server
        verify.py     the same answers here, and sooner?
        servers.py    stock and fast servers: started, asked, seen to be so
        prompts.py    what they are asked; examination.py, timing.py: how
        agreement.py  how far answers are apart, and may be; verdict.py: are they?
        table.py      for a terminal; page.py: for a browser

    loading/      into SGLang's classes, once for each process and each runner
        patch.py      SGLang's methods wrapped, and put back
        starting.py   when a runner starts: facts found out, tail recorded, compared with stock
        repair.py     SGLang's recording of prefills, repaired where it is asked for by name
        metrics.py    the counters in SGLang's metrics and in /server_info
        published.py  two helpers for those who cut a batch themselves

    checking/     does it give what stock gives, here and with these weights?
        audit.py      every N-th prefill both ways, while the server serves
        self_check.py a few prefills both ways, before it serves
        replayed.py   a prefill that left SGLang's recording, and the recording run to its end
        proof.py      a graph must give what the launched layers give
        layerwise.py  each layer given what stock's was given, and compared
        rounding.py   how far two computations of the same numbers are apart, in roundings
        borrowed.py   a server's slots, borrowed for requests of nobody's

    cutting/      one batch on its way
        forward.py    one forward: cut, or served by stock
        cut.py        all rows to the last donor layer, kept rows behind it
        gate.py       may it be cut, and how? In the order of time: planned ahead, asked again
        fallback.py   when the fast path fails, stock serves the batch
        served.py     what is known of the served model and of its current batch
        doors.py      where SGLang's recorded prefills can be left

    tail/         what runs on the kept rows
        batch.py      the batch as the tail sees it, rewritten and restored
        attention.py  an attention backend of the tail's own, planned ahead
        graphs.py     the tail recorded for a few row counts, and replayed
        layers.py     the layers behind the cut, launched or while they are recorded
        donor.py      the last donor layer: K and V for all rows, the rest for kept ones
        per_layer.py  per-layer inputs, projected for the rows that each layer runs on
        shadow.py     methods replaced on single objects, and put back

    core/         the mechanism
        ranks.py      tensor-parallel ranks compare what they found out at start
        limits.py     which servers are refused: arguments, attention, pools, linear layers

    deciding/     which rows
        rows.py       which rows are kept (plain integers)
        threshold.py  whether skipping the others pays

    report.py     log lines and counters
    settings.py   what the operator has set, read and judged once
    seams.py      everything that depends on the installed SGLang's version
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sglang-gemma4-yoco")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
