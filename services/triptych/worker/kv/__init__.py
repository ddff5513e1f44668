"""The paged KV cache: which block holds what, and the tensors themselves."""
