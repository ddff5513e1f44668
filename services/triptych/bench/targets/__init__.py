"""Servers that can be measured, behind one contract: an OpenAI-compatible URL, or our router over gRPC."""
