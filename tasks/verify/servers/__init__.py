"""Running servers, asked over HTTP: one interface, and one module per dialect.

server = connect("http://host:8000")
server.models(), server.score(name, ids), server.next(name, prefixes)
server.tokenize(name, text), server.render(name, chat), server.generate(name, prompt, 16)

What an API cannot do raises UnsupportedError.
"""
