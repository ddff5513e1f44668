"""Traces and logs, one small file each."""
