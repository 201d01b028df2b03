"""Reasons why a server or a batch is not cut, and whether cutting pays. They change nothing."""
