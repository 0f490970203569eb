"""Who holds what, and who gives what to whom: pure values, without torch."""
