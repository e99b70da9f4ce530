"""A NumPyro model read: checked, traced for its rows, started, and run on all rows."""
