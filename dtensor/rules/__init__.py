"""Sharding rules of operators, one family a file."""
