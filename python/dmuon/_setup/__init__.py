"""From a stock model to a dedicated one: options, ranks, what is a matrix, and what stands in its place."""
