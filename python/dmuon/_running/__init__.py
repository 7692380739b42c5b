"""A dedicated model at work: its engine, its hooks, its state dict and its optimizer."""
