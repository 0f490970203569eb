"""How benchmarks are run and told: rows, turns, ratios, tables, the machine."""
