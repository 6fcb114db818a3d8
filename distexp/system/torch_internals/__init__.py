"""All uses of private PyTorch APIs, by concern: a new PyTorch release breaks only this package.

``tests/system/test_torch_internals.py`` checks them against the installed release.
"""
