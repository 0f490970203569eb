"""Planning for very many ranks, simulated."""
