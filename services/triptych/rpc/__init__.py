"""gRPC as all services use it: channels, statuses, health, tracing metadata."""

import os

# Our children exec at once; gRPC's fork handlers would only print warnings about them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
