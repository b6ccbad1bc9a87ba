"""The decode service and its prefix cache; see CHANGELOG.md for what exists."""
