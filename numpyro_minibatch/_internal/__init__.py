"""Internals that all parts of the package use."""
