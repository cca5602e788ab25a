"""Benchmarks; installed as `fastturn.bench`."""
