"""Suites, statistics and gates: what validation loss cannot tell, with intervals."""
