"""Checkpoints of what owners hold: tensors as shards, groups and state of the optimizer, views."""
