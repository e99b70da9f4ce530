"""Costs of long runs, and recovery after a kill."""
