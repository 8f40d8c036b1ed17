"""How a stage says that the user stopped it: raised between steps and tiles, not caught inside."""


class Cancelled(Exception):
    """The request was cancelled; the engine reports it as `Failure(cancelled=True)`."""
