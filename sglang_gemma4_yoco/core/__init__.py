"""One prefill on its way: may it be cut, its plan, the cut, and stock where that fails."""
