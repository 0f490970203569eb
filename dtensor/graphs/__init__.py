"""What compilers record of the library: calls that stand in their graphs.

``nodes`` are calls that a user makes, whose operators are recorded; ``calls`` those that nobody
looks into, which a graph makes whenever it runs.
"""
