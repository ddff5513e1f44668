"""`triptych bench engine`: prefill and decode in process, beside the machine's limits and transformers."""

import triptych.worker  # noqa: F401  # Before torch, for the policy that its OpenMP threads wait by.
