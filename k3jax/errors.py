"""The one exception for a user's mistake."""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """Bad input: the message is one line that names the value, what was expected and what to do.

    Command-line programs print it and exit with code 2; library callers may catch it as a ValueError.
    """


@contextlib.contextmanager
def users_mistake() -> Iterator[None]:
    """Raises a `ValueError` of a lower room, whose message already says what to do, as a `UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None
