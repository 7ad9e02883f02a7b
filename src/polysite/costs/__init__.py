"""What a run costs, measured or planned: steps, bytes, seconds, energy."""
