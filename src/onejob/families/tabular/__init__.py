"""The tabular family: categories and numbers in, a yes/no, a class or a number out; embeddings and an MLP.

options.py   the [train.model] table (pydantic only)
encode.py    rows -> arrays, and a model's outputs -> what a client gets (numpy only)
metrics.py   how good the outputs are (numpy only)
model.py     the module, its loss and its dropout (torch)
"""
