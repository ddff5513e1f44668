"""Triptych: vision-language models served as three stages, encode, prefill and decode."""

__version__ = "0.1.0"
