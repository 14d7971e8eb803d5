"""The one error a person is meant to read."""


class UserError(ValueError):
    """Bad input: the message says what was given, what is allowed and what to do. The command line prints it alone."""


class OtherProcessError(UserError):
    """Another process of the job failed, and said why; this one stops with it."""
