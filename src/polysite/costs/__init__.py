"""Cost of a run, measured or planned: steps, bytes, seconds."""
