"""QK-clip: the largest attention logit of each head, and the rows of queries and keys that it scales."""
