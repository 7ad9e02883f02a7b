"""Which sites belong together, from how far apart they are."""
