"""What a user asks a running model: whole weights, profiles, schedules, proofs."""
