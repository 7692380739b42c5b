"""From a stock model to a dedicated one: options, ranks, which parameters are taken, and what stands in their place."""
