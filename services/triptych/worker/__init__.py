"""The worker: prompts in, tokens out. Prefill, decode and the paged KV cache."""

import os

# OpenMP reads this when torch is loaded. Its threads would otherwise spin while they wait for each other, which on
# cores shared with Triton or anything else made a step of a small model seven times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
