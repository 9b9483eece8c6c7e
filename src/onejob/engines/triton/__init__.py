"""Models under NVIDIA's Triton Inference Server: `repository` writes what it reads, `engine` runs one and asks it.

`server` starts it, `client` speaks to it, `stub` runs our engines inside its Python backend, `wheel` installs one.
"""
