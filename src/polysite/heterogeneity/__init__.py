"""Assessment before training: how hospitals differ, and which strategy to try first."""
