"""One prefill: its eligibility, its plan, the cut, and the fallback to stock."""
