"""Errors that speak to the user: one line with the key, the value and what would be right."""


class ConfigError(ValueError):
    """Something the user asked for cannot be; the run ends with this one line and exit status 2."""


class PeerError(RuntimeError):
    """Another rank failed and has already said why; this one ends quietly with it."""
