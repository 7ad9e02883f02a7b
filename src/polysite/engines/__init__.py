"""Engines: hosts, wires, rounds, phases, records and the run folder."""
