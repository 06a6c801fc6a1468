"""The sections of `gpu_check.py`: each is a function `check(table)` that adds rows to a `Table`."""
