"""What is run from the command line, and what these commands share."""
