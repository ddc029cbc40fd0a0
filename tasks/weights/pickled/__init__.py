"""Files that `torch.save` wrote (`.pt`, `.bin`), read without torch and without running anything.

archive, directory          the zip file around it: which record lies where
program, machine, objects   the pickle in it, interpreted; no instruction calls anything
tensors                     both together: tensors as ranges of the file
state                       a pickled state dict, or a model of several, as a `Source`

What `torch.load(weights_only=True)` promises holds here, and more: classes are not even looked up,
so a checkpoint whose own classes are not installed can be read too; and no tensor is loaded.
"""
