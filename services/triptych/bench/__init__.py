"""A benchmark client for any OpenAI-compatible server, and for our gRPC: same requests, same clock, same statistics."""
