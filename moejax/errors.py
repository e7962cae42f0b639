"""The one exception that means: the user can fix this."""


class InputError(ValueError):
    """A wrong setting, file or checkpoint. Shown as one line; the process exits with code 2.

    The message says, in this order: what is wrong, the value seen, the rule, what to do.
    """
