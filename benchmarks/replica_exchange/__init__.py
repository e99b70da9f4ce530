"""Benchmarks of replica exchange: a mixture with known weights, rivals, tables."""
