"""Decoding with an own loop: cached, batched, reproducible."""
