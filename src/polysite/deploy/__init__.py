"""A study across real hospitals: the coordinator's project, and what a hospital allows and writes down."""
