"""Objects in the memory of agents, one process a host, that outlive the ranks that wrote them."""
