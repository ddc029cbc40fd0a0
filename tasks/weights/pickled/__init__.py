"""Read files that `torch.save` wrote (`.pt`, `.bin`) without torch and without running their code.

torch_file  `read_torch_file`: one file, with tensors as byte ranges; `read_model`: a model
unpickler   follows a pickle by the standard library, with every name inert

Like `torch.load(weights_only=True)` this runs no code. Classes need not be installed.
"""
