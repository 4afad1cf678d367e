"""The one exception that a stage turns into a single line and exit code 2.

Raise `Refused` for everything the person at the keyboard can mend: a wrong path, a target without a
chat template, a layer index out of range, a store made for another target. The message says what was
wrong, with the value, and what to do about it. Anything else that escapes is a fault of ours and
keeps its traceback.
"""


class Refused(Exception):
    """The input cannot be used as it is; the message is one line and says what to do."""
