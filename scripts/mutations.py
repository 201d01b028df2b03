"""The named ways in which ``mutation_check.py`` breaks the package.

Written against what could break: which rows, whose metadata, what is put back, who refuses. None of
them may leave the package's behaviour as it was. Every single entry of the gate's tables is one
more, made from the source itself.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from hashlib import sha256

from environment import REPO

PACKAGE = "sglang_gemma4_yoco"


@dataclass(frozen=True)
class Mutation:
    """One way to break the package: in ``file``, ``old`` becomes ``new``.

    Attributes:
        old: source that occurs exactly once in its file.
        first: the behavioural tests that should notice, relative to ``test/srt``.
    """

    name: str
    file: str
    old: str
    new: str
    first: str

    @property
    def change(self) -> str:
        """What it does, in twelve digits: a verdict is on this, whatever the mutation is called."""
        return sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]


class StaleMutationError(Exception):
    """A mutation's ``old`` does not occur exactly once in its file."""


def broken(mutation: Mutation, source: str) -> str:
    """``source`` with the mutation applied.

    Raises:
        StaleMutationError: the source has changed since the mutation was written.
    """
    count = source.count(mutation.old)
    if count != 1:
        raise StaleMutationError(
            f"{mutation.name!r}: its source occurs {count} times in {mutation.file}; "
            "bring the list of mutations up to date"
        )
    return source.replace(mutation.old, mutation.new)


