"""What is run before a release, and for a new SGLang."""
