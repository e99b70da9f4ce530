"""Shared code of kernels: settings, set-up, first states, pieces, NumPyro's driver."""
