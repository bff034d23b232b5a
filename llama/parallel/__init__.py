"""Tensor parallelism: layers, process groups, and what ranks tell each other."""
