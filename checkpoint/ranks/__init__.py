"""Who takes part in a call, how ranks talk, and that all of them fail together."""
