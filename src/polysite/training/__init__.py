"""The site in torch: local training, prediction, assessment and attacks."""
