"""Cases: where they come from, how they are prepared and split."""
