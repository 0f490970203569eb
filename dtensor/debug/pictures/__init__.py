"""Pictures of layouts: what is to be seen, and how it is drawn."""
