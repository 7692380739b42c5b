"""Training examples."""
