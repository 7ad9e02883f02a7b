"""Cases: sources, preparation, splits and federations."""
