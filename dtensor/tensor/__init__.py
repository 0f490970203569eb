"""The tensor that wraps a local part: its gradients, its views, facts of operators."""
