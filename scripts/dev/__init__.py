"""Commands for a release of this package, and for a new SGLang."""
