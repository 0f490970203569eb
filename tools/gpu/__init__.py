"""What only a machine with a GPU can show: ``python -m tools.gpu``, from the repository root."""
