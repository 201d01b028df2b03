"""One prefill: the check whether it may be cut, its plan, the cut, and the fallback to stock."""
