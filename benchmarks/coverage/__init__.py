"""Coverage of reported errors on skewed and heavy-tailed posteriors."""
