"""Admission: what a server must be for any of its batches to be cut."""
