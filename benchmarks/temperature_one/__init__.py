"""Kernels at temperature one: speed, always reported with the bias."""
