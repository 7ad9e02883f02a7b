"""The hospital's side of a deployment."""
