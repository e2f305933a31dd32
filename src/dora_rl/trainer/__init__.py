"""The learner: groups of scored samples in, versions of the policy out.

    documents -> passes (policy/, attention, losses/) -> updates, optim -> checkpoints/

Names of tensors end in their dimensions, everywhere in this package:

    P  tokens of a pack, prompts and responses      V  vocabulary
    T  trained tokens of a pack, which losses see   H  hidden width
    S  documents (responses, sequences) of a pack   I  inputs of a matrix, O its outputs
    C  tokens of one chunk of logits                R  ranks of all adapters that share an input
    B  rows of a padded batch, L their length       E  experts
    Q  query heads, K heads of keys and values      D  size of a head

`token_ids_P` has a pack's tokens, `logprobs_T` one number for each trained token.
"""
