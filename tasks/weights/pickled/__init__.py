"""Files that `torch.save` wrote (`.pt`, `.bin`), read without torch and without running anything.

archive     the zip file around it: which record lies where
machine     the pickle in it, interpreted by a machine that has no instruction to call anything
tensors     both together: tensors as ranges of the file
state       a pickled state dict as a `Source`

What `torch.load(weights_only=True)` promises holds here, and more: classes are not even looked up,
so a checkpoint whose own classes are not installed can be read too; and no tensor is loaded.
"""
