"""Fivefold: the five parallel strategies of large language models, from plan to record."""

__version__ = "0.1.0"
