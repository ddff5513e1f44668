"""`triptych bench engine`: prefill and decode in process, beside the machine's limits and transformers."""
