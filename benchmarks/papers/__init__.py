"""Figures of the papers that no other benchmark has: one module for each."""
