"""Checkpoints of every format: recognize, read, load, convert."""
