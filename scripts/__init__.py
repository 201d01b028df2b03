"""Commands of this repository, and the modules that they share."""
