"""The decoder: a Llama-family language model read from a Hugging Face checkpoint."""
