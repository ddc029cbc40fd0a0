"""Read files that `torch.save` wrote (`.pt`, `.bin`) without torch and without running their code.

state       `read_state`, `read_model`: a pickled state dict, or a model of several, as a `Source`
tensors     `read_torch_file`: one file, with tensors as byte ranges
archive     the zip file around the pickle
unpickler   follows a pickle by the standard library, with every name inert; `objects` its values
scan        `Scanner`: names that loading a file would use; `allowed` lists the harmless ones

Like `torch.load(weights_only=True)` this runs no code. Classes need not be installed.
"""
