"""A dedicated model at work: its engine, its hooks and its optimizer."""
