"""The experiment of the MINTEE paper."""
