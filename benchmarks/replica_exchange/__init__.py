"""Benchmarks of replica exchange: known mixtures, other packages, tables."""
