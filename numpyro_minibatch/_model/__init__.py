"""Inspection of a NumPyro model: checks, rows, starts, and evaluation on all rows."""
