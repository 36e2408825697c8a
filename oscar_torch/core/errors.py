"""Errors this project raises on purpose; every message names the offending value and the allowed ones.

Twin file, byte-identical in both packages. Standard library only.
"""


class OscarError(ValueError):
    """Base of every error this project raises on purpose; the message names the value and what is allowed."""


class ConfigError(OscarError):
    """A setting is out of range, or two settings contradict each other."""


class ShapeError(OscarError):
    """An array has the wrong shape for the cache, the model or the rotation set."""


class DTypeError(OscarError):
    """An array has the wrong element type."""


class CheckpointError(OscarError):
    """A file is truncated, foreign, mixed up, or belongs to another model."""


class CacheFullError(OscarError):
    """No page is left for the tokens to be stored; nothing was changed."""


class GradientError(OscarError):
    """A gradient is asked for where there is none: through codes of two bits, or rows already stored."""
