"""The sample store: the payload of every sample, from its last token to the end of its group.

The data plane of a run; the ledger of the core is the control plane. Rows are put, extended, read
and dropped here, and nobody waits here. The room holds the table and its file, the samples as the
controller of a local run and of a cluster has them, the shards of a cluster, and token journals.
"""
