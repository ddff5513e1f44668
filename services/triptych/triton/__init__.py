"""Triton: finding one, starting it, and joining its spans to the caller's trace."""
