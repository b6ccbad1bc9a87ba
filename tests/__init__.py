"""Tests; run them by `make test` or `python -m pytest` from the repository's root."""
