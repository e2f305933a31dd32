"""Sealed versions of the policy: format, store, publication, cleaning up."""
