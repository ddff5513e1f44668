"""The gateway: OpenAI's HTTP API, translated to the router's gRPC. It keeps no state of its own."""
