"""Shared code of the tests: batches, requests, servers, and observers from outside."""
