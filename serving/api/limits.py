"""What server and client agree on beside the protocol."""

MAX_MESSAGE_BYTES = 16 * 2**20
"""Of a message: a prompt of a million tokens takes about three million bytes."""
