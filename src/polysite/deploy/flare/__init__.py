"""NVIDIA FLARE as the engine of a deployed study: the only importer of nvflare."""