def of(file: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    """Mutations of one file: (name, old, new, first)."""
    return [Mutation(name, file, old, new, first) for name, old, new, first in mutations]


FORWARD = "forward/test_forward.py"
CUT = f"{FORWARD}::test_cut_inside_the_donor"
DONOR = "forward/test_donor.py"
LATE = f"{DONOR}::test_a_residual_that_is_owed_an_update"
PROJECTIONS = f"{DONOR}::test_projections_that_cannot_be_sliced"
SERVED = f"{FORWARD}::test_a_failure_is_served_by_stock"
ENDLESS = f"{FORWARD}::test_a_loop_that_does_not_end_where_it_is_told_to"
UNREAD = f"{FORWARD}::test_unread_chunks_skip_the_tail_at_every_cut"
GIVES_UP = f"{FORWARD}::test_failures_in_a_row_turn_the_fast_path_off"
REFUSED = "forward/test_refused.py"
REFUSED_BATCHES = f"{REFUSED}::test_refused_batches"
DECIDING = "forward/test_deciding.py"
KINDS = f"{DECIDING}::test_a_kind_of_linear_layer"
FIELDS = f"{DECIDING}::test_a_field_of_the_batch"
ARGUMENTS = f"{DECIDING}::test_an_argument_of_the_server"
# What the gate returns for a batch that may be cut.
ADMITTED = (
    "gate.Admission(gate.kept_rows(forward_batch), gate.is_unread(forward_batch), "
    "gate.judged(forward_batch))"
)
RECORDED = "forward/test_recorded.py"
RANKS = "forward/test_ranks.py"
EQUIVALENCE = "forward/test_equivalence.py"
FIELDS_OF_TAIL = "forward/test_tails_batch.py::test_every_field_describes_the_kept_rows"
_HARD = "triton/test_hard_batches.py::test_hard_batch[two pools"
_USUAL = f"{_HARD}-own backend-DonorCut.KEYS_AND_VALUES"
WINDOWS = f"{_USUAL}-prefixes at the window]"
BESIDE_DECODE = f"{_USUAL}-unfinished beside decode rows]"
LOGPROBS = f"{_USUAL}-logprobs of unfinished]"
ON_ONE = f"{_HARD}-rebuilt backend-DonorCut.AFTER_ATTENTION-prefixes at the window]"
CUDA = "triton/test_cuda_branches.py"
IMAGES = "triton/test_image_masks.py"
READS = "forward/test_no_sync.py"
HOST_WORK = "forward/test_added_work.py"
FAULTS = "server/test_load_faults.py"
DEFAULTS = "server/test_defaults.py"
RULE = "forward/test_measured_rule.py"
REPLAYED = "forward/test_replayed_tail.py"
TOLD = "server/test_served_metrics.py"
OTHER_MAINS = "forward/test_any_backend.py"
VERIFY = "server/test_verify.py"
DEMO = f"{VERIFY}::test_the_demo_keeps_its_contract"
KINDS_ASKED = f"{VERIFY}::test_every_kind_of_prompt_is_asked_and_compared"
PEOPLE_SEE = f"{VERIFY}::test_what_people_see"
BROKEN = f"{VERIFY}::test_a_broken_package_is_told"
CANNOT = f"{VERIFY}::test_what_cannot_be_verified"
PROVEN = f"{REPLAYED}::test_a_graph_that_differs_is_not_used"
ONE_ROW_EACH = f"{REPLAYED}::test_one_row_of_each_request"
OTHER_CUTS = f"{REPLAYED}::test_other_cuts_are_replayed_from_the_first_shared_layer"
_RECORDED = "recorded tail-DonorCut.KEYS_AND_VALUES-prefixes at the window]"
RECORDED_WINDOWS = f"{_HARD}-{_RECORDED}"

_WRITTEN = [
    *of(
        "deciding/rows.py",
        ("wrong suffix: shifted by one",
         "range(end - m, end)", "range(max(end - m - 1, 0), max(end - 1, m))", CUT),
        ("suffix one row short",
         "min(max(n - start, 1), n)", "min(max(n - start - 1, 1), n)", CUT),
        ("no row of a request without logprobs beside one with",
         "min(max(n - start, 1), n)", "min(n - start, n)", CUT),
        ("logprob start of another request",
         "for n, start in zip(extend_lens, logprob_starts, strict=True)",
         "for n, start in zip(extend_lens, logprob_starts[::-1], strict=True)", CUT),
        ("a suffix that begins where its request begins",
         "p + n - m for p, n, m in", "p + m - m for p, n, m in", FIELDS_OF_TAIL),
        ("every kept suffix begins at the first kept row",
         "return [0, *accumulate(self.lens[:-1])]", "return [0] * len(self.lens)",
         "forward/test_tails_batch.py"),
        ("a batch of suffixes taken for one of last rows",
         "return self.kept == len(self.lens)", "return min(self.lens) == 1", CUT),
    ),
    *of(
        "cutting/tail.py",
        ("wrong row: the one before the last",
         "numbers, padding = kept.indices(),",
         "numbers, padding = [max(i - 1, 0) for i in kept.indices()],", CUT),
        ("unpruned out_cache_loc of a suffix",
         '"out_cache_loc": batch.out_cache_loc.index_select(0, index),',
         '"out_cache_loc": batch.out_cache_loc,', FIELDS_OF_TAIL),
        ("unpruned translated slots of a suffix",
         '                "kv_loc_cols": index,\n', "", FIELDS_OF_TAIL),
        ("unpruned input ids",
         'fields["input_ids"] = input_ids.index_select(0, index)', "pass", FIELDS_OF_TAIL),
        ("prefix lengths of the whole batch",
         '"extend_prefix_lens_cpu": list(kept.prefix_lens),',
         '"extend_prefix_lens_cpu": list(batch.extend_prefix_lens_cpu),', FIELDS_OF_TAIL),
        ("prefix lengths of the whole batch, on the device",
         '"extend_prefix_lens": prefix_lens,',
         '"extend_prefix_lens": batch.extend_prefix_lens,', FIELDS_OF_TAIL),
        ("host and device lengths disagree",
         '"extend_seq_lens_cpu": list(kept.lens),',
         '"extend_seq_lens_cpu": list(kept.extend_lens),', FIELDS_OF_TAIL),
        ("lengths of the whole batch, on the device",
         '"extend_seq_lens": lens,',
         '"extend_seq_lens": batch.extend_seq_lens,', FIELDS_OF_TAIL),
        ("start locations of the whole batch",
         '"extend_start_loc": start_loc,',
         '"extend_start_loc": batch.extend_start_loc,', FIELDS_OF_TAIL),
        ("the tail stays an extend of single rows",
         'fields["forward_mode"] = seams.ForwardMode.DECODE',
         'fields["forward_mode"] = seams.ForwardMode.EXTEND', CUT),
        ("lists that travel together are laid over one another",
         "columns = self._packed[kept.kept :]", "columns = self._packed[: -kept.kept]",
         FIELDS_OF_TAIL),
        ("lists that travel together begin anywhere",
         "[0] * (-len(kept.lens) % _ALIGNMENT)", "[]",
         f"{HOST_WORK}::test_all_that_the_host_knows_travels_at_once"),
        ("each list travels alone",
         "        packed = packed.to(device, non_blocking=True)\n",
         "        packed = torch.cat([part.to(device) for part in packed.split(16)])\n",
         "forward/test_added_work.py::test_all_that_the_host_knows_travels_at_once"),
        ("a chunk that nobody reads is read", "unread=unread,", "unread=False,",
         UNREAD),
        ("positions of the whole batch",
         'return {**self.fields, "positions": positions}', "return self.fields", FIELDS_OF_TAIL),
        ("fields not put back",
         "        for name, value in saved.items():\n"
         "            setattr(forward_batch, name, value)", "        pass", CUT),
        ("residual stream not put back",
         'for name in (*fields, "residual_stream") if hasattr(forward_batch, name)]',
         "for name in fields if hasattr(forward_batch, name)]", SERVED),
    ),
    *of(
        "cutting/cut.py",
        ("K and V of a replayed batch are not written",
         "seams.write_keys_and_values(cut.way.main, cut.way.tail, attention, batch, k, v)",
         "pass",
         ONE_ROW_EACH),
        ("replayed at the positions of the batch before",
         "        torch.index_select(positions, 0, index, out=replay.inputs.positions)\n", "",
         ONE_ROW_EACH),
        ("replayed on the rows of the batch before",
         "        torch.index_select(front, 0, index, out=replay.inputs.rows)\n", "",
         ONE_ROW_EACH),
        ("layer K is replayed at the positions of the batch before",
         "            replay.inputs.positions.copy_(cut.row_positions)\n", "", OTHER_CUTS),
        ("layer K is replayed on the rows of the batch before",
         "            replay.inputs.rows.copy_(hidden_states)\n", "", OTHER_CUTS),
        ("replayed with the per-layer embeddings of the batch before",
         "if room is not None and (room.embedded is None) != (per_layer_inputs is None):",
         "if False:", f"{REPLAYED}::test_without_per_layer_embeddings_stock_serves"),
        ("scatter to the wrong rows",
         "gathered.front.index_copy_(0, self.tail.index, rows)",
         "gathered.front.index_copy_(0, self.tail.index.roll(1), rows)", CUT),
        ("no scatter",
         "        gathered.front.index_copy_(0, self.tail.index, rows)\n", "", CUT),
        ("the front's residual is not the batch's again after the tail",
         "rows)\n        self.restore()\n", "rows)\n", CUT),
        ("stale positions in the tail",
         "positions=cut.row_positions,\n", "positions=positions[: hidden_states.shape[0]],\n",
         CUT),
        ("queries at the first positions",
         "donor.queries(parts, normed_rows, cut.row_positions)",
         "donor.queries(parts, normed_rows, positions[: normed_rows.shape[0]])", CUT),
        ("no restore after an exception",
         "        try:\n            self.restore()\n        finally:",
         "        try:\n            if error is None:\n                self.restore()\n"
         "        finally:", SERVED),
        ("shadows stay on the model",
         "            self.restore()\n        finally:\n            self._shadows.close()",
         "            self.restore()\n        finally:\n            pass", CUT),
        ("donor K and V of kept rows only",
         "        k, v = donor.keys_and_values(parts, hidden_states, positions)\n"
         "        normed_rows",
         "        k, v = donor.keys_and_values(parts, hidden_states, positions)\n"
         "        k, v = k.clone(), v.clone()\n"
         "        k[0], v[0] = k[-1], v[-1]\n"
         "        normed_rows", CUT),
        ("an unread chunk writes no K and V in the donor",
         "        donor.attend(parts, q, k, v, batch)\n", "", UNREAD),
        ("an unread chunk writes K and V of unnormed rows",
         "normed = self.donor.input_layernorm(hidden_states)", "normed = hidden_states", UNREAD),
        ("the loop goes on behind a replayed tail",
         "    cut.end_before(0)\n", "", ONE_ROW_EACH),
        ("the loop goes on behind layer K, where all is replayed",
         "    cut.end_before(1)\n    cut.shadow(cut.layers[0], \"forward\", all_at_once)\n",
         "    cut.shadow(cut.layers[0], \"forward\", all_at_once)\n", OTHER_CUTS),
        ("the loop ends one layer late", "self._first_shared + layer)",
         "self._first_shared + layer + 1)", UNREAD),
        ("layers behind the end run unnoticed",
         "        for following in self.layers[layer : layer + 1]:\n",
         "        for following in ():\n",
         ENDLESS),
        ("attention's first rows instead of the kept ones",
         "return cut.kept(output)", "return output[: cut.tail.kept.kept]",
         f"{DONOR}::test_a_donor_whose_weights_are_not_plain"),
        ("per-layer inputs of the first rows",
         "isinstance(given, per_layer.KeptInput) else self.kept(given)",
         "isinstance(given, per_layer.KeptInput) else given[: self.tail.kept.kept]",
         f"{DONOR}::test_per_layer_inputs_whose_weights_are_not_plain"),
        ("final norm of all rows but the kept",
         "return front.index_copy_(0, self.tail.index, stock(self.kept(front)))",
         "return front", CUT),
        ("the tail's residual stays the front's",
         "        seams.write_residual(forward_batch, rows)\n", "", CUT),
        ("the batch's positions stay the front's",
         "way.running(forward_batch, tail.fields_at(row_positions))",
         "way.running(forward_batch, tail.fields)", WINDOWS),
        ("cut although an update is owed to the residual",
         "            not seams.residual_is_written(self._plan.batch, hidden_states)\n"
         "            or",
         "            False\n            or", LATE),
        ("cut although rows were added on the way",
         "            or hidden_states.shape[0] != self.tail.kept.total\n", "",
         f"{DONOR}::test_rows_that_are_not_the_batchs"),
        ("the donor's input is not looked at",
         "            cut.must_be_whole(hidden_states)\n            with Shadows()",
         "            with Shadows()", LATE),
        ("the donor's input is not looked at when nobody reads its output",
         "        self.must_be_whole(hidden_states)\n        normed",
         "        normed", f"{DONOR}::test_an_unread_chunk_that_is_owed_an_update"),
        ("the first shared layer's input is not looked at",
         "            cut.must_be_whole(hidden_states)\n            rows = cut",
         "            rows = cut",
         f"{DONOR}::test_rows_that_are_not_the_batchs"),
    ),
    *of(
        "cutting/plan.py",
        ("an unread chunk is cut in the donor although its layer is to run",
         "if allowed is DonorCut.AFTER_ATTENTION and tail.unread:", "if False:", UNREAD),
        ("K and V apart from queries although the tail is no decode step",
         "if allowed is DonorCut.KEYS_AND_VALUES and not tail.decodes:", "if False:", CUT),
        ("a batch that was not planned is cut",
         "        return Refusal(forward_batch, NOT_PLANNED)\n", "        pass\n",
         f"{FORWARD}::test_the_plan_of_another_batch_is_not_used"),
        ("metadata of the batch before",
         "        and planned.batch is forward_batch\n", "",
         f"{FORWARD}::test_the_plan_of_another_batch_is_not_used"),
        ("a plan for another backend is used",
         "            and seams.current_attn_backend() is self.way.main\n", "", DECIDING),
        ("a plan is used while a graph is recorded",
         "            and not seams.is_capturing()\n", "", DECIDING),
        ("a plan is used though the batch has changed",
         "            all(map(operator.is_, self.judged, now))\n"
         "            and (", "            (", DECIDING),
        ("a plan of suffixes is used though an image has come",
         "            and (self.tail.kept.one_per_request or not gate.is_multimodal(self.batch))\n",
         "", DECIDING),
        ("the gate is asked again though the plan holds",
         "(isinstance(planned, Refusal) or planned.still_holds())",
         "(isinstance(planned, Refusal) or (gate.ineligible_reason(owner, forward_batch) is None "
         "and planned.still_holds()))", HOST_WORK),
        ("a refusal is not remembered",
         "(isinstance(planned, Refusal) or planned.still_holds())",
         "isinstance(planned, Plan) and planned.still_holds()", HOST_WORK),
        ("images lose their masks on a rebuilt backend",
         "        return Refusal(forward_batch, IMAGES_ON_ONE_BACKEND)\n", "        pass\n",
         f"{IMAGES}::test_one_backend_for_both_leaves_images_to_stock"),
        ("what is not planned ahead is not judged",
         "        return Refusal(forward_batch, verdict)\n    if owner.attention",
         f"        verdict = {ADMITTED}\n    if owner.attention",
         f"{HOST_WORK}::test_it_is_asked_once_where_nothing_is_planned_ahead"),
        ("what is planned ahead is not judged",
         "        return Refusal(forward_batch, verdict)\n    assert",
         f"        verdict = {ADMITTED}\n    assert", FIELDS),
    ),
    *of(
        "cutting/forward.py",
        ("a graph that failed is replayed again", "if isinstance(failure, ReplayError):",
         "if False:", f"{REPLAYED}::test_a_failing_replay_is_served_by_stock"),
        ("replays are counted as launches",
         "return report.ACTIVE if plan.replay is None else report.TAIL_REPLAYED",
         "return report.ACTIVE", ONE_ROW_EACH),
        ("a failure is not served by stock",
         "        if not fallback.is_alone():\n            raise\n", "        raise\n", SERVED),
        ("stock runs again although other ranks wait",
         "        if not fallback.is_alone():\n            raise\n", "",
         f"{FORWARD}::test_with_other_ranks_a_failure_propagates_and_leaves_all_ready"),
        ("the second run gets overwritten embeddings",
         "        fallback.failed(failure, rows)\n        fallback.put_back(embeds, copy)\n",
         "        fallback.failed(failure, rows)\n", SERVED),
        ("skipped rows are not counted", "skipped=kept.total - computed,", "skipped=0,",
         f"{TOLD}::test_forwards_and_rows"),
        ("a late refusal leaves overwritten embeddings",
         "tell=gate.is_news(reason))\n    fallback.put_back(embeds, copy)\n",
         "tell=gate.is_news(reason))\n", LATE),
        ("a success is no success", "        fallback.succeeded()\n", "",
         f"{FORWARD}::test_a_success_between_failures_keeps_the_fast_path_on"),
        ("stock runs on the tail's plan",
         "            plan.way.after_failure(forward_batch)\n", "            pass\n",
         f"{FORWARD}::test_metadata_that_cannot_be_rebuilt_is_planned_anew_for_stock"),
        ("planned batches are never let go",
         "    finally:\n        known.release()\n", "    finally:\n        pass\n",
         f"{FORWARD}::test_no_batch_is_held_after_its_forward"),
        ("refused batches are never let go",
         "        known.release()\n        reason = decided.reason\n",
         "        reason = decided.reason\n",
         "forward/test_tails_batch.py::TestPlansThatNobodyUses"),
    ),
    *of(
        "owner.py",
        ("a recording that fails ends the server",
         "            if not fallback.is_alone():\n                raise\n"
         "            report.failure(\"Gemma 4 fast prefill: rec",
         "            if True:\n                raise\n"
         "            report.failure(\"Gemma 4 fast prefill: rec",
         f"{REPLAYED}::test_a_failing_recording_leaves_a_working_server"),
        ("graphs outlive the backends that they read",
         "        self.release()\n        self.launch(graphs.NOT_YET)\n",
         "        self.release()\n",
         f"{REPLAYED}::test_closed_with_the_backends"),
        ("a launched tail on a GPU costs as on a CPU",
         "return TailCost.LAUNCHES if self._on_gpu else TailCost.ARITHMETIC",
         "return TailCost.ARITHMETIC",
         f"{REPLAYED}::test_on_a_gpu_a_launched_tail_must_skip_many"),
        ("a replayed tail costs as a launched one",
         "if read == 0 or (self.graphs is not None and self.graphs.size_for(kept) is not None):",
         "if read == 0:", f"{REPLAYED}::test_by_default_one_skipped_row_is_enough"),
        ("decode steps are planned for",
         "            if forward_batch.forward_mode is not seams.ForwardMode.DECODE:\n"
         "                self._plan_ahead(forward_batch)",
         "            self._plan_ahead(forward_batch)",
         f"{FORWARD}::test_decode_goes_straight_through"),
        ("a plan that fails ends the forward",
         "            if not fallback.is_alone():\n                raise  # the other",
         "            if True:\n                raise  # the other",
         f"{FORWARD}::test_an_exception_while_planning_the_tail_costs_one_stock_forward"),
        ("a plan that fails on one rank is served by stock there",
         "            if not fallback.is_alone():\n                raise  # the other",
         "            if False:\n                raise  # the other", DECIDING),
        ("a backend that was replaced is still planned for",
         "        self._shadows.close()\n        self.model", "        self.model",
         f"{FORWARD}::test_reinitialised_backends_are_followed"),
        ("the backend of a reloaded model stays planned for",
         "        previous.close()\n", "        pass\n",
         f"{FORWARD}::test_reinitialised_backends_are_followed"),
        ("the tail has no backend of its own",
         "        if self.attention is not None:\n            self._shadows.add",
         "        if False:\n            self._shadows.add",
         "forward/test_no_sync.py::test_the_tail_is_planned_before_the_first_layer"),
        ("a plan is found for any batch",
         "isinstance(self.planned, Plan) and self.planned.batch is forward_batch:",
         "isinstance(self.planned, Plan):",
         "forward/test_tails_batch.py::TestPublishedHelpers"),
        ("embedding servers are admitted",
         "    if not runner.is_generation:\n        return gate.EMBEDDINGS\n", "",
         "forward/test_other_models.py::test_an_embedding_server_is_refused"),
        ("a backend is built for a server that attends by another kind",
         "        or backends.why_not_main(main)\n", "",
         f"{HOST_WORK}::test_no_backend_is_built_where_the_gate_will_refuse"),
        ("ranks do not tell whether they planned ahead",
         "planned ahead: {attention is not None}, ", "",
         f"{RANKS}::test_tensor_parallel_ranks_cut_alike_or_not_at_all"),
        ("what the ranks found out is forgotten",
         "    owner.constant_reason = reason\n", "",
         f"{RANKS}::test_tensor_parallel_ranks_cut_alike_or_not_at_all"),
        ("replayed prefills are not announced", "    if graph is not None:\n", "    if False:\n",
         RECORDED),
        ("uninstalled, and still planning",
         "    for owner in list(_attached):\n        owner.close()\n", "    pass\n",
         f"{FORWARD}::TestInstallation"),
        ("what was known of a model outlives the package",
         "        self.model.__dict__.pop(_ENTRY, None)\n", "",
         f"{HOST_WORK}::test_one_entry_is_all_that_a_model_carries"),
        ("the cut is decided without knowing the cache",
         "if reason is None else None, runner.attn_backend)", "if reason is None else None)",
         f"{HOST_WORK}::test_the_cut_is_decided_on_a_backend_over_the_runners_pools"),
        ("pools are not looked at",
         "        or backends.why_not_pool(runner.token_to_kv_pool, runner.dtype, main)\n", "",
         f"{OTHER_MAINS}::test_a_rounded_cache_beside_another_backend"),
        ("without a backend of its own the tail runs on any",
         "        reason = backends.why_not_alone(runner.attn_backend)\n", "        pass\n",
         f"{OTHER_MAINS}::test_without_a_backend_of_its_own_the_tail_runs_on_none"),
        ("any other backend is as good as the one that was looked at",
         "        if backend is None or backend is self._backend:", "        if True:",
         f"{DECIDING}::test_a_backend_that_is_not_proven"),
        ("whatever is registered as Triton's is the tail's",
         "if backends.TAIL in backends.can(type(tail)):", "if True:",
         f"{OTHER_MAINS}::test_without_a_backend_of_its_own_the_tail_runs_on_none"),
        ("the tail's kernels are left to the first request",
         "        if owner.attention is not None:\n            owner.attention.compile",
         "        if False:\n            owner.attention.compile",
         f"{OTHER_MAINS}::test_the_tails_kernels_are_compiled_at_start"),
        ("nothing is compiled at start", "    _compile_kernels(owner)\n", "",
         f"{HOST_WORK}::test_the_donors_kernels_are_compiled_at_start"),
        ("kernels that cannot be compiled end the server",
         "    except Exception as failure:  # noqa: BLE001 - whatever",
         "    except KeyError as failure:  # noqa: BLE001 - whatever",
         f"{HOST_WORK}::test_kernels_that_cannot_be_compiled_are_no_servers_end"),
    ),
    *of(
        "seams.py",
        ("a recorded decode window one key short",
         "    with whole_window(backend):\n        if live",
         "    with ExitStack():\n        if live",
         RECORDED_WINDOWS),
        ("a donor with a window writes where one without does",
         '    if getattr(pool, "layers_mapping", {}).get(attention.layer_id, (0, False))[1]:\n',
         "    if False:\n", RECORDED_WINDOWS),
        ("decode window one key short",
         "backend.sliding_window_size = window + 1", "backend.sliding_window_size = window",
         WINDOWS),
        ("window left widened",
         "    finally:\n        backend.sliding_window_size = window\n",
         "    finally:\n        pass\n", WINDOWS),
        ("decode window one key long",
         "backend.sliding_window_size = window + 1", "backend.sliding_window_size = window + 2",
         WINDOWS),
        ("the last tested release counts as newer",
         "return _installed() > LAST_TESTED", "return _installed() >= LAST_TESTED", WINDOWS),
        ("the release is read from a file every time",
         "@cache  # it is read from a file, and asked for with every batch\n", "",
         f"{READS}::test_on_triton_the_tails_plan_reads_nothing"),
        ("the tail's planner reads how large its buffer must be",
         "if planner is not None and _has_window(backend):", "if False:",
         f"{READS}::test_on_triton_the_tails_plan_reads_nothing"),
        ("SGLang's planner keeps the tail's buffer",
         "        setattr(planner, _WINDOW_PLANNER, stock)\n", "        pass\n", WINDOWS),
        ("room for the window of one request",
         "        requests * backend.sliding_window_size, dtype",
         "        backend.sliding_window_size, dtype", WINDOWS),
        ("the type of the KV cache is not known",
         "return dtype\n\n\n__all__", "return None\n\n\n__all__",
         "triton/test_cache_dtype.py"),
        ("the residual of a batch is not written",
         "        residual_batch.set_written(hidden_states, forward_batch)", "        pass", CUT),
        ("a pending residual counts as written",
         "    if stream.pending is not None:\n        return False\n", "",
         f"{DONOR}::TestResidualIsWritten"),
        ("somebody else's residual counts as the layer's input",
         "return stream.residual is None or stream.residual is hidden_states", "return True",
         DONOR),
        ("the second backend is the first",
         '    backend = ATTENTION_BACKENDS["triton"](runner)\n',
         "    backend = runner.attn_backend\n", WINDOWS),
        ("a quantised projection counts as plain",
         "        type(getattr(projection, \"quant_method\", None)) is UnquantizedLinearMethod\n"
         "        and isinstance", "        isinstance", PROJECTIONS),
        ("a projection packed for the CPU counts as plain",
         "        and not getattr(projection, \"use_intel_amx_backend\", False)"
         "  # packed for the CPU\n", "", PROJECTIONS),
        ("a projection in eight bits counts as plain",
         "        and weight.dtype.itemsize >= 2\n", "", PROJECTIONS),
        ("ranks know no others",
         '    if argument is None or (argument("tp_size") or 1) == 1:\n', "    if True:\n", RANKS),
        ("replayed prefills are not known of",
         'return None if name == "disabled" else name', "return None", RECORDED),
        ("a decode or full graph that is captured is not seen",
         "        capture_mode.get_is_capture_mode()\n        or is_in_breakable",
         "        is_in_breakable", RECORDED),
        ("a piecewise graph that is captured is not seen",
         "        or is_in_tc_piecewise_cuda_graph()\n", "", RECORDED),
        ("a hidden signature is no changed seam",
         '    if _parameters(model.forward)[:5] != [\n', "    if False and [] != [\n",
         f"{FAULTS}::test_server_with_a_changed_seam"),
        ("a renamed method is no changed seam",
         "        if not callable(getattr(ModelRunner, name, None)):\n", "        if False:\n",
         f"{FAULTS}::test_renamed_seams"),
        ("a model that is patched already is patched again",
         "        if hasattr(model, name):\n", "        if False:\n",
         f"{FORWARD}::TestInstallation"),
    ),
    *of(
        "deciding/backends.py",
        ("any backend may be main", "    if FRONT not in can(type(backend)):\n", "    if False:\n",
         f"{HOST_WORK}::test_no_backend_is_built_where_the_gate_will_refuse"),
        ("hybrids are none", "    if parts is not None:\n", "    if False:\n",
         f"{OTHER_MAINS}::test_forwards"),
        ("hybrids are admitted whatever they are made of",
         "return next(filter(None, map(why_not_main, parts)), None)", "return None",
         f"{OTHER_MAINS}::test_a_hybrid_is_as_good_as_its_parts"),
        ("a class inherits what its base says of itself",
         "vars(kind).get(ATTRIBUTE, ())", "getattr(kind, ATTRIBUTE, ())",
         f"{OTHER_MAINS}::test_a_hybrid_is_as_good_as_its_parts"),
        ("Triton's is unknown",
         '    "TritonAttnBackend": frozenset({FRONT, TAIL, RECORDED}),\n', "", WINDOWS),
        ("the tail may run on any backend", "    if TAIL in can(type(backend)):\n",
         "    if True:\n",
         f"{OTHER_MAINS}::test_without_a_backend_of_its_own_the_tail_runs_on_none"),
        ("pools of any class", "        if not seams.is_plain_pool(part):\n",
         "        if False:\n", f"{OTHER_MAINS}::test_pools_that_are_not_plain"),
        ("quantised pools", '        if method != "unquantized":\n', "        if False:\n",
         f"{OTHER_MAINS}::test_pools_that_are_not_plain"),
        ("pools of any layout", "        if not dimensions <= {3}:\n", "        if False:\n",
         f"{OTHER_MAINS}::test_pools_that_are_not_plain"),
        ("rounded caches beside any backend",
         " and TAIL not in can(type(main)):", " and False:",
         f"{OTHER_MAINS}::test_a_rounded_cache_beside_another_backend"),
    ),
    *of(
        "attending/attention.py",
        ("one kernel is compiled for all widths",
         "kinds = {(part.head_dim, part.attn.sliding_window_size): part", "kinds = {0: part",
         f"{OTHER_MAINS}::test_the_tails_kernels_are_compiled_at_start"),
        ("the tail on the front's backend",
         "seams.attn_backend_switched(self.tail),",
         "seams.attn_backend_switched(self.main),", WINDOWS),
        ("the tail planned on the runner's own backend",
         "seams.plan(self.tail, forward_batch)", "seams.plan(self.main, forward_batch)", WINDOWS),
        ("the tail's metadata is never let go",
         "        self.tail.forward_metadata = None", "        pass",
         f"{FORWARD}::test_no_batch_is_held_after_its_forward"),
        ("metadata not rebuilt on the way out",
         "        finally:\n            self.main.init_forward_metadata(forward_batch)",
         "        finally:\n            pass",
         f"{FORWARD}::test_without_a_backend_of_its_own_the_tail_rebuilds_the_runners"),
        ("the rebuilt plan is the whole batch's",
         "                seams.plan(self.main, forward_batch)\n                yield\n",
         "                yield\n", ON_ONE),
        ("metadata that could not be rebuilt is not planned anew",
         'may be why it failed."""\n        self.main.init_forward_metadata(forward_batch)\n',
         'may be why it failed."""\n',
         f"{FORWARD}::test_metadata_that_cannot_be_rebuilt_is_planned_anew_for_stock"),
    ),
    *of(
        "attending/graphs.py",
        ("batches with more rows than are recorded are replayed",
         "if rows >= len(kept.lens)), default=None)",
         "if rows >= len(kept.lens)), default=self.rows[-1])",
         f"{REPLAYED}::test_what_is_not_replayed"),
        ("suffixes are replayed",
         "        if not kept.one_per_request:\n            return None\n        return min",
         "        return min", f"{REPLAYED}::test_suffixes_must_skip_as_many_as_ever"),
        ("an unread chunk is replayed",
         "if size is None or tail.unread or not tail.decodes:",
         "if size is None or not tail.decodes:", f"{REPLAYED}::test_what_is_not_replayed"),
        ("lengths of the batch before", "inputs.lengths.copy_(forward_batch.seq_lens)", "pass",
         ONE_ROW_EACH),
        ("requests of the batch before",
         "inputs.requests.copy_(forward_batch.req_pool_indices)", "pass", ONE_ROW_EACH),
        ("the donor is launched though it could be replayed",
         "self.with_donor = cut is donor.DonorCut.KEYS_AND_VALUES", "self.with_donor = False",
         ONE_ROW_EACH),
        ("the donor is recorded though it cannot be cut",
         "self.with_donor = cut is donor.DonorCut.KEYS_AND_VALUES", "self.with_donor = True",
         OTHER_CUTS),
        ("the operator's largest row count is not asked for",
         "if rows <= min(most, requests)", "if rows <= requests",
         f"{REPLAYED}::test_only_as_many_rows_as_are_asked_for"),
        ("more rows than requests can run",
         "if rows <= min(most, requests)", "if rows <= most",
         f"{REPLAYED}::test_no_more_rows_than_requests_can_run"),
        ("recorded although switched off", "        if most_rows() == 0:\n            return OFF\n",
         "        most_rows()\n", f"{REPLAYED}::TestReasons"),
        ("recorded on any backend", "    if backends.RECORDED not in backends.can(kind):\n",
         "    if False:\n",
         f"{REPLAYED}::TestReasons"),
        ("recorded over pools without memory",
         "    if seams.is_backed_later(attention.tail.token_to_kv_pool):\n", "    if False:\n",
         f"{REPLAYED}::TestReasons"),
        ("recorded although the tail is no decode step",
         "    if not seams.decodes_like_extend(attention.tail):\n", "    if False:\n",
         f"{REPLAYED}::TestReasons"),
        ("recorded although per-layer inputs are quantised",
         "        return QUANTISED\n", "        pass\n", f"{REPLAYED}::TestReasons"),
        ("recorded whatever the server's arguments", "        if argument(name):\n",
         "        if False:\n", f"{REPLAYED}::TestReasons"),
        ("recorded into the last memory", "    if free >= _RESERVE + 3 * needed:\n",
         "    if True:\n", f"{REPLAYED}::TestReasons"),
        ("a tail that is launched after all has no metadata",
         "        self._backend.forward_metadata = graph.metadata\n", "",
         "triton/test_hard_batches.py::test_what_was_planned_for_a_graph_can_be_launched"),
        ("loads of prefixes are not waited for",
         "        seams.await_loads(self._backend.token_to_kv_pool, self._read)\n", "",
         f"{REPLAYED}::test_loads_of_prefixes_are_waited_for"),
        ("recorded beside a cache that loads layer by layer",
         "    if seams.loads_by_layer(attention.tail.token_to_kv_pool):", "    if False:",
         f"{REPLAYED}::TestReasons"),
        ("a replay that fails is any failure",
         "            raise ReplayError(\"the recorded tail could not be run\") from failure\n",
         "            raise\n", f"{REPLAYED}::test_a_failing_replay_is_served_by_stock"),
    ),
    *of(
        "checking/proof.py",
        ("every graph is good", "if not error <= _ROUNDING[launched.dtype]:", "if False:", PROVEN),
        ("what is no number is good", "if not error <= _ROUNDING[launched.dtype]:",
         "if error > _ROUNDING[launched.dtype]:", f"{REPLAYED}::test_no_graph_is_left"),
        ("what the proof wrote stays there", "            place.copy_(values)\n",
         "            pass\n",
         f"{REPLAYED}::test_a_proof_leaves_tables_and_caches_as_they_were"),
        ("the proof's request has one token", "    tokens = min(window + _BEYOND,",
         "    tokens = min(1,", f"{REPLAYED}::test_a_proof_reaches_beyond_the_window"),
    ),
    *of(
        "cutting/shadow.py",
        ("shadows are not taken away",
         "                owner.__dict__.pop(name, None)\n", "                pass\n", CUT),
        ("what an object had of its own is not put back",
         "                owner.__dict__[name] = previous", "                pass", DECIDING),
        ("shadows closed in the wrong order", "self._saved.pop()", "self._saved.pop(0)", DECIDING),
    ),
    *of(
        "cutting/donor.py",
        ("kernels for many rows are compiled in a request",
         "_FEW, _MANY = 2, 257", "_FEW, _MANY = 2, 3",
         f"{HOST_WORK}::test_the_donors_kernels_are_compiled_at_start"),
        ("K of the donor without its norm",
         "    k = _headwise_norm(attention.k_norm, k, heads, head_dim)\n", "", CUT),
        ("V of the donor without its norm",
         "    v = _headwise_norm(attention.v_norm, v, heads, head_dim)\n", "", CUT),
        ("K of the donor without rotation",
         "    _, k = attention.rotary_emb(positions, torch.zeros_like(k), k)\n", "", CUT),
        ("queries of the donor without their norm",
         "    q = _headwise_norm(attention.q_norm, q, attention.num_heads, attention.head_dim)\n",
         "", CUT),
        ("queries of the donor without rotation",
         "    q, _ = attention.rotary_emb(row_positions, q, unused_keys)\n", "", CUT),
        ("the donor writes no K and V",
         "save_kv_cache=k is not None", "save_kv_cache=False", CUT),
        ("rounded K and V are attended to",
         "if stored is not None and stored != _dtype(model.layers[first - 1].self_attn):",
         "if False:",
         "triton/test_cache_dtype.py"),
        ("not all of a quantised projection's queries are dropped",
         "        return whole[:, columns]\n", "        return whole[:, : columns.stop]\n",
         f"{DONOR}::test_a_donor_whose_weights_are_not_plain"),
        ("a quantised projection is sliced",
         "    if not seams.is_plain_linear(projection):\n", "    if False:\n",
         f"{DONOR}::test_a_donor_whose_weights_are_not_plain"),
        ("the first layer of a stage is cut",
         'if first - getattr(model, "start_layer", 0) < 2:', "if False:",
         f"{DONOR}::test_a_donor_without_a_layer_before_it_is_left_alone"),
        ("a layer of another class is cut",
         "if type(layer) is not seams.gemma4_causal.Gemma4DecoderLayer:", "if False:",
         f"{DONOR}::test_a_donor_of_another_kind_is_left_alone"),
        ("an attention of another class is cut",
         "if type(layer.self_attn) is not seams.gemma4_causal.Gemma4Attention:", "if False:",
         f"{DONOR}::test_a_donor_of_another_kind_is_left_alone"),
        ("a layer that lacks a part is cut",
         """return f"layer {first - 1} lacks {', '.join(missing)}" if missing else None""",
         "return None", f"{DONOR}::test_a_donor_that_lacks_a_part_is_left_alone"),
        ("another epsilon in the norms on a GPU",
         "            eps=norm.eps,\n", "            eps=0.1,\n", CUDA),
        ("the norms on a GPU take all heads for one",
         "            num_q_heads=heads,\n", "            num_q_heads=1,\n",
         CUDA),
    ),
    *of(
        "deciding/arguments.py",
        ("what is judged elsewhere counts as not judged",
         "(*HARMLESS.values(), *ELSEWHERE.values())", "HARMLESS.values()", CUT),
    ),
    *of(
        "deciding/quantised.py",
        ("the last donor's own layers are not looked at", "[first_shared - 1 :]", "[first_shared:]",
         KINDS),
        ("any linear layer will do", "and not keeps_rows_apart(part):", "and False:",
         f"{REFUSED}::test_layers_whose_rows_may_depend_on_each_other"),
        ("another package's methods count by their names",
         "        return False\n    name", "        pass\n    name",
         KINDS),
        ("weights of a class of their own count as plain",
         "return seams.is_plain_tensor(layer.weight)", "return True",
         KINDS),
        ("columns that are picked by all rows do no harm",
         "return not layer.quant_method.quant_config.load_in_8bit", "return True",
         KINDS),
        ("a method without its scheme is known",
         "and _scheme(layer) not in _SCHEMES_APART.get(name, ()):",
         "and name not in _SCHEMES_APART:",
         KINDS),
        ("one scale for all rows does no harm",
         "return not _is_scaled_by_the_batch(layer) and", "return", KINDS),
        ("one scale is for all rows everywhere",
         "        torch.version.hip is not None\n        and scale", "        scale",
         KINDS),
        ("weights for few rows do no harm",
         " and not _is_converted_for_few_rows(layer)", "", KINDS),
    ),
    *of(
        "cutting/per_layer.py",
        ("per-layer inputs of the neighbouring layer",
         "return self._rest[:, layer - self._first_cut]",
         "return self._rest[:, layer - self._first_cut - 1]", CUT),
        ("embeddings taken after layer 0 has overwritten them",
         "        self._embeds = _kept(embeds, index, None if room is None else room.embeds)\n",
         "        one = index.shape[0] == 1  # of one row a view, which changes with embeds\n"
         "        self._embeds = embeds[-1:] if one else _kept(embeds, index)\n",
         f"{FORWARD}::test_norms_that_add_in_place"),
        ("per-layer embeddings of the first rows",
         "self._embedded = _kept(_layers(embedded, first_cut, self._stop), index)",
         "self._embedded = _layers(embedded, first_cut, self._stop)[: index.shape[0]]", CUT),
        ("per-layer embeddings of the first layers",
         "else embedded[:, start:stop]", "else embedded[:, : (stop or start + 1) - start]", CUT),
        ("the tail's inputs are projected by the front's weights",
         "            start * model.hidden_size_per_layer_input, stop * model",
         "            0, (stop - start) * model", CUT),
        ("a quantised projection of per-layer inputs is split",
         "return projection is not None and seams.is_plain_linear(projection)",
         "return projection is not None",
         f"{DONOR}::test_per_layer_inputs_whose_weights_are_not_plain"),
    ),
    *of(
        "deciding/gate.py",
        ("hidden states of all rows",
         "if capture is not None and capture not in _LAST_ROW_CAPTURES and not speculates:",
         "if False:", REFUSED_BATCHES),
        ("drafts that read every row",
         'if speculates and getattr(algorithm, "name", None) not in _LAST_ROW_DRAFTS:',
         "if False:", REFUSED_BATCHES),
        ("LoRA rows",
         'if any(adapter is not None for adapter in getattr(forward_batch, "lora_ids", None) '
         "or ()):", "if False:", REFUSED_BATCHES),
        ("captures in the tail",
         "if captured and max(captured) >= owner.first_shared - 1:", "if False:",
         f"{REFUSED}::test_layers_captured_behind_the_cut"),
        ("a capture in the last donor",
         "max(captured) >= owner.first_shared - 1:", "max(captured) >= owner.first_shared:",
         f"{REFUSED}::test_layers_captured_behind_the_cut"),
        ("captures in the front are refused",
         "max(captured) >= owner.first_shared - 1:", "max(captured) >= 0:",
         f"{REFUSED}::test_layers_captured_before_the_cut"),
        ("graph capture", "return CAPTURING if seams.is_capturing() else None", "return None",
         RECORDED),
        ("server arguments", "        if argument(name):\n            return reason",
         "        pass", ARGUMENTS),
        ("server sizes", "        if (argument(name) or 1) > 1:\n", "        if False:\n",
         ARGUMENTS),
        ("drafts of any kind",
         'if argument("speculative_algorithm") not in (None, *_LAST_ROW_DRAFTS):', "if False:",
         ARGUMENTS),
        ("hidden states beside drafts",
         'if argument("speculative_algorithm") and any(map(argument, _HIDDEN_STATE_ARGUMENTS)):',
         "if False:", ARGUMENTS),
        ("drafts in a pipeline",
         'if argument("speculative_algorithm") and (argument("pp_size") or 1) > 1:', "if False:",
         ARGUMENTS),
        ("drafts beside the roles of disaggregation",
         'if argument("speculative_algorithm") and argument("disaggregation_mode") not in '
         '(None, "null"):', "if False:", ARGUMENTS),
        ("unread although logprobs are wanted",
         "        and not _wants_input_logprobs(forward_batch)\n", "", LOGPROBS),
        ("unread although a request decodes along",
         "        and min(forward_batch.extend_seq_lens_cpu) > 1\n", "", BESIDE_DECODE),
        ("unread although its last row is captured",
         "        and (capture is None or capture == seams.CaptureHiddenMode.NULL)\n", "",
         DECIDING),
        ("read although nobody does",
         '        not getattr(forward_batch, "contains_last_prefill_chunk", True)\n        and',
         "        False\n        and", UNREAD),
        ("all layers shared",
         "return layers - shared if 0 < shared < layers else None",
         "return layers - shared if shared else None",
         "forward/test_other_models.py::test_a_model_of_shared_layers_alone_is_never_touched"),
        ("stages that part the tail",
         "return SPLIT_TAIL if end < layers or min(read) < start else None", "return None",
         "server/test_parallel.py::test_stages_that_part_the_tail_from_its_donors_run_as_stock"),
        ("another backend than the one that was looked at",
         "        or owner.why_not_on(seams.current_attn_backend())\n", "", DECIDING),
        ("switch read at load only",
         "        if not switch.enabled():\n            return OFF\n", "", CUT),
        ("the threshold is read twice", "kept, unread, minimum)\n",
         "kept, unread, threshold.min_skipped_rows())\n",
         f"{HOST_WORK}::test_variables_are_read_once_per_forward"),
        ("an argument that nobody has judged does no harm", "    if unjudged:\n", "    if False:\n",
         f"{DECIDING}::test_an_argument_that_nobody_has_judged"),
        ("a group of one offloaded layer is none", '(argument("offload_group_size") or 0) > 0',
         '(argument("offload_group_size") or 0) > 1', ARGUMENTS),
        ("offloading that is off refuses", '(argument("offload_group_size") or 0) > 0',
         '(argument("offload_group_size") or 0) != 0', CUT),
        ("few skipped rows",
         "if not threshold.pays(total, read, minimum, owner.tail_cost(kept, read)):",
         "if False:",
         DEFAULTS),
        ("an unread chunk counts as read",
         "read = 0 if unread else rows", "read = rows",
         f"{DECIDING}::test_three_rows_that_nobody_reads_pay"),
        ("nothing to skip", "    if rows == total:\n        return NOTHING_TO_SKIP\n", "",
         f"{FORWARD}::test_a_refused_batch_is_the_stock_forward_bit_for_bit"),
        ("given up, and going on",
         "return fallback.GIVEN_UP if fallback.given_up() else None", "return None", GIVES_UP),
        ("logprobs of an image prompt",
         "return IMAGE_LOGPROBS if spread and is_multimodal(forward_batch) else None",
         "return None", f"{IMAGES}::test_input_logprobs_beside_an_image_are_stock"),
        ("any image prompt is refused", "    spread = not kept.one_per_request\n",
         "    spread = True\n", "forward/test_media.py"),
        ("mixed batches are refused",
         "mode not in (seams.ForwardMode.EXTEND, seams.ForwardMode.MIXED)",
         "mode is not seams.ForwardMode.EXTEND", f"{DECIDING}::test_a_mixed_batch_that_stays_one"),
        ("what a newer SGLang has renamed",
         "reason = unseen_reason() or server_reason()", "reason = server_reason()",
         f"{REFUSED}::test_a_renamed_argument_is_said_when_the_server_starts"),
    ),
    *of(
        "patch.py",
        ("nothing is recorded when the server starts",
         '        (_Runner, "init_cuda_graphs"): _with_recording(_Runner.init_cuda_graphs),\n', "",
         "server/test_workload.py::test_random_traffic_with_the_recorded_tail"),
        ("new weights are not recorded",
         '        (_Runner, "init_decode_cuda_graph"): _with_recording(',
         '        (_Runner, "get_cuda_graph_layers"): (lambda stock: stock)(',
         f"{REPLAYED}::test_new_weights_are_recorded_anew"),
        ("decode steps are judged",
         "if forward_batch.forward_mode is seams.ForwardMode.DECODE or torch",
         "if torch", f"{FORWARD}::test_decode_goes_straight_through"),
        ("a compiled forward asks the gate",
         "is seams.ForwardMode.DECODE or torch.compiler.is_compiling():",
         "is seams.ForwardMode.DECODE:", RECORDED),
        ("embeddings given by name are not kept",
         'embeds = kwargs.get("input_embeds", args[0] if args else None)',
         "embeds = args[0] if args else None", SERVED),
        ("the published helper knows of no plan",
         "    if plan is not None:\n        return plan.tail, plan.way\n", "",
         "forward/test_tails_batch.py::TestPublishedHelpers"),
        ("the published helper leaves per-layer inputs whole",
         "per_layer_inputs.index_select(0, tail.index)\n", "per_layer_inputs\n",
         "forward/test_tails_batch.py::TestPublishedHelpers"),
        ("a new installation remembers old failures", "    fallback.reset()\n", "", GIVES_UP),
        ("any SGLang is patched", "    seams.check()\n", "", f"{FAULTS}::test_renamed_seams"),
        ("installed twice", "    if _installed:\n        raise Already",
         "    if False:\n        raise Already", f"{FORWARD}::TestInstallation"),
        ("another plugin's wrapper is taken out too",
         "if getattr(patched, name) is not wrapper:", "if False:",
         f"{FORWARD}::TestInstallation"),
        ("owners outlive the package", "    owner.close_all()\n", "",
         f"{FORWARD}::TestInstallation"),
    ),
    *of(
        "cutting/fallback.py",
        ("a failing fast path is tried for ever",
         "return _failures_in_a_row >= LIMIT", "return False", GIVES_UP),
        ("a failure counts twice", "_failures_in_a_row += 1", "_failures_in_a_row += 2", GIVES_UP),
        ("nobody hears that it gave up", "    if given_up():\n", "    if False:\n", GIVES_UP),
        ("a rank among others counts as alone", "distributed.get_world_size() == 1", "True",
         f"{FORWARD}::test_with_other_ranks_a_failure_propagates_and_leaves_all_ready"),
        ("the first try's tensors stay alive",
         "    traceback.clear_frames(error.__traceback__)\n", "",
         f"{FORWARD}::test_the_first_try_frees_its_memory_before_the_second"),
        ("the copy of the embeddings is the embeddings",
         "None if embeds is None else embeds.clone()", "embeds", SERVED),
    ),
    *of(
        "deciding/ranks.py",
        ("ranks that differ go on",
         "_ALIKE if len({store.get(key) for key in keys}) == 1 else NOT_ALIKE", "_ALIKE",
         f"{RANKS}::test_tensor_parallel_ranks_cut_alike_or_not_at_all"),
        ("a rank that does not come is not missed",
         "        verdict = NOT_ALL\n", "        verdict = _ALIKE\n",
         f"{RANKS}::test_a_rank_without_the_package_is_waited_for_once"),
        ("every rank makes up its own mind",
         '    verdict = store.compare_set(f"{name}/verdict", "", verdict).decode()\n', "",
         f"{RANKS}::test_a_rank_that_comes_late_steps_aside_with_the_others"),
        ("the second comparison finds the first one's verdict",
         "next(_comparisons)", "0",
         f"{RANKS}::test_tensor_parallel_ranks_cut_alike_or_not_at_all"),
        ("a rank looks at its own findings only",
         'keys = [f"{name}/{other}" for other in ranks]', 'keys = [f"{name}/{rank}"]',
         f"{RANKS}::test_tensor_parallel_ranks_cut_alike_or_not_at_all"),
    ),
    *of(
        "plugin.py",
        ("a served model's log does not say that the path is off",
         "            _say_so_when_a_model_is_served()\n", "",
         "server/test_server.py::test_log_of_switched_off_server"),
        ("installed although switched off", "        if not switch.enabled():\n",
         "        switch.enabled()\n        if False:\n",
         f"{FAULTS}::test_switched_off"),
        ("installed with an invalid threshold", "        threshold.min_skipped_rows()\n", "",
         f"{FAULTS}::test_settings_that_mean_nothing"),
        ("installed with an invalid number of rows", "        graphs.most_rows()\n", "",
         f"{FAULTS}::test_settings_that_mean_nothing"),
        ("any version is good", "        check_version()\n", "",
         f"{FAULTS}::test_other_versions"),
        ("a changed seam is SGLang's loader's affair", "    except Exception as refusal:",
         "    except UnsupportedError as refusal:", f"{FAULTS}::test_renamed_seams"),
        ("a moved module is not told", "        except ImportError as missing:",
         "        except KeyError as missing:", f"{FAULTS}::test_a_module_that_moved"),
        ("a refusal is said quietly", "        logger.error(\n", "        logger.info(\n",
         f"{FAULTS}::test_other_versions"),
        ("a newer SGLang is not told", "        if seams.is_newer_than_tested():\n",
         "        if False:\n", f"{FAULTS}::test_other_versions"),
        ("loaded twice is an error", "        if patch.is_installed():\n", "        if False:\n",
         f"{FAULTS}::test_loaded_twice"),
    ),
    *of(
        "switch.py",
        ("unset means off", 'os.environ.get(VARIABLE, "1")', 'os.environ.get(VARIABLE, "0")',
         f"{FAULTS}::test_another_plugin_on_the_same_method"),
        ("0 means on", '"0": False', '"0": True', CUT),
        ("whatever is not 0 means on", "return _MEANING[value]",
         "return _MEANING.get(value, True)", "server/test_server.py::test_misspelt_switch"),
    ),
    *of(
        "telling/metrics.py",
        ("every rank counts", '    if labels.get("tp_rank", 0) != 0 and not every_rank:\n',
         "    if False:\n", f"{TOLD}::test_forwards_and_rows"),
        ("a server that is active does not say where it cuts",
         "    if known is not None and reason is None:\n", "    if False:\n",
         f"{TOLD}::test_server_info_has_the_same_numbers"),
    ),
    *of(
        "telling/report.py",
        ("a skipped tail is not told from a shortened one",
         "forwards[outcome] += 1", "forwards[ACTIVE] += 1", UNREAD),
        ("a line is said every time", "    _said.add(said)\n", "",
         f"{FORWARD}::test_each_reason_is_said_once"),
        ("a server's reason is said with its first batch again",
         "    _said.add((_ASIDE, reason))\n    once(f\"Gemma 4 fast prefill steps aside for",
         "    once(f\"Gemma 4 fast prefill steps aside for", GIVES_UP),
        ("refusals are not counted", "    _count(reason, rows_in_all)\n", "",
         f"{FORWARD}::test_each_reason_is_said_once"),
        ("failures are not counted", "    _count(FAILED, rows_in_all)\n", "", SERVED),
        ("a failure without its traceback", ", exc_info=error)", ")", SERVED),
        ("all failures are of one kind",
         "    kind = (line, type(error), *((frame.filename, frame.lineno) for frame in raised))\n",
         "    kind = line if raised else None\n",
         f"{FORWARD}::test_each_kind_of_failure_is_told_once"),
    ),
    *of(
        "deciding/threshold.py",
        ("one skipped row of a replayed tail does not pay", "return skipped >= 1\n",
         "return skipped >= 2\n", f"{REPLAYED}::test_by_default_one_skipped_row_is_enough"),
        ("a launched tail pays on a GPU a row too early", "_FEWEST_LAUNCHED = 1024",
         "_FEWEST_LAUNCHED = 1023",
         f"{REPLAYED}::test_on_a_gpu_a_launched_tail_must_skip_many"),
        ("a launched tail pays on a GPU a row too late", "_FEWEST_LAUNCHED = 1024",
         "_FEWEST_LAUNCHED = 1025",
         f"{REPLAYED}::test_on_a_gpu_a_launched_tail_must_skip_many"),
        ("two skipped rows pay", "_FEWEST = 3", "_FEWEST = 2", RULE),
        ("three skipped rows do not pay", "_FEWEST = 3", "_FEWEST = 4", RULE),
        ("a sixteenth does not pay", "_LEAST = 16", "_LEAST = 15", RULE),
        ("a seventeenth pays", "_LEAST = 16", "_LEAST = 17", RULE),
        ("the operator's number is not asked for", "    if minimum is not None:\n",
         "    if False:\n", EQUIVALENCE),
    ),
    *of(
        "__main__.py",
        ("python -m forgets the exit status",
         "raise SystemExit(main())", "main()", BROKEN),
    ),
    *of(
        "commands/main.py",
        ("what cannot be verified counts as a difference",
         "        return 2\n", "        return 1\n", CANNOT),
        ("SIGTERM and SIGHUP end a command where it stands",
         "sys.exit(128 + signum)", "signal.raise_signal(signal.SIGKILL)",
         f"{VERIFY}::test_signals_leave_no_process"),
    ),
    *of(
        "commands/console.py",
        ("the beginning of a log instead of its end",
         "content[-lines:]", "content[:lines]",
         f"{VERIFY}::test_a_server_that_ends_shows_its_log"),
    ),
    *of(
        "commands/servers.py",
        ("only a server's first process is ended",
         "os.killpg(pid, number)", "os.kill(pid, number)",
         f"{VERIFY}::test_signals_leave_no_process"),
        ("an inactive server passes for an active one",
         "    if active == server.fast:\n", "    if active == server.fast or forwards:\n",
         f"{VERIFY}::test_a_server_that_is_not_active_is_not_measured"),
    ),
    *of(
        "commands/prompts.py",
        ("lines of a file counted from zero",
         "in enumerate(lines, 1)", "in enumerate(lines)", CANNOT),
        ("no log-probabilities of prompts",
         "len(prompt.body[\"input_ids\"]) // 2 if number % 2 else 0", "-1", KINDS_ASKED),
        ("two prefixes that differ",
         "{\"input_ids\": prefix + ending}", "{\"input_ids\": ending + prefix}", KINDS_ASKED),
    ),
    *of(
        "commands/agreement.py",
        ("every answer counts as equal",
         "self.equal_answers += one.tokens == other.tokens", "self.equal_answers += 1", BROKEN),
        ("distances of log-probabilities are not seen",
         "apart if math.isfinite(apart) else math.inf", "0.0", DEMO),
    ),
    *of(
        "commands/timing.py",
        ("the first time of each length counts",
         "if repeat >= 0:", "if repeat >= -1:", KINDS_ASKED),
    ),
    *of(
        "commands/table.py",
        ("the verdict says the opposite",
         "    if document[\"agrees\"]:\n", "    if not document[\"agrees\"]:\n", PEOPLE_SEE),
    ),
    *of(
        "commands/page.py",
        ("a figure that names a DTD on another server",
         "return drawn[drawn.index(\"<svg\") :]", "return drawn", PEOPLE_SEE),
    ),
    *of(
        "commands/verify.py",
        ("a difference is no failure",
         "return 0 if document[\"agrees\"] else 1", "return 0", BROKEN),
    ),
    *of(
        "commands/examination.py",
        ("a prompt that fits into one chunk",
         "length = chunk + max(chunk // 4, 16)", "length = chunk - max(chunk // 4, 16)",
         KINDS_ASKED),
    ),
    *of(
        "commands/verdict.py",
        ("stock is compared with itself alone",
         "both = ((stock.alone, fast.alone), (stock.alone, fast.at_once))",
         "both = ((stock.alone, stock.alone), (stock.alone, stock.at_once))", BROKEN),
    ),
]  # fmt: skip

# The gate's tables, by the test that goes through them in behaviour.
_TABLES = {
    "_REFUSING_FIELDS": FIELDS,
    "_REFUSING_ARGUMENTS": ARGUMENTS,
    "_REFUSING_SIZES": ARGUMENTS,
    "_HIDDEN_STATE_ARGUMENTS": ARGUMENTS,
    "_LAST_ROW_CAPTURES": REFUSED,
    "_LAST_ROW_DRAFTS": f"{REFUSED}::test_full_capture_of_frozen_kv_drafts",
}
_FIRST_OF_ENTRY = {"seams.CaptureHiddenMode.NULL": CUT}


def _table(value: ast.expr) -> ast.expr:
    """The dict, tuple or set that a table is made of."""
    return value.args[0] if isinstance(value, ast.Call) else value


def _names(table: ast.expr) -> list[str]:
    """What the entries of a table are called."""
    if isinstance(table, ast.Dict):
        return [ast.unparse(key) for key in table.keys if key is not None]
    assert isinstance(table, ast.Tuple | ast.Set), ast.dump(table)
    return [ast.unparse(element) for element in table.elts]


def _without(statement: ast.Assign, position: int) -> str:
    """The source of an assignment whose table lacks one entry."""
    changed = copy.deepcopy(statement)
    table = _table(changed.value)
    if isinstance(table, ast.Dict):
        del table.keys[position], table.values[position]
    else:
        assert isinstance(table, ast.Tuple | ast.Set)
        del table.elts[position]
    return ast.unparse(changed)


def table_entries(file: str = "deciding/gate.py") -> list[Mutation]:
    """One mutation for every entry of the gate's tables: without it."""
    source = (REPO / PACKAGE / file).read_text()
    mutations = []
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Assign):
            continue
        table = ast.unparse(statement.targets[0])
        whole = ast.get_source_segment(source, statement)
        if table not in _TABLES or whole is None:
            continue
        for position, entry in enumerate(_names(_table(statement.value))):
            name = entry.strip("'")
            first = _FIRST_OF_ENTRY.get(name, _TABLES[table])
            changed = _without(statement, position)
            mutations.append(Mutation(f"{table} without {name}", file, whole, changed, first))
    return mutations


MUTATIONS = (*_WRITTEN, *table_entries())
