"""A model that is a user's Python file, in a process of its own: `engine` here, `child` there, `channel` in between.

`code` is what the child makes of the file. Nothing is pickled: what crosses is arrays, and words as JSON.
"""
