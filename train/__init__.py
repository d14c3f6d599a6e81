"""Training: DMS retrofit and, on the same parts, everything else that is learned."""
