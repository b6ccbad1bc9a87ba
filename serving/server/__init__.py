"""The server: `python -m serving.server`."""
