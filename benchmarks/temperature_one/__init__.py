"""Kernels at temperature one: speed, always with the bias that was paid for it."""
