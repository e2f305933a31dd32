"""Engines other than the native one, behind the calls that an instance makes of an engine."""
