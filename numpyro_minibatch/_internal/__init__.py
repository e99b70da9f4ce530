"""What every part of the package uses and no user does."""
