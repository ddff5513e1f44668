"""Stubs generated from protos/ by `make protos`."""
