"""The kinds of failure across the bridge: worth another try, or not."""


class BridgeError(Exception):
    """A failure of a call to an engine."""


class Retryable(BridgeError):
    """May succeed if tried again, here or elsewhere (unreachable, restarting, not yet serving, busy)."""


class Busy(Retryable):
    """Another call holds what this one needs; the engine itself is well."""


class Left(Retryable):
    """The engine does not belong to the fleet any more: nothing that was asked of it is missing."""


class Fatal(BridgeError):
    """Will not succeed if repeated: wrong model, wrong shapes, refused version, failed verification, bad request."""


class NotStaged(Fatal):
    """A commit of a version that is not staged (the engine restarted, another push took its place): stage it again."""
