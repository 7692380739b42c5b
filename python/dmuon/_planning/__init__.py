"""Plans: the owner of each matrix, and the costs that decide."""
