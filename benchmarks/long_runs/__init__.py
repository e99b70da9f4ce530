"""What long runs cost, and what is left of them when they are killed."""
