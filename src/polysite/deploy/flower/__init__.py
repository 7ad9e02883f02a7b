"""The wire of polysite's own engine, on Flower's record of nodes; the only importer of ``flwr``."""
