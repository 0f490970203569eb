"""The way of a load: match, decide who reads, plan, read."""
