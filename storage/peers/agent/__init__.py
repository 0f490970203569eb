"""The process that holds objects on a host, and what it does there."""
