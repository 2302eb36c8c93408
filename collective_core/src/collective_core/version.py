"""The engine's version, which the build also reads."""

__version__ = "0.1.0"
