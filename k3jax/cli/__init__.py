"""Command lines: what they read, check and print around the library."""
