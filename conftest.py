"""Beside it is what tests import as ``scripts``: pytest puts this folder into ``sys.path``."""
