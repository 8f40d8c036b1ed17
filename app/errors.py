"""What the console refuses: one sentence for a person, and the HTTP status that it means."""

from __future__ import annotations


class Refused(ValueError):
    """A refusal with a status of its own; a plain ValueError is answered with 400."""

    status = 400


class Forbidden(Refused):
    """This user may not do it."""

    status = 403


class Missing(Refused):
    """There is no such thing, or it belongs to somebody else."""

    status = 404


class WrongState(Refused):
    """The thing exists and cannot be treated so at present."""

    status = 409


class Unacknowledged(Refused):
    """A licence has to be acknowledged before this runs."""

    status = 428


class TooLarge(Refused):
    """More bytes than are taken."""

    status = 413


class TooMany(Refused):
    """More requests than are answered in this time."""

    status = 429


class NoRoom(Refused):
    """The disk is full, or nearly so."""

    status = 507
