"""Read files that `torch.save` wrote (`.pt`, `.bin`) without torch and without running their code.

state       `read_state`, `read_model`: a pickled state dict, or a model of several, as a `Source`
tensors     `read_torch_file`: one file, with tensors as byte ranges
archive     the zip file around the pickle; `directory` parses its table
program     the pickle interpreter; `machine` is its stack, `objects` the inert values it makes

Like `torch.load(weights_only=True)` this runs no code from the file. In addition classes are not
looked up, so checkpoints whose classes are not installed can be read, and no tensor is loaded.
"""
