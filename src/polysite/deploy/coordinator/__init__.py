"""The coordinator's side of a deployment."""
