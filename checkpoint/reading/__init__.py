"""Reading boxes of stored tensors: plan exact ranges of whole blocks, then read and verify.

Planning (``read_plan``, ``cuts``) turns every wanted box into *extents* of one chunk, and
gathers neighbouring ones into *reads*. An extent that is whole blocks and contiguous both in the
chunk and in the destination is read straight into it and verified there. All others pass through a
reused buffer, out of which they are copied once their blocks are verified. Nothing here imports
torch: elements are opaque items.
"""
