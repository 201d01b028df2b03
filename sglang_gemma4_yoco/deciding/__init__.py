"""May a batch be cut, and does it pay? Answers are reasons, and change nothing."""
