"""Flower as the carrier of messages; the only importer of ``flwr``."""
