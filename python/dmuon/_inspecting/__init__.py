"""Tools to inspect a running model: whole weights, profiles, schedules, proofs."""
