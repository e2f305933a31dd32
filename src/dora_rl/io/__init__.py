"""Bytes in and out: lines, messages, connections, and what the system refuses."""
