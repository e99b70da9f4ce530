"""Benchmarks of the cyclical kernels: modes found, effective sizes, networks."""
