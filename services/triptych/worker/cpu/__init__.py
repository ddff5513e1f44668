"""The decoder's step on CPU, in C++."""
