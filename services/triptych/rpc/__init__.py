"""gRPC as all services use it: channels, statuses, health, tracing metadata."""
