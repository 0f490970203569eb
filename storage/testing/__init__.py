"""A store that fails as it is told to, for tests."""
