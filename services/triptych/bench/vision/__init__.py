"""Measures what bounding batches by pixels, instead of by their number, does to the encoder's memory and speed."""
