"""Scripts that run in the peers' environments, on their Python: nothing of this package may be imported here."""
