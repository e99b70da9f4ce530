"""Figures of the papers that are not in other benchmarks: one module each."""
