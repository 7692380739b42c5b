"""Predicted training steps."""
