"""For tests: a store that fails as it is told to, and what every store must do."""
