"""The one exception for a user's mistake."""


class UserError(ValueError):
    """Bad input: the message is one line that names the value, what was expected and what to do.

    Command-line programs print it and exit with code 2; library callers may catch it as a ValueError.
    """
