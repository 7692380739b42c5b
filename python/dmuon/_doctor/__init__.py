"""The answer of `dmuon doctor`: what is on this machine, and which self-tests pass. One module a section."""
