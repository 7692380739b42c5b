"""Benchmarks and the Muon-AG baseline."""
