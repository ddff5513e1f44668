"""The engine: sequences, scheduling, sampling and the step loop."""
