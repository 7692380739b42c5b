"""Who owns which matrix, and by which costs."""
