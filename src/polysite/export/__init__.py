"""Export the model of a hospital as a MONAI bundle."""
