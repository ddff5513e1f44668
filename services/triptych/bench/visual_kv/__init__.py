"""What the visual KV policies save, cost and lose, at a realistic shape."""

import triptych.worker  # noqa: F401  # Before torch, for the policy that its OpenMP threads wait by.
