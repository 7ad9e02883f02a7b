"""Engines: rounds, phases, transports, records and the run folder."""
