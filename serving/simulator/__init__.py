"""Replays request traces against prefix-cache policies: ours, other people's, and bounds that know the future."""
